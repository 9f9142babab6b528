"""What happened: the inputs of `rules.apply`, in the past tense. `at_s` is wall time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.messages import Hello, JobSpec, NodeFacts, RankReport, XidEvent

SCHEDULER = "scheduler"
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place, in rank order."""

    node: str
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A new job."""

    job_id: int
    request_id: str
    spec: JobSpec
    at_s: float
    actor: str


@dataclass(frozen=True, slots=True)
class JobPlaced:
    """The scheduler chose GPUs for a waiting job."""

    job_id: int
    places: tuple[Place, ...]
    at_s: float
    master_port: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    """Sentences on why it went there."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody wants a job to end."""

    job_id: int
    actor: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """Somebody wants a waiting job not to start."""

    job_id: int
    actor: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """Somebody wants a held job to be considered again."""

    job_id: int
    actor: str
    at_s: float


@dataclass(frozen=True, slots=True)
class RequeueRequested:
    """Somebody wants a running or finished job to run again."""

    job_id: int
    actor: str
    at_s: float


@dataclass(frozen=True, slots=True)
class RankReported:
    """An agent told how far a rank is."""

    node: str
    report: RankReport
    at_s: float


@dataclass(frozen=True, slots=True)
class StartDeadlinePassed:
    """An attempt did not start within the time allowed."""

    job_id: int
    attempt: int
    at_s: float
    deadline_s: float
    """The time allowed."""


@dataclass(frozen=True, slots=True)
class UsageMeasured:
    """What telemetry says about the GPUs of an attempt so far."""

    job_id: int
    attempt: int
    gpu_utilization_mean_pct: float | None
    gpu_memory_peak_bytes: int | None
    gpu_sampled_s: float


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """An agent opened a session and told all it knows."""

    hello: Hello
    address: str
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node's lease ended."""

    node: str
    at_s: float
    silent_s: float
    """How long nothing was heard."""


@dataclass(frozen=True, slots=True)
class NodeFactsChanged:
    """A node told a new inventory."""

    node: str
    facts: NodeFacts
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeHealthReported:
    """A node's health differs from what is stored."""

    node: str
    health: tuple[str, ...]
    gpu_health: Mapping[str, tuple[str, ...]]
    """Only GPUs with reasons."""
    lost_gpus: frozenset[str]
    xids: tuple[XidEvent, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeDrained:
    """Somebody wants no new work on a node."""

    node: str
    actor: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeResumed:
    """Somebody wants a node to take work again, whatever was against it."""

    node: str
    actor: str
    reason: str
    at_s: float


JobEvent = (
    JobSubmitted
    | JobPlaced
    | CancelRequested
    | HoldRequested
    | ReleaseRequested
    | RequeueRequested
    | StartDeadlinePassed
    | UsageMeasured
)
NodeEvent = (
    AgentConnected
    | NodeLost
    | NodeFactsChanged
    | NodeHealthReported
    | NodeDrained
    | NodeResumed
    | RankReported
)
Event = JobEvent | NodeEvent
