"""What an operator says about the cluster in a file: partitions, and how fast GPU types are.

partitions:
  - name: research
    nodes: [gpu-node-*]
    default: true
    max_gpus_per_user: 8
  - name: class
    nodes: [gpu-node-1]
    allow_users: [ada, bob]
    max_time: 2h
gpu_types:
  P100: {speed: 0.5}
  V100: {speed: 0.8, cost: 1.5}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from controller.errors import Rejected
from controller.scheduler.types import Partition
from protos.messages import JobSpec

MAX_FILE_BYTES = 2**20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


class ConfigProblem(Exception):
    """The file cannot be used; the message says what, where and how to mend it."""


@dataclass(frozen=True, slots=True)
class PartitionRules:
    """A partition as configured."""

    name: str
    nodes: tuple[str, ...]
    """Names, or patterns such as `gpu-node-*`."""
    is_default: bool = False
    allow_users: frozenset[str] | None = None
    """None: everybody."""
    max_gpus: int | None = None
    max_gpus_per_user: int | None = None
    max_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What is configured beside the command line."""

    partitions: tuple[PartitionRules, ...] = ()
    gpu_speed: Mapping[str, float] = field(default_factory=dict)
    """Speed for the price, by GPU type."""

    @property
    def limits(self) -> dict[str, Partition]:
        """What the scheduler needs to know of the partitions, by name."""
        return {
            rules.name: Partition(rules.name, rules.max_gpus, rules.max_gpus_per_user)
            for rules in self.partitions
        }

    def partitions_of(self, node: str) -> frozenset[str]:
        """The partitions that a node belongs to."""
        return frozenset(
            rules.name
            for rules in self.partitions
            if any(fnmatchcase(node, pattern) for pattern in rules.nodes)
        )

    def admit(self, spec: JobSpec) -> JobSpec:
        """The job with its partition and that partition's time limit filled in.

        Raises:
            Rejected: there is no such partition, its user may not use it, or it may not run for so
                long there.
        """
        if not self.partitions:
            if not spec.partition:
                return spec
            raise Rejected(
                "no_partition", f"there is no partition {spec.partition!r}: none is configured",
                "leave --partition out",
            )  # fmt: skip
        rules = self._rules(spec)
        if rules.allow_users is not None and spec.user not in rules.allow_users:
            raise Rejected(
                "not_allowed",
                f"user {spec.user} may not use partition {rules.name}",
                "`rltune partitions` shows who may use which",
            )
        limit_s = spec.time_limit_s
        if rules.max_time_s is not None:
            if limit_s is None:
                limit_s = rules.max_time_s
            elif limit_s > rules.max_time_s:
                raise Rejected(
                    "time_limit",
                    f"a job of partition {rules.name} may run for {rules.max_time_s:g} s at most, "
                    f"this one asks for {limit_s:g} s",
                    f"ask --time {rules.max_time_s:g}s or less",
                )
        return replace(spec, partition=rules.name, time_limit_s=limit_s)

    def _rules(self, spec: JobSpec) -> PartitionRules:
        for rules in self.partitions:
            if rules.name == spec.partition or (not spec.partition and rules.is_default):
                return rules
        names = ", ".join(rules.name for rules in self.partitions)
        if spec.partition:
            raise Rejected(
                "no_partition",
                f"there is no partition {spec.partition!r}",
                f"there are {names}",
            )
        raise Rejected(
            "no_partition", "no partition was named, and none is the default",
            f"ask --partition with one of {names}",
        )  # fmt: skip


def load_config(path: Path) -> ClusterConfig:
    """Reads the file.

    Raises:
        ConfigProblem: it cannot be read, or something in it cannot be meant.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigProblem(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        values = yaml.safe_load(data.decode())
    except OSError as error:
        raise ConfigProblem(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigProblem(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigProblem(f"{path} holds no keys; write `partitions:` or `gpu_types:`")
    try:
        return _config(_File.model_validate(values))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        told = first["msg"].removeprefix("Value error, ")
        place = f"{path}: {where}" if where else str(path)
        raise ConfigProblem(f"{place}: {told}") from error


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", value.strip())
        if found is None:
            raise ValueError(f"{value!r} is no duration; write e.g. 90m, 2h or 7d")
        return float(found[1]) * _UNITS_S[found[2]]
    return value


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _Partition(_Strict):
    name: Annotated[str, pydantic.Field(pattern=f"^{_NAME}$")]
    nodes: Annotated[list[str], pydantic.Field(min_length=1)]
    default: bool = False
    allow_users: list[str] | None = None
    max_gpus: Annotated[int | None, pydantic.Field(ge=0)] = None
    max_gpus_per_user: Annotated[int | None, pydantic.Field(ge=0)] = None
    max_time: Annotated[float | None, pydantic.Field(gt=0), pydantic.BeforeValidator(_seconds)] = (
        None
    )


class _GpuType(_Strict):
    speed: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
    cost: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0


class _File(_Strict):
    partitions: list[_Partition] = pydantic.Field(default_factory=list)
    gpu_types: dict[str, _GpuType] = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _are_distinct(self) -> _File:
        names = [partition.name for partition in self.partitions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"there are two partitions {twice!r}")
        if sum(partition.default for partition in self.partitions) > 1:
            raise ValueError("only one partition can be the default")
        return self


def _config(file: _File) -> ClusterConfig:
    return ClusterConfig(
        partitions=tuple(
            PartitionRules(
                name=partition.name,
                nodes=tuple(partition.nodes),
                is_default=partition.default,
                allow_users=None
                if partition.allow_users is None
                else frozenset(partition.allow_users),
                max_gpus=partition.max_gpus,
                max_gpus_per_user=partition.max_gpus_per_user,
                max_time_s=partition.max_time,
            )
            for partition in file.partitions
        ),
        gpu_speed={name: told.speed / told.cost for name, told in file.gpu_types.items()},
    )
