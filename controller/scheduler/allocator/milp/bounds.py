"""What can be known about a placement without solving anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.scheduler.allocator.objective import ObjectiveWeights
from controller.scheduler.ledger import Ledger, NodeLedger, pool_types, preference_of
from controller.scheduler.shape import JobShape


def cheapest_place(
    ledger: Ledger, shape: JobShape, weights: ObjectiveWeights
) -> tuple[str, list[NodeLedger]]:
    """The place of least cost for a job that starts alone; it must fit. Ties by best fit.

    Costs of distinct nodes add up, so the cheapest nodes of a type are the cheapest set.
    """
    best: tuple[float, float, str, list[NodeLedger]] | None = None
    for gpu_type in pool_types(shape):
        nodes = ledger.with_room(shape, gpu_type)
        if len(nodes) < shape.nodes:
            continue
        ranked = sorted((*_node_cost(node, shape, gpu_type, weights), node.name) for node in nodes)
        chosen = ranked[: shape.nodes]
        cost = sum(node_cost for node_cost, _, _ in chosen)
        cost += weights.type_preference * preference_of(shape, gpu_type)
        left = sum(left for _, left, _ in chosen)
        candidate = (cost, left, gpu_type, [ledger.node(name) for _, _, name in chosen])
        if best is None or candidate[:3] < best[:3]:
            best = candidate
    assert best is not None, f"{shape} was said to fit"
    return best[2], best[3]


def _node_cost(
    node: NodeLedger, shape: JobShape, gpu_type: str, weights: ObjectiveWeights
) -> tuple[float, float]:
    if shape.gpus:
        change = node.partly_used_change(shape, gpu_type)
        return weights.fragmentation * change, float(node.free[gpu_type] - shape.gpus)
    return weights.cpu_job_on_gpu_node * bool(node.capacity), float(node.free_gpus)


def cost_lower_bound(
    ledger: Ledger, starting: Sequence[JobShape], weights: ObjectiveWeights
) -> float:
    """No joint placement of jobs of these shapes costs less.

    Two facts about a GPU type whose demand is known: a rank can fill at most one partly used
    pool, and where all pools have G GPUs and the number left free is no multiple of G, some pool
    is partly used.
    """
    bound = 0.0
    for shape in starting:
        bound += weights.type_preference * min(
            (preference_of(shape, t) for t in pool_types(shape) if _fits(ledger, shape, t)),
            default=0,
        )
    for gpu_type in {gpu_type for node in ledger.nodes for gpu_type in node.capacity}:
        takers = [shape for shape in starting if gpu_type in pool_types(shape)]
        if all(len(shape.types) == 1 for shape in takers):
            bound += weights.fragmentation * _least_partly_used(ledger, gpu_type, takers)
    return bound


def _fits(ledger: Ledger, shape: JobShape, gpu_type: str) -> bool:
    return len(ledger.with_room(shape, gpu_type)) >= shape.nodes


def _least_partly_used(ledger: Ledger, gpu_type: str, takers: Iterable[JobShape]) -> int:
    pools = [
        (node.free[gpu_type], node.capacity.get(gpu_type, 0)) for node in ledger.pool(gpu_type)
    ]
    left = sum(free for free, _ in pools) - sum(shape.gpus * shape.nodes for shape in takers)
    capacities = {capacity for _, capacity in pools}
    partly = sum(0 < free < capacity for free, capacity in pools)
    least = max(0, partly - sum(shape.nodes for shape in takers))
    if len(capacities) == 1 and left % capacities.pop():
        least = max(least, 1)
    return least


def lacks_gpus(ledger: Ledger, shape: JobShape, starting: Iterable[JobShape]) -> bool:
    """Whether jobs that start for certain leave too few GPUs for one more of this shape.

    Jobs that accept no type but those acceptable here take their GPUs from the same pools.
    """
    types = frozenset(choice.gpu_type for choice in shape.types)
    free = sum(node.free.get(gpu_type, 0) for gpu_type in types for node in ledger.pool(gpu_type))
    taken = sum(
        other.gpus * other.nodes
        for other in starting
        if other.gpus and types.issuperset(choice.gpu_type for choice in other.types)
    )
    return shape.gpus * shape.nodes > free - taken
