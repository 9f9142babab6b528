"""The agent's stream to the controller: says hello, beats, reports, obeys, reconnects.

Losing the controller changes nothing for running jobs. All that must not be lost is in the
launcher's folders: each session begins with a Hello that tells every rank whose release the
controller has not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import grpc

from node_agent.identity import Membership
from node_agent.launcher import Launcher
from protos import rltune_pb2, rltune_pb2_grpc
from protos.codec import enum_from_pb, from_pb, to_pb
from protos.messages import (
    Hello,
    LaunchOrder,
    LogStream,
    NodeFacts,
    RankId,
    RankPhase,
    RankReport,
    StopOrder,
    Telemetry,
    Welcome,
    XidEvent,
)

log = logging.getLogger("rltune.agent")

RESEND_AFTER_S = 5.0
"""A report that is not acknowledged within this time is sent again."""
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
REFUSED_BACKOFF_S = 10.0
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
)
_REFUSALS = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS})

Fault = TypeVar("Fault", bound=BaseException)
Call = grpc.aio.StreamStreamCall[rltune_pb2.AgentMessage, rltune_pb2.ControllerMessage]


class NodeTelemetry(Protocol):
    """What the session needs to know about the machine."""

    def facts(self) -> NodeFacts:
        """What the node is now."""

    def sample(self) -> Telemetry:
        """The latest readings, without Xid events."""

    def take_xids(self) -> tuple[XidEvent, ...]:
        """Xid events that no heartbeat has carried yet."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is."""

    node_name: str
    node_id: str
    boot_id: str
    instance_id: str
    advertise_address: str


class AgentSession:
    """Keeps one session with the controller open for as long as the agent runs."""

    def __init__(
        self,
        target: str,
        identity: Identity,
        membership: Membership,
        telemetry: NodeTelemetry,
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """`target` is the controller's HOST:PORT; clocks are injected."""
        self._target = target
        self._identity = identity
        self._membership = membership
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._sleep = sleep
        self._unacknowledged: dict[RankId, tuple[RankReport, float]] = {}
        self._outgoing: asyncio.Queue[rltune_pb2.AgentMessage] | None = None
        self._facts_sent: NodeFacts | None = None
        self._pause_s = BACKOFF_FIRST_S
        self._trouble = ""

    def on_report(self, report: RankReport) -> None:
        """Take a report of the launcher; it is sent until the controller acknowledges it."""
        self._unacknowledged[report.rank] = (report, self._monotonic())
        if self._outgoing is not None:
            self._outgoing.put_nowait(_report_message(report))

    async def run(self, launcher: Launcher) -> None:
        """Connect, serve and reconnect with back-off until cancelled."""
        async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
            stub = rltune_pb2_grpc.AgentGatewayStub(channel)
            while True:
                try:
                    await self._serve(stub, launcher)
                    log.warning("the controller closed the session")
                except* grpc.aio.AioRpcError as group:
                    self._tell_loss(_first_leaf(group))
                except* OSError as group:
                    self._tell("this node's disk fails: %s", _first_leaf(group))
                await self._sleep(self._pause_s)
                self._pause_s = min(self._pause_s * 2, max(BACKOFF_MAX_S, self._pause_s))

    async def _serve(self, stub: rltune_pb2_grpc.AgentGatewayStub, launcher: Launcher) -> None:
        """One session, until the stream ends."""
        call: Call = stub.AgentSession()
        outgoing: asyncio.Queue[rltune_pb2.AgentMessage] = asyncio.Queue()
        self._outgoing = outgoing
        try:
            await call.write(self._hello(launcher))
            first = await call.read()
            if not isinstance(first, rltune_pb2.ControllerMessage):
                return  # EOF
            welcome = from_pb(first.welcome, Welcome, "welcome")
            await self._obey_welcome(welcome, launcher)
            self._pause_s, self._trouble = BACKOFF_FIRST_S, ""
            async with asyncio.TaskGroup() as tasks:
                side = (
                    tasks.create_task(self._write(call, outgoing)),
                    tasks.create_task(self._beat(welcome.heartbeat_s, outgoing)),
                    tasks.create_task(self._resend(outgoing)),
                )
                await self._read(call, launcher, outgoing, tasks)
                for task in side:
                    task.cancel()
        finally:
            self._outgoing = None
            call.cancel()

    def _tell_loss(self, error: grpc.aio.AioRpcError) -> None:
        refused = error.code() in _REFUSALS
        if refused:
            self._pause_s = REFUSED_BACKOFF_S
        trouble = "refuses this node" if refused else "is not reached"
        self._tell(f"the controller at {self._target} {trouble}: %s", error.details())

    def _tell(self, trouble: str, details: object) -> None:
        """Logs why there is no session: once, not at every try."""
        if trouble != self._trouble:
            log.warning(trouble, details)
        self._trouble = trouble

    def _hello(self, launcher: Launcher) -> rltune_pb2.AgentMessage:
        facts = self._telemetry.facts()
        self._facts_sent = facts
        hello = Hello(
            node_name=self._identity.node_name,
            node_id=self._identity.node_id,
            boot_id=self._identity.boot_id,
            instance_id=self._identity.instance_id,
            facts=facts,
            ranks=launcher.reports(),
            advertise_address=self._identity.advertise_address,
            cluster_id=self._membership.cluster_id(),
        )
        return rltune_pb2.AgentMessage(hello=to_pb(hello, rltune_pb2.Hello))

    async def _obey_welcome(self, welcome: Welcome, launcher: Launcher) -> None:
        self._membership.join(welcome.cluster_id)
        log.info("joined the cluster at %s as %s", self._target, self._identity.node_name)
        if welcome.kill:
            log.warning("ending replaced attempts: %s", ", ".join(map(str, welcome.kill)))
            await launcher.kill_unknown(welcome.kill)
        for rank in welcome.acknowledged:
            launcher.forget(rank)
            self._unacknowledged.pop(rank, None)

    async def _write(self, call: Call, outgoing: asyncio.Queue[rltune_pb2.AgentMessage]) -> None:
        while True:
            message = await outgoing.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError:
                return  # the stream has ended; _read tells why

    async def _beat(self, every_s: float, outgoing: asyncio.Queue[rltune_pb2.AgentMessage]) -> None:
        while True:
            facts = self._telemetry.facts()
            if facts != self._facts_sent:
                self._facts_sent = facts
                outgoing.put_nowait(
                    rltune_pb2.AgentMessage(facts=to_pb(facts, rltune_pb2.NodeFacts))
                )
            beat = replace(self._telemetry.sample(), xids=self._telemetry.take_xids())
            outgoing.put_nowait(
                rltune_pb2.AgentMessage(heartbeat=to_pb(beat, rltune_pb2.Telemetry))
            )
            await self._sleep(every_s)

    async def _resend(self, outgoing: asyncio.Queue[rltune_pb2.AgentMessage]) -> None:
        while True:
            now = self._monotonic()
            for rank, (report, sent_at) in list(self._unacknowledged.items()):
                if now - sent_at >= RESEND_AFTER_S:
                    self._unacknowledged[rank] = (report, now)
                    outgoing.put_nowait(_report_message(report))
            await self._sleep(1.0)

    async def _read(
        self,
        call: Call,
        launcher: Launcher,
        outgoing: asyncio.Queue[rltune_pb2.AgentMessage],
        tasks: asyncio.TaskGroup,
    ) -> None:
        # Orders are carried out one after the other, so that a Stop never overtakes its Launch.
        while isinstance(message := await call.read(), rltune_pb2.ControllerMessage):
            match message.WhichOneof("body"):
                case "launch":
                    await launcher.launch(from_pb(message.launch, LaunchOrder, "launch"))
                case "stop":
                    await launcher.stop(from_pb(message.stop, StopOrder, "stop"))
                case "fetch_log":
                    tasks.create_task(_answer_fetch(message.fetch_log, launcher, outgoing))
                case "ack":
                    self._acknowledged(message.ack, launcher)
                case other:
                    log.warning("a newer controller sent %s, which this agent does not know", other)

    def _acknowledged(self, ack: rltune_pb2.RankAck, launcher: Launcher) -> None:
        rank = from_pb(ack.rank, RankId, "ack.rank")
        phase = enum_from_pb(RankPhase, ack.phase, "ack.phase")
        entry = self._unacknowledged.get(rank)
        if entry is not None and entry[0].phase is phase:
            del self._unacknowledged[rank]
        if phase is RankPhase.RELEASED:
            launcher.forget(rank)


async def _answer_fetch(
    fetch: rltune_pb2.FetchLog,
    launcher: Launcher,
    outgoing: asyncio.Queue[rltune_pb2.AgentMessage],
) -> None:
    chunk = await launcher.read_log(
        from_pb(fetch.rank, RankId, "fetch_log.rank"),
        enum_from_pb(LogStream, fetch.stream, "fetch_log.stream"),
        fetch.offset,
        fetch.limit,
        tail_bytes=fetch.tail_bytes if fetch.HasField("tail_bytes") else None,
    )
    reply = rltune_pb2.LogReply(
        request_id=fetch.request_id, chunk=to_pb(chunk, rltune_pb2.LogChunk)
    )
    outgoing.put_nowait(rltune_pb2.AgentMessage(log=reply))


def _report_message(report: RankReport) -> rltune_pb2.AgentMessage:
    return rltune_pb2.AgentMessage(report=to_pb(report, rltune_pb2.RankReport))


def _first_leaf(group: BaseExceptionGroup[Fault]) -> Fault:
    error: Fault | BaseExceptionGroup[Fault] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
