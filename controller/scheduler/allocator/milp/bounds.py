"""What can be known about a placement without solving anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from controller.scheduler.allocator.objective import Evaluator, ObjectiveWeights
from controller.scheduler.index import Need, NodeState
from controller.scheduler.ledger import Ledger, Place, Share, need_of
from controller.scheduler.shape import JobShape

_Domain = tuple[frozenset[str], str]
"""GPU types and partition: the pools from which a job takes its GPUs."""


def cheapest_place(
    ledger: Ledger, shape: JobShape, weights: ObjectiveWeights, evaluator: Evaluator
) -> Place | None:
    """Where a job costs least if it starts alone; None if it does not fit.

    Costs of distinct nodes add up, so the cheapest nodes for each share size of a cut are the
    cheapest set, as long as the sizes do not compete for nodes; None as well if they could.
    Ties: what is left over, then names.
    """
    best: tuple[float, float, Place] | None = None
    for gpu_types, largest in _type_sets(shape, ledger):
        for way in shape.ways(largest):
            if len(way) > 1 or len(gpu_types) > 1:
                return None
            found = _cheapest_nodes(ledger, shape, way[0], gpu_types[0], weights)
            if found is None:
                continue
            node_cost, left, place = found
            candidate = (node_cost + evaluator.job_cost(shape, place), left, place)
            if best is None or candidate < best:
                best = candidate
    return None if best is None else best[2]


def _type_sets(shape: JobShape, ledger: Ledger) -> list[tuple[tuple[str, ...], int]]:
    if shape.mixes_types:
        largest = max((ledger.largest(shape.partition, t) for t in shape.gpu_types), default=0)
        return [(shape.gpu_types, largest)]
    return [((t,), ledger.largest(shape.partition, t) if t else 0) for t in shape.gpu_types]


def _cheapest_nodes(
    ledger: Ledger,
    shape: JobShape,
    part: tuple[int, int],
    gpu_type: str,
    weights: ObjectiveWeights,
) -> tuple[float, float, Place] | None:
    gpus, count = part
    need = need_of(shape, gpus, gpu_type)
    nodes = sorted(
        (*_node_cost(state, need, shape, weights), name)
        for state, _, names in ledger.with_room(shape, gpus, gpu_type)
        for name in names[:count]
    )[:count]
    if len(nodes) < count:
        return None
    place = tuple(sorted(Share(name, gpus, gpu_type) for _, _, name in nodes))
    return sum(cost for cost, _, _ in nodes), sum(left for _, left, _ in nodes), place


def _node_cost(
    state: NodeState, need: Need, shape: JobShape, weights: ObjectiveWeights
) -> tuple[float, float]:
    after = state.after(need)
    assert after is not None
    change = weights.of_state(after) - weights.of_state(state)
    if need.gpus:
        return change, float(after.free_of(need.gpu_type))
    return change + weights.of_share(shape, state), float(sum(state.free))


def cost_lower_bound(
    ledger: Ledger, starting: Sequence[JobShape], weights: ObjectiveWeights
) -> float | None:
    """No joint placement of jobs of these shapes costs less; None if nothing is known.

    Counted like `evaluate`, from the nodes up. Two facts about a GPU type whose demand is
    known: a share can fill at most one partly used pool, and where all pools have G GPUs and the
    number left free is no multiple of G, some pool is partly used.
    """
    if (
        weights.imbalance
        or weights.packing
        or any(shape.nodes == 0 and shape.gpus for shape in starting)
    ):
        return None
    bound = 0.0
    for shape, count in Counter(starting).items():
        if shape.gpus:
            share = shape.gpus // shape.nodes
            bound += count * min(
                (
                    weights.of_type(shape, gpu_type)
                    for gpu_type in shape.gpu_types
                    if ledger.with_room(shape, share, gpu_type)
                ),
                default=0.0,
            )
    for gpu_type in {t for state, _ in ledger.states for t in state.kind.gpu_types}:
        takers = [shape for shape in starting if gpu_type in shape.gpu_types]
        if all(len(shape.types) == 1 for shape in takers):
            bound += weights.fragmentation * _least_partly_used(ledger, gpu_type, takers)
    return bound


def _least_partly_used(ledger: Ledger, gpu_type: str, takers: Iterable[JobShape]) -> int:
    pools = []
    for state, names in ledger.pool(gpu_type):
        at = state.kind.position(gpu_type)
        assert at is not None
        pools.append((state.free[at], state.kind.capacity[at], len(names)))
    takers = list(takers)
    left = sum(free * count for free, _, count in pools) - sum(shape.gpus for shape in takers)
    capacities = {capacity for _, capacity, _ in pools if capacity}
    partly = sum(count for free, capacity, count in pools if 0 < free < capacity)
    least = max(0, partly - sum(shape.nodes for shape in takers))
    if len(capacities) == 1 and left % capacities.pop():
        least = max(least, 1)
    return least


@dataclass(slots=True)
class _Supply:
    """What a domain has free, and what jobs that start for certain take from it."""

    gpus: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    """How many shares of so many GPUs its nodes could hold, all free GPUs cut that way."""
    pools: list[tuple[int, int]] = field(default_factory=list)
    """Free GPUs of a pool, number of such pools."""
    certain: list[JobShape] = field(default_factory=list)


class Shortage:
    """Tells that a job cannot start beside those that start for certain, by counting.

    Jobs that accept no pool outside a domain take their GPUs from it. Counted are GPUs, CPUs,
    memory, and slots: a pool with f free GPUs holds at most floor(f / k) shares of k or more
    GPUs, and a share of s uses up at least floor(s / k) of them (a dual feasible function, see
    Fekete and Schepers, "New classes of fast lower bounds for bin packing problems", 2001).
    """

    def __init__(self, ledger: Ledger, shapes: Iterable[JobShape]) -> None:
        """Counts what each domain of the given jobs has free."""
        everything = frozenset(t for state, _ in ledger.states for t in state.kind.gpu_types)
        domains = {self._domain(shape) for shape in shapes if shape.gpus}
        domains |= {(everything, "")}
        self._supply = {domain: _count(ledger, domain) for domain in domains}
        self._within: dict[_Domain, list[_Supply]] = {
            domain: [
                supply
                for (types, partition), supply in self._supply.items()
                if domain[0] <= types and partition in {"", domain[1]}
            ]
            for domain in domains
        }

    def start(self, shape: JobShape) -> None:
        """Notes a job that starts for certain."""
        if shape.gpus:
            for supply in self._within[self._domain(shape)]:
                supply.certain.append(shape)
                supply.gpus -= shape.gpus
                supply.cpus -= shape.cpus * max(1, shape.nodes)
                supply.memory_bytes -= shape.memory_bytes * max(1, shape.nodes)
                for size in supply.slots:
                    supply.slots[size] -= _slots(shape, size)

    def forbids(self, shape: JobShape) -> bool:
        """Whether the job cannot start; False if that is not known."""
        if not shape.gpus:
            return False
        return any(_is_short(supply, shape) for supply in self._within[self._domain(shape)])

    @staticmethod
    def _domain(shape: JobShape) -> _Domain:
        return frozenset(shape.gpu_types), shape.partition


def _is_short(supply: _Supply, shape: JobShape) -> bool:
    ranks = max(1, shape.nodes)
    if (
        shape.gpus > supply.gpus
        or (shape.cpus and shape.cpus * ranks > supply.cpus)
        or (shape.memory_bytes and shape.memory_bytes * ranks > supply.memory_bytes)
    ):
        return True
    if not shape.nodes:
        return False
    size = shape.gpus // shape.nodes
    if size not in supply.slots:
        supply.slots[size] = sum(free // size * count for free, count in supply.pools) - sum(
            _slots(other, size) for other in supply.certain
        )
    return supply.slots[size] < shape.nodes


def _slots(shape: JobShape, size: int) -> int:
    """Slots of `size` GPUs that a job uses up at least."""
    return shape.nodes * (shape.gpus // shape.nodes // size) if shape.nodes else 0


def _count(ledger: Ledger, domain: _Domain) -> _Supply:
    types, partition = domain
    supply = _Supply()
    pools: dict[int, int] = {}
    for state, names in ledger.states:
        if not state.kind.admits(partition):
            continue
        mine = [
            free
            for gpu_type, free in zip(state.kind.gpu_types, state.free, strict=True)
            if gpu_type in types
        ]
        if not mine:
            continue
        supply.gpus += sum(mine) * len(names)
        supply.cpus += max(0, state.cpus) * len(names)
        supply.memory_bytes += max(0, state.memory_bytes) * len(names)
        for free in mine:
            pools[free] = pools.get(free, 0) + len(names)
    supply.pools = list(pools.items())
    return supply
