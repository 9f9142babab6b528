"""What every policy that orders the queue looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from controller.scheduler.types import ClusterView, RankedJob, WaitingJob


class Prioritizer(Protocol):
    """Gives waiting jobs an order."""

    @property
    def name(self) -> str:
        """The word by which a configuration names the policy."""
        ...

    def rank(
        self, jobs: Sequence[WaitingJob], cluster: ClusterView, now_s: float
    ) -> tuple[RankedJob, ...]:
        """All of the jobs, larger score first; equal scores by submission, then by job id."""
        ...


def in_order(ranked: Iterable[RankedJob]) -> tuple[RankedJob, ...]:
    """Sorts by score, largest first; ties by submission time, then by job id."""
    return tuple(sorted(ranked, key=lambda r: (-r.score, r.job.submitted_at_s, r.job.job_id)))
