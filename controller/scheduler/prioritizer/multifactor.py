"""The weighted sum of factors that Slurm documents as `priority/multifactor`.

Each factor is between 0 and 1 and is multiplied by its weight:

    priority = age * w_age + job_size * w_job_size + fair_share * w_fair_share + qos * w_qos
             + JobSpec.priority * w_priority

Source: Slurm documentation, "Multifactor Priority Plugin" and "Classic Fairshare Algorithm".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from controller.scheduler.prioritizer.protocol import in_order
from controller.scheduler.types import ClusterView, RankedJob, WaitingJob

DEFAULT_QOS_FACTORS: Mapping[str, float] = {"low": 0.0, "normal": 0.5, "high": 1.0}


@dataclass(frozen=True, slots=True)
class MultifactorWeights:
    """Weights and scales of the factors.

    Age and size are as RLTune's testbed sets them (1,000 each, 12 hours, small jobs first);
    fair share and QOS weigh the same, so that no factor dominates before an operator wants it.
    """

    age: float = 1000.0
    max_age_s: float = 12 * 3600.0
    """The age factor grows from 0 to 1 over this time since the job became eligible."""
    job_size: float = 1000.0
    favour_small: bool = True
    """False gives large jobs the higher factor, which is Slurm's own default."""
    fair_share: float = 1000.0
    half_life_s: float = 7 * 86400.0
    """Past usage counts half after this time (Slurm's PriorityDecayHalfLife)."""
    qos: float = 1000.0
    qos_factors: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_QOS_FACTORS))
    """Factor by QOS name; a name that is not here counts as `normal` (0.5 if that is missing)."""
    priority: float = 1.0
    """Points for each unit of JobSpec.priority: Slurm's nice value with the sign turned."""


@dataclass(frozen=True, slots=True)
class Multifactor:
    """Slurm's multifactor priority with equal shares for all users."""

    weights: MultifactorWeights = field(default_factory=MultifactorWeights)
    name: str = "multifactor"

    def rank(
        self, jobs: Sequence[WaitingJob], cluster: ClusterView, now_s: float
    ) -> tuple[RankedJob, ...]:
        """Orders by the weighted sum; its terms are in `RankedJob.terms`."""
        gpus_total = sum(len(node.gpus) for node in cluster.nodes)
        fair_share = fair_share_factors(
            decayed_usage_gpu_s(cluster, now_s, self.weights.half_life_s),
            {job.spec.user for job in jobs},
        )
        return in_order(self._ranked(job, now_s, gpus_total, fair_share) for job in jobs)

    def _ranked(
        self, job: WaitingJob, now_s: float, gpus_total: int, fair_share: Mapping[str, float]
    ) -> RankedJob:
        weights = self.weights
        spec = job.spec
        share_of_cluster = min(1.0, spec.gpus / gpus_total) if gpus_total else 0.0
        terms = {
            "age": weights.age * age_factor(now_s - job.eligible_at_s, weights.max_age_s),
            "job_size": weights.job_size
            * (1.0 - share_of_cluster if weights.favour_small else share_of_cluster),
            "fair_share": weights.fair_share * fair_share[spec.user],
            "qos": weights.qos
            * weights.qos_factors.get(spec.qos, weights.qos_factors.get("normal", 0.5)),
            "priority": weights.priority * spec.priority,
        }
        return RankedJob(job, math.fsum(terms.values()), terms)


def age_factor(age_s: float, max_age_s: float) -> float:
    """How long the job could have run already: 0 when new, 1 from `max_age_s` on."""
    return min(1.0, max(0.0, age_s) / max_age_s)


def decayed_usage_gpu_s(
    cluster: ClusterView, now_s: float, half_life_s: float
) -> Mapping[str, float]:
    """GPU-seconds by user, each worth 2^(-age / half-life).

    The recorded usage is aged from `usage_at_s` to now, and what jobs have used since then is
    added: the integral of gpus * 2^(-(now - t) / half_life) over the time they ran.
    """
    rate = math.log(2.0) / half_life_s
    elapsed_s = max(0.0, now_s - cluster.usage_at_s)
    usage = {user: used * math.exp(-rate * elapsed_s) for user, used in cluster.usage_gpu_s.items()}
    for running in cluster.running:
        if running.started_at_s is None:
            continue
        ran_s = max(0.0, now_s - max(running.started_at_s, cluster.usage_at_s))
        used = running.gpus * -math.expm1(-rate * ran_s) / rate
        usage[running.user] = usage.get(running.user, 0.0) + used
    return MappingProxyType(usage)


def fair_share_factors(
    usage_gpu_s: Mapping[str, float], waiting_users: set[str]
) -> Mapping[str, float]:
    """Slurm's classic fair share for users with equal shares: 2^(-usage / share).

    Usage is the user's part of all usage, share is one over the number of users who used
    something or wait. 1 is for who has used nothing, 0.5 for who has used exactly the share.
    """
    users = waiting_users | {user for user, used in usage_gpu_s.items() if used > 0.0}
    total = math.fsum(usage_gpu_s.values())
    if total <= 0.0:
        return dict.fromkeys(users, 1.0)
    return {user: 2.0 ** (-usage_gpu_s.get(user, 0.0) / total * len(users)) for user in users}
