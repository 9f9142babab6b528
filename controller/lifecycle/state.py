"""The state that the rules work on: a mapping of jobs, attempts and nodes, and a draft over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from controller.lifecycle.attempt import Attempt, AttemptKey
from controller.lifecycle.effects import Effect, Record
from controller.lifecycle.job import Job
from controller.lifecycle.node import Node
from protos.messages import AttemptState


@dataclass(slots=True)
class Changes:
    """What differs: new values by key."""

    jobs: dict[int, Job] = field(default_factory=dict)
    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.jobs or self.attempts or self.nodes)


@dataclass(slots=True)
class Outcome:
    """What one event comes to."""

    changes: Changes = field(default_factory=Changes)
    effects: list[Effect] = field(default_factory=list)
    """To perform after the changes are stored."""
    records: list[Record] = field(default_factory=list)
    """To store together with the changes."""


class StateView(Protocol):
    """What the rules read."""

    def job(self, job_id: int) -> Job | None:
        """A job, or None."""

    def attempt(self, key: AttemptKey) -> Attempt | None:
        """An attempt, or None."""

    def node(self, name: str) -> Node | None:
        """A node, or None."""

    def held_keys(self, node: str) -> set[AttemptKey]:
        """Attempts that may hold resources of a node (a superset)."""


def held_on(state: StateView, node: str) -> list[tuple[int, Attempt]]:
    """(node rank, attempt) of every rank that holds resources of a node, oldest job first."""
    found: list[tuple[int, Attempt]] = []
    for key in sorted(state.held_keys(node)):
        attempt = state.attempt(key)
        if attempt is None:
            continue
        for node_rank, rank in enumerate(attempt.ranks):
            if rank.node == node and rank.is_held:
                found.append((node_rank, attempt))
    return found


def lost_since_s(state: StateView, attempt: Attempt) -> float | None:
    """When an attempt got out of sight with a node that is still away; else None."""
    if attempt.state is not AttemptState.LOST:
        return None
    found = [state.node(rank.node) for rank in attempt.ranks if not rank.has_ended]
    away = [node for node in found if node is not None and not node.is_connected]
    return min((node.lost_at_s[-1] for node in away if node.lost_at_s), default=None)


class ClusterState:
    """All jobs that are not final, attempts that matter to them or hold resources, all nodes."""

    def __init__(self) -> None:
        """Starts empty."""
        self.jobs: dict[int, Job] = {}
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.nodes: dict[str, Node] = {}
        self._held: dict[str, set[AttemptKey]] = {}

    def job(self, job_id: int) -> Job | None:
        """A job, or None."""
        return self.jobs.get(job_id)

    def attempt(self, key: AttemptKey) -> Attempt | None:
        """An attempt, or None."""
        return self.attempts.get(key)

    def node(self, name: str) -> Node | None:
        """A node, or None."""
        return self.nodes.get(name)

    def held_keys(self, node: str) -> set[AttemptKey]:
        """Attempts that hold resources of a node."""
        return self._held.get(node, set())

    def job_attempts(self, job: Job) -> tuple[Attempt, ...]:
        """The attempts of a job that are in memory, oldest first."""
        found = (self.attempts.get((job.job_id, n)) for n in range(1, job.attempt + 1))
        return tuple(attempt for attempt in found if attempt is not None)

    def absorb(self, changes: Changes) -> None:
        """Takes changes over."""
        self.jobs.update(changes.jobs)
        self.nodes.update(changes.nodes)
        for key, attempt in changes.attempts.items():
            self.attempts[key] = attempt
            for node in {rank.node for rank in attempt.ranks}:
                is_held = any(rank.is_held for rank in attempt.ranks if rank.node == node)
                held = self._held.setdefault(node, set())
                if is_held:
                    held.add(key)
                else:
                    held.discard(key)

    def forget_settled(self, job_ids: Iterator[int] | list[int]) -> list[int]:
        """Drops those of the jobs that are final and hold nothing; they live in the store.

        Returns:
            The jobs dropped.
        """
        dropped = []
        for job_id in job_ids:
            job = self.jobs.get(job_id)
            if job is None or not job.state.is_final:
                continue
            attempts = self.job_attempts(job)
            if any(attempt.is_held for attempt in attempts):
                continue
            for attempt in attempts:
                del self.attempts[attempt.key]
            del self.jobs[job_id]
            dropped.append(job_id)
        return dropped


class Draft:
    """Changes over a state that stays as it is: what the rules write into."""

    def __init__(self, parent: StateView) -> None:
        """Starts without changes."""
        self._parent = parent
        self.changes = Changes()
        self.effects: list[Effect] = []
        self.records: list[Record] = []

    def job(self, job_id: int) -> Job | None:
        """A job, or None."""
        return self.changes.jobs.get(job_id) or self._parent.job(job_id)

    def attempt(self, key: AttemptKey) -> Attempt | None:
        """An attempt, or None."""
        return self.changes.attempts.get(key) or self._parent.attempt(key)

    def node(self, name: str) -> Node | None:
        """A node, or None."""
        return self.changes.nodes.get(name) or self._parent.node(name)

    def held_keys(self, node: str) -> set[AttemptKey]:
        """Attempts that may hold resources of a node."""
        return self._parent.held_keys(node) | {
            key
            for key, attempt in self.changes.attempts.items()
            if any(rank.node == node for rank in attempt.ranks)
        }

    def put(self, *entities: Job | Attempt | Node) -> None:
        """Notes new values."""
        for entity in entities:
            match entity:
                case Job():
                    self.changes.jobs[entity.job_id] = entity
                case Attempt():
                    self.changes.attempts[entity.key] = entity
                case Node():
                    self.changes.nodes[entity.name] = entity

    def absorb(self, outcome: Outcome) -> None:
        """Takes over what one event came to."""
        self.changes.jobs.update(outcome.changes.jobs)
        self.changes.attempts.update(outcome.changes.attempts)
        self.changes.nodes.update(outcome.changes.nodes)
        self.effects.extend(outcome.effects)
        self.records.extend(outcome.records)

    def outcome(self) -> Outcome:
        """What has been noted."""
        return Outcome(self.changes, self.effects, self.records)
