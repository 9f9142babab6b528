"""A cluster by what its nodes have free: the view of it that placement works on.

Nodes that a decision cannot tell apart share a `NodeState`. There are dozens of states however
many nodes there are, so whatever goes through states does not grow with the cluster. The index of
a view is made from the index of the view before it, at a cost of the nodes that changed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from controller.scheduler.types import ClusterView, NodeCapacity


@dataclass(frozen=True, slots=True, eq=False)
class NodeKind:
    """What a node is, apart from what is free on it. One object for each distinct kind."""

    gpu_types: tuple[str, ...]
    """In order of name; types of which all GPUs are out of service too."""
    capacity: tuple[int, ...]
    """GPUs in service by type."""
    partitions: frozenset[str]

    def position(self, gpu_type: str) -> int | None:
        """Where a type stands in the tuples of this kind; None if there are no such GPUs."""
        return self.gpu_types.index(gpu_type) if gpu_type in self.gpu_types else None

    def admits(self, partition: str) -> bool:
        """Whether jobs of this partition may come; the empty name stands for any."""
        return not partition or partition in self.partitions


class Room(NamedTuple):
    """What a node has left for jobs that outlast a reservation."""

    reservation: int
    """Index in the order of their begin."""
    free: tuple[int, ...]
    cpus: int
    memory_bytes: int


class Need(NamedTuple):
    """What one share of a job takes from a node."""

    gpus: int
    gpu_type: str
    cpus: int
    memory_bytes: int
    outlasts: int = 0
    """It takes from the room of each reservation with a smaller index as well."""


class NodeState(NamedTuple):
    """A kind of node with what is free on it."""

    kind: NodeKind
    free: tuple[int, ...]
    """GPUs by type, in the order of the kind's types."""
    cpus: int
    memory_bytes: int
    rooms: tuple[Room, ...] = ()

    def free_of(self, gpu_type: str) -> int:
        """Free GPUs of a type."""
        at = self.kind.position(gpu_type)
        return 0 if at is None else self.free[at]

    def has_room(self, need: Need, at: int | None) -> bool:
        """Whether a share fits here; `at` is the place of its GPU type, None without GPUs."""
        if at is not None and self.free[at] < need.gpus:
            return False
        if (self.cpus < need.cpus and need.cpus) or (
            self.memory_bytes < need.memory_bytes and need.memory_bytes
        ):
            return False
        return not (self.rooms and need.outlasts) or (
            _take_rooms(self.kind, self.rooms, need) is not None
        )

    def after(self, need: Need) -> NodeState | None:
        """The state once a share is placed here; None if it does not fit."""
        cpus, memory_bytes = self.cpus - need.cpus, self.memory_bytes - need.memory_bytes
        if (cpus < 0 and need.cpus) or (memory_bytes < 0 and need.memory_bytes):
            return None
        free = self.free
        if need.gpus:
            at = self.kind.position(need.gpu_type)
            if at is None or free[at] < need.gpus:
                return None
            free = less(free, at, need.gpus)
        rooms = self.rooms
        if rooms and need.outlasts:
            taken = _take_rooms(self.kind, rooms, need)
            if taken is None:
                return None
            rooms = taken
        return NodeState(self.kind, free, cpus, memory_bytes, rooms)

    def before(self, need: Need) -> NodeState:
        """The state once a share that was placed here is gone."""
        free = self.free
        at = self.kind.position(need.gpu_type) if need.gpus else None
        if at is not None:
            free = less(free, at, -need.gpus)
        return NodeState(
            self.kind, free, self.cpus + need.cpus, self.memory_bytes + need.memory_bytes
        )

    @property
    def partly_used(self) -> int:
        """How many pools (GPUs of one type) are neither all free nor all taken."""
        return sum(
            0 < free < capacity
            for free, capacity in zip(self.free, self.kind.capacity, strict=True)
        )

    @property
    def has_gpus(self) -> bool:
        """Whether it has GPUs in service."""
        return any(self.kind.capacity)


def less(free: tuple[int, ...], at: int, gpus: int) -> tuple[int, ...]:
    """The tuple with `gpus` fewer at one position."""
    return (free[0] - gpus,) if len(free) == 1 else (*free[:at], free[at] - gpus, *free[at + 1 :])


def _take_rooms(kind: NodeKind, rooms: tuple[Room, ...], need: Need) -> tuple[Room, ...] | None:
    left = []
    at = kind.position(need.gpu_type) if need.gpus else None
    for room in rooms:
        if room.reservation >= need.outlasts:
            left.append(room)
            continue
        cpus, memory_bytes = room.cpus - need.cpus, room.memory_bytes - need.memory_bytes
        free = room.free if at is None else less(room.free, at, need.gpus)
        if at is not None and free[at] < 0:
            return None
        if (cpus < 0 and need.cpus) or (memory_bytes < 0 and need.memory_bytes):
            return None
        left.append(Room(room.reservation, free, cpus, memory_bytes))
    return tuple(left)


Names = Sequence[str]
"""Names of nodes in one state, sorted."""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterIndex:
    """The nodes of one view by state. Never changed once made."""

    view: tuple[NodeCapacity, ...]
    nodes: Mapping[str, NodeCapacity]
    """All nodes by name."""
    state_of: Mapping[str, NodeState]
    """The state of each node, whether it accepts work or not."""
    open: Mapping[NodeState, Names]
    """The nodes that accept work."""
    closed: Mapping[NodeState, Names]
    """The nodes that do not."""
    gpu_types: Mapping[str, int]
    """Memory of one GPU of each type in bytes, the least of the cluster's; 0: unknown."""
    gpu_speed: Mapping[str, float]
    """Speed for its price of each type, as configured."""
    has_partitions: bool
    kinds: dict[tuple[object, ...], NodeKind] = field(repr=False)
    """Shared with the indices before and after: one object for each kind."""
    _largest: dict[tuple[str, str, bool], int] = field(default_factory=dict, repr=False)

    def after(self, cluster: ClusterView) -> ClusterIndex:
        """The index of a later view; nodes that are the very same objects cost nothing."""
        view = cluster.nodes
        if len(view) != len(self.view):
            return _build(cluster, self.kinds)
        changed = [(old, new) for old, new in zip(self.view, view, strict=True) if old is not new]
        if any(old.name != new.name for old, new in changed):
            return _build(cluster, self.kinds)
        nodes, state_of = dict(self.nodes), dict(self.state_of)
        groups = (_Groups(self.closed), _Groups(self.open))
        gpu_types = dict(self.gpu_types)
        for old, new in changed:
            groups[old.accepts_work].remove(state_of[old.name], old.name)
            state = _state(new, self.kinds)
            groups[new.accepts_work].add(state, new.name)
            nodes[new.name], state_of[new.name] = new, state
            if state.kind is not self.state_of[old.name].kind:
                _note_memory(gpu_types, [new])
        return ClusterIndex(
            view,
            nodes,
            state_of,
            groups[True].done(),
            groups[False].done(),
            dict(sorted(gpu_types.items())),
            cluster.gpu_speed,
            bool(cluster.partitions),
            self.kinds,
        )

    def largest(self, partition: str, gpu_type: str, *, all_nodes: bool = False) -> int:
        """GPUs in service of a type on the largest node of a partition that accepts work.

        An empty partition stands for all nodes; `all_nodes` counts those that accept no work
        too. A job over "as few nodes as possible" is cut to fit nodes of this size.
        """
        key = (partition, gpu_type, all_nodes)
        if key not in self._largest:
            self._largest[key] = max(
                (
                    state.kind.capacity[at]
                    for state in (*self.open, *(self.closed if all_nodes else ()))
                    if state.kind.admits(partition)
                    and (at := state.kind.position(gpu_type)) is not None
                ),
                default=0,
            )
        return self._largest[key]

    def type_of(self, node: str, uuid: str) -> str:
        """The type of a GPU."""
        return next(gpu.gpu_type for gpu in self.nodes[node].gpus if gpu.uuid == uuid)


def index_of(cluster: ClusterView, before: ClusterIndex | None = None) -> ClusterIndex:
    """The index of a view: the one that came with it, or one made now and kept with it.

    `before` is the index of an earlier view, from which it is made quickly.
    """
    if cluster.index is None:
        made = _build(cluster, {}) if before is None else before.after(cluster)
        object.__setattr__(cluster, "index", made)
    assert cluster.index is not None
    return cluster.index


def _build(cluster: ClusterView, kinds: dict[tuple[object, ...], NodeKind]) -> ClusterIndex:
    state_of = {node.name: _state(node, kinds) for node in cluster.nodes}
    found: tuple[dict[NodeState, list[str]], dict[NodeState, list[str]]] = ({}, {})
    for node in sorted(cluster.nodes, key=lambda node: node.name):
        found[node.accepts_work].setdefault(state_of[node.name], []).append(node.name)
    gpu_types: dict[str, int] = {}
    _note_memory(gpu_types, cluster.nodes)
    return ClusterIndex(
        view=cluster.nodes,
        nodes={node.name: node for node in cluster.nodes},
        state_of=state_of,
        open=found[True],
        closed=found[False],
        gpu_types=dict(sorted(gpu_types.items())),
        gpu_speed=cluster.gpu_speed,
        has_partitions=bool(cluster.partitions),
        kinds=kinds,
    )


def _state(node: NodeCapacity, kinds: dict[tuple[object, ...], NodeKind]) -> NodeState:
    counts: dict[str, list[int]] = {}
    for gpu in node.gpus:
        count = counts.setdefault(gpu.gpu_type, [0, 0])
        count[0] += gpu.is_in_service
        count[1] += gpu.is_free
    if len(counts) > 1:
        counts = dict(sorted(counts.items()))
    capacity = tuple(count[0] for count in counts.values())
    key = (*counts, capacity, node.partitions)
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = NodeKind(tuple(counts), capacity, node.partitions)
    free = tuple(count[1] for count in counts.values())
    return NodeState(kind, free, node.cpus_free, node.memory_free_bytes)


def _note_memory(gpu_types: dict[str, int], nodes: Iterable[NodeCapacity]) -> None:
    for node in nodes:
        for gpu in node.gpus:
            least = gpu_types.get(gpu.gpu_type)
            if least is None or gpu.memory_bytes < least:
                gpu_types[gpu.gpu_type] = gpu.memory_bytes


class _Groups:
    """Names by state; lists that are changed are copied first."""

    def __init__(self, names: Mapping[NodeState, Names]) -> None:
        self._names = dict(names)
        self._own: set[NodeState] = set()

    def remove(self, state: NodeState, name: str) -> None:
        names = self._copied(state)
        del names[bisect_left(names, name)]

    def add(self, state: NodeState, name: str) -> None:
        insort(self._copied(state), name)

    def done(self) -> Mapping[NodeState, Names]:
        return {state: names for state, names in self._names.items() if names}

    def _copied(self, state: NodeState) -> list[str]:
        if state not in self._own:
            self._own.add(state)
            self._names[state] = list(self._names.get(state, ()))
        names = self._names[state]
        assert isinstance(names, list)
        return names
