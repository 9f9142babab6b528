"""Descriptions of clusters: small YAML files, some of them in the package.

nodes:
  - {count: 20, gpus: "P100:8", cpus: 64, memory: 512G, partitions: [vc1]}
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from controller.scheduler.types import GpuSlot, NodeCapacity, Partition
from testbed.client_errors import InvalidRequest
from testbed.values import InvalidValue, parse_gpus, parse_size

MAX_NODES = 20_000


class ClusterProblem(InvalidRequest):
    """A description that cannot be used; the message names file and place."""

    default_code = "invalid_cluster"


@dataclass(frozen=True, slots=True)
class Cluster:
    """An empty cluster."""

    name: str
    nodes: tuple[NodeCapacity, ...]
    partitions: dict[str, Partition]

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def gpu_types(self) -> frozenset[str]:
        """The GPU types that it has."""
        return frozenset(gpu.gpu_type for node in self.nodes for gpu in node.gpus)

    @property
    def largest_node(self) -> int:
        """GPUs of its largest node."""
        return max((len(node.gpus) for node in self.nodes), default=0)


def packaged() -> list[str]:
    """Names of the clusters that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("testbed.traces").joinpath("clusters").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_cluster(name: str) -> Cluster:
    """A packaged cluster by name, or a file.

    Raises:
        ClusterProblem: there is none, or something in it cannot be meant.
    """
    if name in packaged():
        folder = files("testbed.traces").joinpath("clusters")
        return _cluster(name, folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ClusterProblem(
            f"{name}: {reason}", f"name a file, or one of {', '.join(packaged())}"
        ) from None
    return _cluster(name, text)


def _read(parse: Any) -> pydantic.BeforeValidator:
    def read(value: Any) -> Any:
        try:
            return parse(str(value))
        except InvalidValue as error:
            raise ValueError(error.problem) from None

    return pydantic.BeforeValidator(read)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _Nodes(_Strict):
    count: Annotated[int, pydantic.Field(ge=1, le=MAX_NODES)] = 1
    gpus: str
    cpus: Annotated[int, pydantic.Field(ge=0)] = 64
    memory: Annotated[int, _read(parse_size)] = 2**40
    partitions: list[str] = pydantic.Field(default_factory=list)


class _File(_Strict):
    nodes: Annotated[list[_Nodes], pydantic.Field(min_length=1)]


def _cluster(name: str, text: str) -> Cluster:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ClusterProblem(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    try:
        described = _File.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ClusterProblem(f"{name}: {where}: {first['msg']}") from None
    nodes: list[NodeCapacity] = []
    for group in described.nodes:
        nodes += _nodes(name, group, len(nodes))
    partitions = {p: Partition(p) for group in described.nodes for p in group.partitions}
    return Cluster(Path(name).stem, tuple(nodes), partitions)


def _nodes(name: str, group: _Nodes, first: int) -> list[NodeCapacity]:
    types: list[str] = []
    try:
        for part in group.gpus.split(","):
            asked = parse_gpus(part)
            if len(asked.types) != 1:
                raise ClusterProblem(f"{name}: gpus {part!r}: write TYPE:NUMBER, e.g. P100:8")
            types += list(asked.types) * asked.count
    except InvalidValue as error:
        raise ClusterProblem(f"{name}: gpus {group.gpus!r}: {error.problem}", error.hint) from None
    return [
        NodeCapacity(
            name=f"node-{number:04d}",
            accepts_work=True,
            gpus=tuple(
                GpuSlot(f"{number}-{k}", k, gpu_type, is_free=True)
                for k, gpu_type in enumerate(types)
            ),
            cpus_total=group.cpus,
            cpus_free=group.cpus,
            memory_total_bytes=group.memory,
            memory_free_bytes=group.memory,
            partitions=frozenset(group.partitions),
        )
        for number in range(first + 1, first + 1 + group.count)
    ]
