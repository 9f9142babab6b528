"""What is still free while a decision is being made: a mutable account of a cluster's states."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from controller.scheduler.index import ClusterIndex, Names, Need, NodeState, Room
from controller.scheduler.shape import JobShape
from controller.scheduler.types import Start


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """The part of a job on one node."""

    node: str
    gpus: int
    gpu_type: str
    """Empty for jobs without GPUs."""


Place = tuple[Share, ...]
"""All shares of a job, in order of node name: the order of its ranks."""


def place_of(start: Start, index: ClusterIndex) -> Place:
    """The place of a start, with the types of its GPUs."""
    return tuple(
        Share(
            rank.node,
            len(rank.gpu_uuids),
            index.type_of(rank.node, rank.gpu_uuids[0]) if rank.gpu_uuids else "",
        )
        for rank in start.ranks
    )


def need_of(shape: JobShape, gpus: int, gpu_type: str) -> Need:
    """What a share of a job takes from its node."""
    return Need(gpus, gpu_type, shape.cpus, shape.memory_bytes, shape.outlasts)


class Ledger:
    """Nodes by state, which move from state to state as shares are placed on them."""

    def __init__(
        self,
        index: ClusterIndex,
        rooms: Mapping[str, tuple[Room, ...]] | None = None,
        *,
        all_nodes: bool = False,
    ) -> None:
        """Opens the account of the nodes that accept work (of every node if `all_nodes`).

        Args:
            index: what is free.
            rooms: what reservations leave to jobs that outlast them, by node.
            all_nodes: to ask what nodes that take no work could do.
        """
        self._bins: dict[NodeState, Names] = dict(index.open)
        self._own: set[NodeState] = set()
        self._now: dict[str, NodeState] = {}
        self._index = index
        self._pools: dict[str, list[NodeState]] = {}
        self._largest: dict[tuple[str, str], int] = {}
        if all_nodes:
            for state, names in index.closed.items():
                mine = self._bins.get(state)
                self._bins[state] = sorted([*mine, *names]) if mine else names
        for state in self._bins:
            self._add_to_pools(state)
        for name, node_rooms in (rooms or {}).items():
            state = index.state_of[name]
            if index.nodes[name].accepts_work or all_nodes:
                self._move(name, state, state._replace(rooms=node_rooms))

    def copy(self) -> Ledger:
        """An account of its own that begins as this one is now."""
        twin = object.__new__(Ledger)
        twin._bins = {state: tuple(names) for state, names in self._bins.items() if names}
        twin._own = set()
        twin._now = dict(self._now)
        twin._index = self._index
        twin._pools = {}
        twin._largest = self._largest
        for state in twin._bins:
            twin._add_to_pools(state)
        return twin

    @property
    def states(self) -> Iterator[tuple[NodeState, Names]]:
        """Each state that some node is in, with the names of those nodes."""
        return ((state, names) for state, names in self._bins.items() if names)

    def state_of(self, node: str) -> NodeState:
        """The present state of a node."""
        return self._now.get(node) or self._index.state_of[node]

    def pool(self, gpu_type: str) -> Iterator[tuple[NodeState, Names]]:
        """The states of nodes with GPUs of a type; all states for the empty type."""
        states = self._pools.get(gpu_type, ()) if gpu_type else self._bins
        bins = self._bins
        return ((state, names) for state in states if (names := bins[state]))

    def with_room(
        self, shape: JobShape, gpus: int, gpu_type: str
    ) -> list[tuple[NodeState, NodeState, Names]]:
        """Where a share of so many GPUs fits: state, state afterwards, the nodes in that state."""
        need = need_of(shape, gpus, gpu_type)
        found = []
        for state, names in self.pool(gpu_type):
            if not state.kind.admits(shape.partition):
                continue
            after = state.after(need)
            if after is None:
                continue
            if shape.excluded_nodes:
                names = [name for name in names if name not in shape.excluded_nodes]
                if not names:
                    continue
            found.append((state, after, names))
        return found

    def largest(self, partition: str, gpu_type: str) -> int:
        """GPUs in service of a type on the largest node of a partition ("": of all)."""
        key = (partition, gpu_type)
        if key not in self._largest:
            self._largest[key] = max(
                (
                    state.kind.capacity[at]
                    for state, _ in self.pool(gpu_type)
                    if (at := state.kind.position(gpu_type)) is not None
                    and state.kind.admits(partition)
                ),
                default=0,
            )
        return self._largest[key]

    def take(self, shape: JobShape, place: Iterable[Share]) -> None:
        """Books a job's place."""
        for share in place:
            state = self.state_of(share.node)
            after = state.after(need_of(shape, share.gpus, share.gpu_type))
            assert after is not None, f"{share} has no room for {shape}"
            self._move(share.node, state, after)

    def fits(self, shape: JobShape, place: Iterable[Share]) -> bool:
        """Whether a job could be booked there; its nodes must be distinct."""
        return all(
            self.state_of(share.node).after(need_of(shape, share.gpus, share.gpu_type))
            for share in place
        )

    def put(self, node: str, state: NodeState) -> None:
        """Says what a node has free from now on."""
        self._move(node, self.state_of(node), state)

    def _move(self, node: str, state: NodeState, after: NodeState) -> None:
        if state == after:
            return
        names = self._copied(state)
        del names[bisect_left(names, node)]
        is_new = after not in self._bins
        insort(self._copied(after), node)
        if is_new:
            self._add_to_pools(after)
        self._now[node] = after

    def _add_to_pools(self, state: NodeState) -> None:
        for gpu_type in state.kind.gpu_types:
            self._pools.setdefault(gpu_type, []).append(state)

    def _copied(self, state: NodeState) -> list[str]:
        names = self._bins.get(state, ())
        if state in self._own:
            assert isinstance(names, list)
            return names
        self._own.add(state)
        copied = self._bins[state] = list(names)
        return copied
