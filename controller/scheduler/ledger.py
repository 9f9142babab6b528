"""What is still free while a decision is being made: a mutable account of one cluster view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.scheduler.shape import JobShape
from controller.scheduler.types import ClusterView, GpuSlot, NodeCapacity, RankPlacement


class NodeLedger:
    """Free GPUs by type, CPUs and memory of one node."""

    __slots__ = ("capacity", "cpus", "free", "memory_bytes", "name", "sick", "slots")

    def __init__(self, node: NodeCapacity) -> None:
        """Opens the account with what the view says is free."""
        self.name = node.name
        self.cpus = node.cpus_free
        self.memory_bytes = node.memory_free_bytes
        self.capacity: dict[str, int] = {}
        """GPUs in service by type, free or not."""
        self.sick: dict[str, int] = {}
        """GPUs out of service by type."""
        self.slots: dict[str, list[GpuSlot]] = {}
        """Free GPUs by type in order of index."""
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
            counts = self.capacity if gpu.is_in_service else self.sick
            counts[gpu.gpu_type] = counts.get(gpu.gpu_type, 0) + 1
            free = self.slots.setdefault(gpu.gpu_type, [])
            if gpu.is_free:
                free.append(gpu)
        self.free: dict[str, int] = {gpu_type: len(free) for gpu_type, free in self.slots.items()}
        """How many GPUs are free by type."""

    @property
    def free_gpus(self) -> int:
        """Free GPUs of all types."""
        return sum(self.free.values())

    def has_room(self, shape: JobShape, gpu_type: str) -> bool:
        """Whether one rank of the shape fits, with GPUs of the given type (any if it asks none)."""
        return (
            (shape.gpus == 0 or self.free.get(gpu_type, 0) >= shape.gpus)
            and self.cpus >= shape.cpus
            and self.memory_bytes >= shape.memory_bytes
            and self.name not in shape.excluded_nodes
        )

    def partly_used_change(self, shape: JobShape, gpu_type: str) -> int:
        """How one rank changes the number of partly used pools here: -1, 0 or 1."""
        if shape.gpus == 0:
            return 0
        free = self.free[gpu_type]
        capacity = self.capacity[gpu_type]
        return int(0 < free - shape.gpus < capacity) - int(0 < free < capacity)

    def take(self, shape: JobShape, gpu_type: str) -> RankPlacement:
        """Books one rank and says which GPUs it gets."""
        assert self.has_room(shape, gpu_type), f"{self.name} has no room for {shape}"
        self.cpus -= shape.cpus
        self.memory_bytes -= shape.memory_bytes
        if shape.gpus == 0:
            return RankPlacement(self.name, (), ())
        chosen = choose_slots(self.slots[gpu_type], shape.gpus)
        taken = {gpu.uuid for gpu in chosen}
        self.slots[gpu_type] = [gpu for gpu in self.slots[gpu_type] if gpu.uuid not in taken]
        self.free[gpu_type] -= shape.gpus
        return RankPlacement(
            self.name, tuple(gpu.uuid for gpu in chosen), tuple(gpu.index for gpu in chosen)
        )


class Ledger:
    """The account of the nodes that accept work (or of all, to ask what drained ones could do)."""

    def __init__(self, cluster: ClusterView, *, all_nodes: bool = False) -> None:
        """Opens an account for each node that accepts work; for every node if `all_nodes`."""
        self.nodes = [NodeLedger(node) for node in cluster.nodes if all_nodes or node.accepts_work]
        self._by_name = {node.name: node for node in self.nodes}
        self._by_type: dict[str, list[NodeLedger]] = {}
        for node in self.nodes:
            for gpu_type in node.slots:
                self._by_type.setdefault(gpu_type, []).append(node)

    def node(self, name: str) -> NodeLedger:
        """The account of a node by name."""
        return self._by_name[name]

    def pool(self, gpu_type: str) -> Sequence[NodeLedger]:
        """The nodes that have GPUs of a type; all nodes for the empty type of GPU-free jobs."""
        return self._by_type.get(gpu_type, []) if gpu_type else self.nodes

    def with_room(self, shape: JobShape, gpu_type: str) -> list[NodeLedger]:
        """The nodes on which one rank fits."""
        return [node for node in self.pool(gpu_type) if node.has_room(shape, gpu_type)]

    def fits(self, shape: JobShape) -> bool:
        """Whether all ranks of a job of this shape fit now, on distinct nodes of one GPU type."""
        return any(
            len(self.with_room(shape, gpu_type)) >= shape.nodes for gpu_type in pool_types(shape)
        )

    def take(
        self, shape: JobShape, gpu_type: str, nodes: Iterable[NodeLedger]
    ) -> tuple[RankPlacement, ...]:
        """Books a rank on each of the nodes."""
        return tuple(node.take(shape, gpu_type) for node in nodes)

    def partly_used(self) -> int:
        """How many pools (GPUs of one type on one node) are neither all free nor all taken."""
        return sum(
            0 < node.free[gpu_type] < capacity
            for node in self.nodes
            for gpu_type, capacity in node.capacity.items()
        )


def pool_types(shape: JobShape) -> tuple[str, ...]:
    """The GPU types to look at for a shape, best first; one empty type for GPU-free jobs."""
    return tuple(choice.gpu_type for choice in shape.types) if shape.gpus else ("",)


def preference_of(shape: JobShape, gpu_type: str) -> int:
    """How far down the job's list of types this one is; 0 for GPU-free jobs."""
    return next((c.preference for c in shape.types if c.gpu_type == gpu_type), 0)


def choose_slots(free: Sequence[GpuSlot], count: int) -> tuple[GpuSlot, ...]:
    """Picks GPUs of a node: the lowest of the shortest block of neighbours that is long enough.

    Neighbouring indices usually share a PCIe switch or NVLink; taking the shortest block keeps
    longer ones whole. Without any block long enough, the lowest indices are taken.
    """
    blocks: list[list[GpuSlot]] = []
    for gpu in free:
        if blocks and blocks[-1][-1].index + 1 == gpu.index:
            blocks[-1].append(gpu)
        else:
            blocks.append([gpu])
    fitting = [block for block in blocks if len(block) >= count]
    chosen = min(fitting, key=len) if fitting else free
    return tuple(chosen[:count])
