"""What the scheduler sees, built once per change and reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controller.accounting import FairShare
from controller.lifecycle.attempt import Attempt
from controller.lifecycle.job import Job, excluded_nodes
from controller.lifecycle.node import Node, reasons
from controller.lifecycle.state import Changes, ClusterState, StateView, held_on
from controller.partitions import ClusterConfig
from controller.scheduler.index import ClusterIndex, index_of
from controller.scheduler.prediction import RunTimeModel
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankPlacement,
    RunningJob,
    WaitingJob,
    WaitReason,
)
from protos.messages import JobState

NOT_CONNECTED = "its agent is not connected"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Queue and cluster at one moment."""

    version: int
    """Grows with every change of the state."""
    queue: tuple[WaitingJob, ...]
    cluster: ClusterView
    now_s: float


def node_capacity(
    state: StateView,
    node: Node,
    *,
    is_connected: bool,
    partitions: frozenset[str] = frozenset(),
) -> NodeCapacity:
    """What a node has and what of it is free."""
    held_gpus: set[str] = set()
    cpus = memory_bytes = 0
    for node_rank, attempt in held_on(state, node.name):
        job = state.job(attempt.job_id)
        assert job is not None, f"attempt {attempt.key} without a job"
        held_gpus.update(attempt.ranks[node_rank].gpu_uuids)
        cpus += job.spec.cpus
        memory_bytes += job.spec.memory_bytes
    slots = []
    for gpu in node.facts.gpus:
        is_in_service = not node.gpu_reasons(gpu.uuid)
        is_free = is_in_service and gpu.uuid not in held_gpus
        slots.append(
            GpuSlot(
                *(gpu.uuid, gpu.index, gpu.gpu_type, is_free, is_in_service),
                memory_bytes=gpu.memory_bytes or 0,
                near=gpu.near,
            )
        )
    against = reasons(node)
    if not is_connected and node.is_connected:
        against = (NOT_CONNECTED, *against)
    return NodeCapacity(
        name=node.name,
        accepts_work=node.accepts_work and is_connected,
        gpus=tuple(slots),
        cpus_total=node.facts.cpus,
        cpus_free=node.facts.cpus - cpus,
        memory_total_bytes=node.facts.memory_bytes,
        memory_free_bytes=node.facts.memory_bytes - memory_bytes,
        reasons=against,
        closed_word=_closed_word(node, is_connected=is_connected),
        partitions=partitions,
    )


def _closed_word(node: Node, *, is_connected: bool) -> WaitReason:
    """Why a node does not accept work, the hardest to mend first."""
    if not (is_connected and node.is_connected):
        return WaitReason.NODE_DOWN
    if node.health or node.faults:
        return WaitReason.NODE_UNHEALTHY
    return WaitReason.NODE_DRAINED


class SnapshotBuilder:
    """Keeps the parts of a snapshot and renews those that changed."""

    def __init__(
        self,
        state: ClusterState,
        fair_share: FairShare,
        is_connected: Callable[[str], bool],
        config: ClusterConfig,
        run_times: RunTimeModel,
    ) -> None:
        """`is_connected` tells whether a node's agent has an open session."""
        self._run_times = run_times
        self._config = config
        self._limits = config.limits
        self._state = state
        self._fair_share = fair_share
        self._is_connected = is_connected
        self._version = 0
        self._nodes: dict[str, NodeCapacity] = {}
        self._stale_nodes: set[str] = set(state.nodes)
        self._waiting: dict[int, WaitingJob] = {}
        self._stale_jobs: set[int] = set(state.jobs)
        self._running: dict[int, RunningJob] = {}
        self._index: ClusterIndex | None = None

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    def note(self, changes: Changes) -> None:
        """The state has changed."""
        self._version += 1
        self._stale_jobs.update(changes.jobs)
        self._stale_nodes.update(changes.nodes)
        for attempt in changes.attempts.values():
            self._stale_jobs.add(attempt.job_id)
            self._stale_nodes.update(rank.node for rank in attempt.ranks)

    def note_node(self, name: str) -> None:
        """A node's session opened or closed."""
        self._version += 1
        self._stale_nodes.add(name)

    def note_jobs(self, job_ids: set[int]) -> None:
        """A pause or exclusion of these jobs is over."""
        self._version += 1
        self._stale_jobs.update(job_ids)

    def cluster(self, now_s: float) -> ClusterView:
        """The cluster as it is."""
        for name in self._stale_nodes:
            node = self._state.nodes.get(name)
            if node is not None:
                self._nodes[name] = node_capacity(
                    self._state,
                    node,
                    is_connected=self._is_connected(name),
                    partitions=self._config.partitions_of(name),
                )
        self._stale_nodes.clear()
        self._renew_jobs(now_s)
        view = ClusterView(
            nodes=tuple(self._nodes[name] for name in sorted(self._nodes)),
            running=tuple(self._running.values()),
            usage_gpu_s=self._fair_share.usage_gpu_s(
                (
                    (job.user, job.gpus * max(0.0, now_s - job.started_at_s))
                    for job in self._running.values()
                    if job.started_at_s is not None
                ),
                now_s,
            ),
            usage_at_s=now_s,
            partitions=self._limits,
            gpu_speed=self._config.gpu_speed,
        )
        self._index = index_of(view, self._index)
        return view

    def build(self, now_s: float) -> Snapshot:
        """Queue and cluster as they are."""
        cluster = self.cluster(now_s)
        queue = tuple(self._waiting[job_id] for job_id in sorted(self._waiting))
        return Snapshot(self._version, queue, cluster, now_s)

    def _renew_jobs(self, now_s: float) -> None:
        for job_id in self._stale_jobs:
            self._waiting.pop(job_id, None)
            self._running.pop(job_id, None)
            job = self._state.jobs.get(job_id)
            if job is None:
                continue
            if job.state is JobState.PENDING:
                self._waiting[job_id] = _waiting_job(job, now_s, self._run_times)
            elif job.state.is_active:
                attempt = self._state.attempts[job_id, job.attempt]
                self._running[job_id] = _running_job(job, attempt)
        self._stale_jobs.clear()


def _waiting_job(job: Job, now_s: float, run_times: RunTimeModel) -> WaitingJob:
    assert job.eligible_at_s is not None
    return WaitingJob(
        job_id=job.job_id,
        spec=job.spec,
        submitted_at_s=job.submitted_at_s,
        eligible_at_s=job.eligible_at_s,
        restarts=job.restarts,
        excluded_nodes=excluded_nodes(job, now_s),
        not_before_s=job.not_before_s,
        expected_run_s=run_times.predict(job.spec).median_s,
    )


def _running_job(job: Job, attempt: Attempt) -> RunningJob:
    return RunningJob(
        job_id=job.job_id,
        user=job.user,
        gpus=job.spec.gpus,
        started_at_s=attempt.started_at_s,
        time_limit_s=job.spec.time_limit_s,
        ranks=tuple(RankPlacement(r.node, r.gpu_uuids, r.gpu_indices) for r in attempt.ranks),
        partition=job.spec.partition,
        cpus=job.spec.cpus,
        memory_bytes=job.spec.memory_bytes,
    )
