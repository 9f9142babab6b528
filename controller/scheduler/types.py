"""What the scheduler sees and what it answers: plain frozen values, no time-dependent field.

A wait is `now_s - job.submitted_at_s`, computed by whoever needs it, so a view is built once
per change and reused until the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from controller.scheduler.index import ClusterIndex, Room
from protos.messages import JobSpec


class WaitReason(StrEnum):
    """Why a job waits, in fixed words that scripts may compare (Slurm's where it has one)."""

    PRIORITY = "Priority"
    """Its resources are free, but jobs before it in the order take them."""
    RESOURCES = "Resources"
    HELD = "Held"
    NODE_DRAINED = "NodeDrained"
    """It would fit if nodes that somebody drained took work."""
    NODE_UNHEALTHY = "NodeUnhealthy"
    """It would fit if unhealthy nodes took work; none that is only drained would do."""
    NODE_DOWN = "NodeDown"
    """It would fit if silent nodes were back; none that is only drained or unhealthy would do."""
    NEVER_FITS = "NeverFits"
    """No node that the cluster knows could hold it, even empty."""
    BACKOFF = "Backoff"
    """A launch failed on a node; it is tried again after a pause."""
    QUOTA = "Quota"
    """The GPU quota of its partition, or of its user there, is used up."""
    RESERVED = "Reserved"
    """Its resources are free, but it would delay a job before it that has a reservation."""
    NOT_CONSIDERED = "NotConsidered"
    """Beyond the window of jobs that one cycle looks at."""


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """One GPU of a node."""

    uuid: str
    index: int
    gpu_type: str
    is_free: bool
    """Healthy, in service and held by no attempt."""
    is_in_service: bool = True
    """Not lost, unhealthy or dirty; may be held by an attempt."""
    memory_bytes: int = 0
    """0: unknown."""
    near: tuple[int, ...] = ()
    """Its place in the node's topology, from far to near (NUMA node, PCIe switch, NVLink
    island): GPUs that share a longer beginning are closer. Empty where NVML does not tell."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One node with what is free on it now."""

    name: str
    accepts_work: bool
    """Connected, active (not drained) and healthy."""
    gpus: tuple[GpuSlot, ...]
    cpus_total: int
    cpus_free: int
    memory_total_bytes: int
    memory_free_bytes: int
    reasons: tuple[str, ...] = ()
    """Why it does not accept work; empty when it does."""
    closed_word: WaitReason = WaitReason.NODE_DRAINED
    """The same in a word, for jobs that it could hold; says nothing while it accepts work."""
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The part of a job on one node."""

    node: str
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that holds resources, for explanations, fair share and backfill."""

    job_id: int
    user: str
    gpus: int
    started_at_s: float | None
    """None while it is starting."""
    time_limit_s: float | None
    ranks: tuple[RankPlacement, ...]
    partition: str = ""
    cpus: int = 0
    """On each node, like the memory."""
    memory_bytes: int = 0
    predicted_run_s: float | None = None

    def ends_s(self, now_s: float) -> float:
        """When it is expected to end: never before now; infinite if nobody knows."""
        if self.predicted_run_s is None and self.time_limit_s is None:
            return inf
        run_s = self.time_limit_s if self.predicted_run_s is None else self.predicted_run_s
        assert run_s is not None
        return max(now_s, (now_s if self.started_at_s is None else self.started_at_s) + run_s)


@dataclass(frozen=True, slots=True)
class Partition:
    """A named set of nodes with limits on what its jobs may hold together."""

    name: str
    max_gpus: int | None = None
    max_gpus_per_user: int | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where and when a job that waits will start at the latest."""

    job_id: int
    begins_s: float
    nodes: tuple[str, ...]
    after_job_id: int | None = None
    """The job whose end makes the room."""
    ahead: frozenset[int] = frozenset()
    """Jobs before it in the order."""

    def binds(self, job_id: int, ends_s: float) -> bool:
        """Whether a job that would start now and end then must leave the reserved room.

        Where nobody knows when the reserved job begins, nothing can be said of the jobs before
        it; those behind it that could run as long must leave the room.
        """
        if self.begins_s == inf:
            return ends_s == inf and job_id not in self.ahead
        return self.begins_s < ends_s


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything about the cluster that a decision may depend on."""

    nodes: tuple[NodeCapacity, ...]
    running: tuple[RunningJob, ...] = ()
    usage_gpu_s: Mapping[str, float] = field(default_factory=dict)
    """Decayed GPU-seconds by user, as of `usage_at_s` (half-life in the policy's weights)."""
    usage_at_s: float = 0.0
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    gpu_speed: Mapping[str, float] = field(default_factory=dict)
    """Training speed for the price, by GPU type; any unit, only ratios count."""
    reservations: tuple[Reservation, ...] = ()
    """In order of their begin."""
    rooms: Mapping[str, tuple[Room, ...]] = field(default_factory=dict)
    """By node: what is left there for jobs that outlast a reservation."""
    index: ClusterIndex | None = field(default=None, compare=False, repr=False)
    """Made from the index of the view before where there is one; see `index.index_of`."""


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job of the queue."""

    job_id: int
    spec: JobSpec
    submitted_at_s: float
    eligible_at_s: float
    """When it could first have run: submission, release from hold, or requeue."""
    restarts: int = 0
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes on which its launch failed lately."""
    not_before_s: float = 0.0
    """End of the pause after a failed launch; 0 when there is none."""
    predicted_run_s: float | None = None
    """For backfill: a time that it most probably does not exceed."""
    expected_run_s: float | None = None
    """For policies: as likely to be exceeded as not."""

    @property
    def planned_run_s(self) -> float:
        """How long it is expected to run: as predicted, else its limit; infinite without both."""
        if self.predicted_run_s is not None:
            return self.predicted_run_s
        return inf if self.spec.time_limit_s is None else self.spec.time_limit_s


@dataclass(frozen=True, slots=True)
class RankedJob:
    """A job with its place in the order: larger score first."""

    job: WaitingJob
    score: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """What the score is made of, by name, for `explain`."""


@dataclass(frozen=True, slots=True)
class Start:
    """A job to start now, on these nodes and GPUs: all of it or none (gang)."""

    job_id: int
    ranks: tuple[RankPlacement, ...]
    """In rank order; ranks[0] is the master."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Objective terms that chose the place, by name."""


@dataclass(frozen=True, slots=True)
class WaitNote:
    """Why a job was not started; numbers for the sentence, which is made by `explain`."""

    reason: WaitReason
    gpus_needed: int = 0
    """On one node."""
    nodes_needed: int = 1
    best_node: str = ""
    best_node_free_gpus: int = 0
    free_gpus: int = 0
    """Free GPUs of acceptable types on all nodes that accept work."""
    short_of: str = ""
    """`gpus`, `cpus` or `memory`: what the best node lacks."""
    best_node_free_cpus: int = 0
    best_node_free_memory_bytes: int = 0
    nodes_with_room: int = 0
    """Nodes of one GPU type on which one rank would fit now, for jobs over several nodes."""
    ahead: int = 0
    """Jobs before it in this cycle's order, those that start included."""
    until_s: float | None = None
    """End of a back-off, or the earliest time a running job's limit frees enough."""
    detail: str = ""
    best_node_sick_gpus: int = 0
    """GPUs of the best node, of the type looked at, that are out of service."""
    sick_gpus: int = 0
    """GPUs of acceptable types that are out of service on nodes that accept work."""
    reserved_nodes: tuple[str, ...] = ()
    """Where it will start, if it has a reservation."""
    reserved_after_job: int | None = None
    """The running job whose end makes the room for it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What an allocator answers."""

    starts: tuple[Start, ...]
    objective: float = 0.0
    cut_short: bool = False
    """A limit struck before the optimum was proven."""
    fallback: str = ""
    """Why another allocator's answer was taken; empty when none was."""
    solve_s: float = field(default=0.0, compare=False)
    """Spent in a solver, translation included."""
    cost: float = 0.0
    """What the places cost by the allocator's weights; the starts come first."""

    @property
    def status(self) -> str:
        """`fallback`, `cut short`, or `done`: all that the allocator promises holds."""
        if self.fallback:
            return "fallback"
        return "cut short" if self.cut_short else "done"


@dataclass(frozen=True, slots=True)
class Decision:
    """What one scheduling cycle decided."""

    starts: tuple[Start, ...]
    waits: Mapping[int, WaitNote]
    """For each job of the queue that does not start."""
    ranking: tuple[RankedJob, ...]
    """The window in the policy's order, started jobs included."""
    policy: str
    allocator: str
    objective: float = 0.0
    cut_short: bool = False
    fallback: str = ""
    wake_at_s: float | None = None
    """When to decide again even if nothing happens (end of a back-off)."""
    reservations: tuple[Reservation, ...] = ()
    """Of jobs that wait, in order of their begin."""
