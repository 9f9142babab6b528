"""Why each job of the window was not started: one diagnosis for each shape, then plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from controller.scheduler.ledger import Ledger, NodeLedger, pool_types
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import (
    ClusterView,
    NodeCapacity,
    RankedJob,
    RankPlacement,
    Start,
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

    def __init__(
        self,
        cluster: ClusterView,
        starts: Sequence[Start],
        ranked: Sequence[RankedJob],
        now_s: float,
    ) -> None:
        """Takes what the cycle saw and decided; the starts must be valid."""
        self._cluster = cluster
        self._shapes = ShapeIndex(cluster)
        self._before = Ledger(cluster)
        self._every_node = Ledger(cluster, all_nodes=True)
        self._after = Ledger(cluster)
        jobs = {entry.job.job_id: entry.job for entry in ranked}
        types = {gpu.uuid: gpu.gpu_type for node in cluster.nodes for gpu in node.gpus}
        for start in starts:
            shape = self._shapes.of(jobs[start.job_id])
            gpu_type = types[start.ranks[0].gpu_uuids[0]] if shape.gpus else ""
            self._after.take(shape, gpu_type, [self._after.node(rank.node) for rank in start.ranks])
        self._releases = _Releases(cluster, starts, jobs, types, now_s)
        self._known: dict[JobShape, WaitNote] = {}

    def note(self, job: WaitingJob, ahead: int) -> WaitNote:
        """Why this job waits, with `ahead` jobs before it in the order."""
        shape = self._shapes.of(job)
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = self._diagnose(shape)
        return replace(known, ahead=ahead)

    def _diagnose(self, shape: JobShape) -> WaitNote:
        reason, detail = self._reason(shape)
        gpu_type, best = self._best_node(shape)
        note = WaitNote(
            reason,
            gpus_needed=shape.gpus,
            nodes_needed=shape.nodes,
            free_gpus=sum(
                node.free[t] for t in pool_types(shape) if t for node in self._after.pool(t)
            ),
            nodes_with_room=max(
                (len(self._after.with_room(shape, t)) for t in pool_types(shape)), default=0
            ),
            sick_gpus=sum(
                node.sick.get(t, 0) for t in pool_types(shape) if t for node in self._after.pool(t)
            ),
            until_s=self._releases.enough_at_s(self._after, shape),
            detail=detail,
        )
        if best is None:
            return note
        return replace(
            note,
            best_node=best.name,
            best_node_free_gpus=best.free.get(gpu_type, 0),
            best_node_sick_gpus=best.sick.get(gpu_type, 0),
            best_node_free_cpus=best.cpus,
            best_node_free_memory_bytes=best.memory_bytes,
            short_of=_short_of(shape, best, gpu_type),
        )

    def _reason(self, shape: JobShape) -> tuple[WaitReason, str]:
        if self._before.fits(shape):
            return WaitReason.PRIORITY, ""
        anywhere = replace(shape, excluded_nodes=frozenset())
        if self._before.fits(anywhere):
            return WaitReason.BACKOFF, _names(sorted(shape.excluded_nodes))
        if self._every_node.fits(anywhere):
            closed = self._closed_nodes(anywhere)
            words = {node.closed_word for node in closed}
            word = next(word for word in _CLOSED_WORDS if word in words)
            return word, _names([_with_reasons(node) for node in closed])
        return WaitReason.RESOURCES, ""

    def _closed_nodes(self, shape: JobShape) -> list[NodeCapacity]:
        """The nodes that would help but do not accept work."""
        with_room = {
            node.name for t in pool_types(shape) for node in self._every_node.with_room(shape, t)
        }
        return [
            node for node in self._cluster.nodes if node.name in with_room and not node.accepts_work
        ]

    def _best_node(self, shape: JobShape) -> tuple[str, NodeLedger | None]:
        """The node that comes nearest to holding one rank now, and by which GPU type."""
        nearest: tuple[tuple[int, bool, bool, int], str, NodeLedger] | None = None
        for gpu_type in pool_types(shape):
            for node in self._after.pool(gpu_type):
                if node.name in shape.excluded_nodes:
                    continue
                free = node.free.get(gpu_type, 0)
                key = (
                    min(free, shape.gpus),
                    node.cpus >= shape.cpus,
                    node.memory_bytes >= shape.memory_bytes,
                    free if shape.gpus else node.cpus,
                )
                if nearest is None or key > nearest[0]:
                    nearest = (key, gpu_type, node)
        return (nearest[1], nearest[2]) if nearest else ("", None)


class _Releases:
    """When time limits give GPUs back, by node and type."""

    def __init__(
        self,
        cluster: ClusterView,
        starts: Iterable[Start],
        jobs: dict[int, WaitingJob],
        types: dict[str, str],
        now_s: float,
    ) -> None:
        self._freed: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for running in cluster.running:
            if running.started_at_s is not None and running.time_limit_s is not None:
                ends_s = max(now_s, running.started_at_s + running.time_limit_s)
                self._add(running.ranks, types, ends_s)
        for start in starts:
            limit_s = jobs[start.job_id].spec.time_limit_s
            if limit_s is not None:
                self._add(start.ranks, types, now_s + limit_s)
        for freed in self._freed.values():
            freed.sort()

    def _add(self, ranks: Iterable[RankPlacement], types: dict[str, str], ends_s: float) -> None:
        for rank in ranks:
            for uuid in rank.gpu_uuids:
                if uuid in types:
                    self._freed.setdefault((rank.node, types[uuid]), []).append((ends_s, 1))

    def enough_at_s(self, ledger: Ledger, shape: JobShape) -> float | None:
        """When enough nodes have enough GPUs at the latest, if no other job takes them.

        None if GPUs are not what is missing, or if jobs without a limit hold them.
        """
        best: float | None = None
        for gpu_type in pool_types(shape) if shape.gpus else ():
            times = sorted(
                at_s
                for node in ledger.pool(gpu_type)
                if node.name not in shape.excluded_nodes
                and (at_s := self._node_at_s(node, gpu_type, shape.gpus)) is not None
            )
            if len(times) >= shape.nodes:
                at_s = times[shape.nodes - 1]
                best = at_s if best is None else min(best, at_s)
        return best if best else None

    def _node_at_s(self, node: NodeLedger, gpu_type: str, gpus: int) -> float | None:
        free = node.free[gpu_type]
        if free >= gpus:
            return 0.0
        for at_s, count in self._freed.get((node.name, gpu_type), ()):
            free += count
            if free >= gpus:
                return at_s
        return None


def _short_of(shape: JobShape, node: NodeLedger, gpu_type: str) -> str:
    if node.free.get(gpu_type, 0) < shape.gpus:
        return "gpus"
    if node.cpus < shape.cpus:
        return "cpus"
    if node.memory_bytes < shape.memory_bytes:
        return "memory"
    return ""


def _with_reasons(node: NodeCapacity) -> str:
    return f"{node.name} ({'; '.join(node.reasons)})" if node.reasons else node.name


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_NODES
    return ", ".join(names[:_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")
