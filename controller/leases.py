"""Sessions, leases and deadlines of the present process: monotonic time, never stored.

Nobody is judged for a time in which the controller itself was not there: after its start, and
after a stall of its own longer than a quarter of a lease, everybody gets a full new term.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from protos.messages import Telemetry

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Session:
    """An agent's open session."""

    node_id: str
    instance_id: str
    streams: int = 1
    """A half-open stream may still be there when the agent's next one comes."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The last heartbeat of a node."""

    telemetry: Telemetry
    at_s: float
    """Monotonic."""


class Deadlines(Generic[_K]):
    """Things that must happen within a term."""

    def __init__(self, term_s: float) -> None:
        """All have the same term."""
        self.term_s = term_s
        self._began_s: dict[_K, float] = {}

    def begin(self, key: _K, monotonic_s: float) -> None:
        """Starts a full term."""
        self._began_s[key] = monotonic_s

    def begin_if_new(self, key: _K, monotonic_s: float) -> None:
        """Starts a full term unless one runs."""
        self._began_s.setdefault(key, monotonic_s)

    def begin_all(self, monotonic_s: float) -> None:
        """Starts a full term for all."""
        self._began_s = dict.fromkeys(self._began_s, monotonic_s)

    def end(self, key: _K) -> None:
        """It has happened, or no longer matters."""
        self._began_s.pop(key, None)

    def passed(self, monotonic_s: float) -> list[tuple[_K, float]]:
        """Whose term is over, and how long ago it began; they are dropped."""
        over = [
            (key, monotonic_s - began_s)
            for key, began_s in self._began_s.items()
            if monotonic_s - began_s >= self.term_s
        ]
        for key, _ in over:
            del self._began_s[key]
        return over
