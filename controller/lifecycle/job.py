"""A job: its states, what an attempt's end makes of it, and the pause after a failed launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from controller.lifecycle.errors import IllegalTransition
from protos.messages import (
    FINAL_JOB_STATES,
    ExitFacts,
    JobSpec,
    JobState,
    LaunchFault,
    OnNodeFail,
    OomKind,
    StopReason,
)

ALLOWED: Mapping[JobState, frozenset[JobState]] = {
    # A final state straight from PENDING, other than CANCELLED, is the end of an attempt that was
    # lost, requeued, and turned out to have ended by itself before anything replaced it.
    JobState.PENDING: frozenset({JobState.STARTING, JobState.HELD})
    | (FINAL_JOB_STATES - {JobState.NODE_FAIL}),
    JobState.HELD: frozenset({JobState.PENDING, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.PENDING}) | FINAL_JOB_STATES,
    JobState.RUNNING: frozenset({JobState.PENDING}) | FINAL_JOB_STATES,
    **{state: frozenset({JobState.PENDING}) for state in sorted(FINAL_JOB_STATES)},
}

BACKOFF_FIRST_S = 1.0
BACKOFF_CAP_S = 60.0
MAX_FAULTY_NODES = 3
MAX_LAUNCH_FAULTS = 5


class EndReason(StrEnum):
    """Why a job ended or went back to the queue, in fixed words."""

    NONE = ""
    EXIT_ZERO = "ExitZero"
    NON_ZERO_EXIT = "NonZeroExit"
    SIGNALLED = "Signalled"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    CUDA_OUT_OF_MEMORY = "CudaOutOfMemory"
    TIME_LIMIT = "TimeLimit"
    CANCELLED = "Cancelled"
    LAUNCH_FAILED = "LaunchFailed"
    NODE_FAULT = "NodeFault"
    NODE_FAILED = "NodeFailed"
    PREEMPTED = "Preempted"
    REQUEUED = "Requeued"


@dataclass(frozen=True, slots=True)
class CancelWish:
    """Somebody wants the job to end; stored until it has."""

    at_s: float
    actor: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A launch that failed by a node's fault."""

    node: str
    at_s: float
    excluded_until_s: float
    """Until then the job is not placed on that node again."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the controller knows it."""

    job_id: int
    request_id: str
    spec: JobSpec
    state: JobState
    submitted_at_s: float
    eligible_at_s: float | None
    """When it could first have run in its present wait; None while held."""
    started_at_s: float | None = None
    """When its newest attempt began to run."""
    ended_at_s: float | None = None
    attempt: int = 0
    """Number of its newest attempt; 0 when there was none."""
    restarts: int = 0
    cancel: CancelWish | None = None
    exit: ExitFacts | None = None
    exit_node_rank: int | None = None
    reason: EndReason = EndReason.NONE
    reason_text: str = ""
    failed_launches: tuple[FailedLaunch, ...] = ()
    """Since it last ran or a person requeued it."""
    not_before_s: float = 0.0

    @property
    def user(self) -> str:
        """Who submitted it."""
        return self.spec.user


@dataclass(frozen=True, slots=True)
class End:
    """What an attempt's end makes of its job."""

    state: JobState
    """A final state, or PENDING."""
    reason: EndReason
    text: str
    is_node_fault: bool = False
    """The launch failed by a node's fault: pause, blame, count."""


def move(job: Job, state: JobState) -> Job:
    """The job in another state.

    Raises:
        IllegalTransition: the table does not allow it.
    """
    if state not in ALLOWED[job.state]:
        raise IllegalTransition(f"job {job.job_id}", job.state, f"a change to {state}")
    return replace(job, state=state)


def finish(job: Job, end: End, at_s: float, exit_facts: ExitFacts | None, rank: int | None) -> Job:
    """The job in its final state."""
    return replace(
        move(job, end.state),
        ended_at_s=at_s,
        reason=end.reason,
        reason_text=end.text,
        exit=exit_facts,
        exit_node_rank=rank,
    )


def requeue(job: Job, at_s: float, reason: EndReason, text: str) -> Job:
    """The job waiting again; its next attempt gets the next number."""
    return replace(
        move(job, JobState.PENDING),
        eligible_at_s=at_s,
        started_at_s=None,
        ended_at_s=None,
        exit=None,
        exit_node_rank=None,
        cancel=None,
        restarts=job.restarts + 1,
        reason=reason,
        reason_text=text,
    )


def launch_pause_s(faults: int) -> float:
    """Seconds to wait after the n-th failed launch in a row: 1, 2, 4 ... 60."""
    return float(min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2 ** (faults - 1)))


def with_failed_launches(job: Job, nodes: tuple[str, ...], at_s: float) -> Job:
    """Notes failed launches and sets the pause.

    The node stays excluded for twice the pause, so that for a while only other nodes are tried
    and a cluster of one node is not shut out.
    """
    pause_s = launch_pause_s(len(job.failed_launches) + 1)
    noted = tuple(FailedLaunch(node, at_s, at_s + 2 * pause_s) for node in nodes)
    return replace(job, failed_launches=job.failed_launches + noted, not_before_s=at_s + pause_s)


def launch_verdict(job: Job, text: str) -> End | None:
    """The final end of a job whose launches failed too often, else None."""
    nodes = {launch.node for launch in job.failed_launches}
    count = len(job.failed_launches)
    if len(nodes) < MAX_FAULTY_NODES and count < MAX_LAUNCH_FAULTS:
        return None
    where = ", ".join(sorted(nodes))
    times = f"{count} time{'s' if count > 1 else ''}"
    sentence = f"It could not be launched {times} (on {where}); the last time: {text}"
    return End(JobState.FAILED, EndReason.LAUNCH_FAILED, sentence)


def excluded_nodes(job: Job, now_s: float) -> frozenset[str]:
    """Nodes on which its launch failed lately."""
    return frozenset(
        launch.node for launch in job.failed_launches if launch.excluded_until_s > now_s
    )


def end_of(
    stop_reason: StopReason | None,
    exit_facts: ExitFacts,
    on_node_fail: OnNodeFail,
    node_failure: str = "",
) -> End:
    """What an attempt's end makes of its job.

    Our own act counts before the exit code (a job that exits 0 on SIGTERM at its time limit is a
    TIMEOUT); only an attempt that nobody stopped is judged by how it exited.
    """
    own = stop_reason is None or stop_reason is StopReason.RANK_FAILED
    cause = exit_facts.stop_reason if own else stop_reason
    match cause:
        case StopReason.CANCEL:
            return End(JobState.CANCELLED, EndReason.CANCELLED, "It was cancelled.")
        case StopReason.TIME_LIMIT:
            text = exit_facts.message or "It ran into its time limit."
            return End(JobState.TIMEOUT, EndReason.TIME_LIMIT, text)
        case StopReason.MEMORY_LIMIT:
            text = exit_facts.message or "It used more host memory than it asked for."
            return End(JobState.OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY, text)
        case StopReason.PREEMPT:
            return End(JobState.PENDING, EndReason.PREEMPTED, "It was preempted.")
        case StopReason.DRAIN | StopReason.REQUEUE:
            return End(JobState.PENDING, EndReason.REQUEUED, "It was requeued.")
        case StopReason.START_TIMEOUT:
            text = "the node did not start it in time"
            return End(JobState.PENDING, EndReason.NODE_FAULT, text, is_node_fault=True)
        case StopReason.FENCED:
            return _node_failure_end(on_node_fail, node_failure or "Its node failed.")
        case StopReason.RANK_FAILED | None:
            return _natural_end(exit_facts)
        case _:
            assert_never(cause)


def _node_failure_end(on_node_fail: OnNodeFail, text: str) -> End:
    match on_node_fail:
        case OnNodeFail.FAIL:
            return End(JobState.NODE_FAIL, EndReason.NODE_FAILED, text)
        case OnNodeFail.REQUEUE | OnNodeFail.WAIT:
            # WAIT is over when the node is back and the process proved gone: run it again.
            return End(JobState.PENDING, EndReason.NODE_FAILED, text)
        case _:
            assert_never(on_node_fail)


def _natural_end(exit_facts: ExitFacts) -> End:
    match exit_facts.launch_fault:
        case LaunchFault.JOB:
            text = exit_facts.message or "It could not be launched."
            return End(JobState.FAILED, EndReason.LAUNCH_FAILED, text)
        case LaunchFault.NODE:
            text = exit_facts.message or "the node could not launch it"
            return End(JobState.PENDING, EndReason.NODE_FAULT, text, is_node_fault=True)
        case LaunchFault.NONE:
            pass
        case _:
            assert_never(exit_facts.launch_fault)
    match exit_facts.oom:
        case OomKind.HOST:
            text = exit_facts.message or "It ran out of host memory."
            return End(JobState.OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY, text)
        case OomKind.CUDA:
            text = exit_facts.message or "It ran out of GPU memory."
            return End(JobState.OUT_OF_MEMORY, EndReason.CUDA_OUT_OF_MEMORY, text)
        case OomKind.NONE:
            pass
        case _:
            assert_never(exit_facts.oom)
    if exit_facts.signal is not None:
        text = exit_facts.message or f"It was ended by signal {exit_facts.signal}."
        return End(JobState.FAILED, EndReason.SIGNALLED, text)
    if exit_facts.exit_code == 0:
        return End(JobState.COMPLETED, EndReason.EXIT_ZERO, "It exited with code 0.")
    if exit_facts.exit_code is None:
        text = exit_facts.message or "How it ended is not known."
        return End(JobState.FAILED, EndReason.NON_ZERO_EXIT, text)
    text = exit_facts.message or f"It exited with code {exit_facts.exit_code}."
    return End(JobState.FAILED, EndReason.NON_ZERO_EXIT, text)
