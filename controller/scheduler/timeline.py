"""What is free when: running jobs end, reserved jobs begin and end. For backfill and forecasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from controller.scheduler.allocator.greedy import find_place
from controller.scheduler.index import ClusterIndex, Need, NodeState, Room, index_of
from controller.scheduler.ledger import Ledger, Place, need_of
from controller.scheduler.shape import JobShape
from controller.scheduler.types import ClusterView, Reservation, RunningJob

OVERRUN_S = 1.0
"""A job that runs on beyond its expected end is expected to end so soon."""


class _Holding(NamedTuple):
    """What a job has of a node, from when to when."""

    from_s: float
    to_s: float
    need: Need
    job_id: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A reservation with what it takes."""

    reservation: Reservation
    shape: JobShape
    place: Place
    ends_s: float


class Timeline:
    """The future of a cluster as far as the ends of jobs are known.

    A job is expected to end as predicted, or at its time limit; where nobody knows, at infinity.
    """

    def __init__(self, cluster: ClusterView, now_s: float) -> None:
        """Notes what runs."""
        self.cluster = cluster
        self.index: ClusterIndex = index_of(cluster)
        self.now_s = now_s
        self.planned: list[Planned] = []
        """In order of their begin."""
        self._running: dict[str, list[_Holding]] = {}
        self._added: dict[str, list[_Holding]] = {}
        for job in cluster.running:
            self._note_running(job)

    def start(self, job_id: int, shape: JobShape, place: Place, ends_s: float) -> None:
        """Notes a job that starts now."""
        self._add(job_id, shape, place, self.now_s, ends_s)

    def reserve(self, job_id: int, shape: JobShape, run_s: float) -> Planned | None:
        """Finds the earliest time at which a job fits without delaying an earlier reservation.

        Returns:
            The reservation, which is noted; None if the job would fit now, or not even when
            everything that runs has ended.
        """
        ledger = self._ledger_at(self.now_s)
        if self._place_at(ledger, shape, self.now_s, run_s) is not None:
            return None
        for at_s, changing, ended in self._moments():
            for node in changing:
                ledger.put(node, self._with_rooms(node, at_s))
            place = self._place_at(ledger, shape, at_s, run_s) if ended else None
            if place is not None:
                nodes = tuple(share.node for share in place)
                after = max((j for n, j in ended if n in nodes), default=None)
                reservation = Reservation(job_id, at_s, nodes, after)
                planned = Planned(reservation, shape, place, at_s + run_s)
                self.planned.append(planned)
                self.planned.sort(key=lambda p: p.reservation.begins_s)
                self._add(job_id, shape, place, at_s, planned.ends_s)
                return planned
        return None

    def rooms(self) -> dict[str, tuple[Room, ...]]:
        """By node: what each reservation there leaves to jobs that start now and outlast it.

        Jobs that start now are not counted: they take their part of the room.
        """
        found: dict[str, list[Room]] = {}
        for number, planned in enumerate(self.planned):
            at_s = planned.reservation.begins_s
            for share in planned.place:
                state = self._state(share.node, at_s, reserved_only=True)
                found.setdefault(share.node, []).append(
                    Room(number, state.free, state.cpus, state.memory_bytes)
                )
        return {node: tuple(rooms) for node, rooms in found.items()}

    def _note_running(self, job: RunningJob) -> None:
        ends_s = max(job.ends_s(self.now_s), self.now_s + OVERRUN_S)
        for rank in job.ranks:
            node = self.index.nodes.get(rank.node)
            if node is None or not node.accepts_work:
                continue
            held = set(rank.gpu_uuids)
            types = [gpu.gpu_type for gpu in node.gpus if gpu.uuid in held and gpu.is_in_service]
            need = Need(len(types), types[0] if types else "", job.cpus, job.memory_bytes)
            self._running.setdefault(rank.node, []).append(_Holding(-inf, ends_s, need, job.job_id))

    def _add(self, job_id: int, shape: JobShape, place: Place, from_s: float, to_s: float) -> None:
        for share in place:
            need = need_of(shape, share.gpus, share.gpu_type)
            self._added.setdefault(share.node, []).append(_Holding(from_s, to_s, need, job_id))

    def _moments(self) -> Iterable[tuple[float, set[str], list[tuple[str, int]]]]:
        """Each time at which something changes: the nodes, and (node, job) of what ends there."""
        nodes: dict[float, set[str]] = {}
        ends: dict[float, list[tuple[str, int]]] = {}
        for holdings in (self._running, self._added):
            for node, held in holdings.items():
                for holding in held:
                    nodes.setdefault(holding.to_s, set()).add(node)
                    ends.setdefault(holding.to_s, []).append((node, holding.job_id))
                    if holding.from_s > self.now_s:
                        nodes.setdefault(holding.from_s, set()).add(node)
        for at_s in sorted(nodes):
            yield at_s, nodes[at_s], ends.get(at_s, [])

    def _ledger_at(self, at_s: float) -> Ledger:
        ledger = Ledger(self.index)
        for node in self._added:
            if self.index.nodes[node].accepts_work:
                ledger.put(node, self._with_rooms(node, at_s))
        return ledger

    def _state(self, node: str, at_s: float, *, reserved_only: bool = False) -> NodeState:
        """What a node has free at a time, started jobs left out if `reserved_only`."""
        state = self.index.state_of[node]
        for holding in self._running.get(node, ()):
            if holding.to_s <= at_s:
                state = state.before(holding.need)
        for holding in self._added.get(node, ()):
            if reserved_only and holding.from_s == self.now_s:
                continue
            if holding.from_s <= at_s < holding.to_s or holding.from_s == at_s == inf:
                state = _less(state, holding.need)
        return state

    def _with_rooms(self, node: str, at_s: float) -> NodeState:
        rooms = []
        for number, planned in enumerate(self.planned):
            begins_s = planned.reservation.begins_s
            if begins_s > at_s and node in planned.reservation.nodes:
                state = self._state(node, begins_s)
                rooms.append(Room(number, state.free, state.cpus, state.memory_bytes))
        return self._state(node, at_s)._replace(rooms=tuple(rooms))

    def _place_at(self, ledger: Ledger, shape: JobShape, at_s: float, run_s: float) -> Place | None:
        outlasts = sum(planned.reservation.binds(-1, at_s + run_s) for planned in self.planned)
        return find_place(ledger, shape.with_outlasts(outlasts))


def _less(state: NodeState, need: Need) -> NodeState:
    """The state without what a job holds; below zero where a limit was overrun."""
    return state.before(Need(-need.gpus, need.gpu_type, -need.cpus, -need.memory_bytes))


def fits_all(ledger: Ledger, places: Mapping[int, Place], shapes: Mapping[int, JobShape]) -> bool:
    """Whether all places can be booked together; books those before the first that cannot."""
    for job_id, place in places.items():
        if not ledger.fits(shapes[job_id], place):
            return False
        ledger.take(shapes[job_id], place)
    return True
