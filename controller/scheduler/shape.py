"""What a job needs, as a value: jobs of one shape are interchangeable for placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from controller.scheduler.index import ClusterIndex
from controller.scheduler.types import ClusterView, RankedJob, WaitingJob
from protos.messages import JobSpec

Way = tuple[tuple[int, int], ...]
"""One way to cut a job into shares: (GPUs of a share, number of such shares), largest first."""


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """A GPU type that a job accepts, with its place in the job's preference (0 is best)."""

    preference: int
    gpu_type: str
    slowness: float = 0.0
    """From 0 (the acceptable type that does most for its price) to 1 (next to nothing)."""


@dataclass(frozen=True, slots=True, eq=False)
class JobShape:
    """Everything about a job that decides where it may go.

    A `ShapeIndex` gives jobs that ask for the same the same object, so shapes compare by identity.
    """

    gpus: int
    """All GPUs of the job together."""
    nodes: int
    """How many nodes, in equal shares; 0: as few as possible or one more, in any shares."""
    cpus: int
    """On each node."""
    memory_bytes: int
    """On each node."""
    types: tuple[TypeChoice, ...]
    """Best first; empty when no GPU type of the cluster is acceptable or no GPU is asked."""
    partition: str = ""
    """Only nodes of this partition; empty: any node."""
    mixes_types: bool = False
    """Whether shares on different nodes may have different GPU types."""
    excluded_nodes: frozenset[str] = frozenset()
    outlasts: int = 0
    """How many of the decision's reservations begin before such a job would end."""
    gpu_types: tuple[str, ...] = ("",)
    """The types to look at, best first; one empty type for jobs without GPUs."""

    def choice(self, gpu_type: str) -> TypeChoice:
        """How much this type is liked; the neutral one for jobs without GPUs."""
        return next((c for c in self.types if c.gpu_type == gpu_type), NEUTRAL)

    def ways(self, largest: int) -> tuple[Way, ...]:
        """The ways to cut the job into shares for nodes of at most `largest` GPUs, fewest first."""
        if not self.gpus:
            return (((0, max(1, self.nodes)),),)
        if self.nodes:
            share = self.gpus // self.nodes
            return (((share, self.nodes),),) if share <= largest else ()
        return cuts(self.gpus, largest)

    def with_outlasts(self, outlasts: int) -> JobShape:
        """The same shape for jobs that outlast so many reservations."""
        return self if outlasts == self.outlasts else replace(self, outlasts=outlasts)

    def is_at_least(self, other: JobShape) -> bool:
        """Whether a place for this shape is always a place for the other as well."""
        return (
            (self.nodes > 0) == (other.nodes > 0)
            and self.nodes >= other.nodes
            and (self.gpus > 0) == (other.gpus > 0)
            and self.gpus // (self.nodes or 1) >= other.gpus // (other.nodes or 1)
            and (self.nodes > 0 or self.gpus == other.gpus)
            and self.cpus >= other.cpus
            and self.memory_bytes >= other.memory_bytes
            and set(self.gpu_types) <= set(other.gpu_types)
            and self.partition == other.partition
            and self.mixes_types <= other.mixes_types
            and self.excluded_nodes >= other.excluded_nodes
            and self.outlasts >= other.outlasts
        )


NEUTRAL = TypeChoice(0, "")


@lru_cache(maxsize=4096)
def cuts(gpus: int, largest: int) -> tuple[Way, ...]:
    """All ways to write `gpus` as ceil(gpus / largest) or one more shares of 1 to `largest`."""
    if largest <= 0:
        return ()
    fewest = -(-gpus // largest)
    found: list[list[int]] = []

    def extend(left: int, most: int, shares: list[int]) -> None:
        if not left:
            if len(shares) >= fewest:
                found.append(shares)
            return
        remaining = fewest + 1 - len(shares)
        for share in range(min(most, left), 0, -1):
            if share * remaining < left:
                break
            extend(left - share, share, [*shares, share])

    extend(gpus, largest, [])
    found.sort(key=lambda shares: (len(shares), [-share for share in shares]))
    return tuple(tuple(sorted(Counter(shares).items(), reverse=True)) for shares in found)


def type_matches(asked: str, gpu_type: str) -> bool:
    """Whether a word such as `v100` names a GPU type such as `V100-16GB`.

    Slurm's rule for GPU types: case does not matter, a part of the name is enough, and a
    space is the same as `_`; here `-` is the same as well.
    """
    return _normal(asked) in _normal(gpu_type)


def acceptable_types(asked: tuple[str, ...], here: Iterable[str]) -> tuple[TypeChoice, ...]:
    """The types among `here` that match what was asked, best first; all of them if nothing was."""
    choices = []
    for gpu_type in sorted(set(here)):
        if not asked:
            choices.append(TypeChoice(0, gpu_type))
            continue
        preference = next((i for i, word in enumerate(asked) if type_matches(word, gpu_type)), None)
        if preference is not None:
            choices.append(TypeChoice(preference, gpu_type))
    return tuple(sorted(choices, key=lambda choice: (choice.preference, choice.gpu_type)))


class ShapeIndex:
    """Shapes of jobs on one cluster; type names are resolved once for each distinct request."""

    def __init__(self, index: ClusterIndex) -> None:
        """Reads the GPU types of the cluster."""
        self._index = index
        self._resolved: dict[tuple[tuple[str, ...], int], tuple[TypeChoice, ...]] = {}
        self._shapes: dict[tuple[object, ...], JobShape] = {}

    def of(self, job: WaitingJob, outlasts: int = 0) -> JobShape:
        """The shape of a waiting job, with the nodes that it must avoid now."""
        return self.of_spec(job.spec, job.excluded_nodes, outlasts)

    def of_spec(
        self, spec: JobSpec, excluded_nodes: frozenset[str] = frozenset(), outlasts: int = 0
    ) -> JobShape:
        """The shape of a request."""
        key = (
            *(spec.gpus, spec.nodes, spec.cpus, spec.memory_bytes, spec.gpu_types),
            *(spec.min_gpu_memory_bytes, spec.partition, spec.mix_gpu_types),
            *(excluded_nodes, outlasts),
        )
        shape = self._shapes.get(key)
        if shape is None:
            types = self._resolve(spec) if spec.gpus else ()
            shape = self._shapes[key] = JobShape(
                gpus=spec.gpus,
                nodes=spec.nodes,
                cpus=spec.cpus,
                memory_bytes=spec.memory_bytes,
                types=types,
                partition=spec.partition if self._index.has_partitions else "",
                mixes_types=spec.mix_gpu_types and spec.nodes != 1 and spec.gpus > 0,
                excluded_nodes=frozenset(
                    name for name in excluded_nodes if name in self._index.nodes
                ),
                outlasts=outlasts,
                gpu_types=tuple(choice.gpu_type for choice in types) if spec.gpus else ("",),
            )
        return shape

    def _resolve(self, spec: JobSpec) -> tuple[TypeChoice, ...]:
        key = (spec.gpu_types, spec.min_gpu_memory_bytes)
        choices = self._resolved.get(key)
        if choices is None:
            large = [
                gpu_type
                for gpu_type, memory_bytes in self._index.gpu_types.items()
                if not memory_bytes or memory_bytes >= spec.min_gpu_memory_bytes
            ]
            choices = self._resolved[key] = _with_slowness(
                acceptable_types(spec.gpu_types, large), self._index
            )
        return choices


def shapes_of(
    ranked: Iterable[RankedJob], cluster: ClusterView, shapes: ShapeIndex, now_s: float
) -> dict[int, JobShape]:
    """The shape of each job, by id, with the reservations that it would outlast."""
    return {
        entry.job.job_id: shapes.of(
            entry.job,
            sum(
                reservation.binds(entry.job.job_id, now_s + entry.job.planned_run_s)
                for reservation in cluster.reservations
            ),
        )
        for entry in ranked
    }


def _with_slowness(choices: tuple[TypeChoice, ...], index: ClusterIndex) -> tuple[TypeChoice, ...]:
    speed = index.gpu_speed
    known = [speed[c.gpu_type] for c in choices if c.gpu_type in speed]
    if not known:
        return choices
    best = max(known)
    return tuple(
        TypeChoice(c.preference, c.gpu_type, 1.0 - speed.get(c.gpu_type, best) / best)
        for c in choices
    )


def _normal(word: str) -> str:
    return word.strip().lower().replace(" ", "_").replace("-", "_")
