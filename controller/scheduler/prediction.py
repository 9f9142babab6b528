"""Run times predicted from finished jobs: nobody profiles, a job is a black box with a name.

People submit the same things again: the same name with as many GPUs mostly takes about as long as
the last times. Log run times are averaged within nested groups, from everybody to (user, name,
GPUs); each group's mean is drawn towards that of the group around it by as much as its own few
jobs leave open (empirical Bayes shrinkage, as in Efron and Morris, JASA 1975, with a fixed
strength). Recent jobs weigh more. The spread that is left is told with the prediction.

Only finished jobs are ever looked at, and each when it ends: nothing leaks from the future.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import exp, log, sqrt

from protos.messages import JobSpec

MEMORY_JOBS = 30.0
"""A job weighs 1/e in its group once so many others have ended there."""
STRENGTH = 1.0
"""The surrounding group counts as so many jobs."""
PRIOR_LOG_MEAN = log(600.0)
PRIOR_LOG_VARIANCE = 4.0
"""Before anything has ended: 10 minutes, within a factor of 7."""
LEAST_LOG_VARIANCE = 0.01
LEAST_RUN_S = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of a job's run time, as a log-normal distribution."""

    median_s: float
    log_deviation: float
    """Standard deviation of the logarithm."""
    samples: float
    """How much of the closest group it rests on: its weight in jobs; 0 if that has none."""

    def quantile_s(self, normal_quantile: float) -> float:
        """A quantile, by the normal distribution's (0: the median, 1.28: 90 %)."""
        return self.median_s * exp(self.log_deviation * normal_quantile)

    @property
    def mean_s(self) -> float:
        """The expected run time."""
        return self.median_s * exp(0.5 * self.log_deviation**2)


@dataclass(slots=True)
class _Group:
    """Weighted moments of log run times."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    """Around the mean."""

    def add(self, value: float) -> None:
        """Takes one more in; the older ones fade (West's update with forgetting)."""
        self.weight *= exp(-1.0 / MEMORY_JOBS)
        total = self.weight + 1.0
        difference = value - self.mean
        self.mean += difference / total
        self.variance = (self.variance + difference**2 / total) * self.weight / total
        self.weight = total


class RunTimeModel:
    """Learns as jobs end; asked as jobs come. The same calls give the same answers."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._groups: dict[Hashable, _Group] = {}

    def observe(self, spec: JobSpec, run_s: float) -> None:
        """A job has ended by itself after so long.

        Jobs that were cancelled or lost say nothing about how long they would have run; those
        stopped at their limit say at least that.
        """
        value = log(max(LEAST_RUN_S, run_s))
        for key in _keys(spec):
            self._groups.setdefault(key, _Group()).add(value)

    def predict(self, spec: JobSpec) -> Prediction:
        """What is expected of a job like this one, never beyond its time limit."""
        mean, variance, weight = PRIOR_LOG_MEAN, PRIOR_LOG_VARIANCE, 0.0
        for key in _keys(spec):
            group = self._groups.get(key)
            if group is None:
                weight = 0.0
                continue
            weight = group.weight
            share = weight / (weight + STRENGTH)
            apart = group.mean - mean
            # What the two groups disagree on is uncertainty too, as far as it is not settled.
            variance = (1.0 - share) * (variance + share * apart**2) + share * group.variance
            mean += share * apart
        deviation = sqrt(max(LEAST_LOG_VARIANCE, variance))
        median_s = exp(mean)
        if spec.time_limit_s is not None:
            median_s = min(median_s, spec.time_limit_s)
        return Prediction(median_s, deviation, weight)


def _keys(spec: JobSpec) -> tuple[Hashable, ...]:
    """The groups that a job belongs to, from the widest to the closest."""
    return (
        "all",
        ("gpus", spec.gpus),
        ("user", spec.user),
        ("user", spec.user, spec.gpus),
        ("name", spec.user, spec.name),
        ("name", spec.user, spec.name, spec.gpus),
    )
