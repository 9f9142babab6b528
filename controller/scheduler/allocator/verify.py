"""The rules that no placement may break, checked from scratch on every decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankedJob,
    RankPlacement,
    Start,
)


class InvalidPlacement(AssertionError):
    """An allocator broke a rule: a defect of ours, never a user's fault."""


def verify(starts: Iterable[Start], ranked: Sequence[RankedJob], cluster: ClusterView) -> None:
    """Checks capacity, gang, GPU types and node states of a placement.

    Raises:
        InvalidPlacement: a rule is broken; the message says which, by whom and where.
    """
    jobs = {entry.job.job_id: entry.job for entry in ranked}
    shapes = ShapeIndex(cluster)
    account = _Account(cluster)
    seen: set[int] = set()
    for start in starts:
        if start.job_id not in jobs or start.job_id in seen:
            raise InvalidPlacement(f"job {start.job_id} was not asked for, or starts twice")
        seen.add(start.job_id)
        shape = shapes.of(jobs[start.job_id])
        nodes = [rank.node for rank in start.ranks]
        if len(nodes) != shape.nodes or len(set(nodes)) != shape.nodes:
            raise InvalidPlacement(f"job {start.job_id} needs {shape.nodes} nodes, got {nodes}")
        types = {
            gpu_type for rank in start.ranks for gpu_type in account.take(start.job_id, shape, rank)
        }
        allowed = {choice.gpu_type for choice in shape.types}
        if len(types) > 1 or not types <= allowed:
            raise InvalidPlacement(
                f"job {start.job_id} got {sorted(types)}, wants one of {sorted(allowed)}"
            )


class _Account:
    """What is left of each node; independent of the allocators' own ledger."""

    def __init__(self, cluster: ClusterView) -> None:
        self._nodes: dict[str, NodeCapacity] = {node.name: node for node in cluster.nodes}
        self._cpus = {node.name: node.cpus_free for node in cluster.nodes}
        self._memory_bytes = {node.name: node.memory_free_bytes for node in cluster.nodes}
        self._free: dict[tuple[str, str], GpuSlot] = {
            (node.name, gpu.uuid): gpu
            for node in cluster.nodes
            for gpu in node.gpus
            if gpu.is_free and gpu.is_in_service
        }

    def take(self, job_id: int, shape: JobShape, rank: RankPlacement) -> set[str]:
        """Books a rank and gives the types of its GPUs."""
        where = f"job {job_id} on {rank.node}"
        node = self._nodes.get(rank.node)
        if node is None or not node.accepts_work or rank.node in shape.excluded_nodes:
            raise InvalidPlacement(f"{where}: the node takes no such work")
        if len(rank.gpu_uuids) != shape.gpus or len(rank.gpu_indices) != shape.gpus:
            raise InvalidPlacement(f"{where}: needs {shape.gpus} GPUs, got {rank.gpu_uuids}")
        types = set()
        for uuid, index in zip(rank.gpu_uuids, rank.gpu_indices, strict=True):
            slot = self._free.pop((rank.node, uuid), None)
            if slot is None or slot.index != index:
                raise InvalidPlacement(f"{where}: GPU {index} ({uuid}) is not free there")
            types.add(slot.gpu_type)
        self._cpus[rank.node] -= shape.cpus
        self._memory_bytes[rank.node] -= shape.memory_bytes
        if shape.cpus and self._cpus[rank.node] < 0:
            raise InvalidPlacement(f"{where}: CPUs are overbooked")
        if shape.memory_bytes and self._memory_bytes[rank.node] < 0:
            raise InvalidPlacement(f"{where}: memory is overbooked")
        return types
