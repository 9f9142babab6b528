"""Orders that need one look at a job: first come, shortest, smallest.

`JobSpec.priority` is the first key of each: a job of higher priority is always before one of
lower priority. Within one priority the score falls with the policy's own figure x as 1 / (1 + x),
which is below 1 and so never crosses into the next priority.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.scheduler.prioritizer.protocol import in_order
from controller.scheduler.types import ClusterView, RankedJob, WaitingJob


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    name: str = "fcfs"

    def rank(
        self,
        jobs: Sequence[WaitingJob],
        cluster: ClusterView,  # noqa: ARG002 (protocol)
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> tuple[RankedJob, ...]:
        """Orders by priority, then by submission."""
        return in_order(
            RankedJob(job, float(job.spec.priority), {"priority": float(job.spec.priority)})
            for job in jobs
        )


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Shortest job first by the user's estimate, else the time limit; unknown times last."""

    name: str = "sjf"

    def rank(
        self,
        jobs: Sequence[WaitingJob],
        cluster: ClusterView,  # noqa: ARG002 (protocol)
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> tuple[RankedJob, ...]:
        """Orders by priority, then by expected run time."""
        return in_order(self._ranked(job) for job in jobs)

    def _ranked(self, job: WaitingJob) -> RankedJob:
        spec = job.spec
        run_s = spec.time_limit_s if spec.time_estimate_s is None else spec.time_estimate_s
        terms = {"priority": float(spec.priority)}
        if run_s is None:
            return RankedJob(job, float(spec.priority), terms)
        return RankedJob(job, spec.priority + 1.0 / (1.0 + run_s), terms | {"run_time_s": run_s})


@dataclass(frozen=True, slots=True)
class SmallestFirst:
    """Fewest GPUs first."""

    name: str = "smallest"

    def rank(
        self,
        jobs: Sequence[WaitingJob],
        cluster: ClusterView,  # noqa: ARG002 (protocol)
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> tuple[RankedJob, ...]:
        """Orders by priority, then by GPUs asked."""
        return in_order(
            RankedJob(
                job,
                job.spec.priority + 1.0 / (1.0 + job.spec.gpus),
                {"priority": float(job.spec.priority), "gpus": float(job.spec.gpus)},
            )
            for job in jobs
        )
