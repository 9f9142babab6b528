"""Nodes that a decision cannot tell apart, as classes; jobs that it cannot tell apart, as groups.

CPUs, memory and rooms of reservations are left out of a node's state (`AMPLE`) where the jobs at
hand could not use them up whatever is placed there. That is the usual case, and it makes most
nodes alike. Where they could run out they are counted in units of what the jobs ask for (their
greatest common divisor), which loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import gcd
from typing import NamedTuple

from controller.scheduler.index import Names, NodeKind, NodeState, Room, less
from controller.scheduler.ledger import Ledger
from controller.scheduler.shape import JobShape

AMPLE = -1
"""More than all jobs that could come to the node ask for."""


class Take(NamedTuple):
    """What a share takes from a node of a class, in the class's units."""

    gpus: int
    at: int | None
    """Which of the kind's types; None without GPUs."""
    cpus: int
    memory: int
    outlasts: int


class Bin(NamedTuple):
    """What is free on a node, as far as the jobs at hand could use it up."""

    free: tuple[int, ...]
    """GPUs by type, in the order of the kind's types."""
    cpus: int
    memory: int
    rooms: tuple[Room, ...] = ()

    def after(self, take: Take) -> Bin | None:
        """The same once a share has been placed; None if it does not fit."""
        free = self.free
        if take.at is not None:
            if free[take.at] < take.gpus:
                return None
            free = less(free, take.at, take.gpus)
        cpus, memory = _subtract(self.cpus, take.cpus), _subtract(self.memory, take.memory)
        if cpus is None or memory is None:
            return None
        if not self.rooms or not take.outlasts:
            return Bin(free, cpus, memory, self.rooms)
        rooms = []
        for room in self.rooms:
            left = room if room.reservation >= take.outlasts else _room_after(room, take)
            if left is None:
                return None
            rooms.append(left)
        return Bin(free, cpus, memory, tuple(rooms))


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Interchangeable jobs, in order."""

    shape: JobShape
    job_ids: tuple[int, ...]


class Demand(NamedTuple):
    """Shares that are interchangeable: each takes the same, from the same nodes."""

    gpus: int
    gpu_types: tuple[str, ...]
    """One, or several where a job mixes types; empty without GPUs."""
    cpus: int
    memory_bytes: int
    outlasts: int
    hosts: frozenset[int]
    """Classes of nodes where they may go."""
    alone: int = -1
    """The only job that they belong to, where its shares must be kept apart."""
    mixed: JobShape | None = None
    """For jobs that mix types: what decides what each type costs."""


class Option(NamedTuple):
    """One way for the jobs of a group: on this type, cut like this."""

    group: int
    gpu_type: str
    """Empty for jobs without GPUs, and for jobs that mix types."""
    extra_nodes: int
    """Nodes beyond the fewest."""
    parts: tuple[tuple[int, int], ...]
    """Index of a demand, number of its shares."""


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes of one kind that are open to the same jobs."""

    kind: NodeKind
    nodes: Mapping[Bin, Names]
    """By what is free on them; never more of a kind than the jobs could use."""
    takes: tuple[tuple[int, str, Take], ...]
    """What the shares that may come here take: demand, GPU type, amounts."""

    @property
    def size(self) -> int:
        """How many nodes the class has."""
        return sum(len(names) for names in self.nodes.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that the network and the model are made from."""

    groups: tuple[JobGroup, ...]
    options: tuple[Option, ...]
    demands: tuple[Demand, ...]
    most: tuple[int, ...]
    """For each demand: the shares of all its jobs together."""
    classes: tuple[NodeClass, ...]


def make_problem(jobs: Sequence[int], shapes: Mapping[int, JobShape], ledger: Ledger) -> Problem:
    """Groups jobs and nodes, in an order that depends on nothing but them."""
    excluding = [shapes[job].excluded_nodes for job in jobs if shapes[job].excluded_nodes]
    raw = _raw_classes(ledger, frozenset().union(*excluding))
    groups = _group(jobs, shapes, ledger)
    options, demands = _options(groups, raw, ledger)
    most = [0] * len(demands)
    on_node = [0] * len(demands)
    for option in options:
        group = groups[option.group]
        for demand, count in option.parts:
            most[demand] += count * len(group.job_ids)
            on_node[demand] += (1 if group.shape.nodes else count) * len(group.job_ids)
    classes = tuple(
        _node_class(kind, states, _open_to(number, demands), on_node, sum(most))
        for number, (kind, _, states) in enumerate(raw)
    )
    return Problem(tuple(groups), tuple(options), tuple(demands), tuple(most), classes)


_Raw = list[tuple[NodeKind, str, list[tuple[NodeState, Names]]]]
"""Kind, name if the class is one node that some job must avoid, states with nodes."""


def _raw_classes(ledger: Ledger, named: frozenset[str]) -> _Raw:
    found: dict[tuple[int, str], tuple[NodeKind, str, list[tuple[NodeState, Names]]]] = {}
    for state, names in ledger.states:
        others = names
        if named:
            others = [name for name in names if name not in named]
            for name in names:
                if name in named:
                    found[id(state.kind), name] = (state.kind, name, [(state, [name])])
        if others:
            entry = found.setdefault((id(state.kind), ""), (state.kind, "", []))
            entry[2].append((state, others))
    return sorted(found.values(), key=lambda entry: min(names[0] for _, names in entry[2]))


def _group(jobs: Iterable[int], shapes: Mapping[int, JobShape], ledger: Ledger) -> list[JobGroup]:
    members: dict[tuple[JobShape, int], list[int]] = {}
    doubles: dict[JobShape, bool] = {}
    for job in jobs:
        shape = shapes[job]
        if shape not in doubles:
            doubles[shape] = _could_double(shape, ledger)
        members.setdefault((shape, job if doubles[shape] else -1), []).append(job)
    return [JobGroup(shape, tuple(job_ids)) for (shape, _), job_ids in members.items()]


def _could_double(shape: JobShape, ledger: Ledger) -> bool:
    """Whether some node could take two of the shares that must be on distinct nodes.

    Two shares of one type on a node are one larger share for jobs that may be cut anyhow.
    """
    if shape.mixes_types and any(
        sum(gpu_type in state.kind.gpu_types for gpu_type in shape.gpu_types) > 1
        for state, _ in ledger.states
    ):
        return True
    if shape.nodes < 2:
        return False
    share = shape.gpus // shape.nodes
    return not share or any(
        # CPUs and memory are not looked at: they may be left out of the state as ample.
        at is not None and state.free[at] >= 2 * share
        for gpu_type in shape.gpu_types
        for state, at, _ in ledger.with_room(shape, share, gpu_type)
    )


def _options(
    groups: Sequence[JobGroup], raw: _Raw, ledger: Ledger
) -> tuple[list[Option], list[Demand]]:
    hosts: dict[tuple[str, frozenset[str]], frozenset[int]] = {}
    options: list[Option] = []
    demands: dict[Demand, int] = {}
    for number, group in enumerate(groups):
        shape = group.shape
        where = (shape.partition, shape.excluded_nodes)
        if where not in hosts:
            hosts[where] = frozenset(
                i
                for i, (kind, name, _) in enumerate(raw)
                if kind.admits(shape.partition) and name not in shape.excluded_nodes
            )
        doubles = _could_double(shape, ledger)
        for gpu_types, largest in _type_sets(shape, ledger):
            ways = shape.ways(largest)
            for way in ways:
                parts = []
                for gpus, count in way:
                    demand = Demand(
                        *(gpus, gpu_types, shape.cpus, shape.memory_bytes, shape.outlasts),
                        hosts=hosts[where],
                        alone=group.job_ids[0] if doubles else -1,
                        mixed=shape if shape.mixes_types else None,
                    )
                    parts.append((demands.setdefault(demand, len(demands)), count))
                gpu_type = gpu_types[0] if len(gpu_types) == 1 else ""
                extra = sum(count for _, count in way) - sum(count for _, count in ways[0])
                options.append(Option(number, gpu_type, extra, tuple(parts)))
    return options, list(demands)


def _type_sets(shape: JobShape, ledger: Ledger) -> list[tuple[tuple[str, ...], int]]:
    """The sets of types from which all shares of a job come, with the largest node's GPUs."""
    if not shape.gpus:
        return [((), 0)]
    largest = {t: ledger.largest(shape.partition, t) for t in shape.gpu_types}
    if shape.mixes_types:
        return [(shape.gpu_types, max(largest.values()))]
    return [((gpu_type,), gpus) for gpu_type, gpus in largest.items()]


def _open_to(number: int, demands: Iterable[Demand]) -> list[tuple[int, Demand]]:
    return [(i, demand) for i, demand in enumerate(demands) if number in demand.hosts]


def _node_class(
    kind: NodeKind,
    states: Sequence[tuple[NodeState, Names]],
    demands: Sequence[tuple[int, Demand]],
    on_node: Sequence[int],
    shares: int,
) -> NodeClass:
    """Puts states together that the demands cannot tell apart.

    Args:
        kind: of all the nodes.
        states: their states.
        demands: those that may come here.
        on_node: for each demand, how many of its shares could be on one node.
        shares: of all jobs; no more nodes in one state than that can be of use.
    """
    cpu_unit = gcd(*(demand.cpus for _, demand in demands)) or 1
    memory_unit = gcd(*(demand.memory_bytes for _, demand in demands)) or 1
    takes = tuple(
        (
            number,
            gpu_type,
            Take(
                demand.gpus,
                kind.position(gpu_type) if gpu_type else None,
                demand.cpus // cpu_unit,
                demand.memory_bytes // memory_unit,
                demand.outlasts,
            ),
        )
        for number, demand in demands
        for gpu_type in demand.gpu_types or ("",)
        if not gpu_type or gpu_type in kind.gpu_types
    )
    project = _Projection(takes, on_node, cpu_unit, memory_unit)
    found: dict[Bin, list[Names]] = {}
    for state, names in states:
        at = project(state)
        if any(at.after(take) is not None for _, _, take in takes):
            found.setdefault(at, []).append(names)
    nodes = {
        at: lists[0][:shares] if len(lists) == 1 else tuple(islice(merge(*lists), shares))
        for at, lists in found.items()
    }
    return NodeClass(kind, dict(sorted(nodes.items(), key=lambda item: item[1][0])), takes)


class _Projection:
    """From the state of a node to its bin."""

    def __init__(
        self,
        takes: Sequence[tuple[int, str, Take]],
        on_node: Sequence[int],
        cpu_unit: int,
        memory_unit: int,
    ) -> None:
        self._units = (cpu_unit, memory_unit)
        self._cpus = [(take.gpus, on_node[d], take.cpus) for d, _, take in takes]
        self._memory = [(take.gpus, on_node[d], take.memory) for d, _, take in takes]
        self._outlasts = max((take.outlasts for _, _, take in takes), default=0)

    def __call__(self, state: NodeState) -> Bin:
        free_gpus = sum(state.free)
        cpus = self._amount(state.cpus, free_gpus, 0)
        memory = self._amount(state.memory_bytes, free_gpus, 1)
        rooms = []
        for room in state.rooms:
            room_cpus = self._amount(room.cpus, free_gpus, 0)
            room_memory = self._amount(room.memory_bytes, free_gpus, 1)
            binds = any(f < g for f, g in zip(room.free, state.free, strict=True))
            if room.reservation < self._outlasts and (
                binds or room_cpus != AMPLE or room_memory != AMPLE
            ):
                rooms.append(Room(room.reservation, room.free, room_cpus, room_memory))
        return Bin(state.free, cpus, memory, tuple(rooms))

    def _amount(self, amount: int, free_gpus: int, resource: int) -> int:
        units = max(0, amount) // self._units[resource]
        demands = (self._cpus, self._memory)[resource]
        return AMPLE if _most_used(free_gpus, demands) <= units else units


def _most_used(free_gpus: int, demands: Sequence[tuple[int, int, int]]) -> float:
    """A bound on what jobs can take of one resource of a node.

    Each demand is (GPUs of a share, shares, amount of a share); shares with GPUs are limited by
    the free GPUs as well.
    """
    without_gpus = sum(shares * amount for gpus, shares, amount in demands if not gpus)
    with_gpus = sum(shares * amount for gpus, shares, amount in demands if 0 < gpus <= free_gpus)
    per_gpu = max(
        (amount / gpus for gpus, _, amount in demands if 0 < gpus <= free_gpus), default=0.0
    )
    return without_gpus + min(with_gpus, free_gpus * per_gpu)


def _room_after(room: Room, take: Take) -> Room | None:
    free = room.free
    if take.at is not None:
        if free[take.at] < take.gpus:
            return None
        free = less(free, take.at, take.gpus)
    cpus, memory = _subtract(room.cpus, take.cpus), _subtract(room.memory_bytes, take.memory)
    return None if cpus is None or memory is None else Room(room.reservation, free, cpus, memory)


def _subtract(available: int, amount: int) -> int | None:
    if available == AMPLE:
        return AMPLE
    return available - amount if available >= amount else None
