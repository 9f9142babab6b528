"""The flow network behind the model: nodes of a class travel from state to state as jobs land.

Each class of nodes has a graph. A vertex is a state; an arc is "one rank of group g lands on a
node in this state"; the flow on it counts the nodes to which that happens. A node's path from
its present state to the state where it rests is the set of ranks that it gets, so capacities
hold by construction, several jobs share a node exactly, and the size does not depend on how many
nodes a class has (arc-flow formulation of vector packing; formulation A of the project's notes
with CPUs and memory in the state where they can run out).

Ranks of one job must be on distinct nodes. Where a node could take two ranks of the same job, the
job gets a layer of its own, which each node passes once: by taking a rank, or by skipping it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from controller.scheduler.allocator.milp.classes import JobGroup, NodeClass, NodeState

MAX_ARCS = 4_000
"""Beyond this a model takes longer to build than a cycle may last."""

SKIP = -1
"""Group of an arc on which a node passes a layer and takes nothing."""


class NetworkTooLarge(Exception):
    """The jobs and nodes at hand need more than `MAX_ARCS` arcs; take fewer jobs."""


@dataclass(frozen=True, slots=True)
class Vertex:
    """Nodes of one class in one state."""

    node_class: int
    state: NodeState
    names: tuple[str, ...]
    """The nodes that start here."""
    layer: int
    is_last_layer: bool
    """Whether a node may rest here: it has passed every layer."""
    partly_used_pools: int


@dataclass(frozen=True, slots=True)
class Arc:
    """A rank of a group lands on a node (or none does: `SKIP`). Equal ends: nothing changes."""

    tail: int
    head: int
    group: int
    gpu_type: str
    most: int
    """No optimal flow is larger."""


@dataclass(frozen=True, slots=True)
class Network:
    """All classes' graphs together. An arc leads to the next layer, or to a smaller state."""

    classes: tuple[NodeClass, ...]
    groups: tuple[JobGroup, ...]
    vertices: tuple[Vertex, ...]
    arcs: tuple[Arc, ...]


class _GraphBuilder:
    """Lays out the graph of one class."""

    def __init__(self, index: int, node_class: NodeClass, groups: Sequence[JobGroup]) -> None:
        self.index = index
        self.node_class = node_class
        self.groups = groups
        self.vertices: list[Vertex] = []
        self.arcs: list[Arc] = []
        self.layered = [g for g in node_class.groups if _could_double(node_class, groups[g])]

    def build(self) -> None:
        current = {
            state: self._vertex(state, 0, names) for state, names in self.node_class.nodes.items()
        }
        for layer, group in enumerate(self.layered, start=1):
            current = self._pass_layer(layer, group, current)
        self._fill(current)

    def _pass_layer(
        self, layer: int, group: int, current: dict[NodeState, int]
    ) -> dict[NodeState, int]:
        """Each node that comes by takes one rank of the group, or skips it."""
        heads: dict[NodeState, int] = {}
        for state, tail in current.items():
            for taken, after, gpu_type in [(SKIP, state, ""), *self._steps(state, [group])]:
                if after not in heads:
                    heads[after] = self._vertex(after, layer)
                self._arc(tail, heads[after], taken, gpu_type)
        return heads

    def _fill(self, current: dict[NodeState, int]) -> None:
        """The last layer: any number of ranks of the other groups, one after the other."""
        groups = [g for g in self.node_class.groups if g not in self.layered]
        heads = dict(current)
        pending = sorted(heads)
        while pending:
            state = pending.pop()
            for group, after, gpu_type in self._steps(state, groups):
                if after == state and state not in self.node_class.nodes:
                    continue
                if after not in heads:
                    heads[after] = self._vertex(after, len(self.layered))
                    pending.append(after)
                self._arc(heads[state], heads[after], group, gpu_type)

    def _steps(
        self, state: NodeState, groups: Sequence[int]
    ) -> Iterator[tuple[int, NodeState, str]]:
        """The ranks that fit on a node in this state: group, state afterwards, GPU type."""
        for group in groups:
            shape = self.groups[group].shape
            for type_index, gpu_type in self.node_class.type_choices(shape):
                after = state.after(shape, type_index)
                if after is not None:
                    yield group, after, gpu_type

    def _vertex(self, state: NodeState, layer: int, names: tuple[str, ...] = ()) -> int:
        partly_used = sum(
            0 < free < capacity
            for free, capacity in zip(state.free, self.node_class.capacity, strict=True)
        )
        is_last = layer == len(self.layered)
        self.vertices.append(Vertex(self.index, state, names, layer, is_last, partly_used))
        return len(self.vertices) - 1

    def _arc(self, tail: int, head: int, group: int, gpu_type: str) -> None:
        if len(self.arcs) >= MAX_ARCS:
            raise NetworkTooLarge
        most = self.node_class.size
        if group != SKIP:
            ranks = self.groups[group].shape.nodes * len(self.groups[group].job_ids)
            most = ranks if tail == head else min(most, ranks)
        self.arcs.append(Arc(tail, head, group, gpu_type, most))


def build_network(classes: Sequence[NodeClass], groups: Sequence[JobGroup]) -> Network:
    """Lays out the graphs of all classes.

    Raises:
        NetworkTooLarge: more than `MAX_ARCS` arcs would be needed.
    """
    vertices: list[Vertex] = []
    arcs: list[Arc] = []
    for index, node_class in enumerate(classes):
        graph = _GraphBuilder(index, node_class, groups)
        graph.build()
        offset = len(vertices)
        vertices += graph.vertices
        arcs += [replace(arc, tail=arc.tail + offset, head=arc.head + offset) for arc in graph.arcs]
        if len(arcs) > MAX_ARCS:
            raise NetworkTooLarge
    return Network(tuple(classes), tuple(groups), tuple(vertices), tuple(arcs))


def _could_double(node_class: NodeClass, group: JobGroup) -> bool:
    """Whether some node of the class could take two ranks of one job of the group."""
    if group.shape.nodes == 1:
        return False
    choices = node_class.type_choices(group.shape)
    for state in node_class.nodes:
        for type_index, _ in choices:
            once = state.after(group.shape, type_index)
            if once is not None and once.after(group.shape, type_index) is not None:
                return True
    return False
