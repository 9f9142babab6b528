"""Metrics of a run: wait, job completion time, makespan, utilization, queue length. All pure.

Every job counts: one that has not ended is counted as unfinished and named in the summary,
never dropped from a mean without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from protos.messages import JobState
from testbed.report.records import JobRecord


@dataclass(frozen=True, slots=True)
class Step:
    """A step function's value from `at_s` on, until the next step."""

    at_s: float
    value: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. What cannot be computed (no job ended, no GPU) is None."""

    jobs: int
    completed: int
    unfinished: int
    """Jobs that have not reached a final state; they are in no mean of completion times."""
    gpus: int
    wait_mean_s: float | None
    wait_p95_s: float | None
    jct_mean_s: float | None
    jct_p95_s: float | None
    makespan_s: float | None
    gpu_seconds: float
    """GPU time held by attempts."""
    held_ratio: float | None
    """Share of the makespan's GPU time that attempts held, 0 to 1."""
    gpu_utilization_pct: float | None
    """Mean utilization over all GPUs and the makespan as telemetry measured it, idle GPUs
    counted as 0; None if any job that held GPUs was not measured."""


def summarize(jobs: Sequence[JobRecord], gpus: int) -> Summary:
    """The figures of a run on a cluster of `gpus` GPUs."""
    waits_s = [job.wait_s for job in jobs]
    jcts_s = [job.jct_s for job in jobs if job.jct_s is not None]
    makespan = makespan_s(jobs)
    until_s = last_end_s(jobs)
    held_s = sum(held_gpu_seconds(job, until_s) for job in jobs)
    capacity_s = makespan * gpus if makespan else 0.0
    return Summary(
        jobs=len(jobs),
        completed=sum(job.state is JobState.COMPLETED for job in jobs),
        unfinished=sum(not job.state.is_final for job in jobs),
        gpus=gpus,
        wait_mean_s=mean(waits_s),
        wait_p95_s=percentile(waits_s, 95),
        jct_mean_s=mean(jcts_s),
        jct_p95_s=percentile(jcts_s, 95),
        makespan_s=makespan,
        gpu_seconds=held_s,
        held_ratio=held_s / capacity_s if capacity_s else None,
        gpu_utilization_pct=_utilization_pct(jobs, until_s, capacity_s),
    )


def last_end_s(jobs: Iterable[JobRecord]) -> float | None:
    """UTC seconds at which the last ended job ended; None if none has ended."""
    return max((job.ended_at_s for job in jobs if job.ended_at_s is not None), default=None)


def makespan_s(jobs: Sequence[JobRecord]) -> float | None:
    """From the first submission to the last end; None if no job has ended."""
    end_s = last_end_s(jobs)
    return None if end_s is None else end_s - min(job.submitted_at_s for job in jobs)


def held_gpu_seconds(job: JobRecord, until_s: float | None) -> float:
    """GPU time held by a job's attempts; open ones and late ends are cut at `until_s`."""
    total_s = 0.0
    for span in job.spans:
        end_s = _earlier(span.end_s, until_s)
        if end_s is not None:
            total_s += max(0.0, end_s - span.start_s) * len(span.gpu_uuids)
    return total_s


def held_series(jobs: Iterable[JobRecord]) -> tuple[Step, ...]:
    """How many GPUs were held, over time."""
    return _steps(
        (span.start_s, span.end_s, len(span.gpu_uuids)) for job in jobs for span in job.spans
    )


def queue_series(jobs: Iterable[JobRecord]) -> tuple[Step, ...]:
    """How many jobs waited (submitted or requeued, not placed, not ended), over time."""
    return _steps((start_s, end_s, 1) for job in jobs for start_s, end_s in waiting_spans(job))


def waiting_spans(job: JobRecord) -> list[tuple[float, float | None]]:
    """The times in which a job had no attempt and had not ended; None as end: it still waits."""
    starts_s = [job.submitted_at_s, *(span.end_s for span in job.spans)]
    ends_s = [*(span.start_s for span in job.spans), job.ended_at_s]
    return [
        (start_s, end_s)
        for start_s, end_s in zip(starts_s, ends_s, strict=True)
        if start_s is not None and (end_s is None or end_s > start_s)
    ]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile with linear interpolation between the closest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _earlier(end_s: float | None, until_s: float | None) -> float | None:
    return min((at_s for at_s in (end_s, until_s) if at_s is not None), default=None)


def _utilization_pct(
    jobs: Iterable[JobRecord], until_s: float | None, capacity_s: float
) -> float | None:
    busy_s = 0.0
    for job in jobs:
        held_s = held_gpu_seconds(job, until_s)
        if held_s and job.gpu_utilization_pct is None:
            return None
        busy_s += held_s * (job.gpu_utilization_pct or 0.0)
    return busy_s / capacity_s if capacity_s else None


def _steps(spans: Iterable[tuple[float, float | None, int]]) -> tuple[Step, ...]:
    changes: dict[float, int] = {}
    for start_s, end_s, weight in spans:
        changes[start_s] = changes.get(start_s, 0) + weight
        if end_s is not None:
            changes[end_s] = changes.get(end_s, 0) - weight
    level = 0
    steps = []
    for at_s in sorted(changes):
        level += changes[at_s]
        steps.append(Step(at_s, level))
    return tuple(
        step
        for before, step in pairwise([Step(-math.inf, 0), *steps])
        if step.value != before.value
    )
