"""What makes one joint placement better than another, for every allocator alike.

1. Starts decide first, in the order of the queue: of two placements, the one is better that
   starts the first job on which they differ. So no job is passed over for later ones that need
   the same GPUs.
2. Among placements that start the same jobs, the lower cost is better (`ObjectiveWeights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.scheduler.ledger import Ledger, NodeLedger, preference_of
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import ClusterView, RankedJob, Start

TOLERANCE = 1e-9
"""Differences of cost below this are noise of floating point."""


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """What a placement costs beyond which jobs it starts."""

    type_preference: float = 1.0
    """For each step down a job's list of GPU types."""
    fragmentation: float = 0.25
    """For each pool (GPUs of one type on one node) left neither all free nor all taken."""
    cpu_job_on_gpu_node: float = 0.05
    """For each rank without GPUs that lands on a node which has some."""


@dataclass(frozen=True, slots=True)
class ObjectiveValue:
    """The value of one joint placement."""

    started: tuple[bool, ...]
    """By place in the order of the queue."""
    cost: float

    def is_better_than(self, other: ObjectiveValue) -> bool:
        """Whether this placement is to be preferred to the other one of the same jobs."""
        if self.started != other.started:
            return self.started > other.started
        return self.cost < other.cost - TOLERANCE

    def as_float(self) -> float:
        """One number that never orders two placements of the same jobs the wrong way.

        Starting the i-th job counts 2^-i (i from 1), so 0.875 means "the first three"; the cost
        is squeezed below the last job's part. Late jobs are lost in rounding, so compare values,
        not these numbers.
        """
        starts = sum(2.0 ** -(i + 1) for i, started in enumerate(self.started) if started)
        return starts - 2.0 ** -(len(self.started) + 1) * self.cost / (1.0 + self.cost)


def evaluate(
    starts: Iterable[Start],
    ranked: Sequence[RankedJob],
    cluster: ClusterView,
    weights: ObjectiveWeights,
) -> ObjectiveValue:
    """The value of starting these jobs there, counted from the nodes up."""
    shapes = ShapeIndex(cluster)
    jobs = {entry.job.job_id: entry.job for entry in ranked}
    ledger = Ledger(cluster)
    types = {gpu.uuid: gpu.gpu_type for node in cluster.nodes for gpu in node.gpus}
    cost = 0.0
    started = set()
    for start in starts:
        started.add(start.job_id)
        shape = shapes.of(jobs[start.job_id])
        gpu_type = types[start.ranks[0].gpu_uuids[0]] if shape.gpus else ""
        nodes = [ledger.node(rank.node) for rank in start.ranks]
        cost += choice_cost(shape, gpu_type, nodes, weights)
        ledger.take(shape, gpu_type, nodes)
    cost += weights.fragmentation * ledger.partly_used()
    return ObjectiveValue(tuple(entry.job.job_id in started for entry in ranked), cost)


def choice_cost(
    shape: JobShape, gpu_type: str, nodes: Sequence[NodeLedger], weights: ObjectiveWeights
) -> float:
    """What a job's place costs by itself, whatever else is placed (all but fragmentation)."""
    if shape.gpus:
        return weights.type_preference * preference_of(shape, gpu_type)
    return weights.cpu_job_on_gpu_node * sum(bool(node.capacity) for node in nodes)


def start_terms(shape: JobShape, gpu_type: str, nodes: Sequence[NodeLedger]) -> Mapping[str, float]:
    """Why this place, in numbers, as it looks just before the job is booked there."""
    if not shape.gpus:
        return {"free_gpus_on_node": float(sum(node.free_gpus for node in nodes))}
    return {
        "type_preference": float(preference_of(shape, gpu_type)),
        "gpus_left_over": float(sum(node.free[gpu_type] - shape.gpus for node in nodes)),
        "partly_used_nodes": float(sum(node.partly_used_change(shape, gpu_type) for node in nodes)),
    }
