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
        self.index = index
        """The cluster as it was when the account was opened."""
        self._has_all_nodes = all_nodes
        self._bins: dict[NodeState, Names] = dict(index.open)
        self._own: set[NodeState] = set()
        self._now: dict[str, NodeState] = {}
        self._pools: dict[str, list[tuple[NodeState, int]]] = {}
        self._levels: dict[str, list[int]] = {}
        """By GPU type: how many nodes have so many free."""
        if all_nodes:
            for state, names in index.closed.items():
                mine = self._bins.get(state)
                self._bins[state] = sorted([*mine, *names]) if mine else names
        for state, names in self._bins.items():
            self._add_to_pools(state)
            self._count(state, len(names))
        for name, node_rooms in (rooms or {}).items():
            state = index.state_of[name]
            if index.nodes[name].accepts_work or all_nodes:
                self._move(name, state, state._replace(rooms=node_rooms))

    def copy(self) -> Ledger:
        """An account of its own that begins as this one is now."""
        twin = object.__new__(Ledger)
        twin._bins = dict(self._bins)
        self._own = set()
        twin._own = set()
        twin._has_all_nodes = self._has_all_nodes
        twin._now = dict(self._now)
        twin.index = self.index
        twin._pools = {gpu_type: list(states) for gpu_type, states in self._pools.items()}
        twin._levels = {gpu_type: list(counts) for gpu_type, counts in self._levels.items()}
        return twin

    @property
    def states(self) -> Iterator[tuple[NodeState, Names]]:
        """Each state that some node is in, with the names of those nodes."""
        return ((state, names) for state, names in self._bins.items() if names)

    def state_of(self, node: str) -> NodeState:
        """The present state of a node."""
        return self._now.get(node) or self.index.state_of[node]

    def pool(self, gpu_type: str) -> Iterator[tuple[NodeState, Names]]:
        """The states of nodes with GPUs of a type; all states for the empty type."""
        bins = self._bins
        if not gpu_type:
            return self.states
        return (
            (state, names) for state, _ in self._pools.get(gpu_type, ()) if (names := bins[state])
        )

    def with_room(
        self, shape: JobShape, gpus: int, gpu_type: str
    ) -> list[tuple[NodeState, int | None, Names]]:
        """Where a share of so many GPUs fits.

        Returns:
            For each state: itself, where the GPU type stands in its tuples (None without GPUs),
            and the nodes in that state on which the job may run.
        """
        need = need_of(shape, gpus, gpu_type)
        bins, partition, excluded = self._bins, shape.partition, shape.excluded_nodes
        found: list[tuple[NodeState, int | None, Names]] = []
        states: Iterable[tuple[NodeState, int | None]] = (
            self._pools.get(gpu_type, ()) if gpu_type else ((state, None) for state in bins)
        )
        for state, at in states:
            if at is not None and state.free[at] < gpus:
                continue
            names = bins[state]
            if (
                not names
                or (partition and partition not in state.kind.partitions)
                or not state.has_room(need, at)
            ):
                continue
            if excluded:
                names = [name for name in names if name not in excluded]
            if names:
                found.append((state, at, names))
        return found

    def may_hold(self, shape: JobShape, gpu_type: str) -> bool:
        """Whether a type has the free GPUs at all, by a quick count over its nodes."""
        levels = self._levels.get(gpu_type)
        if levels is None:
            return False
        if shape.nodes:
            share, wanted = shape.gpus // shape.nodes, shape.nodes
            for free in range(len(levels) - 1, share - 1, -1):
                wanted -= levels[free]
                if wanted <= 0:
                    return True
            return False
        largest = self.largest(shape.partition, gpu_type)
        nodes = -(-shape.gpus // largest) + 1 if largest else 0
        left = shape.gpus
        for free in range(len(levels) - 1, 0, -1):
            used = min(nodes, levels[free])
            left -= used * free
            nodes -= used
            if left <= 0:
                return True
            if not nodes:
                break
        return False

    def largest(self, partition: str, gpu_type: str) -> int:
        """GPUs of the largest node, see `ClusterIndex.largest`."""
        return self.index.largest(partition, gpu_type, all_nodes=self._has_all_nodes)

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
        if state.free != after.free:
            self._count(state, -1)
            self._count(after, 1)

    def _add_to_pools(self, state: NodeState) -> None:
        for at, gpu_type in enumerate(state.kind.gpu_types):
            self._pools.setdefault(gpu_type, []).append((state, at))

    def _count(self, state: NodeState, nodes: int) -> None:
        for gpu_type, free in zip(state.kind.gpu_types, state.free, strict=True):
            levels = self._levels.setdefault(gpu_type, [])
            if len(levels) <= free:
                levels += [0] * (free + 1 - len(levels))
            levels[max(0, free)] += nodes

    def _copied(self, state: NodeState) -> list[str]:
        names = self._bins.get(state, ())
        if state in self._own:
            assert isinstance(names, list)
            return names
        self._own.add(state)
        copied = self._bins[state] = list(names)
        return copied
