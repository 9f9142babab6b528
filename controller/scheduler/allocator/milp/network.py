"""The flow network behind the model: nodes of a class travel from state to state as jobs land.

Each class of nodes has a graph. A vertex is what is free on a node; an arc is "one share of a
demand lands on such a node"; the flow on it counts the nodes to which that happens. A node's path
from its present state to the state where it rests is the set of shares that it gets, so
capacities hold by construction, several jobs share a node exactly, and the size does not depend
on how many nodes a class has (arc-flow formulation of vector packing; formulation A of the
project's notes, with CPUs and memory in the state where they can run out).

The shares of a job over a given number of nodes must be on distinct nodes. Where a node could
take two of them, the job gets a layer of its own, which each node passes once: by taking a share,
or by skipping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.scheduler.allocator.milp.classes import Bin, NodeClass, Problem, Take
from controller.scheduler.index import Names

MAX_ARCS = 4_000
"""Beyond this a model takes longer to build than a cycle may last."""

SKIP = -1
"""Demand of an arc on which a node passes a layer and takes nothing."""


class NetworkTooLarge(Exception):
    """The jobs and nodes at hand need more than `MAX_ARCS` arcs; take fewer jobs."""


class Vertex(NamedTuple):
    """Nodes of one class with the same things free."""

    node_class: int
    bin: Bin
    names: Names
    """The nodes that start here."""
    layer: int
    is_last_layer: bool
    """Whether a node may rest here: it has passed every layer."""


class Arc(NamedTuple):
    """A share lands on a node (or none does: `SKIP`). Equal ends: nothing that counts changes."""

    tail: int
    head: int
    demand: int
    gpu_type: str
    most: int
    """No optimal flow is larger."""


@dataclass(frozen=True, slots=True)
class Network:
    """All classes' graphs together. An arc leads to the next layer, or to a smaller state."""

    problem: Problem
    vertices: tuple[Vertex, ...]
    arcs: tuple[Arc, ...]


def build_network(problem: Problem) -> Network:
    """Lays out the graphs of all classes.

    Raises:
        NetworkTooLarge: more than `MAX_ARCS` arcs would be needed.
    """
    vertices: list[Vertex] = []
    arcs: list[Arc] = []
    for number, node_class in enumerate(problem.classes):
        _GraphBuilder(number, node_class, problem, vertices, arcs).build()
    return Network(problem, tuple(vertices), tuple(arcs))


def usable_options(network: Network) -> list[list[int]]:
    """For each group the options, by index, whose shares all have some node to go to."""
    supplied = {arc.demand for arc in network.arcs}
    usable: list[list[int]] = [[] for _ in network.problem.groups]
    for o, option in enumerate(network.problem.options):
        if all(demand in supplied for demand, _ in option.parts):
            usable[option.group].append(o)
    return usable


class _GraphBuilder:
    """Lays out the graph of one class."""

    def __init__(
        self,
        number: int,
        node_class: NodeClass,
        problem: Problem,
        vertices: list[Vertex],
        arcs: list[Arc],
    ) -> None:
        self.number = number
        self.node_class = node_class
        self.size = node_class.size
        self.problem = problem
        self.vertices = vertices
        self.arcs = arcs
        layers: dict[int, list[tuple[int, str, Take]]] = {}
        self.takes: list[tuple[int, str, Take]] = []
        for entry in node_class.takes:
            alone = problem.demands[entry[0]].alone
            (self.takes if alone < 0 else layers.setdefault(alone, [])).append(entry)
        self.layers = list(layers.values())

    def build(self) -> None:
        current = {at: self._vertex(at, 0, names) for at, names in self.node_class.nodes.items()}
        for layer, takes in enumerate(self.layers, start=1):
            current = self._pass_layer(layer, takes, current)
        self._fill(current)

    def _pass_layer(
        self, layer: int, takes: Sequence[tuple[int, str, Take]], current: dict[Bin, int]
    ) -> dict[Bin, int]:
        """Each node that comes by takes one share of the job, or skips it."""
        heads: dict[Bin, int] = {}
        for at, tail in current.items():
            self._arc(tail, self._head(heads, at, layer), SKIP, "")
            for demand, gpu_type, take in takes:
                after = at.after(take)
                if after is not None:
                    self._arc(tail, self._head(heads, after, layer), demand, gpu_type)
        return heads

    def _head(self, heads: dict[Bin, int], at: Bin, layer: int) -> int:
        if at not in heads:
            heads[at] = self._vertex(at, layer)
        return heads[at]

    def _fill(self, heads: dict[Bin, int]) -> None:
        """The last layer: any number of shares of the other demands, one after the other."""
        layer = len(self.layers)
        pending = list(heads)
        for at in pending:
            tail = heads[at]
            for demand, gpu_type, take in self.takes:
                after = at.after(take)
                if after is None or (after == at and at not in self.node_class.nodes):
                    continue
                if after not in heads:
                    heads[after] = self._vertex(after, layer)
                    pending.append(after)
                self._arc(tail, heads[after], demand, gpu_type)

    def _vertex(self, at: Bin, layer: int, names: Names = ()) -> int:
        self.vertices.append(Vertex(self.number, at, names, layer, layer == len(self.layers)))
        return len(self.vertices) - 1

    def _arc(self, tail: int, head: int, demand: int, gpu_type: str) -> None:
        if len(self.arcs) >= MAX_ARCS:
            raise NetworkTooLarge
        most = self.size
        if demand != SKIP:
            shares = self.problem.most[demand]
            most = shares if tail == head else min(most, shares)
        self.arcs.append(Arc(tail, head, demand, gpu_type, most))
