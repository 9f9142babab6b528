"""How many GPUs the jobs of a partition, and of a user in it, may still take."""

from __future__ import annotations

from controller.scheduler.types import ClusterView
from protos.messages import JobSpec

_Key = tuple[str, str]
"""Partition and user; an empty user stands for all of them."""


class Quotas:
    """What is left of each quota while a decision is being made."""

    def __init__(self, cluster: ClusterView) -> None:
        """Counts what running jobs use."""
        self._left: dict[_Key, int] = {}
        self._per_user: dict[str, int] = {}
        for partition in cluster.partitions.values():
            if partition.max_gpus is not None:
                self._left[partition.name, ""] = partition.max_gpus
            if partition.max_gpus_per_user is not None:
                self._per_user[partition.name] = partition.max_gpus_per_user
        if self._left or self._per_user:
            for job in cluster.running:
                self._take(job.partition, job.user, job.gpus)

    def allows(self, spec: JobSpec) -> bool:
        """Whether the job may start beside what is booked."""
        return all(left >= spec.gpus for left in self.binding(spec).values())

    def take(self, spec: JobSpec) -> None:
        """Books a job that starts."""
        self._take(spec.partition, spec.user, spec.gpus)

    def binding(self, spec: JobSpec) -> dict[_Key, int]:
        """The quotas that count for a job with what is left of each."""
        found = {}
        if (spec.partition, "") in self._left:
            found[spec.partition, ""] = self._left[spec.partition, ""]
        if spec.partition in self._per_user:
            key = (spec.partition, spec.user)
            found[key] = self._left.get(key, self._per_user[spec.partition])
        return found

    def copy(self) -> Quotas:
        """An account of its own that begins as this one is now."""
        twin = object.__new__(Quotas)
        twin._left, twin._per_user = dict(self._left), self._per_user
        return twin

    def _take(self, partition: str, user: str, gpus: int) -> None:
        if (partition, "") in self._left:
            self._left[partition, ""] -= gpus
        if partition in self._per_user:
            key = (partition, user)
            self._left[key] = self._left.get(key, self._per_user[partition]) - gpus
