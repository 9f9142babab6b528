"""From flows over classes back to concrete nodes for each job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import isfinite

from controller.scheduler.allocator.milp.network import SKIP, Network, usable_options
from controller.scheduler.ledger import Place, Share

INTEGRALITY = 1e-4
"""How far from an integer a solver's value may be (GLPK's own tolerance is 1e-5)."""

_Slots = dict[int, list[tuple[str, str]]]
"""For each demand: node and GPU type of each share that is placed for it."""


class UnusableAnswer(Exception):
    """The solver's values are no placement: not integer, or they break the model's rows."""


def to_integers(values: Sequence[float]) -> list[int]:
    """Rounds a solver's values.

    Raises:
        UnusableAnswer: a value is not near an integer, or is negative.
    """
    for value in values:
        if not isfinite(value) or abs(value - round(value)) > INTEGRALITY or round(value) < 0:
            raise UnusableAnswer(f"the solver answered {value} where a count is due")
    return [round(value) for value in values]


def expand(
    network: Network,
    flows: Sequence[int],
    picks: Mapping[int, int],
    starting: Collection[int],
) -> dict[int, Place]:
    """Walks the nodes of each class along the flows and deals the shares to the jobs.

    Nodes go in order of name, jobs of a group in their order: the first gets the option that
    they like best.

    Args:
        network: what the model was built from.
        flows: nodes on each of its arcs.
        picks: jobs by option, for groups that have several.
        starting: ids of the jobs that start.

    Raises:
        UnusableAnswer: the flows are not a placement of these jobs.
    """
    problem = network.problem
    slots = _walk(network, flows)
    places: dict[int, Place] = {}
    for group, options in zip(problem.groups, usable_options(network), strict=True):
        jobs = [job_id for job_id in group.job_ids if job_id in starting]
        for o in options:
            count = picks[o] if len(options) > 1 else len(jobs)
            dealt, jobs = jobs[:count], jobs[count:]
            if len(dealt) < count:
                raise UnusableAnswer("more jobs are placed than start")
            for job_id in dealt:
                places[job_id] = _deal(slots, problem.options[o].parts, network)
        if jobs:
            raise UnusableAnswer(f"no place for {len(jobs)} jobs that start")
    if any(slots.values()):
        raise UnusableAnswer("shares are placed that no job needs")
    return places


def _deal(slots: _Slots, parts: Sequence[tuple[int, int]], network: Network) -> Place:
    """Takes the shares of one job; of a node that it has already only if there is no other."""
    gpus: Counter[tuple[str, str]] = Counter()
    for demand, count in parts:
        for _ in range(count):
            mine = slots.get(demand, [])
            if not mine:
                raise UnusableAnswer("too few shares are placed for the jobs that start")
            at = next((i for i, slot in enumerate(mine) if slot not in gpus), 0)
            gpus[mine.pop(at)] += network.problem.demands[demand].gpus
    return tuple(sorted(Share(node, count, gpu_type) for (node, gpu_type), count in gpus.items()))


def _walk(network: Network, flows: Sequence[int]) -> _Slots:
    out: list[list[int]] = [[] for _ in network.vertices]
    slots: _Slots = {}
    for a, arc in enumerate(network.arcs):
        if not flows[a]:
            continue
        if arc.tail != arc.head:
            out[arc.tail].append(a)
            continue
        vertex = network.vertices[arc.tail]
        host = network.problem.classes[vertex.node_class].nodes[vertex.bin][0]
        slots.setdefault(arc.demand, []).extend([(host, arc.gpu_type)] * flows[a])
    here = [list(vertex.names) for vertex in network.vertices]
    for v in _downstream(network):
        for a in out[v]:
            arc = network.arcs[a]
            moving, here[v] = here[v][: flows[a]], here[v][flows[a] :]
            if len(moving) < flows[a]:
                raise UnusableAnswer("more nodes leave a state than are in it")
            here[arc.head] += moving
            if arc.demand != SKIP:
                slots.setdefault(arc.demand, []).extend((name, arc.gpu_type) for name in moving)
        if here[v] and out[v] and not network.vertices[v].is_last_layer:
            raise UnusableAnswer("nodes stay in a layer that they must pass")
    for placed in slots.values():
        placed.sort()
    return slots


def _downstream(network: Network) -> list[int]:
    """Vertices such that each comes after all from which nodes arrive."""
    order = sorted(range(len(network.vertices)), key=lambda v: network.vertices[v].bin)
    order.reverse()
    return sorted(order, key=lambda v: network.vertices[v].layer)
