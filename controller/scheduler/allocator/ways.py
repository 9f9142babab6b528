"""The published way to list and score the places of one job (RLTune, SoCC '25, allocation).

Nodes of a pool are grouped by free GPUs and the groups are gone through from the most free to
the least. From each group 0 to k nodes are taken, and they give as much as they can. So the list
is not complete (it never leaves a fitting hole half used), which is part of what is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

MAX_WAYS = 500
"""Ways that are looked at for one job. The published code has no bound and explodes on large
requests; nodes of one group are interchangeable, so few are ever more than this."""


@dataclass(frozen=True, slots=True, order=True)
class PoolNode:
    """A node of a job's pool."""

    name: str
    free: int
    capacity: int

    @property
    def is_partly_free(self) -> bool:
        """Whether some GPUs are free and some are not."""
        return 0 < self.free < self.capacity


@dataclass(frozen=True, slots=True)
class Way:
    """GPUs by node, with what placing the job there does to the pool."""

    gpus: tuple[tuple[str, int], ...]
    """In order of node name."""
    fragmentation: int
    """Change of the number of partly free nodes."""
    waste: int
    """Change of the GPUs in use on partly free nodes."""
    variance: float
    """Change of the variance of the nodes' utilization (0 to 1)."""

    @property
    def by_defragmentation(self) -> tuple[object, ...]:
        """Smaller is better."""
        return (self.fragmentation, self.waste, self.variance, len(self.gpus), self.gpus)

    @property
    def by_balance(self) -> tuple[object, ...]:
        """Smaller is better."""
        return (self.variance, self.fragmentation, self.waste, len(self.gpus), self.gpus)


@dataclass(frozen=True, slots=True)
class Request:
    """How a job wants its GPUs."""

    gpus: int
    nodes: int
    """0: as few as possible (tier 1), or one more (tier 2)."""


def candidates(request: Request, pool: Sequence[PoolNode]) -> list[Way]:
    """At most four distinct ways: the best of each tier by defragmentation and by balance.

    Tier 1 uses the fewest nodes; tier 2 one more, if that leaves no more nodes partly free. The
    list is empty if tier 1 is: tier 2 never rescues a job.
    """
    first = tier_1(request, pool)
    if not first:
        return []
    tiers = [first, [] if request.nodes or request.gpus < 2 else _tier_2(request, pool)]
    found: list[Way] = []
    for ways in tiers:
        if ways:
            for best in (
                min(ways, key=lambda way: way.by_defragmentation),
                min(ways, key=lambda way: way.by_balance),
            ):
                if best not in found:
                    found.append(best)
    return found


def tier_1(request: Request, pool: Sequence[PoolNode]) -> list[Way]:
    """The ways over the fewest nodes (over the number asked for, if one is)."""
    return _score(_listed(request, pool, _fewest(request, pool)), pool)


def _tier_2(request: Request, pool: Sequence[PoolNode]) -> list[Way]:
    ways = _score(_listed(request, pool, _fewest(request, pool) + 1), pool)
    return [way for way in ways if way.fragmentation <= 0]


def _fewest(request: Request, pool: Sequence[PoolNode]) -> int:
    largest = max((node.capacity for node in pool), default=1)
    return request.nodes or -(-request.gpus // largest)


def _listed(
    request: Request, pool: Sequence[PoolNode], nodes: int
) -> list[tuple[tuple[str, int], ...]]:
    groups: dict[int, list[str]] = {}
    for node in sorted(pool):
        if node.free:
            groups.setdefault(node.free, []).append(node.name)
    ordered = sorted(groups.items(), reverse=True)
    share = request.gpus // request.nodes if request.nodes else 0
    return list(islice(_extend(ordered, request.gpus, nodes, share), MAX_WAYS))


def _extend(
    groups: Sequence[tuple[int, list[str]]], left: int, nodes: int, share: int
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Ways to take `left` GPUs from exactly `nodes` nodes; `share` from each if it is not 0."""
    if not left and not nodes:
        yield ()
        return
    if not groups or nodes <= 0 or left < nodes:
        return
    (free, names), rest = groups[0], groups[1:]
    for count in range(min(nodes, len(names)), -1, -1):
        if share:
            parts = [(share,) * count] if share <= free or not count else []
        else:
            parts = list(_partitions(min(count * free, left), count, free))
        for sizes in parts:
            taken = tuple(zip(names[:count], sizes, strict=True))
            for more in _extend(rest, left - sum(sizes), nodes - count, share):
                yield tuple(sorted((*taken, *more)))


def _partitions(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """Descending lists of `parts` numbers from 1 to `most` with this total."""
    if not parts:
        if not total:
            yield ()
        return
    for first in range(min(most, total - parts + 1), 0, -1):
        if first * parts < total:
            return
        for rest in _partitions(total - first, parts - 1, first):
            yield (first, *rest)


def _score(listed: Sequence[tuple[tuple[str, int], ...]], pool: Sequence[PoolNode]) -> list[Way]:
    by_name = {node.name: node for node in pool}
    used = {node.name: 1 - node.free / node.capacity for node in pool}
    total, squares = sum(used.values()), sum(value * value for value in used.values())
    count = len(pool)
    ways = []
    for gpus in listed:
        fragmentation = waste = 0
        more = more_squares = 0.0
        for name, taken in gpus:
            node = by_name[name]
            after = PoolNode(name, node.free - taken, node.capacity)
            fragmentation += after.is_partly_free - node.is_partly_free
            waste += (after.capacity - after.free) * after.is_partly_free
            waste -= (node.capacity - node.free) * node.is_partly_free
            now = 1 - after.free / after.capacity
            more += now - used[name]
            more_squares += now * now - used[name] * used[name]
        before = squares / count - (total / count) ** 2
        then = (squares + more_squares) / count - ((total + more) / count) ** 2
        ways.append(Way(gpus, fragmentation, waste, round(then - before, 12)))
    return ways
