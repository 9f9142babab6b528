"""What one rank of a job needs, as a value: jobs of one shape are interchangeable for placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.scheduler.types import ClusterView, WaitingJob
from protos.messages import JobSpec


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """A GPU type that a job accepts, with its place in the job's preference (0 is best)."""

    preference: int
    gpu_type: str


@dataclass(frozen=True, slots=True)
class JobShape:
    """Everything about a job that decides where it may go. Resources are per node."""

    gpus: int
    nodes: int
    cpus: int
    memory_bytes: int
    types: tuple[TypeChoice, ...]
    """Best first; empty when no GPU type of the cluster is acceptable or no GPU is asked."""
    excluded_nodes: frozenset[str] = frozenset()

    def is_at_least(self, other: JobShape) -> bool:
        """Whether a place for this shape is always a place for the other as well."""
        return (
            self.gpus >= other.gpus
            and self.nodes >= other.nodes
            and self.cpus >= other.cpus
            and self.memory_bytes >= other.memory_bytes
            and (self.gpus > 0) == (other.gpus > 0)
            and {choice.gpu_type for choice in self.types}
            <= {choice.gpu_type for choice in other.types}
            and self.excluded_nodes >= other.excluded_nodes
        )


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

    def __init__(self, cluster: ClusterView) -> None:
        """Reads the GPU types and node names of the cluster."""
        self._types = sorted({gpu.gpu_type for node in cluster.nodes for gpu in node.gpus})
        self._nodes = frozenset(node.name for node in cluster.nodes)
        self._resolved: dict[tuple[str, ...], tuple[TypeChoice, ...]] = {}

    def of(self, job: WaitingJob) -> JobShape:
        """The shape of a waiting job, with the nodes that it must avoid now."""
        return self.of_spec(job.spec, job.excluded_nodes)

    def of_spec(self, spec: JobSpec, excluded_nodes: frozenset[str] = frozenset()) -> JobShape:
        """The shape of a request."""
        return JobShape(
            gpus=spec.gpus_per_node,
            nodes=spec.nodes,
            cpus=spec.cpus,
            memory_bytes=spec.memory_bytes,
            types=self._resolve(spec.gpu_types) if spec.gpus else (),
            excluded_nodes=excluded_nodes & self._nodes if excluded_nodes else excluded_nodes,
        )

    def _resolve(self, asked: tuple[str, ...]) -> tuple[TypeChoice, ...]:
        types = self._resolved.get(asked)
        if types is None:
            types = self._resolved[asked] = acceptable_types(asked, self._types)
        return types


def _normal(word: str) -> str:
    return word.strip().lower().replace(" ", "_").replace("-", "_")
