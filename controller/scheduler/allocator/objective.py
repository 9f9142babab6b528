"""What makes one joint placement better than another, for every allocator alike.

1. Starts decide first, in the order of the queue: of two placements, the one is better that
   starts the first job on which they differ. So no job is passed over for later ones that need
   the same GPUs.
2. Among placements that start the same jobs, the lower cost is better (`ObjectiveWeights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.scheduler.index import ClusterIndex, NodeState, index_of
from controller.scheduler.ledger import Place, Share, need_of, place_of
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import ClusterView, RankedJob, Start

TOLERANCE = 1e-9
"""Differences of cost below this are noise of floating point."""


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """What a placement costs beyond which jobs it starts."""

    type_preference: float = 4.0
    """For each step down a job's list of GPU types."""
    slowness: float = 4.0
    """For a job on a GPU type that is so much slower for its price (0 to 1, see
    `shape.TypeChoice`). Counts only where speeds are configured."""
    spread: float = 2.0
    """For each node that a job takes beyond the fewest possible."""
    packing: float = 1 / 64
    """Keeps free GPUs together: for each pool (GPUs of one type on one node) of G GPUs of which f
    stay free, times G^2 - f^2. Of several nodes the one with the fewest free GPUs costs least,
    as for best fit, whatever its size."""
    fragmentation: float = 0.0
    """For each pool left neither all free nor all taken. Counting them alone breaks large
    nodes for jobs that a small one could hold, see docs/allocator.md."""
    imbalance: float = 0.0
    """For each pool, times the square of the share of it that is taken. With the number of
    taken GPUs given, the sum of squares is least where all nodes are equally loaded."""
    cpu_job_on_gpu_node: float = 0.05
    """For each share without GPUs that lands on a node which has some."""

    def of_state(self, state: NodeState) -> float:
        """The cost of one node that is left in this state."""
        cost = 0.0
        for free, capacity in zip(state.free, state.kind.capacity, strict=True):
            if capacity and self.imbalance:
                cost += self.imbalance * ((capacity - free) / capacity) ** 2
            if 0 < free < capacity:
                cost += self.fragmentation
            cost += self.packing * (capacity * capacity - free * free)
        return cost

    def of_type(self, shape: JobShape, gpu_type: str) -> float:
        """The cost of a job's GPUs being of this type."""
        if not shape.gpus:
            return 0.0
        choice = shape.choice(gpu_type)
        return self.type_preference * choice.preference + self.slowness * choice.slowness

    def of_share(self, shape: JobShape, state: NodeState) -> float:
        """What a share costs on a node in this state, besides its type."""
        return self.cpu_job_on_gpu_node if not shape.gpus and state.has_gpus else 0.0


PRESETS: Mapping[str, ObjectiveWeights] = {
    "completion-time": ObjectiveWeights(),
    "utilization": ObjectiveWeights(slowness=0.5, spread=0.25),
    "balance": ObjectiveWeights(spread=1.0, packing=0.0, imbalance=1.0),
}
"""Weights by what an operator aims at: each job fast (the right type, on few nodes); all GPUs in
use (jobs are cut and put on slower types more readily); or load spread evenly over the nodes
(cooler, less contention for CPUs and disks). Preferred types and few nodes outweigh packing on
nodes of up to 16 GPUs."""


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


class Evaluator:
    """Values placements on one cluster, counted from the nodes up."""

    def __init__(
        self,
        ranked: Sequence[RankedJob],
        shapes: Mapping[int, JobShape],
        index: ClusterIndex,
        weights: ObjectiveWeights,
    ) -> None:
        """Takes all jobs that were asked for, in order, and the cluster before any start."""
        self._order = [entry.job.job_id for entry in ranked]
        self._shapes = shapes
        self._index = index
        self._weights = weights
        self._idle_cost = sum(
            weights.of_state(state) * len(names) for state, names in index.open.items()
        )

    def value(self, places: Mapping[int, Place]) -> ObjectiveValue:
        """The value of starting these jobs, by id, there."""
        cost = self._idle_cost
        states: dict[str, NodeState] = {}
        for job_id, place in places.items():
            shape = self._shapes[job_id]
            cost += self.job_cost(shape, place)
            for share in place:
                before = states.get(share.node) or self._index.state_of[share.node]
                after = _after(before, shape, share)
                cost += self._weights.of_state(after) - self._weights.of_state(before)
                states[share.node] = after
        return ObjectiveValue(tuple(job_id in places for job_id in self._order), cost)

    def terms(self, places: Mapping[int, Place]) -> dict[int, Mapping[str, float]]:
        """Why each place, in numbers, as it looks just before the job is booked there."""
        states: dict[str, NodeState] = {}
        terms = {}
        for job_id, place in places.items():
            shape = self._shapes[job_id]
            here = [states.get(share.node) or self._index.state_of[share.node] for share in place]
            terms[job_id] = self._terms_of(shape, place, here)
            for share, state in zip(place, here, strict=True):
                states[share.node] = _after(state, shape, share)
        return terms

    def job_cost(self, shape: JobShape, place: Place) -> float:
        """What a job's place costs by itself, whatever is left on the nodes."""
        weights = self._weights
        if not shape.gpus:
            return sum(weights.of_share(shape, self._index.state_of[s.node]) for s in place)
        if len(place) == 1:
            cost = weights.of_type(shape, place[0].gpu_type)
        else:
            cost = sum(
                weights.of_type(shape, share.gpu_type) * share.gpus / shape.gpus for share in place
            )
        return cost + weights.spread * (len(place) - self._fewest_nodes(shape, place))

    def _terms_of(
        self, shape: JobShape, place: Place, states: Sequence[NodeState]
    ) -> Mapping[str, float]:
        if not shape.gpus:
            return {"free_gpus_on_node": float(sum(sum(state.free) for state in states))}
        left = change = 0
        for share, state in zip(place, states, strict=True):
            at = state.kind.position(share.gpu_type)
            assert at is not None
            free, capacity = state.free[at], state.kind.capacity[at]
            left += free - share.gpus
            change += (0 < free - share.gpus < capacity) - (0 < free < capacity)
        choices = [shape.choice(share.gpu_type) for share in place]
        terms = {
            "type_preference": float(max(choice.preference for choice in choices)),
            "gpus_left_over": float(left),
            "partly_used_nodes": float(change),
        }
        slowness = max(choice.slowness for choice in choices)
        if slowness:
            terms["slowness"] = slowness
        extra = len(place) - self._fewest_nodes(shape, place)
        if extra:
            terms["nodes_beyond_fewest"] = float(extra)
        return terms

    def _fewest_nodes(self, shape: JobShape, place: Place) -> int:
        """The fewest nodes over which a job could be spread on the types that it got."""
        if shape.nodes:
            return shape.nodes
        types = shape.gpu_types if shape.mixes_types else (place[0].gpu_type,)
        return -(-shape.gpus // max(self._index.largest(shape.partition, t) for t in types))


def _after(state: NodeState, shape: JobShape, share: Share) -> NodeState:
    after = state.after(need_of(shape, share.gpus, share.gpu_type))
    assert after is not None, f"{share} has no room for {shape}"
    return after


def value_of(
    starts: Sequence[Start],
    ranked: Sequence[RankedJob],
    cluster: ClusterView,
    weights: ObjectiveWeights,
) -> ObjectiveValue:
    """The value of any allocator's answer, counted from the nodes up."""
    index = index_of(cluster)
    plain = ShapeIndex(index)
    shapes = {entry.job.job_id: plain.of(entry.job) for entry in ranked}
    places = {start.job_id: place_of(start, index) for start in starts}
    return Evaluator(ranked, shapes, index, weights).value(places)
