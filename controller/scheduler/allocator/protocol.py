"""What everything that maps ordered jobs to GPUs looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from controller.scheduler.types import ClusterView, Placement, RankedJob


class Allocator(Protocol):
    """Chooses which of the ordered jobs start now, and where."""

    @property
    def name(self) -> str:
        """The word by which a configuration names the allocator."""
        ...

    def place(self, ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float) -> Placement:
        """Starts for a subset of the jobs; each gets all that it asks for, or does not start.

        Where the view has reservations, a job that would outlast one must leave it room
        (`ClusterView.rooms`). Starts of allocators that do not look at that are dropped later.
        """
        ...
