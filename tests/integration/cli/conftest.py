"""A controller that keeps jobs in a dict, behind a real gRPC server on a real port."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from protos import rltune_pb2 as pb
from protos import rltune_pb2_grpc
from protos.codec import enum_from_pb, enum_to_pb, from_pb, to_pb
from protos.messages import (
    AdminState,
    AttemptState,
    AttemptView,
    ClusterEvent,
    ClusterInfo,
    ExitFacts,
    Explanation,
    GpuFacts,
    GpuSample,
    GpuView,
    HostSample,
    JobSpec,
    JobState,
    JobView,
    LogStream,
    NodeFacts,
    NodeView,
    RankPhase,
    RankUsage,
    RankView,
)
from testbed.cli.main import main
from testbed.job_request import os_user

NOW_S = 1_790_000_000.25


def make_job(job_id: int, spec: JobSpec, state: JobState = JobState.PENDING) -> JobView:
    return JobView(
        job_id=job_id,
        spec=spec,
        state=state,
        completing=False,
        reason="Resources" if state is JobState.PENDING else "",
        reason_text="needs 2 GPUs, 1 is free" if state is JobState.PENDING else "",
        submitted_at_s=NOW_S,
        eligible_at_s=NOW_S,
        started_at_s=None,
        ended_at_s=None,
        wait_s=1.5,
        run_s=0.0,
        gpu_s=0.0,
        exit=None,
        exit_node_rank=None,
        attempts=(),
    )


def make_attempt(node_names: tuple[str, ...], gpus: int, facts: ExitFacts | None) -> AttemptView:
    return AttemptView(
        attempt=1,
        state=AttemptState.RUNNING if facts is None else AttemptState.ENDED,
        stop_reason=None,
        created_at_s=NOW_S,
        started_at_s=NOW_S,
        ended_at_s=None if facts is None else NOW_S + 3,
        gpu_utilization_mean_pct=75.0,
        gpu_memory_peak_bytes=3 * 2**30,
        ranks=tuple(
            RankView(
                node=name,
                node_rank=rank,
                gpu_uuids=tuple(f"GPU-{name}-{i}" for i in range(gpus // len(node_names))),
                gpu_indices=tuple(range(gpus // len(node_names))),
                phase=RankPhase.RUNNING if facts is None else RankPhase.RELEASED,
                pid=4711,
                exit=facts,
                usage=None if facts is None else RankUsage(3.0, 2.5, 2**30),
            )
            for rank, name in enumerate(node_names)
        ),
    )


def make_node(name: str) -> NodeView:
    facts = GpuFacts(f"GPU-{name}-0", 0, "Tesla P100", "P100", "0000:01:00.0", 16 * 2**30, 250.0)
    sample = GpuSample(
        facts.uuid,
        memory_used_bytes=2**30,
        memory_total_bytes=16 * 2**30,
        gpu_utilization_pct=87.5,
        temperature_c=61.0,
        power_w=180.0,
        power_limit_w=250.0,
    )
    silent = replace(facts, uuid=f"GPU-{name}-1", index=1)
    return NodeView(
        name=name,
        state="UP",
        admin=AdminState.ACTIVE,
        reasons=(),
        address="127.0.0.1",
        facts=NodeFacts(name, "Linux", 8, 64 * 2**30, (facts, silent)),
        host=HostSample(cpu_utilization_pct=12.5),
        gpus=(
            GpuView(name, facts, sample, 1, healthy=True, reasons=()),
            GpuView(name, silent, None, None, healthy=False, reasons=("lost",)),
        ),
        cpus_used=2,
        memory_used_bytes=2**30,
        last_seen_s_ago=0.4,
        telemetry_age_s=0.2,
        jobs=(1,),
    )


@dataclass
class Refusal:
    """An answer that says no, as the real controller says it."""

    status: grpc.StatusCode
    detail: dict[str, str] | None = None

    def abort(self, context: grpc.ServicerContext) -> None:
        if self.detail is not None:
            data = json.dumps(self.detail).encode()
            context.set_trailing_metadata((("rltune-error-bin", data),))
        context.abort(self.status, "status text")


class FakeController(rltune_pb2_grpc.ControllerServicer):
    """Jobs in a dict; `refusals` are given to the next calls, one each."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobView] = {}
        self.nodes = [make_node("gpu-node-1"), make_node("gpu-node-2")]
        self.events: list[ClusterEvent] = []
        self.logs: list[pb.LogMessage] = []
        self.break_logs_after: list[int] = []
        self.end_event_streams = 0
        self.refusals: list[Refusal] = []
        self.lose_answers = 0
        self.requests: list[tuple[str, Any]] = []
        self.page = 1000
        self._known: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._news = threading.Condition()
        self._server: grpc.Server | None = None
        self.port = 0

    # ---------------------------------------------------------- the server

    def start(self) -> None:
        """Serves, on the same port as before if there was one."""
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        rltune_pb2_grpc.add_ControllerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Goes away without a word to anybody."""
        assert self._server is not None
        stopped = self._server.stop(grace=None)
        with self._news:
            self._news.notify_all()
        stopped.wait(5)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ---------------------------------------------------------- the world

    def add(self, state: JobState = JobState.PENDING, **fields: Any) -> int:
        """A job that is there already."""
        spec = JobSpec(
            **{"name": "job", "user": os_user(), "argv": ("true",), "cwd": "/", **fields}
        )
        job_id = next(self._ids)
        self.jobs[job_id] = make_job(job_id, spec, state)
        self.tell(job_id, "JobSubmitted")
        if state is JobState.RUNNING:
            self.run(job_id)
        return job_id

    def run(self, job_id: int, *node_names: str) -> None:
        job = self.jobs[job_id]
        nodes = node_names or ("gpu-node-1",)
        self.jobs[job_id] = replace(
            job,
            state=JobState.RUNNING,
            reason="",
            reason_text="",
            started_at_s=NOW_S,
            run_s=2.0,
            attempts=(make_attempt(nodes, job.spec.gpus, None),),
        )
        self.tell(job_id, "JobStarted")

    def end(self, job_id: int, state: JobState, facts: ExitFacts) -> None:
        job = self.jobs[job_id]
        nodes = tuple(r.node for a in job.attempts[-1:] for r in a.ranks) or ("gpu-node-1",)
        self.jobs[job_id] = replace(
            job,
            state=state,
            reason="",
            started_at_s=NOW_S,
            ended_at_s=NOW_S + 3,
            run_s=3.0,
            gpu_s=3.0 * job.spec.gpus,
            exit=facts,
            exit_node_rank=0,
            attempts=(make_attempt(nodes, job.spec.gpus, facts),),
        )
        self.tell(job_id, "JobEnded")

    def tell(self, job_id: int | None, kind: str, node: str | None = None) -> None:
        with self._news:
            event_id = len(self.events) + 1
            event = ClusterEvent(
                event_id, NOW_S + event_id, kind, job_id, None, node, "scheduler", f"{kind} text"
            )
            self.events.append(event)
            self._news.notify_all()

    def write(self, data: bytes, stream: LogStream = LogStream.STDOUT, rank: int = 0) -> None:
        """A piece of log, behind what is there already."""
        number = enum_to_pb(stream)
        offset = sum(len(m.data) for m in self.logs if (m.node_rank, m.stream) == (rank, number))
        self.logs.append(
            pb.LogMessage(
                attempt=1,
                node_rank=rank,
                node=f"gpu-node-{rank + 1}",
                stream=number,
                offset=offset,
                data=data,
            )
        )

    # ---------------------------------------------------------- the service

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append((type(request).__name__, request))
        if self.refusals:
            self.refusals.pop(0).abort(context)

    def _queue(self, request: pb.SubmitJobRequest) -> int:
        if request.request_id not in self._known:
            spec = from_pb(request.spec, JobSpec)
            job_id = next(self._ids)
            self.jobs[job_id] = make_job(job_id, spec)
            self._known[request.request_id] = job_id
            self.tell(job_id, "JobSubmitted")
        return self._known[request.request_id]

    def _lose(self, context: grpc.ServicerContext) -> None:
        if self.lose_answers:
            self.lose_answers -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def SubmitJob(self, request, context):
        self._note(request, context)
        job_id = self._queue(request)
        self._lose(context)
        return pb.SubmitJobResponse(job_id=job_id)

    def SubmitJobs(self, request, context):
        self._note(request, context)
        job_ids = [self._queue(job) for job in request.jobs]
        self._lose(context)
        return pb.SubmitJobsResponse(job_ids=job_ids)

    def _job(self, job_id: int, context: grpc.ServicerContext) -> JobView:
        if job_id not in self.jobs:
            detail = {"code": "not_found", "message": f"there is no job {job_id}", "hint": "look"}
            Refusal(grpc.StatusCode.NOT_FOUND, detail).abort(context)
        return self.jobs[job_id]

    def GetJob(self, request, context):
        self._note(request, context)
        return to_pb(self._job(request.job_id, context), pb.JobView)

    def ListJobs(self, request, context):
        self._note(request, context)
        states = {enum_from_pb(JobState, number, "states") for number in request.states}
        found = [
            job
            for job_id, job in sorted(self.jobs.items(), reverse=True)
            if (not states or job.state in states)
            and request.user in {"", job.spec.user}
            and request.name in {"", job.spec.name}
            and (not request.job_ids or job_id in request.job_ids)
            and (not request.before_job_id or job_id < request.before_job_id)
        ]
        limit = min(request.limit or self.page, self.page)
        return pb.ListJobsResponse(
            jobs=[to_pb(job, pb.JobView) for job in found[:limit]], more=len(found) > limit
        )

    def _act(self, request, context, allowed: set[JobState], becomes: JobState) -> Any:
        self._note(request, context)
        results = []
        for job_id in request.job_ids:
            job = self.jobs.get(job_id)
            if job is None:
                result = pb.ActionResult(job_id=job_id, message="there is no such job")
            elif job.state in allowed:
                self.jobs[job_id] = replace(job, state=becomes)
                self.tell(job_id, f"Job{becomes}")
                result = pb.ActionResult(job_id=job_id, ok=True, state=enum_to_pb(becomes))
            else:
                result = pb.ActionResult(
                    job_id=job_id,
                    ok=job.state.is_final and becomes is JobState.CANCELLED,
                    state=enum_to_pb(job.state),
                    message=f"already {job.state}",
                )
            results.append(result)
        return pb.JobActionsResponse(results=results)

    def CancelJobs(self, request, context):
        unfinished = {state for state in JobState if not state.is_final}
        return self._act(request, context, unfinished, JobState.CANCELLED)

    def HoldJobs(self, request, context):
        return self._act(request, context, {JobState.PENDING}, JobState.HELD)

    def ReleaseJobs(self, request, context):
        return self._act(request, context, {JobState.HELD}, JobState.PENDING)

    def RequeueJobs(self, request, context):
        return self._act(request, context, set(JobState), JobState.PENDING)

    def WatchEvents(self, request, context):
        self._note(request, context)
        server, sent = self._server, request.after_event_id
        if sent < 0:
            sent = len(self.events)
        while True:
            with self._news:
                if request.follow and len(self.events) <= sent and context.is_active():
                    self._news.wait(0.2)
                fresh = self.events[sent:]
                sent = len(self.events)
            for event in fresh:
                if not request.job_ids or event.job_id in request.job_ids:
                    yield to_pb(event, pb.ClusterEvent)
            if self.end_event_streams:
                self.end_event_streams -= 1
                return
            if not request.follow or not context.is_active() or server is not self._server:
                return

    def StreamLogs(self, request, context):
        self._note(request, context)
        self._job(request.job_id, context)
        sent = 0
        while True:
            for message in self.logs[sent:]:
                wanted = (not request.streams or message.stream in request.streams) and not (
                    request.HasField("node_rank") and message.node_rank != request.node_rank
                )
                if self.break_logs_after and sent >= self.break_logs_after[0]:
                    self.break_logs_after.pop(0)
                    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                sent += 1
                if wanted:
                    yield self._tail(message, request)
            ended = self.jobs[request.job_id].state.is_final and sent >= len(self.logs)
            if not request.follow or ended or not context.is_active():
                return
            with self._news:
                self._news.wait(0.05)

    def _tail(self, message: pb.LogMessage, request: pb.StreamLogsRequest) -> pb.LogMessage:
        """The part of a piece that lies within the tail of its stream."""
        if not request.HasField("tail_bytes"):
            return message
        same = [
            m for m in self.logs if (m.node_rank, m.stream) == (message.node_rank, message.stream)
        ]
        first = max(0, sum(len(m.data) for m in same) - request.tail_bytes)
        skip = min(len(message.data), max(0, first - message.offset))
        tail = pb.LogMessage()
        tail.CopyFrom(message)
        tail.data, tail.offset = message.data[skip:], message.offset + skip
        return tail

    def ListNodes(self, request, context):
        self._note(request, context)
        found = [node for node in self.nodes if request.node in {"", node.name}]
        if request.node and not found:
            detail = {"code": "not_found", "message": f"there is no node {request.node!r}"}
            Refusal(grpc.StatusCode.NOT_FOUND, detail).abort(context)
        return pb.ListNodesResponse(nodes=[to_pb(node, pb.NodeView) for node in found])

    def SetNodeState(self, request, context):
        self.ListNodes(pb.ListNodesRequest(node=request.node), context)
        admin = enum_from_pb(AdminState, request.admin, "admin")
        (index,) = (i for i, node in enumerate(self.nodes) if node.name == request.node)
        self.nodes[index] = replace(
            self.nodes[index],
            admin=admin,
            state="DRAINING" if admin is AdminState.DRAIN else "UP",
            reasons=(request.reason,) if request.reason else (),
        )
        return pb.SetNodeStateResponse(node=to_pb(self.nodes[index], pb.NodeView))

    def GetClusterInfo(self, request, context):
        self._note(request, context)
        counts = {str(state): 0 for state in JobState}
        for job in self.jobs.values():
            counts[job.state] += 1
        info = ClusterInfo(
            "rltune", "0.1.0", "multifactor", "milp", NOW_S, NOW_S + 60, counts, 2, 2, 4, 1, 7,
            0.0125, 0,
        )  # fmt: skip
        return to_pb(info, pb.ClusterInfo)

    def ExplainJob(self, request, context):
        self._note(request, context)
        job = self._job(request.job_id, context)
        told = Explanation(
            job.job_id, job.state, "Resources", "needs 2 GPUs, 1 is free",
            ("gpu-node-1 has 1 free P100",), {"age": 0.25, "size": 1.0},
        )  # fmt: skip
        return to_pb(told, pb.Explanation)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[FakeController]:
    """A running fake; `RLTUNE_CONTROLLER` points to it, and no settings file of ours is read."""
    fake = FakeController()
    fake.start()
    monkeypatch.setenv("RLTUNE_CONTROLLER", fake.address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "RLTUNE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    yield fake
    fake.stop()


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def out(self) -> str:
        return self.stdout.decode()

    @property
    def json(self) -> Any:
        """The one JSON value; fails if there is more or less on standard output."""
        assert self.stdout.endswith(b"\n")
        assert self.stdout.count(b"\n") == 1
        return json.loads(self.stdout, parse_constant=_not_json)

    @property
    def lines(self) -> list[Any]:
        """JSON Lines."""
        return [json.loads(line, parse_constant=_not_json) for line in self.out.splitlines()]


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.fixture
def rltune(capsysbinary: pytest.CaptureFixture[bytes]) -> Any:
    """`rltune("jobs", "--json")` runs the command in this process."""

    def run(*args: str) -> Ran:
        code = main(list(args))
        captured = capsysbinary.readouterr()
        return Ran(int(code), captured.out, captured.err.decode())

    return run


@pytest.fixture
def refusal() -> type[Refusal]:
    """Builds an answer that says no."""
    return Refusal
