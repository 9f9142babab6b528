"""What to do and what to write down: the outputs of `rules.apply`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.messages import RankId, StopReason


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a rank on its node. Idempotent: the order carries the attempt's number."""

    node: str
    rank: RankId


@dataclass(frozen=True, slots=True)
class Stop:
    """End a rank on its node. Idempotent."""

    node: str
    rank: RankId
    reason: StopReason
    grace_s: float


Effect = Launch | Stop


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the event log, before it has an id."""

    at_s: float
    kind: str
    text: str
    actor: str
    job_id: int | None = None
    attempt: int | None = None
    node: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
