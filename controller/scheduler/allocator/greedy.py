"""List scheduling: jobs in order, each where it fits best (or, to spread load, worst)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import groupby
from typing import NamedTuple

from controller.scheduler.allocator.objective import (
    Evaluator,
    ObjectiveValue,
    ObjectiveWeights,
)
from controller.scheduler.index import ClusterIndex, index_of
from controller.scheduler.ledger import Ledger, Place, Share
from controller.scheduler.quota import Quotas
from controller.scheduler.shape import JobShape, ShapeIndex, Way, shapes_of
from controller.scheduler.slots import make_starts
from controller.scheduler.types import ClusterView, Placement, RankedJob


@dataclass(frozen=True, slots=True)
class GreedyAllocator:
    """Places jobs one after the other; one that does not fit is skipped and later ones may start.

    `packs` chooses between best fit, which keeps nodes whole for large jobs, and worst fit,
    which loads all nodes alike.
    """

    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)
    packs: bool = True
    name: str = "greedy"

    def place(self, ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float) -> Placement:
        """See `Allocator.place`."""
        index = index_of(cluster)
        shapes = shapes_of(ranked, cluster, ShapeIndex(index), now_s)
        ledger, quotas = Ledger(index, cluster.rooms), Quotas(cluster)
        places = pack(ranked, shapes, ledger, quotas, packs=self.packs)
        evaluator = Evaluator(ranked, shapes, index, self.weights)
        return finish(places, index, evaluator, evaluator.value(places))


def finish(
    places: Mapping[int, Place], index: ClusterIndex, evaluator: Evaluator, value: ObjectiveValue
) -> Placement:
    """The answer of an allocator that chose these places, of this value: GPUs and terms."""
    starts = make_starts(places, index, evaluator.terms(places))
    return Placement(starts, value.as_float(), cost=value.cost)


def pack(
    jobs: Sequence[RankedJob],
    shapes: Mapping[int, JobShape],
    ledger: Ledger,
    quotas: Quotas,
    *,
    packs: bool = True,
) -> dict[int, Place]:
    """Starts each job that fits in what the ones before it left, and books it."""
    places: dict[int, Place] = {}
    failed: set[JobShape] = set()
    for entry in jobs:
        spec = entry.job.spec
        shape = shapes[entry.job.job_id]
        if shape in failed or not quotas.allows(spec):
            continue
        place = find_place(ledger, shape, packs=packs)
        if place is None:
            failed.add(shape)
            continue
        places[entry.job.job_id] = place
        ledger.take(shape, place)
        quotas.take(spec)
    return places


class _Option(NamedTuple):
    """Nodes for one way to cut a job; the smaller the better."""

    key: tuple[float, ...]
    gpu_type: str
    shares: tuple[Share, ...]


def find_place(ledger: Ledger, shape: JobShape, *, packs: bool = True) -> Place | None:
    """The place that leaves the fewest GPUs over (the most if not `packs`); None if none fits.

    The first acceptable type in the job's order of preference wins; types of equal preference
    compete by speed for their price, then by how many nodes they take and what those have left.
    Ties: fewer partly used nodes, then names. Jobs without GPUs go where the fewest GPUs are
    free, so that GPU nodes stay free for GPU jobs; then where the fewest CPUs are.
    """
    if not shape.gpus:
        return _for_cpu_job(ledger, shape, packs=packs)
    for _, tier in groupby(shape.types, key=lambda choice: choice.preference):
        options = [
            option
            for choice in tier
            if (option := _of_type(ledger, shape, choice.gpu_type, choice.slowness, packs=packs))
        ]
        if options:
            return tuple(sorted(min(options).shares))
    return _mixed(ledger, shape, packs=packs) if shape.mixes_types else None


def _for_cpu_job(ledger: Ledger, shape: JobShape, *, packs: bool) -> Place | None:
    sign = 1 if packs else -1
    room = ledger.with_room(shape, 0, "")
    nodes = nsmallest(
        max(1, shape.nodes),
        (
            (sign * sum(state.free), sign * state.cpus, name)
            for state, _, names in room
            for name in names[: max(1, shape.nodes)]
        ),
    )
    if len(nodes) < max(1, shape.nodes):
        return None
    return tuple(sorted(Share(name, 0, "") for _, _, name in nodes))


def _of_type(
    ledger: Ledger, shape: JobShape, gpu_type: str, slowness: float, *, packs: bool
) -> _Option | None:
    if not ledger.may_hold(shape, gpu_type):
        return None
    best: _Option | None = None
    fewest = 0
    for way in shape.ways(ledger.largest(shape.partition, gpu_type)):
        nodes = sum(count for _, count in way)
        if best is not None and nodes > fewest:
            break
        found = _for_way(ledger, shape, way, (gpu_type,), packs=packs)
        if found is not None:
            option = _Option((slowness, float(nodes), *found[0]), gpu_type, found[1])
            best, fewest = option if best is None else min(best, option), nodes
    return best


def _mixed(ledger: Ledger, shape: JobShape, *, packs: bool) -> Place | None:
    largest = max((ledger.largest(shape.partition, t) for t in shape.gpu_types), default=0)
    for way in shape.ways(largest):
        found = _for_way(ledger, shape, way, shape.gpu_types, packs=packs)
        if found is not None:
            return tuple(sorted(found[1]))
    return None


def _for_way(
    ledger: Ledger, shape: JobShape, way: Way, gpu_types: Sequence[str], *, packs: bool
) -> tuple[tuple[float, float], tuple[Share, ...]] | None:
    """Distinct nodes for all shares: what they have left together, and the shares."""
    taken: set[str] = set()
    shares: list[Share] = []
    left = change = 0
    for gpus, count in way:
        candidates = _candidates(ledger, shape, gpus, count, gpu_types, taken, packs)
        if len(candidates) < count:
            return None
        nodes = [min(candidates)] if len(way) == count == 1 else sorted(candidates)
        wanted = len(shares) + count
        for _, node_left, node_change, name, gpu_type in nodes:
            if name not in taken and len(shares) < wanted:
                left += node_left
                change += node_change
                taken.add(name)
                shares.append(Share(name, gpus, gpu_type))
        if len(shares) < wanted:
            return None
    return (float(left if packs else -left), float(change)), tuple(shares)


def _candidates(
    ledger: Ledger,
    shape: JobShape,
    gpus: int,
    count: int,
    gpu_types: Sequence[str],
    taken: set[str],
    packs: bool,
) -> list[tuple[int, int, int, str, str]]:
    """Type's place in the list with what is left, what is left, change, name, type."""
    several = 1000 if len(gpu_types) > 1 else 0
    found = []
    for place, gpu_type in enumerate(gpu_types):
        for state, at, names in ledger.with_room(shape, gpus, gpu_type):
            assert at is not None
            free, capacity = state.free[at], state.kind.capacity[at]
            left = free - gpus
            change = (0 < left < capacity) - (0 < free < capacity)
            key = several * place + (left if packs else -left)
            if taken or several:
                names = [name for name in names if name not in taken]  # noqa: PLW2901
            for name in names if several else names[:count]:
                found.append((key, left, change, name, gpu_type))  # noqa: PERF401
    return found
