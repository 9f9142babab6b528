"""Protobuf on one side, the dataclasses of `protos.messages` on the other.

Conversion is driven by the dataclasses' type hints, since both sides use the same field names:
a plan per class is built once and cached. What arrives is validated here and nowhere else;
`InvalidMessage` names the path of the field. This is the only hand-written module that knows
how protobuf represents enums, absent values and bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos import rltune_pb2
from protos.messages import JobSpec

MAX_ARG_BYTES = 131_071
"""Longest single argument or variable that Linux takes (MAX_ARG_STRLEN - 1)."""
MAX_ENV_BYTES = 1_000_000
"""Largest environment plus argv we take: half of execve's usual total of 2 MiB."""
MAX_GPUS = 65_536
MAX_NODES = 16_384
MAX_CPUS = 65_536
MAX_MEMORY_BYTES = 2**50
MAX_DURATION_S = 10 * 366 * 86_400.0
MAX_NAME_BYTES = 255
QOS_NAMES = ("low", "normal", "high")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,252}")


E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class InvalidMessage(ValueError):
    """A message that breaks a rule. `field` is its path, `hint` says how to mend it."""

    def __init__(self, field: str, problem: str, hint: str = "") -> None:
        """Make the error for one field."""
        self.field = field
        self.hint = hint
        super().__init__(f"{field}: {problem}" + (f" ({hint})" if hint else ""))


# ------------------------------------------------------------------ enums


def enum_to_pb(value: StrEnum) -> int:
    """The protobuf number of an enum member, found by name (`JobState.HELD` -> 2)."""
    return _enum_tables(type(value))[0][value]


def enum_from_pb(enum: type[E], number: int, path: str) -> E:
    """The member with a protobuf number. Raises InvalidMessage for one that we do not know."""
    member = _enum_tables(enum)[1].get(number)
    if member is None:
        raise InvalidMessage(path, f"{number} is not a known {enum.__name__}")
    return typing.cast("E", member)


@cache
def _enum_tables(enum: type[StrEnum]) -> tuple[dict[StrEnum, int], dict[int, StrEnum]]:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.__name__).upper()
    pb_enum = getattr(rltune_pb2, enum.__name__)
    forward = {member: pb_enum.Value(f"{prefix}_{member.name}") for member in enum}
    return forward, {number: member for member, number in forward.items()}


# ------------------------------------------------------------------ dataclass -> protobuf


def to_pb(value: Any, into: type[M]) -> M:
    """The protobuf message of type `into` with the fields of a dataclass of the same shape."""
    message = into()
    _fill(value, message)
    return message


def _fill(value: Any, message: Message) -> None:
    for name, write in _writers(type(value), message.DESCRIPTOR.full_name):  # type: ignore[arg-type]  # mypy: type is not Hashable
        item = getattr(value, name)
        if item is not None:
            write(message, item)


Writer = Callable[[Message, Any], None]


@cache
def _writers(cls: type, pb_name: str) -> tuple[tuple[str, Writer], ...]:
    pb_class = getattr(rltune_pb2, pb_name.rsplit(".", 1)[1])
    hints = typing.get_type_hints(cls)
    return tuple(
        (f.name, _writer(f.name, _strip_optional(hints[f.name]), pb_class))
        for f in dataclasses.fields(cls)
    )


def _writer(name: str, hint: Any, pb_class: Any) -> Writer:
    descriptor = pb_class.DESCRIPTOR.fields_by_name[name]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if _is_wrapped_list(descriptor):
            return lambda m, v: _write_items(_present(m, name).items, args[0], v)
        if descriptor.type == descriptor.TYPE_BYTES:
            return lambda m, v: getattr(m, name).extend(os.fsencode(x) for x in v)
        return lambda m, v: _write_items(getattr(m, name), args[0], v)
    if origin is not None and issubclass(origin, Mapping):
        entry = descriptor.message_type.fields_by_name["value"]
        if entry.type == entry.TYPE_BYTES:
            return lambda m, v: getattr(m, name).update({k: os.fsencode(x) for k, x in v.items()})
        return lambda m, v: getattr(m, name).update(v)
    if dataclasses.is_dataclass(hint):
        return lambda m, v: _fill(v, _present(m, name))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda m, v: setattr(m, name, enum_to_pb(v))
    if descriptor.type == descriptor.TYPE_BYTES and hint is str:
        return lambda m, v: setattr(m, name, os.fsencode(v))
    return lambda m, v: setattr(m, name, v)


def _present(message: Message, name: str) -> Any:
    """The sub-message, marked as present even if it stays empty."""
    sub = getattr(message, name)
    sub.SetInParent()
    return sub


def _write_items(container: Any, item_hint: Any, items: tuple[Any, ...]) -> None:
    if dataclasses.is_dataclass(item_hint):
        for item in items:
            _fill(item, container.add())
    else:
        container.extend(items)


# ------------------------------------------------------------------ protobuf -> dataclass


def from_pb(message: Message, cls: type[T], path: str = "") -> T:
    """The dataclass `cls` with the fields of a protobuf message of the same shape.

    Raises InvalidMessage with the field's path for an unknown enum number, a number that is
    not finite or a negative count.
    """
    values = {
        name: read(message, f"{path}.{name}" if path else name)
        for name, read in _readers(cls, message.DESCRIPTOR.full_name)  # type: ignore[arg-type]
    }
    return cls(**values)


Reader = Callable[[Message, str], Any]


@cache
def _readers(cls: type, pb_name: str) -> tuple[tuple[str, Reader], ...]:
    pb_class = getattr(rltune_pb2, pb_name.rsplit(".", 1)[1])
    hints = typing.get_type_hints(cls)
    return tuple(
        (f.name, _reader(f.name, hints[f.name], pb_class)) for f in dataclasses.fields(cls)
    )


def _reader(name: str, hint: Any, pb_class: Any) -> Reader:
    inner = _strip_optional(hint)
    read = _present_reader(name, inner, pb_class)
    if inner is hint:
        return read
    return lambda m, path: read(m, path) if m.HasField(name) else None


def _present_reader(name: str, hint: Any, pb_class: Any) -> Reader:
    descriptor = pb_class.DESCRIPTOR.fields_by_name[name]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if _is_wrapped_list(descriptor):
            return lambda m, path: _read_items(getattr(m, name).items, args[0], path)
        if descriptor.type == descriptor.TYPE_BYTES:
            return lambda m, _path: tuple(os.fsdecode(x) for x in getattr(m, name))
        return lambda m, path: _read_items(getattr(m, name), args[0], path)
    if origin is not None and issubclass(origin, Mapping):
        entry = descriptor.message_type.fields_by_name["value"]
        if entry.type == entry.TYPE_BYTES:
            return lambda m, _path: {k: os.fsdecode(v) for k, v in getattr(m, name).items()}
        return lambda m, _path: dict(getattr(m, name))
    if dataclasses.is_dataclass(hint):
        return lambda m, path: from_pb(getattr(m, name), typing.cast("type[Any]", hint), path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda m, path: enum_from_pb(hint, getattr(m, name), path)
    if descriptor.type == descriptor.TYPE_BYTES and hint is str:
        return lambda m, _path: os.fsdecode(getattr(m, name))
    if hint is float:
        return lambda m, path: _finite(getattr(m, name), path)
    return lambda m, _path: getattr(m, name)


def _read_items(container: Any, item_hint: Any, path: str) -> tuple[Any, ...]:
    if dataclasses.is_dataclass(item_hint):
        cls = typing.cast("type[Any]", item_hint)
        return tuple(from_pb(item, cls, f"{path}[{i}]") for i, item in enumerate(container))
    return tuple(container)


def _finite(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise InvalidMessage(path, f"{value} is not a finite number")
    return value


def _is_wrapped_list(descriptor: Any) -> bool:
    message = descriptor.message_type
    return message is not None and message.name in {"StringList", "GpuProcessList"}


def _strip_optional(hint: Any) -> Any:
    """`X` for `X | None`, anything else unchanged."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner
    return hint


# ------------------------------------------------------------------ rules for what people send


def valid_job_spec(message: rltune_pb2.JobSpec, path: str = "spec") -> JobSpec:
    """The job that a client asks for. Raises InvalidMessage for the first broken rule."""
    spec = from_pb(message, JobSpec, path)
    check_job_spec(spec, path)
    return spec


def check_job_spec(spec: JobSpec, path: str = "spec") -> None:
    """Raises InvalidMessage for the first rule that `spec` breaks.

    Clients call it before sending, so that mistakes are told without a round trip; the
    controller calls it on arrival, since anybody may write a client.
    """
    _check_name(spec.name, f"{path}.name")
    _check_word(spec.user, f"{path}.user")
    _check_argv(spec, path)
    _check_env(spec, path)
    if not spec.cwd.startswith("/") or "\0" in spec.cwd:
        raise InvalidMessage(f"{path}.cwd", f"{spec.cwd!r} is not an absolute path")
    _check_range(spec.gpus, 0, MAX_GPUS, f"{path}.gpus", "--gpus")
    _check_range(spec.nodes, 0, MAX_NODES, f"{path}.nodes", "--nodes")
    _check_range(spec.cpus, 1, MAX_CPUS, f"{path}.cpus", "--cpus")
    _check_range(spec.memory_bytes, 0, MAX_MEMORY_BYTES, f"{path}.memory_bytes", "--mem")
    if spec.partition:
        _check_word(spec.partition, f"{path}.partition")
    _check_range(
        *(spec.min_gpu_memory_bytes, 0, MAX_MEMORY_BYTES),
        *(f"{path}.min_gpu_memory_bytes", "--gpu-mem"),
    )
    if spec.nodes == 0 and spec.gpus == 0:
        raise InvalidMessage(
            f"{path}.nodes", "a job without GPUs must say how many nodes", "ask --nodes 1"
        )
    if spec.nodes and spec.gpus % spec.nodes:
        raise InvalidMessage(
            f"{path}.gpus",
            f"{spec.gpus} GPUs cannot be shared equally by {spec.nodes} nodes",
            f"--gpus counts all nodes together: ask for a multiple of {spec.nodes}",
        )
    if spec.gpu_types and not spec.gpus:
        raise InvalidMessage(
            f"{path}.gpu_types", "names a GPU type, but no GPU is asked for", "add --gpus N"
        )
    for i, gpu_type in enumerate(spec.gpu_types):
        _check_word(gpu_type, f"{path}.gpu_types[{i}]")
    for name in ("time_limit_s", "time_estimate_s"):
        value = getattr(spec, name)
        if value is not None and not 0 < value <= MAX_DURATION_S:
            raise InvalidMessage(f"{path}.{name}", f"{value:g} s is not a positive duration")
    if not 0 <= spec.grace_s <= 86_400:
        raise InvalidMessage(f"{path}.grace_s", f"{spec.grace_s:g} s is not between 0 and a day")
    _check_range(spec.priority, -(2**31), 2**31 - 1, f"{path}.priority", "--priority")
    if spec.qos not in QOS_NAMES:
        raise InvalidMessage(
            f"{path}.qos", f"{spec.qos!r} is not known", f"one of {', '.join(QOS_NAMES)}"
        )


def check_node_name(name: str, path: str = "node_name") -> None:
    """Raises InvalidMessage unless `name` can be a node's: it becomes a path and a label."""
    _check_word(name, path)


def _check_name(name: str, path: str) -> None:
    if not name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise InvalidMessage(
            path, f"must have 1 to {MAX_NAME_BYTES} bytes", "choose another --name"
        )
    bad = next((c for c in name if not c.isprintable()), None)
    if bad is not None:
        raise InvalidMessage(
            path, f"contains the unprintable character {bad!r}", "choose another --name"
        )


def _check_word(word: str, path: str) -> None:
    if not _WORD.fullmatch(word):
        raise InvalidMessage(
            path,
            f"{word!r} is not a plain word",
            "letters, digits and . _ + - only, beginning with a letter or digit",
        )


def _check_argv(spec: JobSpec, path: str) -> None:
    if not spec.argv or not spec.argv[0]:
        raise InvalidMessage(f"{path}.argv", "there is no command", "give one after --")
    for i, arg in enumerate(spec.argv):
        if "\0" in arg:
            raise InvalidMessage(f"{path}.argv[{i}]", "contains a NUL byte")
        if len(os.fsencode(arg)) > MAX_ARG_BYTES:
            raise InvalidMessage(
                f"{path}.argv[{i}]",
                f"has {len(os.fsencode(arg)):,} bytes, Linux takes {MAX_ARG_BYTES:,}",
                "put it into a file",
            )


def _check_env(spec: JobSpec, path: str) -> None:
    sizes = {}
    for key, value in spec.env.items():
        where = f"{path}.env[{key!r}]"
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidMessage(where, "is not a variable's name and value")
        sizes[key] = len(os.fsencode(key)) + len(os.fsencode(value)) + 2
        if sizes[key] > MAX_ARG_BYTES:
            raise InvalidMessage(
                where,
                f"has {sizes[key]:,} bytes, Linux takes {MAX_ARG_BYTES:,} for one variable",
                "put it into a file",
            )
    total = sum(sizes.values()) + sum(len(os.fsencode(arg)) + 1 for arg in spec.argv)
    if total > MAX_ENV_BYTES:
        largest = max(sizes, key=lambda key: sizes[key]) if sizes else "argv"
        raise InvalidMessage(
            f"{path}.env",
            f"command and environment have {total:,} bytes, at most {MAX_ENV_BYTES:,} are taken",
            f"the largest is {largest}; put it into a file",
        )


def _check_range(value: int, low: int, high: int, path: str, option: str) -> None:
    if not low <= value <= high:
        raise InvalidMessage(path, f"{value} is not between {low} and {high:,}", f"mend {option}")
