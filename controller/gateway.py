"""The agents' side of the controller: one stream per node, orders out, reports in."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import grpc

from controller.dispatch import Dispatch, OrderQueue
from controller.errors import NodeUnreachable, Refused
from controller.service import Service
from controller.store.errors import StoreUnavailable
from protos import rltune_pb2, rltune_pb2_grpc
from protos.codec import InvalidMessage, check_node_name, enum_to_pb, from_pb, to_pb
from protos.messages import (
    PROTOCOL_MAJOR,
    Hello,
    LaunchOrder,
    LogChunk,
    LogStream,
    NodeFacts,
    RankId,
    RankReport,
    StopOrder,
    Telemetry,
)

log = logging.getLogger("rltune.gateway")

HELLO_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 10.0

Context = grpc.aio.ServicerContext[Any, Any]
Outgoing = asyncio.Queue[rltune_pb2.ControllerMessage]


@dataclass(slots=True)
class _Session:
    """One live stream."""

    node: str
    instance_id: str
    outgoing: Outgoing = field(default_factory=asyncio.Queue)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    fetches: dict[int, asyncio.Future[LogChunk]] = field(default_factory=dict)


class Gateway(rltune_pb2_grpc.AgentGatewayServicer):
    """Serves AgentSession, and fetches log bytes for the client API."""

    def __init__(self, service: Service, dispatch: Dispatch) -> None:
        """`service` hears what agents say; `dispatch` holds what they are told."""
        self._service = service
        self._dispatch = dispatch
        self._sessions: dict[str, _Session] = {}
        self._request_ids = itertools.count(1)
        self._is_closed = False

    def close(self) -> None:
        """Ends all sessions and refuses new ones: the controller stops. Agents come again."""
        self._is_closed = True
        for session in self._sessions.values():
            session.replaced.set()

    # The read/write form of a stream returns None; the stubs know only the generator form.
    async def AgentSession(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        """Serve one agent until its stream ends or another session of it takes over."""
        hello = await _read_hello(context)
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the controller is stopping")
        address = hello.advertise_address or _peer_address(context.peer())
        try:
            welcome = await self._service.agent_hello(hello, address)
        except Refused as refusal:
            log.warning("refused node %s at %s: %s", hello.node_name, address, refusal)
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(refusal))
        except StoreUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        session = self._replace_session(hello)
        log.info("node %s joined from %s", session.node, address)
        try:
            await context.write(
                rltune_pb2.ControllerMessage(welcome=to_pb(welcome, rltune_pb2.Welcome))
            )
            await self._serve(session, context)
        finally:
            self._forget(session)
            await asyncio.shield(self._service.agent_gone(session.node, session.instance_id))

    def _replace_session(self, hello: Hello) -> _Session:
        session = _Session(hello.node_name, hello.instance_id)
        if self._is_closed:  # while Hello was recorded
            session.replaced.set()
        older = self._sessions.get(session.node)
        if older is not None:
            older.replaced.set()
        self._sessions[session.node] = session
        return session

    async def _serve(self, session: _Session, context: Context) -> None:
        """Both directions, until the agent's side ends or another session takes over."""
        orders = self._dispatch.queue(session.node)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(session, context, tasks))
                others = (
                    tasks.create_task(_pump_orders(orders, session.outgoing)),
                    tasks.create_task(_write(session, context)),
                    tasks.create_task(session.replaced.wait()),
                )
                await asyncio.wait({reader, others[-1]}, return_when=asyncio.FIRST_COMPLETED)
                for task in (reader, *others):
                    task.cancel()
        except* Refused as group:
            log.warning("ending the session of node %s: %s", session.node, group.exceptions[0])
            await context.abort(grpc.StatusCode.ABORTED, str(group.exceptions[0]))
        except* InvalidMessage as group:
            log.error("node %s sent what is invalid: %s", session.node, group.exceptions[0])
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(group.exceptions[0]))

    async def fetch_log(
        self,
        node: str,
        rank: RankId,
        stream: LogStream,
        offset: int,
        limit: int,
        tail_bytes: int | None = None,
    ) -> LogChunk:
        """Bytes of a rank's output from its node.

        Raises NodeUnreachable if the node is not connected or does not answer in time.
        """
        session = self._sessions.get(node)
        if session is None:
            raise NodeUnreachable(f"node {node} is not connected; its logs are on its disk")
        request_id = next(self._request_ids)
        answer: asyncio.Future[LogChunk] = asyncio.get_running_loop().create_future()
        session.fetches[request_id] = answer
        fetch = rltune_pb2.FetchLog(
            request_id=request_id,
            rank=to_pb(rank, rltune_pb2.RankId),
            stream=rltune_pb2.LogStream.ValueType(enum_to_pb(stream)),
            offset=offset,
            limit=limit,
            tail_bytes=tail_bytes,
        )
        session.outgoing.put_nowait(rltune_pb2.ControllerMessage(fetch_log=fetch))
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise NodeUnreachable(f"node {node} did not answer in {FETCH_TIMEOUT_S:g} s") from None
        finally:
            session.fetches.pop(request_id, None)

    def _forget(self, session: _Session) -> None:
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            log.info("the stream of node %s ended", session.node)
        for answer in session.fetches.values():
            if not answer.done():
                answer.set_exception(NodeUnreachable(f"node {session.node} disconnected"))

    async def _read(self, session: _Session, context: Context, tasks: asyncio.TaskGroup) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            match message.WhichOneof("body"):
                case "heartbeat":
                    telemetry = from_pb(message.heartbeat, Telemetry, "heartbeat")
                    await self._service.agent_heartbeat(
                        session.node, session.instance_id, telemetry
                    )
                case "report":
                    # A task each, so that reports of many ranks share one commit; their order
                    # is kept, since tasks start in the order in which they were made.
                    report = from_pb(message.report, RankReport, "report")
                    tasks.create_task(self._record(session, report))
                case "facts":
                    facts = from_pb(message.facts, NodeFacts, "facts")
                    await self._service.agent_facts(session.node, facts)
                case "log":
                    answer = session.fetches.get(message.log.request_id)
                    if answer is not None and not answer.done():
                        answer.set_result(from_pb(message.log.chunk, LogChunk, "log.chunk"))
                case other:
                    log.warning("node %s sent %s, which is not known here", session.node, other)

    async def _record(self, session: _Session, report: RankReport) -> None:
        """Record a report; only then acknowledge it. Not recorded: the agent sends it again."""
        try:
            await self._service.rank_report(session.node, report)
        except StoreUnavailable as error:
            log.error("report %s of node %s is not stored: %s", report.rank, session.node, error)
            return
        ack = rltune_pb2.RankAck(
            rank=to_pb(report.rank, rltune_pb2.RankId),
            phase=rltune_pb2.RankPhase.ValueType(enum_to_pb(report.phase)),
        )
        session.outgoing.put_nowait(rltune_pb2.ControllerMessage(ack=ack))


async def _pump_orders(orders: OrderQueue, outgoing: Outgoing) -> None:
    while True:
        match await orders.get():
            case LaunchOrder() as launch:
                body = rltune_pb2.ControllerMessage(launch=to_pb(launch, rltune_pb2.LaunchOrder))
            case StopOrder() as stop:
                body = rltune_pb2.ControllerMessage(stop=to_pb(stop, rltune_pb2.StopOrder))
        outgoing.put_nowait(body)


async def _write(session: _Session, context: Context) -> None:
    while True:
        await context.write(await session.outgoing.get())


async def _read_hello(context: Context) -> Hello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came")
    if first is grpc.aio.EOF or first.WhichOneof("body") != "hello":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
    if first.hello.protocol_major != PROTOCOL_MAJOR:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the agent speaks protocol {first.hello.protocol_major}, this controller "
            f"{PROTOCOL_MAJOR}: install the controller's version of rltune-testbed on the node",
        )
    try:
        check_node_name(first.hello.node_name)
        return from_pb(first.hello, Hello, "hello")
    except InvalidMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _peer_address(peer: str) -> str:
    """The IP address in gRPC's word for a peer (`ipv4:10.0.0.1:5000`, `ipv6:%5B::1%5D:5000`)."""
    address = peer.partition(":")[2].rpartition(":")[0]
    return address.replace("%5B", "").replace("%5D", "").strip("[]")
