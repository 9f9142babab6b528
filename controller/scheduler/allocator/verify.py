"""The rules that no placement may break, checked from scratch on every decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from controller.scheduler.index import index_of
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
    """Checks capacity, gang, GPU types, partitions, quotas and node states of a placement.

    Reservations are not checked here: the cycle drops starts that break them, because allocators
    that know nothing of reservations may be used with them.

    Raises:
        InvalidPlacement: a rule is broken; the message says which, by whom and where.
    """
    jobs = {entry.job.job_id: entry.job for entry in ranked}
    shapes = ShapeIndex(index_of(cluster))
    account = _Account(cluster)
    seen: set[int] = set()
    for start in starts:
        if start.job_id not in jobs or start.job_id in seen:
            raise InvalidPlacement(f"job {start.job_id} was not asked for, or starts twice")
        seen.add(start.job_id)
        shape = shapes.of(jobs[start.job_id])
        _check_shares(start, shape, cluster)
        types = {
            gpu_type for rank in start.ranks for gpu_type in account.take(start.job_id, shape, rank)
        }
        allowed = {choice.gpu_type for choice in shape.types}
        if (len(types) > 1 and not shape.mixes_types) or not types <= allowed:
            raise InvalidPlacement(
                f"job {start.job_id} got {sorted(types)}, wants one of {sorted(allowed)}"
            )


def _check_shares(start: Start, shape: JobShape, cluster: ClusterView) -> None:
    """Checks on how many nodes a job is, and in which shares."""
    nodes = [rank.node for rank in start.ranks]
    shares = [len(rank.gpu_uuids) for rank in start.ranks]
    if not nodes or len(set(nodes)) != len(nodes) or (shape.nodes and len(nodes) != shape.nodes):
        raise InvalidPlacement(
            f"job {start.job_id} needs {shape.nodes or 'some'} nodes, got {nodes}"
        )
    if shape.nodes:
        even = [shape.gpus // shape.nodes] * shape.nodes
        if shares != even:
            raise InvalidPlacement(f"job {start.job_id} needs {even[0]} GPUs, got {shares}")
        return
    largest = max(
        (sum(gpu.is_in_service for gpu in node.gpus) for node in cluster.nodes), default=0
    )
    fewest = -(-shape.gpus // largest) if shape.gpus and largest else 1
    if sum(shares) != shape.gpus or (shape.gpus and 0 in shares) or len(shares) < fewest:
        raise InvalidPlacement(f"job {start.job_id} needs {shape.gpus} GPUs, got {shares}")


class _Account:
    """What is left of each node; independent of the allocators' own ledger."""

    def __init__(self, cluster: ClusterView) -> None:
        self._nodes: Mapping[str, NodeCapacity] = index_of(cluster).nodes
        self._cpus: dict[str, int] = {}
        self._memory_bytes: dict[str, int] = {}
        self._free: dict[tuple[str, str], GpuSlot] = {}

    def _open(self, node: NodeCapacity) -> None:
        self._cpus[node.name] = node.cpus_free
        self._memory_bytes[node.name] = node.memory_free_bytes
        for gpu in node.gpus:
            if gpu.is_free and gpu.is_in_service:
                self._free[node.name, gpu.uuid] = gpu

    def take(self, job_id: int, shape: JobShape, rank: RankPlacement) -> set[str]:
        """Books a rank and gives the types of its GPUs."""
        where = f"job {job_id} on {rank.node}"
        node = self._nodes.get(rank.node)
        if node is None or not node.accepts_work or rank.node in shape.excluded_nodes:
            raise InvalidPlacement(f"{where}: the node takes no such work")
        if shape.partition and shape.partition not in node.partitions:
            raise InvalidPlacement(f"{where}: the node is not in partition {shape.partition}")
        if rank.node not in self._cpus:
            self._open(node)
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
        if len(types) > 1:
            raise InvalidPlacement(f"{where}: one rank got {sorted(types)}")
        return types
