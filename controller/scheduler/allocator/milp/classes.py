"""Nodes that a decision cannot tell apart, as classes; jobs that it cannot tell apart, as groups.

A node is described by its state: free GPUs by type, free CPUs, free memory. CPUs (or memory) are
left out of the state, written `AMPLE`, where the jobs at hand could not use them up whatever is
placed there. That is the usual case, and it makes most nodes alike; where they could run out the
state keeps the exact figure, so the model stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.scheduler.ledger import Ledger, NodeLedger
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import WaitingJob

AMPLE = -1
"""More CPUs or memory than all jobs that could come to the node ask for."""


@dataclass(frozen=True, slots=True, order=True)
class NodeState:
    """What is free on a node."""

    free: tuple[int, ...]
    """GPUs by type, in the order of the class's types."""
    cpus: int
    memory_bytes: int

    def after(self, shape: JobShape, type_index: int | None) -> NodeState | None:
        """The state once one rank has been placed; None if it does not fit."""
        free = self.free
        if type_index is not None:
            left = free[type_index] - shape.gpus
            if left < 0:
                return None
            free = (*free[:type_index], left, *free[type_index + 1 :])
        cpus = _less(self.cpus, shape.cpus)
        memory_bytes = _less(self.memory_bytes, shape.memory_bytes)
        if cpus is None or memory_bytes is None:
            return None
        return NodeState(free, cpus, memory_bytes)


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Jobs of one shape, in order. A job over several nodes is a group of its own."""

    shape: JobShape
    job_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes with the same GPU types and capacities that are open to the same groups."""

    gpu_types: tuple[str, ...]
    capacity: tuple[int, ...]
    """GPUs in service by type."""
    groups: tuple[int, ...]
    """Indices of the job groups that may come here."""
    nodes: Mapping[NodeState, tuple[str, ...]]
    """Node names by present state, in order of name."""

    @property
    def size(self) -> int:
        """How many nodes the class has."""
        return sum(len(names) for names in self.nodes.values())

    def type_choices(self, shape: JobShape) -> tuple[tuple[int | None, str], ...]:
        """The GPU types that a rank of this shape may take here, as (index, type)."""
        if shape.gpus == 0:
            return ((None, ""),)
        return tuple(
            (self.gpu_types.index(choice.gpu_type), choice.gpu_type)
            for choice in shape.types
            if choice.gpu_type in self.gpu_types
        )


def group_jobs(jobs: Sequence[WaitingJob], shapes: ShapeIndex) -> tuple[JobGroup, ...]:
    """Groups interchangeable jobs, in order of each group's first job."""
    members: dict[tuple[JobShape, int], list[int]] = {}
    for job in jobs:
        shape = shapes.of(job)
        alone = job.job_id if shape.nodes > 1 else 0
        members.setdefault((shape, alone), []).append(job.job_id)
    return tuple(JobGroup(shape, tuple(ids)) for (shape, _), ids in members.items())


def classify(ledger: Ledger, groups: Sequence[JobGroup]) -> tuple[NodeClass, ...]:
    """Puts each node to which some group may come into a class; deterministic order."""
    found: dict[
        tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], dict[NodeState, list[str]]
    ] = {}
    for node in sorted(ledger.nodes, key=lambda node: node.name):
        open_to = tuple(i for i, group in enumerate(groups) if _may_host(node, group.shape))
        if not open_to:
            continue
        gpu_types = tuple(sorted(node.capacity))
        capacity = tuple(node.capacity[gpu_type] for gpu_type in gpu_types)
        state = _state(node, gpu_types, [groups[i] for i in open_to])
        states = found.setdefault((gpu_types, capacity, open_to), {})
        states.setdefault(state, []).append(node.name)
    return tuple(
        NodeClass(*key, {state: tuple(names) for state, names in states.items()})
        for key, states in found.items()
    )


def _may_host(node: NodeLedger, shape: JobShape) -> bool:
    return any(
        node.has_room(shape, gpu_type)
        for gpu_type in ([choice.gpu_type for choice in shape.types] if shape.gpus else [""])
    )


def _state(node: NodeLedger, gpu_types: Sequence[str], groups: Sequence[JobGroup]) -> NodeState:
    cpus = [(group.shape.gpus, len(group.job_ids), group.shape.cpus) for group in groups]
    memory = [(group.shape.gpus, len(group.job_ids), group.shape.memory_bytes) for group in groups]
    free_gpus = sum(node.free[gpu_type] for gpu_type in gpu_types)
    return NodeState(
        free=tuple(node.free[gpu_type] for gpu_type in gpu_types),
        cpus=AMPLE if _most_used(free_gpus, cpus) <= node.cpus else node.cpus,
        memory_bytes=(
            AMPLE if _most_used(free_gpus, memory) <= node.memory_bytes else node.memory_bytes
        ),
    )


def _most_used(free_gpus: int, demands: Sequence[tuple[int, int, int]]) -> float:
    """A bound on what jobs can take of one resource of a node.

    Each demand is (GPUs of a rank, jobs, amount of a rank). A job puts at most one rank on a
    node, and ranks with GPUs are limited by the free GPUs as well.
    """
    without_gpus = sum(jobs * amount for gpus, jobs, amount in demands if gpus == 0)
    with_gpus = sum(jobs * amount for gpus, jobs, amount in demands if gpus)
    per_gpu = max((amount / gpus for gpus, _, amount in demands if gpus), default=0.0)
    return without_gpus + min(with_gpus, free_gpus * per_gpu)


def _less(available: int, amount: int) -> int | None:
    if available == AMPLE:
        return AMPLE
    return available - amount if available >= amount else None
