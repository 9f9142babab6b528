"""The service: what clients, agents and the scheduler may ask, in front of the one writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from controller.actions import ActionResult, Actions, Submission, check_fits
from controller.agents import Agents
from controller.core import Core, CycleStats, Terms
from controller.dispatch import Dispatch
from controller.errors import NoSuchNode, Refused, Rejected
from controller.lifecycle.attempt import Attempt
from controller.lifecycle.events import NodeDrained, NodeResumed
from controller.lifecycle.job import Job
from controller.partitions import ClusterConfig
from controller.placing import place_all
from controller.scheduler.cycle import Scheduler
from controller.scheduler.forecast import forecast
from controller.scheduler.types import Decision, WaitingJob
from controller.snapshot import Snapshot
from controller.store.errors import StoreUnavailable
from controller.store.store import JobFilter, Store
from controller.store.thread import StoreThread
from controller.views import explanation, job_view, node_view, partition_views
from protos.messages import (
    ClusterEvent,
    ClusterInfo,
    Explanation,
    Forecast,
    Hello,
    JobSpec,
    JobView,
    NodeFacts,
    NodeView,
    RankReport,
    Telemetry,
    Welcome,
)

__all__ = [
    "ActionResult",
    "JobFilter",
    "NoSuchNode",
    "Refused",
    "Rejected",
    "Service",
    "StoreUnavailable",
    "Submission",
    "Terms",
]


NOT_SUBMITTED = 2**62
"""Number of a job that is only asked about: after all others."""


class Service:
    """One controller. `load` first, then `run` as a task for as long as anything is asked.

    Whatever writes raises `StoreUnavailable` when nothing could be stored; then nothing has
    changed.
    """

    def __init__(
        self,
        store: Store,
        dispatch: Dispatch,
        *,
        cluster: str,
        scheduler: Scheduler,
        version: str,
        lease_s: float,
        heartbeat_s: float,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        config: ClusterConfig | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Takes the open store over; it must be closed by its owner after `run` has ended."""
        self._store = StoreThread(store)
        self._dispatch = dispatch
        self._cluster = cluster
        self._scheduler = scheduler
        self._config = config or ClusterConfig()
        self._version = version
        self._terms = Terms(
            lease_s=lease_s, heartbeat_s=heartbeat_s, start_timeout_s=start_timeout_s
        )
        self._now = now
        self._monotonic = monotonic
        self._started_at_s = now()

    async def load(self) -> Self:
        """Reads the state that the last controller left.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        self._core = await Core.load(
            self._store, self._dispatch, self._terms, self._config, self._now, self._monotonic
        )
        self._agents = Agents(self._core)
        self._actions = Actions(self._core)
        return self

    async def run(self) -> None:
        """Serves until cancelled; then waits for the store and refuses whoever still asks."""
        try:
            await self._core.writer.run()
        finally:
            self._store.shut_down()

    async def tick(self) -> None:
        """Judges leases, deadlines and pauses; to be called a few times a second."""
        await self._agents.tick()

    # Clients:

    async def submit(self, items: Sequence[Submission], actor: str) -> list[int]:
        """Queues jobs, all or none, and returns their ids.

        A request id that was used before by the same user gives the id of the job it made.

        Raises:
            Rejected: a job could never run here (`never_fits`), or its partition does not take it.
        """
        return await self._actions.submit(items, actor)

    async def cancel(
        self, job_ids: Sequence[int], actor: str, reason: str = ""
    ) -> list[ActionResult]:
        """Wishes jobs to end. A job that has ended stays as it is, and that is no failure."""
        return await self._actions.cancel(job_ids, actor, reason)

    async def hold(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Keeps waiting jobs from starting."""
        return await self._actions.hold(job_ids, actor)

    async def release(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Lets held jobs start."""
        return await self._actions.release(job_ids, actor)

    async def requeue(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Puts running or finished jobs back into the queue."""
        return await self._actions.requeue(job_ids, actor)

    async def set_node(self, node: str, drain: bool, reason: str, actor: str) -> None:
        """Drains a node (no new work, what runs goes on), or resumes it.

        Raises:
            NoSuchNode: it never joined.
        """
        if self._core.state.node(node) is None:
            raise NoSuchNode(node)
        kind = NodeDrained if drain else NodeResumed
        event = kind(node, actor, reason, self._now())
        await self._core.writer.do(lambda transaction: transaction.apply(event))

    async def job(self, job_id: int) -> JobView | None:
        """A job, running or finished; None if there is none of that number."""
        found = await self._found(job_id)
        return None if found is None else job_view(self._core, *found)

    async def _found(self, job_id: int) -> tuple[Job, tuple[Attempt, ...]] | None:
        job = self._core.state.job(job_id)
        if job is not None:
            return job, self._core.state.job_attempts(job)
        rows = await self._store.call(Store.jobs_by_id, [job_id])
        return (rows.jobs[0], rows.attempts.get(job_id, ())) if rows.jobs else None

    async def jobs(self, wanted: JobFilter) -> list[JobView]:
        """The jobs that pass the filter, newest first."""
        if wanted.states and not any(state.is_final for state in wanted.states):
            live = sorted(self._core.state.jobs.values(), key=lambda job: -job.job_id)
            found = [job for job in live if _passes(job, wanted)]
            state = self._core.state
            return [
                job_view(self._core, job, state.job_attempts(job)) for job in found[: wanted.limit]
            ]
        rows = await self._store.call(Store.jobs, wanted)
        return [job_view(self._core, job, rows.attempts.get(job.job_id, ())) for job in rows.jobs]

    def nodes(self) -> list[NodeView]:
        """All nodes that ever joined, by name."""
        core = self._core
        monotonic_s = self._monotonic()
        return [
            node_view(
                core.state,
                node,
                core.heard.get(name),
                is_connected=core.is_connected(name),
                monotonic_s=monotonic_s,
            )
            for name, node in sorted(core.state.nodes.items())
        ]

    def info(self) -> ClusterInfo:
        """What the controller is and how it does."""
        core = self._core
        now_s = self._now()
        nodes = core.snapshots.cluster(now_s).nodes
        held = {
            (rank.node, uuid)
            for attempt in core.state.attempts.values()
            for rank in attempt.ranks
            if rank.is_held
            for uuid in rank.gpu_uuids
        }
        return ClusterInfo(
            cluster=self._cluster,
            version=self._version,
            policy=self._scheduler.prioritizer.name,
            allocator=self._scheduler.allocator.name,
            started_at_s=self._started_at_s,
            now_s=now_s,
            jobs_by_state={state: n for state, n in core.jobs_by_state.items() if n},
            nodes_total=len(nodes),
            nodes_up=sum(node.accepts_work for node in nodes),
            gpus_total=sum(len(node.gpus) for node in nodes),
            gpus_used=len(held),
            cycles=core.stats.cycles,
            last_cycle_s=core.stats.last_cycle_s,
            fallbacks=core.stats.fallbacks,
            last_error="; ".join(filter(None, (core.store_error, core.stats.last_error))),
            last_fallback=core.stats.last_fallback,
            partitions=partition_views(self._config, core.snapshots.cluster(now_s)),
        )

    async def explain(self, job_id: int) -> Explanation | None:
        """Why a job waits, or why it went where it went; None if there is no such job."""
        found = await self._found(job_id)
        if found is None:
            return None
        return explanation(job_view(self._core, *found), found[1], self._core.decision)

    async def forecast(self, spec: JobSpec) -> Forecast:
        """When and where a job would start if it were submitted now; nothing is queued.

        Raises:
            Rejected: it would be refused.
        """
        spec = self._config.admit(spec)
        snapshot = self._core.snapshots.build(self._now())
        check_fits(Submission("", spec), snapshot.cluster)
        now_s = snapshot.now_s
        job = WaitingJob(NOT_SUBMITTED, spec, now_s, now_s)
        return await asyncio.to_thread(
            forecast, job, snapshot.queue, snapshot.cluster, now_s, self._scheduler
        )

    def watch(
        self,
        after_event_id: int = 0,
        job_ids: Sequence[int] = (),
        node: str | None = None,
        *,
        follow: bool = True,
    ) -> AsyncIterator[ClusterEvent]:
        """The event log after an event, then with `follow` what comes, without a gap."""
        return self._core.feed.watch(after_event_id, frozenset(job_ids), node, follow=follow)

    # Agents:

    async def agent_hello(self, hello: Hello, address: str) -> Welcome:
        """Opens a node's session.

        Raises:
            Refused: another live agent has this name, or it speaks another protocol.
        """
        return await self._agents.hello(hello, address)

    async def agent_heartbeat(self, node: str, instance_id: str, telemetry: Telemetry) -> None:
        """Renews a node's lease and takes its telemetry in.

        Raises:
            Refused: the session is over; the agent has to say Hello again.
        """
        await self._agents.heartbeat(node, instance_id, telemetry)

    async def agent_facts(self, node: str, facts: NodeFacts) -> None:
        """A connected node's inventory changed."""
        await self._agents.facts(node, facts)

    async def rank_report(self, node: str, report: RankReport) -> None:
        """Records how far a rank is; returns once that is stored, so it may be acknowledged."""
        await self._agents.report(node, report)

    async def agent_gone(self, node: str, instance_id: str) -> None:
        """A stream of the node closed; its lease goes on counting."""
        self._agents.gone(node, instance_id)

    # The scheduling loop:

    @property
    def changed(self) -> asyncio.Event:
        """Set when a scheduling cycle has something new to see; the loop clears it."""
        return self._core.changed

    @property
    def stats(self) -> CycleStats:
        """Where the loop notes how it does."""
        return self._core.stats

    def snapshot(self) -> Snapshot:
        """Queue and cluster as they are."""
        return self._core.snapshots.build(self._now())

    async def commit_decision(self, decision: Decision, version: int) -> int:
        """Stores and launches those starts of a decision that are still possible.

        Returns:
            How many jobs were placed.
        """
        core = self._core
        core.decision = decision
        if not decision.starts:
            return 0
        at_s = self._now()
        del version  # every start is checked against the present state, which is stricter
        return await core.writer.do(
            lambda transaction: place_all(
                transaction, decision, core.state, core.is_connected, at_s
            ),
            job_ids=[start.job_id for start in decision.starts],
        )


def _passes(job: Job, wanted: JobFilter) -> bool:
    return (
        job.state in wanted.states
        and wanted.user in {None, job.user}
        and wanted.name in {None, job.spec.name}
        and (not wanted.job_ids or job.job_id in wanted.job_ids)
        and (wanted.before_job_id is None or job.job_id < wanted.before_job_id)
    )
