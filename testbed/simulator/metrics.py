"""What a replay was worth: times, utilization, fragmentation, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from testbed.simulator.engine import Outcome, Replay

BOUND_S = 10.0
"""Threshold of the bounded slowdown (Feitelson; the same in RLTune's code)."""
RESAMPLES = 2_000

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one replay."""

    jobs: int
    never_started: int
    wait_s: Interval
    jct_s: Interval
    bounded_slowdown: Interval
    wait_p95_s: float
    makespan_s: float
    """From the first submission to the last end."""
    gpu_utilization: float
    """Busy GPU-seconds over GPU-seconds of the makespan, 0 to 1."""
    partly_used_nodes: float
    """Mean over time."""


def summarize(replay: Replay, rng: np.random.Generator) -> Summary:
    """The figures of a replay; `rng` draws the bootstrap samples."""
    outcomes = replay.outcomes
    first_s = min((outcome.job.submitted_at_s for outcome in outcomes), default=0.0)
    last_s = max((outcome.ended_at_s for outcome in outcomes), default=0.0)
    span_s = last_s - first_s
    busy = sum(o.job.spec.gpus * (o.ended_at_s - o.started_at_s) for o in outcomes)
    wait = waits_s(outcomes)
    return Summary(
        jobs=len(outcomes),
        never_started=len(replay.never_started),
        wait_s=bootstrap(wait, rng),
        jct_s=bootstrap(np.array([outcome.jct_s for outcome in outcomes]), rng),
        bounded_slowdown=bootstrap(bounded_slowdowns(outcomes), rng),
        wait_p95_s=float(np.percentile(wait, 95)) if wait.size else 0.0,
        makespan_s=span_s,
        gpu_utilization=busy / (replay.gpus * span_s) if span_s and replay.gpus else 0.0,
        partly_used_nodes=_over_time(replay),
    )


def waits_s(outcomes: Sequence[Outcome]) -> Values:
    """Waiting times in order of job."""
    return np.array([outcome.wait_s for outcome in outcomes])


def bounded_slowdowns(outcomes: Sequence[Outcome]) -> Values:
    """max(1, (wait + run) / max(run, 10 s)) in order of job."""
    jct = np.array([outcome.jct_s for outcome in outcomes])
    run = np.array([outcome.ended_at_s - outcome.started_at_s for outcome in outcomes])
    slowdowns: Values = np.maximum(1.0, jct / np.maximum(run, BOUND_S))
    return slowdowns


def bootstrap(values: Values, rng: np.random.Generator) -> Interval:
    """The mean with its percentile bootstrap interval (Efron, 1979)."""
    if not values.size:
        return Interval(0.0, 0.0, 0.0)
    means = np.array(
        [values[rng.integers(0, values.size, values.size)].mean() for _ in range(RESAMPLES)]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


def _over_time(replay: Replay) -> float:
    instants = replay.instants
    if len(instants) < 2:
        return 0.0
    lengths = np.diff([instant.at_s for instant in instants])
    partly = np.array([instant.partly_used_nodes for instant in instants[:-1]], dtype=np.float64)
    total = float(lengths.sum())
    return float((partly * lengths).sum() / total) if total else 0.0
