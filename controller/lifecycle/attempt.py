"""An attempt: one try at running a job, with a row for each rank. Attempts hold the GPUs.

A rank holds its GPUs, CPU cores and memory from the row that is written before its launch until
its agent reports RELEASED (GPUs checked), or a new boot of its node proves the process gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.lifecycle.errors import IllegalTransition
from protos.messages import (
    AttemptState,
    ExitFacts,
    LaunchFault,
    OomKind,
    RankId,
    RankPhase,
    RankUsage,
    StopReason,
)

AttemptKey = tuple[int, int]
"""(job_id, attempt number)."""

ALLOWED: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.LAUNCHING: frozenset(
        {AttemptState.RUNNING, AttemptState.ENDED, AttemptState.LOST}
    ),
    AttemptState.RUNNING: frozenset({AttemptState.ENDED, AttemptState.LOST}),
    # Back to LAUNCHING: the node was lost before it acknowledged the launch, the job waits for it.
    AttemptState.LOST: frozenset(
        {AttemptState.LAUNCHING, AttemptState.RUNNING, AttemptState.ENDED}
    ),
    AttemptState.ENDED: frozenset(),
}

PHASE_ORDER: Mapping[RankPhase, int] = {phase: order for order, phase in enumerate(RankPhase)}

MASTER_PORT_FIRST = 20_000
MASTER_PORT_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class Rank:
    """One node's part of an attempt."""

    node: str
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    phase: RankPhase = RankPhase.LAUNCHING
    pid: int | None = None
    exit: ExitFacts | None = None
    usage: RankUsage | None = None
    released_at_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no process of it runs any more."""
        return self.phase in {RankPhase.ENDED, RankPhase.RELEASED}

    @property
    def is_held(self) -> bool:
        """Whether it still holds its GPUs, CPU cores and memory."""
        return self.phase is not RankPhase.RELEASED


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at running a job on one or more nodes."""

    job_id: int
    number: int
    state: AttemptState
    ranks: tuple[Rank, ...]
    created_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stop_reason: StopReason | None = None
    fenced: bool = False
    """The job has given up on it: it is killed wherever it turns up, its end decides nothing."""
    node_failure: str = ""
    """Why a node failed it, in a sentence; empty when none did."""
    exit: ExitFacts | None = None
    """Of the first bad rank; of rank 0 when all ended well."""
    exit_node_rank: int | None = None
    master_port: int = 0
    """Port of rank 0 for the rendezvous; 0 for an attempt on one node."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What the allocator weighed when it chose the place."""
    why: tuple[str, ...] = ()
    """The same in sentences, as they were true at that moment."""
    gpu_utilization_mean_pct: float | None = None
    gpu_memory_peak_bytes: int | None = None
    """The most memory in use on any one of its GPUs."""
    gpu_sampled_s: float = 0.0
    """GPU-seconds of telemetry behind the mean: its weight."""

    @property
    def key(self) -> AttemptKey:
        """(job_id, number)."""
        return (self.job_id, self.number)

    @property
    def gpus(self) -> int:
        """GPUs of all ranks."""
        return sum(len(rank.gpu_uuids) for rank in self.ranks)

    @property
    def is_held(self) -> bool:
        """Whether any rank still holds resources."""
        return any(rank.is_held for rank in self.ranks)

    @property
    def is_stopping(self) -> bool:
        """Whether we want it to end and it has not."""
        return self.stop_reason is not None and self.state is not AttemptState.ENDED

    def rank_id(self, node_rank: int) -> RankId:
        """The name of a rank on the wire."""
        return RankId(self.job_id, self.number, node_rank)

    def run_s(self, now_s: float) -> float:
        """How long it has run, or ran."""
        if self.started_at_s is None:
            return 0.0
        end_s = self.ended_at_s if self.ended_at_s is not None else now_s
        return max(0.0, end_s - self.started_at_s)


def move(attempt: Attempt, state: AttemptState) -> Attempt:
    """The attempt in another state.

    Raises:
        IllegalTransition: the table does not allow it.
    """
    if state not in ALLOWED[attempt.state]:
        name = f"attempt {attempt.job_id}.{attempt.number}"
        raise IllegalTransition(name, attempt.state, f"a change to {state}")
    return replace(attempt, state=state)


def with_rank(attempt: Attempt, node_rank: int, rank: Rank) -> Attempt:
    """The attempt with one rank replaced."""
    ranks = (*attempt.ranks[:node_rank], rank, *attempt.ranks[node_rank + 1 :])
    return replace(attempt, ranks=ranks)


def with_stop(attempt: Attempt, reason: StopReason) -> Attempt:
    """The attempt with a wish to stop: the first one stays, CANCEL overrides."""
    if attempt.stop_reason is not None and reason is not StopReason.CANCEL:
        return attempt
    return replace(attempt, stop_reason=reason)


def is_bad_end(exit_facts: ExitFacts) -> bool:
    """Whether a rank's end must stop the other ranks."""
    return (
        exit_facts.exit_code != 0
        or exit_facts.signal is not None
        or exit_facts.oom is not OomKind.NONE
        or exit_facts.stop_reason is not None
        or exit_facts.launch_fault is not LaunchFault.NONE
    )


def exit_words(attempt: Attempt) -> str:
    """How it exited, without a full stop."""
    facts = attempt.exit
    if facts is None:
        return "how is not known"
    if facts.message:
        return facts.message.rstrip(".")
    if facts.signal is not None:
        return f"signal {facts.signal}"
    return f"exit code {facts.exit_code}"


def end_words(attempt: Attempt) -> str:
    """How an attempt ended, or was given up, and why: a sentence without a full stop."""
    name = f"attempt {attempt.number}"
    if attempt.node_failure:
        return f"{name} ended: {attempt.node_failure.rstrip('.')}"
    if attempt.stop_reason is StopReason.START_TIMEOUT:
        slow = tuple(rank for rank in attempt.ranks if rank.pid is None) or attempt.ranks
        return f"{name} did not start in time on {_names(slow)}"
    if attempt.exit is not None and attempt.exit.launch_fault is not LaunchFault.NONE:
        where = attempt.ranks[attempt.exit_node_rank or 0].node
        why = attempt.exit.message.rstrip(".") or "why is not known"
        return f"{name} could not start on {where}: {why}"
    if attempt.stop_reason is not None and attempt.stop_reason is not StopReason.RANK_FAILED:
        return f"{name} was stopped ({attempt.stop_reason})"
    return f"{name} ended: {exit_words(attempt)}"


def _names(ranks: tuple[Rank, ...]) -> str:
    return ", ".join(dict.fromkeys(rank.node for rank in ranks))


def has_started(attempt: Attempt) -> bool:
    """Whether every rank got to run."""
    return all(rank.phase is not RankPhase.LAUNCHING for rank in attempt.ranks)


def master_port(job_id: int, number: int, taken: frozenset[int]) -> int:
    """A port for rank 0 that no live attempt uses; the next attempt of the job gets another.

    Raises:
        IllegalTransition: all ports are taken.
    """
    first = (job_id * 31 + number) % MASTER_PORT_COUNT
    for step in range(MASTER_PORT_COUNT):
        port = MASTER_PORT_FIRST + (first + step) % MASTER_PORT_COUNT
        if port not in taken:
            return port
    raise IllegalTransition(f"attempt {job_id}.{number}", "new", "a launch without a free port")
