"""Orders by a formula of submission s, wait w, run time r and GPUs n; the smallest value first.

    lcfs      -s                            last come first served
    ljf       -r                            longest first
    largest   -n
    saf       r n                           smallest area (GPU-seconds) first
    laf       -r n
    sexp      (w + r) / n                   smallest expansion
    srf       r / n                         smallest ratio
    wfp3      -(w / r)^3 n                  Tang, Lan, Desai, Buettner, Cluster 2009
    unicep    -w / (log2(n) r)              the same, "UNICEF"
    f1        log10(r) n + 870 log10(s)     Carastan-Santos and de Camargo, SC 2017
    f2        sqrt(r) n + 25,600 log10(s)
    f3        r n + 6,860,000 log10(s)
    f4        r sqrt(n) + 530,000 log10(s)

    psjf      p                             shortest predicted run time first
    qssf      p n                           least predicted GPU time first: Hu et al., SC 2021

p is the run time predicted from finished jobs (`prediction`), r where there is no prediction.
r is the user's estimate, else the time limit, else 30 days. A job without GPUs counts as one of
one GPU. log2(n) counts as at least 1, since it would be 0 for one GPU. In F1 to F4, s counts from
one second before the first submission in the queue: with seconds since the epoch, log10(s) would
hardly differ from job to job. `JobSpec.priority` is the first key of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, log10, sqrt

from controller.scheduler.types import ClusterView, RankedJob, WaitingJob

UNKNOWN_RUN_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What formulas are made of."""

    s: float
    """Submission, seconds from one second before the first of the queue; at least 1."""
    w: float
    """Wait so far, seconds."""
    r: float
    """Run time asked, seconds."""
    n: int
    """GPUs, at least 1."""
    p: float
    """Run time predicted, seconds."""


FORMULAS: Mapping[str, Callable[[Figures], float]] = {
    "lcfs": lambda f: -f.s,
    "ljf": lambda f: -f.r,
    "largest": lambda f: -float(f.n),
    "saf": lambda f: f.r * f.n,
    "laf": lambda f: -f.r * f.n,
    "sexp": lambda f: (f.w + f.r) / f.n,
    "srf": lambda f: f.r / f.n,
    "wfp3": lambda f: -((f.w / f.r) ** 3) * f.n,
    "unicep": lambda f: -f.w / (max(1.0, log2(f.n)) * f.r),
    "psjf": lambda f: f.p,
    "qssf": lambda f: f.p * f.n,
    "f1": lambda f: log10(f.r) * f.n + 870.0 * log10(f.s),
    "f2": lambda f: sqrt(f.r) * f.n + 25_600.0 * log10(f.s),
    "f3": lambda f: f.r * f.n + 6_860_000.0 * log10(f.s),
    "f4": lambda f: f.r * sqrt(f.n) + 530_000.0 * log10(f.s),
}


@dataclass(frozen=True, slots=True)
class Formula:
    """Orders by one of `FORMULAS`."""

    name: str

    def rank(
        self,
        jobs: Sequence[WaitingJob],
        cluster: ClusterView,  # noqa: ARG002 (protocol)
        now_s: float,
    ) -> tuple[RankedJob, ...]:
        """Orders by priority, then by the formula; ties by submission, then by job id."""
        formula = FORMULAS[self.name]
        origin_s = min((job.submitted_at_s for job in jobs), default=0.0) - 1.0
        values = {job.job_id: formula(figures(job, now_s, origin_s)) for job in jobs}
        ordered = sorted(
            jobs,
            key=lambda job: (
                *(-job.spec.priority, values[job.job_id]),
                *(job.submitted_at_s, job.job_id),
            ),
        )
        return tuple(
            # The place, since no squeezed value keeps every difference of a formula apart.
            RankedJob(job, float(-place), _terms(job, self.name, values[job.job_id]))
            for place, job in enumerate(ordered)
        )


def figures(job: WaitingJob, now_s: float, origin_s: float) -> Figures:
    """The figures of a job; `origin_s` is what its submission counts from."""
    spec = job.spec
    asked_s = spec.time_limit_s if spec.time_estimate_s is None else spec.time_estimate_s
    run_s = max(1.0, UNKNOWN_RUN_S if asked_s is None else asked_s)
    return Figures(
        s=job.submitted_at_s - origin_s,
        w=max(0.0, now_s - job.submitted_at_s),
        r=run_s,
        n=max(1, spec.gpus),
        p=run_s if job.expected_run_s is None else max(1.0, job.expected_run_s),
    )


def _terms(job: WaitingJob, name: str, value: float) -> Mapping[str, float]:
    return {"priority": float(job.spec.priority), name: value}
