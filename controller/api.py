"""The clients' side of the controller: decode, validate, call the service, encode."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from controller.gateway import Gateway
from controller.logs import LogFollower, NoSuchJob, NoSuchRank
from controller.service import (
    ActionResult,
    JobFilter,
    NoSuchNode,
    Rejected,
    Service,
    StoreUnavailable,
    Submission,
)
from controller.store.errors import StoreDamaged
from protos import rltune_pb2, rltune_pb2_grpc
from protos.codec import InvalidMessage, enum_from_pb, enum_to_pb, to_pb, valid_job_spec
from protos.messages import AdminState, JobState, LogStream

log = logging.getLogger("rltune.api")

MAX_LIST = 1000
MAX_REQUEST_ID_BYTES = 128
MAX_MESSAGE_BYTES = 500
MAX_HINT_BYTES = 250
"""Together less than a third of the 8 KiB that gRPC takes as metadata: some bytes become three."""
ERROR_METADATA_KEY = "rltune-error-bin"

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


_REFUSALS = {
    "no_partition": grpc.StatusCode.INVALID_ARGUMENT,
    "not_allowed": grpc.StatusCode.PERMISSION_DENIED,
}
"""Statuses of refused submissions, where it is another than FAILED_PRECONDITION."""


class ControllerApi(rltune_pb2_grpc.ControllerServicer):
    """Serves the Controller service of protos/rltune.proto."""

    def __init__(self, service: Service, gateway: Gateway) -> None:
        """`gateway` fetches log bytes from the nodes."""
        self._service = service
        self._logs = LogFollower(service, gateway.fetch_log)

    async def SubmitJob(
        self, request: rltune_pb2.SubmitJobRequest, context: Context
    ) -> rltune_pb2.SubmitJobResponse:
        """Queue one job."""
        (job_id,) = await self._submit([request], context, paths=[""])
        return rltune_pb2.SubmitJobResponse(job_id=job_id)

    async def SubmitJobs(
        self, request: rltune_pb2.SubmitJobsRequest, context: Context
    ) -> rltune_pb2.SubmitJobsResponse:
        """Queue several jobs, all or none."""
        if not request.jobs:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "jobs: there is none")
        paths = [f"jobs[{i}]." for i in range(len(request.jobs))]
        job_ids = await self._submit(request.jobs, context, paths)
        return rltune_pb2.SubmitJobsResponse(job_ids=job_ids)

    async def _submit(
        self,
        requests: Sequence[rltune_pb2.SubmitJobRequest],
        context: Context,
        paths: Sequence[str],
    ) -> list[int]:
        try:
            submissions = [
                _submission(request, path) for request, path in zip(requests, paths, strict=True)
            ]
        except InvalidMessage as error:
            await _abort_invalid(context, error)
        actor = submissions[0].spec.user
        return await _answered(self._service.submit(submissions, actor), context)

    async def GetJob(
        self, request: rltune_pb2.GetJobRequest, context: Context
    ) -> rltune_pb2.JobView:
        """One job."""
        job = await self._service.job(request.job_id)
        if job is None:
            await _abort_no_job(context, request.job_id)
        return to_pb(job, rltune_pb2.JobView)

    async def ListJobs(
        self, request: rltune_pb2.ListJobsRequest, context: Context
    ) -> rltune_pb2.ListJobsResponse:
        """Jobs that match, newest first, one page."""
        try:
            states = frozenset(
                enum_from_pb(JobState, number, f"states[{i}]")
                for i, number in enumerate(request.states)
            )
        except InvalidMessage as error:
            await _abort_invalid(context, error)
        limit = min(request.limit or MAX_LIST, MAX_LIST)
        jobs = await self._service.jobs(
            JobFilter(
                states=states,
                user=request.user or None,
                name=request.name or None,
                job_ids=tuple(request.job_ids),
                limit=limit + 1,
                before_job_id=request.before_job_id or None,
            )
        )
        return rltune_pb2.ListJobsResponse(
            jobs=[to_pb(job, rltune_pb2.JobView) for job in jobs[:limit]], more=len(jobs) > limit
        )

    async def CancelJobs(
        self, request: rltune_pb2.CancelJobsRequest, context: Context
    ) -> rltune_pb2.JobActionsResponse:
        """Wish to end jobs."""
        wish = self._service.cancel(tuple(request.job_ids), request.actor, request.reason)
        return _actions(await _answered(wish, context))

    async def HoldJobs(
        self, request: rltune_pb2.JobActionsRequest, context: Context
    ) -> rltune_pb2.JobActionsResponse:
        """Keep waiting jobs from starting."""
        wish = self._service.hold(tuple(request.job_ids), request.actor)
        return _actions(await _answered(wish, context))

    async def ReleaseJobs(
        self, request: rltune_pb2.JobActionsRequest, context: Context
    ) -> rltune_pb2.JobActionsResponse:
        """Let held jobs start."""
        wish = self._service.release(tuple(request.job_ids), request.actor)
        return _actions(await _answered(wish, context))

    async def RequeueJobs(
        self, request: rltune_pb2.JobActionsRequest, context: Context
    ) -> rltune_pb2.JobActionsResponse:
        """Put jobs back into the queue."""
        wish = self._service.requeue(tuple(request.job_ids), request.actor)
        return _actions(await _answered(wish, context))

    async def WatchEvents(
        self, request: rltune_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[rltune_pb2.ClusterEvent]:
        """The event log, and with follow what comes after it."""
        del context
        events = self._service.watch(
            after_event_id=request.after_event_id,
            job_ids=tuple(request.job_ids),
            node=request.node or None,
            follow=request.follow,
        )
        async for event in events:
            yield to_pb(event, rltune_pb2.ClusterEvent)

    async def StreamLogs(
        self, request: rltune_pb2.StreamLogsRequest, context: Context
    ) -> AsyncIterator[rltune_pb2.LogMessage]:
        """Output of a job."""
        try:
            streams = tuple(
                enum_from_pb(LogStream, number, f"streams[{i}]")
                for i, number in enumerate(request.streams)
            )
            pieces = self._logs.stream(
                request.job_id,
                attempt=request.attempt if request.HasField("attempt") else None,
                node_rank=request.node_rank if request.HasField("node_rank") else None,
                streams=streams or tuple(LogStream),
                follow=request.follow,
                tail_bytes=request.tail_bytes if request.HasField("tail_bytes") else None,
            )
            async for piece in pieces:
                yield piece.to_pb()
        except InvalidMessage as error:
            await _abort_invalid(context, error)
        except NoSuchJob:
            await _abort_no_job(context, request.job_id)
        except NoSuchRank as error:
            await _abort(context, grpc.StatusCode.NOT_FOUND, str(error), code="not_found")

    async def ListNodes(
        self, request: rltune_pb2.ListNodesRequest, context: Context
    ) -> rltune_pb2.ListNodesResponse:
        """All nodes, or one."""
        nodes = [n for n in self._service.nodes() if request.node in {"", n.name}]
        if request.node and not nodes:
            await _abort_no_node(context, request.node)
        return rltune_pb2.ListNodesResponse(nodes=[to_pb(n, rltune_pb2.NodeView) for n in nodes])

    async def SetNodeState(
        self, request: rltune_pb2.SetNodeStateRequest, context: Context
    ) -> rltune_pb2.SetNodeStateResponse:
        """Drain or resume a node."""
        try:
            admin = enum_from_pb(AdminState, request.admin, "admin")
            if admin is AdminState.DRAIN and not request.reason.strip():
                raise InvalidMessage("reason", "is empty", "say why, e.g. --reason 'new disk'")
        except InvalidMessage as error:
            await _abort_invalid(context, error)
        wish = self._service.set_node(
            request.node, admin is AdminState.DRAIN, request.reason, request.actor
        )
        try:
            await _answered(wish, context)
        except NoSuchNode:
            await _abort_no_node(context, request.node)
        (node,) = (n for n in self._service.nodes() if n.name == request.node)
        return rltune_pb2.SetNodeStateResponse(node=to_pb(node, rltune_pb2.NodeView))

    async def GetClusterInfo(
        self, request: rltune_pb2.GetClusterInfoRequest, context: Context
    ) -> rltune_pb2.ClusterInfo:
        """What the controller is and how it does."""
        del request, context
        return to_pb(self._service.info(), rltune_pb2.ClusterInfo)

    async def ExplainJob(
        self, request: rltune_pb2.ExplainJobRequest, context: Context
    ) -> rltune_pb2.Explanation:
        """Why a job waits, or why it went where it went."""
        explanation = await self._service.explain(request.job_id)
        if explanation is None:
            await _abort_no_job(context, request.job_id)
        return to_pb(explanation, rltune_pb2.Explanation)

    async def ForecastJob(
        self, request: rltune_pb2.ForecastJobRequest, context: Context
    ) -> rltune_pb2.Forecast:
        """When and where a job would start."""
        try:
            spec = valid_job_spec(request.spec, "spec")
        except InvalidMessage as error:
            await _abort_invalid(context, error)
        told = await _answered(self._service.forecast(spec), context)
        return to_pb(told, rltune_pb2.Forecast)


def _submission(request: rltune_pb2.SubmitJobRequest, path: str) -> Submission:
    if not 0 < len(request.request_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise InvalidMessage(
            f"{path}request_id",
            f"must have 1 to {MAX_REQUEST_ID_BYTES} bytes",
            "make a UUID per submission, and keep it when trying again",
        )
    spec = valid_job_spec(request.spec, f"{path}spec")
    return Submission(request.request_id, spec, allow_infeasible=request.allow_infeasible)


def _actions(results: Sequence[ActionResult]) -> rltune_pb2.JobActionsResponse:
    return rltune_pb2.JobActionsResponse(
        results=[
            rltune_pb2.ActionResult(
                job_id=r.job_id,
                ok=r.ok,
                state=None
                if r.state is None
                else rltune_pb2.JobState.ValueType(enum_to_pb(r.state)),
                message=r.message,
            )
            for r in results
        ]
    )


async def _answered(wish: Awaitable[T], context: Context) -> T:
    """The service's answer, or the right status for what it refuses."""
    try:
        return await wish
    except Rejected as error:
        await _abort(
            context,
            _REFUSALS.get(error.code, grpc.StatusCode.FAILED_PRECONDITION),
            str(error),
            code=error.code,
            hint=error.hint,
        )
    except StoreUnavailable as error:
        log.error("the store refuses writes: %s", error)
        await _abort(
            context,
            grpc.StatusCode.UNAVAILABLE,
            str(error),
            code="store_unavailable",
            hint="nothing was changed"
            if isinstance(error, StoreDamaged)
            else "nothing was changed; free disk space on the controller and try again",
        )


async def _abort_invalid(context: Context, error: InvalidMessage) -> NoReturn:
    await _abort(
        context,
        grpc.StatusCode.INVALID_ARGUMENT,
        str(error),
        code="invalid_argument",
        hint=error.hint,
        field=error.field,
    )


async def _abort_no_job(context: Context, job_id: int) -> NoReturn:
    await _abort(
        context,
        grpc.StatusCode.NOT_FOUND,
        f"there is no job {job_id}",
        code="not_found",
        hint="`rltune jobs --all` lists those there are",
    )


async def _abort_no_node(context: Context, node: str) -> NoReturn:
    await _abort(
        context,
        grpc.StatusCode.NOT_FOUND,
        f"there is no node {node!r}",
        code="not_found",
        hint="`rltune nodes` lists those there are",
    )


async def _abort(
    context: Context,
    status: grpc.StatusCode,
    message: str,
    *,
    code: str = "invalid_argument",
    hint: str = "",
    field: str = "",
) -> NoReturn:
    """End the call with a status, and the same as JSON in the trailing metadata."""
    # Names from the request are part of it, and metadata has a limit of its own.
    message, hint = _cut(message, MAX_MESSAGE_BYTES), _cut(hint, MAX_HINT_BYTES)
    detail = {"code": code, "message": message, "hint": hint, "field": _cut(field, MAX_HINT_BYTES)}
    data = json.dumps(detail, ensure_ascii=False).encode()
    await context.abort(status, message, ((ERROR_METADATA_KEY, data),))
    raise AssertionError("unreachable: abort raises")


def _cut(text: str, most: int) -> str:
    """The text, or its beginning, in at most so many bytes."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return data.decode()
    return data[: most - 3].decode("utf-8", "ignore") + "..."
