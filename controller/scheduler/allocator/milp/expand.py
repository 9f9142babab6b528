"""From flows over classes back to concrete nodes for each job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite

from controller.scheduler.allocator.milp.network import SKIP, Network

INTEGRALITY = 1e-4
"""How far from an integer a solver's value may be (GLPK's own tolerance is 1e-5)."""

_Slots = dict[tuple[int, str], list[str]]


class UnusableAnswer(Exception):
    """The solver's values are no placement: not integer, or they break the model's rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one job goes."""

    gpu_type: str
    """Empty for jobs without GPUs."""
    nodes: tuple[str, ...]


def to_integers(values: Sequence[float]) -> list[int]:
    """Rounds a solver's values.

    Raises:
        UnusableAnswer: a value is not near an integer, or is negative.
    """
    for value in values:
        if not isfinite(value) or abs(value - round(value)) > INTEGRALITY or round(value) < 0:
            raise UnusableAnswer(f"the solver answered {value} where a count is due")
    return [round(value) for value in values]


def expand(network: Network, flows: Sequence[int], starting: Collection[int]) -> dict[int, Place]:
    """Walks the nodes of each class along the flows and deals the ranks to the jobs.

    Nodes go in order of name, jobs of a group in their order: the first gets the GPU type that
    they like best.

    Args:
        network: what the model was built from.
        flows: nodes on each of its arcs.
        starting: ids of the jobs that start.

    Raises:
        UnusableAnswer: the flows are not a placement of these jobs.
    """
    slots = _walk(network, flows)
    places: dict[int, Place] = {}
    for g, group in enumerate(network.groups):
        jobs = [job_id for job_id in group.job_ids if job_id in starting]
        ranks = [
            (gpu_type, name)
            for gpu_type in [choice.gpu_type for choice in group.shape.types] or [""]
            for name in slots.get((g, gpu_type), [])
        ]
        if len(ranks) != len(jobs) * group.shape.nodes:
            raise UnusableAnswer(f"{len(ranks)} ranks were placed for {len(jobs)} jobs")
        for i, job_id in enumerate(jobs):
            mine = ranks[i * group.shape.nodes : (i + 1) * group.shape.nodes]
            places[job_id] = Place(mine[0][0], tuple(name for _, name in mine))
    return places


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
        host = network.classes[vertex.node_class].nodes[vertex.state][0]
        slots.setdefault((arc.group, arc.gpu_type), []).extend([host] * flows[a])
    here = [list(vertex.names) for vertex in network.vertices]
    for v in _downstream(network):
        for a in out[v]:
            arc = network.arcs[a]
            moving, here[v] = here[v][: flows[a]], here[v][flows[a] :]
            if len(moving) < flows[a]:
                raise UnusableAnswer("more nodes leave a state than are in it")
            here[arc.head] += moving
            if arc.group != SKIP:
                slots.setdefault((arc.group, arc.gpu_type), []).extend(moving)
        if here[v] and out[v] and not network.vertices[v].is_last_layer:
            raise UnusableAnswer("nodes stay in a layer that they must pass")
    return slots


def _downstream(network: Network) -> list[int]:
    """Vertices such that each comes after all from which nodes arrive."""
    order = sorted(range(len(network.vertices)), key=lambda v: network.vertices[v].state)
    order.reverse()
    return sorted(order, key=lambda v: network.vertices[v].layer)
