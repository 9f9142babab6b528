"""The agents' side of the service: sessions, heartbeats, reports, leases and deadlines."""

from __future__ import annotations

import logging
from dataclasses import replace

from controller.core import Core
from controller.errors import Refused
from controller.leases import Heard, Session
from controller.lifecycle import ending
from controller.lifecycle.events import (
    AgentConnected,
    Event,
    NodeFactsChanged,
    NodeHealthReported,
    NodeLost,
    RankReported,
    StartDeadlinePassed,
)
from controller.lifecycle.node import CRITICAL_XIDS, GpuFaultKind, Node
from controller.lifecycle.node_rules import welcome_lists
from controller.lifecycle.state import Draft
from controller.store.errors import StoreUnavailable
from controller.writer import Transaction
from protos.messages import (
    PROTOCOL_MAJOR,
    Hello,
    NodeFacts,
    RankReport,
    Telemetry,
    Welcome,
    XidEvent,
)

STALL_FRACTION = 0.25
"""A stall of ours longer than this part of a lease renews all leases."""

log = logging.getLogger("rltune.agents")


class Agents:
    """What agents say, and what their silence says."""

    def __init__(self, core: Core) -> None:
        """Shares the core with the other parts of the service."""
        self._core = core
        self._xids: dict[str, tuple[XidEvent, ...]] = {}
        """Told by an agent and not stored yet."""
        self._ticked_at_s = core.monotonic()
        self._ticked_wall_s = core.now()
        self._flushed_at_s = self._ticked_at_s

    async def hello(self, hello: Hello, address: str) -> Welcome:
        """Opens a session, and reconciles what the agent knows with what we know.

        Raises:
            Refused: another live agent has this name, or it speaks another protocol.
            StoreUnavailable: nothing was changed; the agent should try again.
        """
        core = self._core
        if hello.protocol_major != PROTOCOL_MAJOR:
            raise Refused(
                "version",
                f"the agent speaks protocol {hello.protocol_major}, this controller "
                f"{PROTOCOL_MAJOR}: install the controller's version of rltune-testbed",
            )
        if hello.cluster_id not in {"", core.cluster_id}:
            raise Refused(
                "other_cluster",
                f"node {hello.node_name} belongs to another cluster (its jobs have the same "
                "numbers as jobs here). If this controller lost its database, restore that; to "
                "move the node here, start its agent with another --state-dir",
            )
        name = hello.node_name
        before = core.sessions.get(name)
        if before is not None and before.node_id != hello.node_id and before.streams > 0:
            raise Refused(
                "duplicate_node",
                f"another agent is connected as node {name}: give this one another name "
                "(--name), or stop the other",
            )
        is_same = before is not None and before.instance_id == hello.instance_id
        streams = before.streams + 1 if before is not None and is_same else 1
        core.sessions[name] = Session(hello.node_id, hello.instance_id, streams)
        core.dispatch.connect(name)
        event = AgentConnected(hello, address, core.now())
        try:
            await core.writer.do(lambda transaction: transaction.apply(event))
        except BaseException:
            self.gone(name, hello.instance_id)
            raise
        core.leases.begin(name, core.monotonic())
        core.snapshots.note_node(name)
        core.changed.set()
        kill, acknowledged = welcome_lists(core.state, hello)
        return Welcome(
            core.terms.lease_s, core.terms.heartbeat_s, kill, acknowledged, core.cluster_id
        )

    async def heartbeat(self, node: str, instance_id: str, telemetry: Telemetry) -> None:
        """Renews a lease. Writes nothing unless the node's health has changed.

        Raises:
            Refused: the session is over (its lease ended, or another took its place); the agent
                has to open a new one.
        """
        core = self._core
        session = core.sessions.get(node)
        known = core.state.node(node)
        # Kept also when the heartbeat is refused: an agent tells an Xid once.
        critical = tuple(xid for xid in telemetry.xids if xid.xid in CRITICAL_XIDS)
        if critical and known is not None and known.instance_id == instance_id:
            self._xids[node] = self._xids.get(node, ()) + critical
        if session is None or session.instance_id != instance_id or known is None:
            raise Refused("stale_session", f"the session of node {node} is over: say Hello again")
        monotonic_s = core.monotonic()
        core.leases.begin(node, monotonic_s)
        core.account.sample(core.state, node, telemetry, monotonic_s)
        core.heard[node] = Heard(telemetry, monotonic_s)
        event = self._health_news(known, telemetry)
        if event is None:
            return
        try:
            await core.writer.do(lambda transaction: transaction.apply(event))
        except StoreUnavailable as error:
            # The next heartbeat tells it again.
            log.warning("health of node %s not stored: %s", node, error)
            return
        self._xids.pop(node, None)

    def _health_news(self, node: Node, telemetry: Telemetry) -> NodeHealthReported | None:
        """What of a heartbeat differs from the stored health; None when nothing does."""
        gpu_health = node.gpu_health
        if telemetry.gpus:
            gpu_health = {s.uuid: s.health for s in telemetry.gpus if s.health}
        lost = frozenset(sample.uuid for sample in telemetry.gpus if sample.lost)
        known_lost = {
            uuid
            for uuid, faults in node.gpu_faults.items()
            if any(fault.kind is GpuFaultKind.LOST for fault in faults)
        }
        xids = self._xids.get(node.name, ())
        is_known = node.health == telemetry.node_health and node.gpu_health == gpu_health
        if is_known and lost <= known_lost and not xids:
            return None
        return NodeHealthReported(
            node.name, telemetry.node_health, gpu_health, lost, xids, self._core.now()
        )

    async def facts(self, node: str, facts: NodeFacts) -> None:
        """A connected node's inventory changed.

        Raises:
            StoreUnavailable: nothing was changed.
        """
        event = NodeFactsChanged(node, facts, self._core.now())
        await self._core.writer.do(lambda transaction: transaction.apply(event))

    async def report(self, node: str, report: RankReport) -> None:
        """Records how far a rank is; returns once that is stored.

        Raises:
            StoreUnavailable: nothing was changed; the agent will tell it again.
        """
        event = RankReported(node, report, self._core.now())
        job_ids = (report.rank.job_id,)
        await self._core.writer.do(lambda tx: tx.apply(event), job_ids=job_ids)

    def gone(self, node: str, instance_id: str) -> None:
        """A stream of the node closed; its lease goes on counting."""
        core = self._core
        session = core.sessions.get(node)
        if session is None or session.instance_id != instance_id:
            return
        core.sessions[node] = replace(session, streams=session.streams - 1)
        if session.streams <= 1:
            del core.sessions[node]
            core.dispatch.disconnect(node)
            core.snapshots.note_node(node)

    async def tick(self) -> None:
        """Judges leases, deadlines and pauses. To be called a few times a second."""
        core = self._core
        monotonic_s = core.monotonic()
        stall_s = monotonic_s - self._ticked_at_s
        self._ticked_at_s = monotonic_s
        if stall_s > core.terms.lease_s * STALL_FRACTION:
            log.warning("we stood still for %.1f s: nobody is judged for that", stall_s)
            core.leases.begin_all(monotonic_s)
            core.starts.begin_all(monotonic_s)
        self._end_pauses()
        self._repeat_stops(monotonic_s)
        try:
            await self._judge(monotonic_s)
            if monotonic_s - self._flushed_at_s >= core.terms.usage_flush_s:
                self._flushed_at_s = monotonic_s
                await self._apply_all(list(core.account.news()))
        except StoreUnavailable as error:
            log.error("a tick could not be stored and is tried again: %s", error)

    async def _judge(self, monotonic_s: float) -> None:
        """Tells of leases and starting times that are over."""
        core = self._core
        at_s = core.now()
        lost = core.leases.passed(monotonic_s)
        late = core.starts.passed(monotonic_s)
        for node, silent_s in lost:
            log.warning("node %s is lost: nothing heard for %.1f s", node, silent_s)
            core.sessions.pop(node, None)
            core.dispatch.disconnect(node)
            core.snapshots.note_node(node)
        events: list[Event] = [NodeLost(node, at_s, silent_s) for node, silent_s in lost]
        events += [
            StartDeadlinePassed(key[0], key[1], at_s, core.terms.start_timeout_s) for key, _ in late
        ]
        try:
            await self._apply_all(events)
        except BaseException:
            for node, _ in lost:
                core.leases.begin(node, monotonic_s - core.terms.lease_s)
            for key, _ in late:
                core.starts.begin(key, monotonic_s - core.terms.start_timeout_s)
            raise

    async def _apply_all(self, events: list[Event]) -> None:
        def run(transaction: Transaction) -> None:
            for event in events:
                transaction.apply(event)

        if events:
            await self._core.writer.do(run)

    def _end_pauses(self) -> None:
        """Jobs whose pause or exclusion of a node ended since the last tick wait anew."""
        core = self._core
        now_s = core.now()
        before_s, self._ticked_wall_s = self._ticked_wall_s, now_s
        over = set()
        for job_id in core.paused_jobs:
            job = core.state.jobs[job_id]
            ends = [job.not_before_s, *(f.excluded_until_s for f in job.failed_launches)]
            if any(before_s < end_s <= now_s for end_s in ends):
                over.add(job_id)
        if over:
            core.snapshots.note_jobs(over)
            core.changed.set()

    def _repeat_stops(self, monotonic_s: float) -> None:
        """Ranks that were told to stop long ago are told again."""
        core = self._core
        for key, _ in core.stops.passed(monotonic_s):
            attempt = core.state.attempt(key)
            if attempt is None:
                continue
            core.stops.begin(key, monotonic_s)
            draft = Draft(core.state)
            ending.order_stop(draft, attempt)
            core.dispatch.perform(draft.effects, core.state)
