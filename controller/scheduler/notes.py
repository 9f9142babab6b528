"""Why each job of the window was not started: one diagnosis for each shape, then plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from controller.scheduler.allocator.greedy import find_place
from controller.scheduler.backfill import Planned
from controller.scheduler.index import ClusterIndex, NodeState, index_of
from controller.scheduler.ledger import Ledger, place_of
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import (
    NodeCapacity,
    RankedJob,
    Reservation,
    WaitingJob,
    WaitNote,
    WaitReason,
)

_CLOSED_WORDS = (WaitReason.NODE_DRAINED, WaitReason.NODE_UNHEALTHY, WaitReason.NODE_DOWN)
"""Of several, the one told: what a person can end at once comes first."""
_NAMED_NODES = 3
"""As many nodes as a note names one by one."""


class Diagnosis:
    """Compares what jobs need with the cluster before and after this cycle's starts."""

    def __init__(self, planned: Planned, ranked: Sequence[RankedJob], now_s: float) -> None:
        """Takes what the cycle saw and decided; the starts must be valid."""
        self._cluster = planned.cluster
        self._quota_bound = planned.quota_bound
        self._index = index_of(planned.cluster)
        self._shapes = ShapeIndex(self._index)
        self._before = Ledger(self._index)
        self._after = Ledger(self._index)
        jobs = {entry.job.job_id: entry.job for entry in ranked}
        for start in planned.placement.starts:
            shape = self._shapes.of(jobs[start.job_id])
            self._after.take(shape, place_of(start, self._index))
        self._every_node: Ledger | None = None
        self._releases = _Releases(planned, jobs, now_s)
        self._reservations = {r.job_id: r for r in planned.cluster.reservations}
        self._known: dict[JobShape, WaitNote] = {}

    def note(self, job: WaitingJob, ahead: int) -> WaitNote:
        """Why this job waits, with `ahead` jobs before it in the order."""
        shape = self._shapes.of(job)
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = self._diagnose(shape)
        note = replace(known, ahead=ahead)
        if job.job_id in self._quota_bound:
            note = replace(note, reason=WaitReason.QUOTA, detail=self._quota_words(job))
        reservation = self._reservations.get(job.job_id)
        return note if reservation is None else _with_reservation(note, reservation)

    def _diagnose(self, shape: JobShape) -> WaitNote:
        reason, detail = self._reason(shape)
        gpu_type, best = self._best_node(shape)
        pools = [
            (gpu_type, state, names)
            for gpu_type in shape.gpu_types
            if gpu_type
            for state, names in self._after.pool(gpu_type)
            if state.kind.admits(shape.partition)
        ]
        note = WaitNote(
            reason,
            gpus_needed=shape.gpus // (shape.nodes or 1),
            nodes_needed=shape.nodes,
            free_gpus=sum(state.free_of(t) * len(names) for t, state, names in pools),
            nodes_with_room=max(
                (self._nodes_with_room(shape, gpu_type) for gpu_type in shape.gpu_types), default=0
            ),
            sick_gpus=sum(self._sick(name, t) for t, _, names in pools for name in names),
            until_s=self._releases.enough_at_s(self._after, shape),
            detail=detail,
        )
        if best is None:
            return note
        name, state = best
        return replace(
            note,
            best_node=name,
            best_node_free_gpus=state.free_of(gpu_type),
            best_node_sick_gpus=self._sick(name, gpu_type),
            best_node_free_cpus=state.cpus,
            best_node_free_memory_bytes=state.memory_bytes,
            short_of=_short_of(shape, state, gpu_type),
        )

    def _reason(self, shape: JobShape) -> tuple[WaitReason, str]:
        if find_place(self._after, shape) is not None:
            return WaitReason.RESERVED, self._reserved_words()
        if find_place(self._before, shape) is not None:
            return WaitReason.PRIORITY, ""
        anywhere = replace(shape, excluded_nodes=frozenset())
        if shape.excluded_nodes and find_place(self._before, anywhere) is not None:
            return WaitReason.BACKOFF, _names(sorted(shape.excluded_nodes))
        if self._index.closed:
            if self._every_node is None:
                self._every_node = Ledger(self._index, all_nodes=True)
            if find_place(self._every_node, anywhere) is not None:
                closed = self._closed_nodes(anywhere, self._every_node)
                words = {node.closed_word for node in closed}
                word = next(word for word in _CLOSED_WORDS if word in words)
                return word, _names([_with_reasons(node) for node in closed])
        return WaitReason.RESOURCES, ""

    def _nodes_with_room(self, shape: JobShape, gpu_type: str) -> int:
        share = _least_share(shape)
        return sum(len(names) for _, _, names in self._after.with_room(shape, share, gpu_type))

    def _closed_nodes(self, shape: JobShape, ledger: Ledger) -> list[NodeCapacity]:
        """The nodes that would help but do not accept work."""
        with_room = {
            name
            for gpu_type in shape.gpu_types
            for _, _, names in ledger.with_room(shape, _least_share(shape), gpu_type)
            for name in names
        }
        return [
            node for node in self._cluster.nodes if node.name in with_room and not node.accepts_work
        ]

    def _best_node(self, shape: JobShape) -> tuple[str, tuple[str, NodeState] | None]:
        """The node that comes nearest to holding one share now, and by which GPU type."""
        share = shape.gpus // (shape.nodes or 1)
        nearest: tuple[tuple[int, bool, bool, int], str, str, NodeState] | None = None
        for gpu_type in shape.gpu_types:
            for state, names in self._after.pool(gpu_type):
                if not state.kind.admits(shape.partition):
                    continue
                name = next((n for n in names if n not in shape.excluded_nodes), None)
                if name is None:
                    continue
                free = state.free_of(gpu_type)
                key = (
                    min(free, share),
                    state.cpus >= shape.cpus,
                    state.memory_bytes >= shape.memory_bytes,
                    free if share else state.cpus,
                )
                if (
                    nearest is None
                    or key > nearest[0]
                    or (key == nearest[0] and gpu_type == nearest[1] and name < nearest[2])
                ):
                    nearest = (key, gpu_type, name, state)
        return (nearest[1], nearest[2:]) if nearest else ("", None)

    def _sick(self, node: str, gpu_type: str) -> int:
        gpus = self._index.nodes[node].gpus
        return sum(gpu.gpu_type == gpu_type and not gpu.is_in_service for gpu in gpus)

    def _reserved_words(self) -> str:
        jobs = sorted(self._reservations)
        return _names([f"job {job_id}" for job_id in jobs])

    def _quota_words(self, job: WaitingJob) -> str:
        partition = self._cluster.partitions[job.spec.partition]
        words = []
        if partition.max_gpus is not None:
            words.append(f"{partition.max_gpus} GPUs for all its jobs together")
        if partition.max_gpus_per_user is not None:
            words.append(f"{partition.max_gpus_per_user} GPUs for each user")
        return f"partition {partition.name} allows {' and '.join(words)}"


class _Releases:
    """When GPUs come back at the latest, by node and type, as far as anybody knows."""

    def __init__(self, planned: Planned, jobs: dict[int, WaitingJob], now_s: float) -> None:
        self._planned = planned
        self._jobs = jobs
        self._now_s = now_s
        self._freed: dict[tuple[str, str], list[tuple[float, int]]] | None = None

    def enough_at_s(self, ledger: Ledger, shape: JobShape) -> float | None:
        """When enough nodes have enough GPUs at the latest, if no other job takes them.

        None if GPUs are not what is missing, or if jobs whose end nobody knows hold them.
        """
        if not shape.gpus or not shape.nodes:
            return None
        best: float | None = None
        share = shape.gpus // shape.nodes
        for gpu_type in shape.gpu_types:
            times = sorted(
                at_s
                for state, names in ledger.pool(gpu_type)
                if state.kind.admits(shape.partition)
                for name in names
                if name not in shape.excluded_nodes
                and (at_s := self._node_at_s(name, state, gpu_type, share)) is not None
            )
            if len(times) >= shape.nodes:
                at_s = times[shape.nodes - 1]
                best = at_s if best is None else min(best, at_s)
        return best if best else None

    def _node_at_s(self, node: str, state: NodeState, gpu_type: str, gpus: int) -> float | None:
        free = state.free_of(gpu_type)
        if free >= gpus:
            return 0.0
        if self._freed is None:
            self._freed = _freed(self._planned, self._jobs, self._now_s)
        for at_s, count in self._freed.get((node, gpu_type), ()):
            free += count
            if free >= gpus:
                return at_s
        return None


def _freed(
    planned: Planned, jobs: dict[int, WaitingJob], now_s: float
) -> dict[tuple[str, str], list[tuple[float, int]]]:
    index: ClusterIndex = index_of(planned.cluster)
    ends = [
        (job.ranks, job.ends_s(now_s))
        for job in planned.cluster.running
        if job.started_at_s is not None
    ]
    ends += [
        (start.ranks, now_s + jobs[start.job_id].planned_run_s)
        for start in planned.placement.starts
    ]
    freed: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for ranks, ends_s in ends:
        for rank in ranks:
            node = index.nodes.get(rank.node)
            if node is None or not isfinite(ends_s):
                continue
            held = set(rank.gpu_uuids)
            for gpu in node.gpus:
                if gpu.uuid in held:
                    freed.setdefault((rank.node, gpu.gpu_type), []).append((ends_s, 1))
    for times in freed.values():
        times.sort()
    return freed


def _least_share(shape: JobShape) -> int:
    """A share that any node of the job must have room for."""
    return shape.gpus // shape.nodes if shape.nodes else min(1, shape.gpus)


def _with_reservation(note: WaitNote, reservation: Reservation) -> WaitNote:
    return replace(
        note,
        reserved_nodes=reservation.nodes,
        reserved_after_job=reservation.after_job_id,
        until_s=reservation.begins_s if isfinite(reservation.begins_s) else note.until_s,
    )


def _short_of(shape: JobShape, state: NodeState, gpu_type: str) -> str:
    if state.free_of(gpu_type) < shape.gpus // (shape.nodes or 1):
        return "gpus"
    if state.cpus < shape.cpus:
        return "cpus"
    if state.memory_bytes < shape.memory_bytes:
        return "memory"
    return ""


def _with_reasons(node: NodeCapacity) -> str:
    return f"{node.name} ({'; '.join(node.reasons)})" if node.reasons else node.name


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_NODES
    return ", ".join(names[:_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")
