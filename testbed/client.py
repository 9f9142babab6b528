"""The Python client: the verbs of the command line, with typed answers.

    >>> from testbed.client import Client
    >>> from testbed.job_request import JobRequest
    >>> with Client() as client:                       # doctest: +SKIP
    ...     job_id = client.submit(JobRequest(argv=("python", "train.py"), gpus=2))
    ...     [job] = client.wait([job_id], timeout_s=3600)
    ...     print(job.state, job.exit)

Answers are the dataclasses of `protos.messages`; errors are those of `testbed.client_errors`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from protos import rltune_pb2 as pb
from protos.codec import InvalidMessage, check_job_spec, enum_to_pb, from_pb, to_pb
from protos.messages import (
    AdminState,
    ClusterEvent,
    ClusterInfo,
    Explanation,
    Forecast,
    GpuView,
    JobSpec,
    JobState,
    JobView,
    LogStream,
    NodeView,
)
from testbed.client_errors import InvalidRequest
from testbed.client_rpc import Rpc
from testbed.client_streams import LogMessage, stream_events, stream_logs
from testbed.client_wait import wait_for_end
from testbed.job_request import JobRequest, os_user
from testbed.settings import load_settings

PAGE_JOBS = 1000
"""The controller gives at most so many jobs an answer."""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of a wish about one job."""

    job_id: int
    ok: bool
    """Whether the wish was taken; a job that has ended already counts as taken."""
    state: JobState | None
    """The job's state afterwards; None if there is no such job."""
    message: str


class Client:
    """A connection to one controller. Use it as a context manager, from one thread."""

    def __init__(
        self,
        controller: str | None = None,
        *,
        user: str | None = None,
        patience_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        rpc: Rpc | None = None,
    ) -> None:
        """`controller` is `HOST:PORT`; `user` is who acts, by default the user of the system.

        Without `controller` it is found as the command line finds it: RLTUNE_CONTROLLER, then the
        settings file, then the default.

        `patience_s` is how long a question is tried again after the connection was lost
        (default: `client_rpc.UNARY_PATIENCE_S`).

        Raises:
            BadSettings: the address, or the settings file, cannot be meant.
        """
        flags = {} if controller is None else {"client.controller": controller}
        self.address = load_settings(os.environ, flags).controller
        self.user = user or os_user()
        self._monotonic = monotonic
        self._rpc = rpc or Rpc(self.address, patience_s=patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._rpc.close()

    # -------------------------------------------------------------- submitting

    def submit(
        self,
        job: JobSpec | JobRequest,
        *,
        allow_infeasible: bool = False,
        request_id: str | None = None,
    ) -> int:
        """Queue one job and return its number.

        The request carries an id, so that trying again after a lost answer makes no second job.

        Raises:
            InvalidRequest: a field breaks a rule; nothing was sent or queued.
            Infeasible: no known node could ever hold it, and `allow_infeasible` is not set.
            ControllerUnreachable: nobody answers. The job may be queued: ask again with the
                same `request_id` to find out.
        """
        request = self._submission(job, allow_infeasible, request_id or secrets.token_hex(16))
        return int(self._rpc.unary("SubmitJob", request, pb.SubmitJobResponse).job_id)

    def submit_many(
        self, jobs: Iterable[JobSpec | JobRequest], *, allow_infeasible: bool = False
    ) -> tuple[int, ...]:
        """Queue several jobs, all or none, and return their numbers in the same order.

        Raises:
            InvalidRequest, Infeasible, ControllerUnreachable: as `submit`.
        """
        requests = [self._submission(job, allow_infeasible, secrets.token_hex(16)) for job in jobs]
        answer = self._rpc.unary(
            "SubmitJobs", pb.SubmitJobsRequest(jobs=requests), pb.SubmitJobsResponse
        )
        return tuple(answer.job_ids)

    def _submission(
        self, job: JobSpec | JobRequest, allow_infeasible: bool, request_id: str
    ) -> pb.SubmitJobRequest:
        spec = job if isinstance(job, JobSpec) else job.to_spec(user=self.user)
        try:
            check_job_spec(spec)
        except InvalidMessage as error:
            message = str(error).removesuffix(f" ({error.hint})")
            raise InvalidRequest(message, error.hint, field=error.field) from None
        return pb.SubmitJobRequest(
            request_id=request_id,
            spec=to_pb(spec, pb.JobSpec),
            allow_infeasible=allow_infeasible,
        )

    # -------------------------------------------------------------- jobs

    def job(self, job_id: int) -> JobView:
        """One job with all its attempts.

        Raises:
            NotFound: there is none of that number.
        """
        answer = self._rpc.unary("GetJob", pb.GetJobRequest(job_id=job_id), pb.JobView)
        return from_pb(answer, JobView)

    def jobs(
        self,
        *,
        states: Iterable[JobState] = (),
        user: str | None = None,
        name: str | None = None,
        job_ids: Sequence[int] = (),
        limit: int | None = None,
    ) -> list[JobView]:
        """The jobs that match, newest first; all of them, unless `limit` says otherwise."""
        found: list[JobView] = []
        request = pb.ListJobsRequest(
            states=[pb.JobState.ValueType(enum_to_pb(state)) for state in states],
            user=user or "",
            name=name or "",
            job_ids=job_ids,
        )
        while limit is None or len(found) < limit:
            request.limit = PAGE_JOBS if limit is None else min(PAGE_JOBS, limit - len(found))
            answer = self._rpc.unary("ListJobs", request, pb.ListJobsResponse)
            found.extend(from_pb(job, JobView) for job in answer.jobs)
            if not answer.more:
                break
            request.before_job_id = found[-1].job_id
        return found

    def cancel(self, job_ids: Sequence[int], *, reason: str = "") -> list[ActionResult]:
        """Wish that jobs end. A job that has ended already is no error."""
        request = pb.CancelJobsRequest(job_ids=job_ids, actor=self.user, reason=reason)
        return _results(self._rpc.unary("CancelJobs", request, pb.JobActionsResponse))

    def hold(self, job_ids: Sequence[int]) -> list[ActionResult]:
        """Keep waiting jobs from starting."""
        return self._act("HoldJobs", job_ids)

    def release(self, job_ids: Sequence[int]) -> list[ActionResult]:
        """Let held jobs start again."""
        return self._act("ReleaseJobs", job_ids)

    def requeue(self, job_ids: Sequence[int]) -> list[ActionResult]:
        """Put jobs back into the queue: running ones are stopped first, ended ones run again.

        It is not tried again when the connection breaks, since a second wish would stop the
        new run.
        """
        return self._act("RequeueJobs", job_ids, idempotent=False)

    def _act(
        self, method: str, job_ids: Sequence[int], *, idempotent: bool = True
    ) -> list[ActionResult]:
        request = pb.JobActionsRequest(job_ids=job_ids, actor=self.user)
        answer = self._rpc.unary(method, request, pb.JobActionsResponse, idempotent=idempotent)
        return _results(answer)

    def explain(self, job_id: int) -> Explanation:
        """Why a job waits, or why it went where it went.

        Raises:
            NotFound: there is none of that number.
        """
        request = pb.ExplainJobRequest(job_id=job_id)
        return from_pb(self._rpc.unary("ExplainJob", request, pb.Explanation), Explanation)

    def forecast(self, job: JobSpec | JobRequest) -> Forecast:
        """When and where a job would start if it were submitted now; nothing is queued.

        Raises:
            InvalidRequest, Infeasible, ControllerUnreachable: as `submit`.
        """
        submission = self._submission(job, False, "forecast")
        request = pb.ForecastJobRequest(spec=submission.spec)
        return from_pb(self._rpc.unary("ForecastJob", request, pb.Forecast), Forecast)

    def wait(
        self,
        job_ids: Sequence[int],
        *,
        timeout_s: float | None = None,
        on_end: Callable[[JobView], None] = lambda _job: None,
    ) -> list[JobView]:
        """The jobs once all have ended, in the order asked; `on_end` is told each as it ends.

        It outlives a restart of the controller.

        Raises:
            NotFound: one of them does not exist.
            WaitTimedOut: `timeout_s` is over; the jobs go on.
        """
        return wait_for_end(
            job_ids,
            fetch=lambda ids: self.jobs(job_ids=ids),
            address=self.address,
            monotonic=self._monotonic,
            timeout_s=timeout_s,
            on_end=on_end,
        )

    # -------------------------------------------------------------- streams

    def events(
        self,
        *,
        after_event_id: int = 0,
        job_ids: Sequence[int] = (),
        node: str = "",
        follow: bool = False,
    ) -> Iterator[ClusterEvent]:
        """The event log from the next row on; with `follow`, then what comes, without end.

        -1 for `after_event_id` leaves the history out. With `follow` a lost connection is taken
        up again behind the last event seen.
        """
        request = pb.WatchEventsRequest(
            after_event_id=after_event_id, job_ids=job_ids, node=node, follow=follow
        )
        return stream_events(self._rpc, request)

    def logs(
        self,
        job_id: int,
        *,
        follow: bool = False,
        streams: Sequence[LogStream] = (),
        node_rank: int | None = None,
        attempt: int | None = None,
        tail_bytes: int | None = None,
    ) -> Iterator[LogMessage]:
        """A job's output; with `follow` until the job has ended.

        Raises:
            NotFound: there is no such job, attempt or rank.
        """
        request = pb.StreamLogsRequest(
            job_id=job_id,
            attempt=attempt,
            node_rank=node_rank,
            streams=[pb.LogStream.ValueType(enum_to_pb(stream)) for stream in streams],
            follow=follow,
            tail_bytes=tail_bytes,
        )
        return stream_logs(self._rpc, request)

    # -------------------------------------------------------------- nodes

    def nodes(self, node: str = "") -> list[NodeView]:
        """All nodes by name, or the one asked for.

        Raises:
            NotFound: there is no node of that name.
        """
        answer = self._rpc.unary("ListNodes", pb.ListNodesRequest(node=node), pb.ListNodesResponse)
        return [from_pb(view, NodeView) for view in answer.nodes]

    def gpus(self, node: str = "") -> list[GpuView]:
        """All GPUs, by node and index."""
        return [gpu for view in self.nodes(node) for gpu in view.gpus]

    def drain(self, node: str, reason: str) -> NodeView:
        """Give a node no new work; what runs there goes on.

        Raises:
            NotFound: there is no node of that name.
            InvalidRequest: there is no reason.
        """
        return self._set_node(node, AdminState.DRAIN, reason)

    def resume(self, node: str) -> NodeView:
        """Give a node work again.

        Raises:
            NotFound: there is no node of that name.
        """
        return self._set_node(node, AdminState.ACTIVE, "")

    def _set_node(self, node: str, admin: AdminState, reason: str) -> NodeView:
        request = pb.SetNodeStateRequest(
            node=node,
            admin=pb.AdminState.ValueType(enum_to_pb(admin)),
            reason=reason,
            actor=self.user,
        )
        answer = self._rpc.unary("SetNodeState", request, pb.SetNodeStateResponse)
        return from_pb(answer.node, NodeView)

    def info(self) -> ClusterInfo:
        """What the controller is and how it does."""
        answer = self._rpc.unary("GetClusterInfo", pb.GetClusterInfoRequest(), pb.ClusterInfo)
        return from_pb(answer, ClusterInfo)


def _results(answer: pb.JobActionsResponse) -> list[ActionResult]:
    return [from_pb(result, ActionResult) for result in answer.results]


__all__ = ["ActionResult", "Client", "JobRequest", "LogMessage"]
