"""The frozen dataclasses and enums that travel between controller, agent and client.

Everything here is already validated (`protos.codec` does that on arrival); inside a process
these values are trusted. Absent is `None`, never 0. Units are in the names: seconds as float,
bytes, watts, percent. Points in time are UTC seconds since the epoch; durations are measured
on the machine that judges them, with its monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0


class JobState(StrEnum):
    """Where a job stands, in Slurm's words. `COMPLETING` is derived, never stored."""

    PENDING = "PENDING"
    HELD = "HELD"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"

    @property
    def is_final(self) -> bool:
        """Whether a job in this state never changes again by itself."""
        return self in FINAL_JOB_STATES

    @property
    def is_active(self) -> bool:
        """Whether an attempt of the job may hold GPUs."""
        return self in {JobState.STARTING, JobState.RUNNING}


FINAL_JOB_STATES = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.OUT_OF_MEMORY,
        JobState.TIMEOUT,
        JobState.CANCELLED,
        JobState.NODE_FAIL,
    }
)


class AttemptState(StrEnum):
    """Where one try at running a job stands."""

    LAUNCHING = "LAUNCHING"
    RUNNING = "RUNNING"
    LOST = "LOST"
    ENDED = "ENDED"


class StopReason(StrEnum):
    """Why we (not the job itself) ended an attempt."""

    CANCEL = "CANCEL"
    PREEMPT = "PREEMPT"
    TIME_LIMIT = "TIME_LIMIT"
    DRAIN = "DRAIN"
    REQUEUE = "REQUEUE"
    RANK_FAILED = "RANK_FAILED"
    START_TIMEOUT = "START_TIMEOUT"
    FENCED = "FENCED"
    MEMORY_LIMIT = "MEMORY_LIMIT"


class OomKind(StrEnum):
    """Which memory ran out."""

    NONE = "NONE"
    HOST = "HOST"
    CUDA = "CUDA"


class LaunchFault(StrEnum):
    """Whose fault it is that a process could not be started."""

    NONE = "NONE"
    JOB = "JOB"
    NODE = "NODE"


class OnNodeFail(StrEnum):
    """What becomes of a job whose node is lost."""

    REQUEUE = "REQUEUE"
    WAIT = "WAIT"
    FAIL = "FAIL"


class AdminState(StrEnum):
    """What the operator wants of a node."""

    ACTIVE = "ACTIVE"
    DRAIN = "DRAIN"


class LogStream(StrEnum):
    """Which output of a rank."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user asks for. Resources are per node unless the name says otherwise."""

    name: str
    user: str
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    """All GPUs of the job together; a multiple of `nodes`."""
    gpu_types: tuple[str, ...] = ()
    """Acceptable types in order of preference; empty means any."""
    nodes: int = 1
    """0: as few nodes as possible, at most one more; shares need not be equal."""
    cpus: int = 1
    """CPU cores on each node."""
    memory_bytes: int = 0
    """Host memory on each node; 0 means no request and no limit."""
    time_limit_s: float | None = None
    time_estimate_s: float | None = None
    """The user's own guess of the run time, for policies; never enforced."""
    grace_s: float = 30.0
    """From SIGTERM to SIGKILL when the job is stopped."""
    priority: int = 0
    """Added by the user or operator to the policy's order; higher starts earlier."""
    qos: str = "normal"
    hold: bool = False
    on_node_fail: OnNodeFail = OnNodeFail.REQUEUE
    partition: str = ""
    """Only nodes of this partition; empty means the default one, or any node without one."""
    min_gpu_memory_bytes: int = 0
    """Least memory of each GPU; 0 means any."""
    mix_gpu_types: bool = False
    """Whether ranks on different nodes may have different GPU types; one rank never mixes."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs on each node of the job; all of them where it does not say how many nodes."""
        return self.gpus // (self.nodes or 1)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change while the driver is loaded."""

    uuid: str
    index: int
    """NVML index (PCI bus order)."""
    name: str
    """As NVML names it, e.g. `Tesla P100-PCIE-16GB`."""
    gpu_type: str
    """Short type that jobs ask for, e.g. `P100`."""
    pci_bus_id: str
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    mig_enabled: bool | None = None
    mock: bool = False
    near: tuple[int, ...] = ()
    """Its groups in the node's topology, from far to near (NUMA node, PCIe switch, NVLink
    island), each named by its lowest GPU index. GPUs that share a longer beginning are closer;
    empty where NVML does not tell."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. A field that the card does not support is None."""

    uuid: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    gpu_utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None
    lost: bool = False
    """NVML no longer reaches the card; every other field is None then."""
    health: tuple[str, ...] = ()
    """Reasons why the card must not get work; empty means healthy."""
    warnings: tuple[str, ...] = ()
    """Things a person should see that do not take the card out of service."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An Xid error that the driver reported for a GPU."""

    uuid: str
    xid: int
    message: str


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of a node's host."""

    cpu_utilization_pct: float | None = None
    load_1min: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_used_bytes: int | None = None
    disk_total_bytes: int | None = None
    """Disk that holds the agent's state folder."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node is, told once per session and again when it changes."""

    hostname: str
    os: str
    cpus: int
    """CPU cores that jobs may use."""
    memory_bytes: int
    """Host memory that jobs may use."""
    gpus: tuple[GpuFacts, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    agent_version: str = ""
    mock: bool = False


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a heartbeat carries."""

    gpus: tuple[GpuSample, ...] = ()
    host: HostSample = field(default_factory=HostSample)
    xids: tuple[XidEvent, ...] = ()
    telemetry_age_s: float = 0.0
    """Age of the GPU samples: grows while NVML does not answer."""
    node_health: tuple[str, ...] = ()
    """Reasons why the whole node must not get work (e.g. driver mismatch)."""


@dataclass(frozen=True, slots=True, order=True)
class RankId:
    """One rank (node) of one attempt of one job: the unit that an agent launches."""

    job_id: int
    attempt: int
    node_rank: int = 0

    def __str__(self) -> str:
        """`JOB.ATTEMPT.RANK`, also the name of the attempt's folder on the node."""
        return f"{self.job_id}.{self.attempt}.{self.node_rank}"


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Everything an agent needs to start one rank."""

    rank: RankId
    name: str
    user: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    gpu_uuids: tuple[str, ...]
    gpu_type: str
    cpus: int
    memory_bytes: int
    time_limit_s: float | None
    grace_s: float
    node_names: tuple[str, ...]
    """Nodes of the attempt in rank order."""
    node_addresses: tuple[str, ...]
    """Addresses of those nodes as their peers see them, in rank order."""
    master_port: int
    """Port of rank 0; 0 lets the agent choose a free one (single-node attempts)."""
    cluster: str = "rltune"
    gpus_by_node: tuple[int, ...] = ()
    """How many GPUs each rank of the attempt has, in rank order."""

    @property
    def nnodes(self) -> int:
        """How many nodes the attempt spans."""
        return len(self.node_names)


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Ends a rank: SIGTERM, `grace_s`, SIGKILL to the whole tree. Idempotent."""

    rank: RankId
    reason: StopReason
    grace_s: float


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """How a rank ended, with the facts kept apart."""

    exit_code: int | None = None
    """What the leader returned; None if a signal ended it or it never started."""
    signal: int | None = None
    core_dumped: bool = False
    oom: OomKind = OomKind.NONE
    stop_reason: StopReason | None = None
    """Why the node stopped it; None when it ended by itself."""
    launch_fault: LaunchFault = LaunchFault.NONE
    message: str = ""
    """A sentence for people; empty when the numbers say all."""


@dataclass(frozen=True, slots=True)
class RankUsage:
    """What a rank used, measured on its node."""

    elapsed_s: float = 0.0
    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    log_bytes_dropped: int = 0


class RankPhase(StrEnum):
    """How far a rank has come on its node."""

    LAUNCHING = "LAUNCHING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    RELEASED = "RELEASED"
    """Ended, and its GPUs were checked: they are free or named in `dirty_gpus`."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The state of one rank as its agent knows it. Sent until acknowledged; idempotent.

    A later phase contains the facts of the earlier ones, so a lost report costs nothing.
    """

    rank: RankId
    phase: RankPhase
    pid: int | None = None
    exit: ExitFacts | None = None
    """Set from ENDED on."""
    usage: RankUsage | None = None
    dirty_gpus: Mapping[str, str] = field(default_factory=dict)
    """GPU uuid -> why it stays out of service; only with RELEASED."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of an agent session."""

    node_name: str
    node_id: str
    """Made at the agent's first start and kept in its state folder."""
    boot_id: str
    instance_id: str
    """New at each start of the agent process."""
    facts: NodeFacts
    ranks: tuple[RankReport, ...]
    """All ranks whose end the controller has not acknowledged, running ones included."""
    advertise_address: str = ""
    """How peers reach this node; empty lets the controller take the connection's address."""
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    cluster_id: str = ""
    """Of the cluster that the agent joined first; empty if it never joined one."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The controller's answer to Hello."""

    lease_s: float
    heartbeat_s: float
    kill: tuple[RankId, ...]
    """Ranks that are fenced: end them before anything is launched."""
    acknowledged: tuple[RankId, ...]
    """Ranks whose RELEASED report is recorded: forget them."""
    cluster_id: str = ""
    """Which cluster this is, whatever its name and address."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a rank's output, in answer to a fetch."""

    data: bytes
    offset: int
    """Position of `data` in the stream as the job wrote it."""
    next_offset: int
    """Where to go on; larger than offset + len(data) never, larger than asked when bytes
    in between were dropped by the size limit."""
    end: bool
    """The rank has ended and nothing follows."""
    error: str = ""
    """Why nothing can be read (e.g. the folder was cleaned up)."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as clients see it."""

    node: str
    facts: GpuFacts
    sample: GpuSample | None
    job_id: int | None
    """The job that holds it, if any."""
    healthy: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as clients see it."""

    name: str
    state: str
    """Slurm's words: UP, MIXED... see controller.lifecycle.node.state_word."""
    admin: AdminState
    reasons: tuple[str, ...]
    address: str
    facts: NodeFacts
    host: HostSample | None
    gpus: tuple[GpuView, ...]
    cpus_used: int
    memory_used_bytes: int
    last_seen_s_ago: float | None
    telemetry_age_s: float | None
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of an attempt as clients see it."""

    node: str
    node_rank: int
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    phase: RankPhase
    pid: int | None
    exit: ExitFacts | None
    usage: RankUsage | None


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt as clients see it."""

    attempt: int
    state: AttemptState
    stop_reason: StopReason | None
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    ranks: tuple[RankView, ...]
    gpu_utilization_mean_pct: float | None = None
    gpu_memory_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as clients see it."""

    job_id: int
    spec: JobSpec
    state: JobState
    completing: bool
    reason: str
    """Why it waits or how it ended, a fixed word (see docs/states.md) or empty."""
    reason_text: str
    """The same in a sentence with numbers."""
    submitted_at_s: float
    eligible_at_s: float | None
    started_at_s: float | None
    ended_at_s: float | None
    wait_s: float
    run_s: float
    gpu_s: float
    exit: ExitFacts | None
    exit_node_rank: int | None
    attempts: tuple[AttemptView, ...]


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One row of the event log: what happened to whom, and what caused it."""

    event_id: int
    at_s: float
    kind: str
    """E.g. `JobSubmitted`, `AttemptEnded`, `NodeDrained`."""
    job_id: int | None
    attempt: int | None
    node: str | None
    actor: str
    """User, node or `scheduler` that caused it."""
    text: str
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A named set of nodes with rules of its own."""

    name: str
    is_default: bool
    """Jobs that name no partition go here."""
    nodes: tuple[str, ...]
    """The known nodes in it."""
    nodes_up: int
    gpus_total: int
    gpus_used: int
    """Held by its jobs, not by jobs of other partitions on the same nodes."""
    everybody: bool
    """Any user may use it; otherwise `allow_users` may."""
    allow_users: tuple[str, ...] = ()
    max_gpus: int | None = None
    """That its jobs may hold together."""
    max_gpus_per_user: int | None = None
    max_time_s: float | None = None
    """Longest time limit, and that of jobs that name none."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When and where a job would start if it were submitted now. Nothing is promised."""

    starts_in_s: float | None
    """0: at once; None: nobody knows."""
    nodes: tuple[str, ...] = ()
    ahead: int = 0
    """Jobs that wait and would be before it."""
    after_job_id: int | None = None
    """The job whose end makes the room."""
    text: str = ""
    """Why it would wait; empty if it would not."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What the controller is and how it does."""

    cluster: str
    version: str
    policy: str
    allocator: str
    started_at_s: float
    now_s: float
    jobs_by_state: Mapping[str, int]
    nodes_total: int
    nodes_up: int
    gpus_total: int
    gpus_used: int
    cycles: int
    last_cycle_s: float | None
    """How long the last scheduling decision took."""
    fallbacks: int
    """How often the allocator had to fall back to greedy."""
    last_error: str = ""
    """Why the store refuses writes and since when, or what made the last decision fail."""
    last_fallback: str = ""
    """Why the last fallback was."""
    partitions: tuple[PartitionView, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job waits, or why it went where it went."""

    job_id: int
    state: JobState
    reason: str
    text: str
    lines: tuple[str, ...] = ()
    """Further sentences: priority terms, nearest fit, alternatives."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Numeric terms of priority or placement by name."""
