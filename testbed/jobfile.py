"""Job files in YAML or TOML: `rltune submit -f job.yaml`.

Values are written as on the command line (`time: 2h30m`, `mem: 32G`, `gpus: p100:2`).
`-f -` reads YAML from standard input.
"""

from __future__ import annotations

import datetime
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from protos.messages import OnNodeFail
from testbed.client_errors import InvalidRequest
from testbed.job_request import MAX_COUNT, JobRequest
from testbed.nearest import did_you_mean
from testbed.values import (
    GpuRequest,
    parse_duration,
    parse_finite_duration,
    parse_gpu_types,
    parse_gpus,
    parse_nodes,
    parse_size,
)
from testbed.yaml_text import YamlProblem, load_yaml

MAX_FILE_BYTES = 2 * 2**20
MAX_QUOTED_CHARS = 60
"""Of a value in an error."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """What a job file says."""

    request: JobRequest
    count: int
    """How many equal jobs."""


class JobFileProblem(InvalidRequest):
    """A job file that cannot be read or understood; the message names the line if it can."""

    default_code = "invalid_job_file"


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."


def _from_text(parse: Callable[[str], Any], example: str) -> pydantic.BeforeValidator:
    """Read what people write with `parse`; TOML's own numbers and times count as their text."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float | datetime.time):
            # A TypeError would not become one of pydantic's problems.
            raise ValueError(f"{_quoted(value)} cannot be meant; write e.g. {example}")  # noqa: TRY004
        return parse(str(value))

    return pydantic.BeforeValidator(read)


def _types(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return value
    return tuple(name for word in words for name in parse_gpu_types(word))


def _words(value: Any) -> Any:
    """Words may be one text, split as a shell would split it, or a list."""
    return shlex.split(value) if isinstance(value, str) else value


def _command(value: Any) -> Any:
    """As `_words`, but several lines are meant for a shell, and joined they mean another thing."""
    if isinstance(value, str) and "\n" in value.strip():
        raise ValueError(
            "has several lines, but no shell reads it: write a list of sh, -c and the script"
        )
    return _words(value)


Words = Annotated[tuple[str, ...], pydantic.BeforeValidator(_words)]
Command = Annotated[tuple[str, ...], pydantic.BeforeValidator(_command)]
Seconds = Annotated[float, _from_text(parse_duration, "2h30m")]
GraceSeconds = Annotated[float, _from_text(parse_finite_duration, "30s")]


class _Keys(pydantic.BaseModel):
    """The keys of a job file; None means "not said"."""

    model_config = pydantic.ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=True
    )

    command: Command | None = None
    workload: str | None = None
    args: Words = ()
    name: str | None = None
    cwd: str | None = None
    env: dict[str, str] = pydantic.Field(default_factory=dict)
    gpus: Annotated[GpuRequest | None, _from_text(parse_gpus, "4 or p100:4")] = None
    gpu_type: Annotated[tuple[str, ...] | None, pydantic.BeforeValidator(_types)] = None
    nodes: Annotated[int | None, _from_text(parse_nodes, "2 or auto")] = None
    cpus: int | None = None
    mem: Annotated[int | None, _from_text(parse_size, "32G")] = None
    time: Seconds | None = None
    estimate: Seconds | None = None
    grace: GraceSeconds | None = None
    priority: int | None = None
    qos: Literal["low", "normal", "high"] | None = None
    hold: bool | None = None
    on_node_fail: Literal["requeue", "wait", "fail"] | None = None
    partition: str | None = None
    gpu_mem: Annotated[int | None, _from_text(parse_size, "16G")] = None
    mix_gpu_types: bool | None = None
    count: Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)] = 1


KEYS = tuple(_Keys.model_fields)
"""All keys, for the documentation and its test."""


STDIN = Path("-")


def load_job_file(path: Path) -> JobFile:
    """Read a job file; its ending says whether it is YAML or TOML.

    `-` is standard input, in YAML. A relative `cwd` counts from the file's folder.

    Raises:
        JobFileProblem: it cannot be read, or something in it cannot be meant.
    """
    text = _read(path)
    if path.suffix == ".toml":
        values, line_of = _toml(path, text)
    elif path.suffix in {".yaml", ".yml"} or path == STDIN:
        values, line_of = _yaml(path, text)
    else:
        raise JobFileProblem(
            f"{path}: the ending {path.suffix or '(none)'} is not known", "call it .yaml or .toml"
        )
    try:
        keys = _Keys.model_validate(values)
    except pydantic.ValidationError as error:
        raise _problem(path, error, line_of) from None
    if (keys.command is None) == (keys.workload is None):
        command, workload = (
            _shown(path, "command", "python train.py"),
            _shown(path, "workload", "resnet50"),
        )
        raise JobFileProblem(
            f"{_name(path)}: give either `command` or `workload`",
            f"{command}, or {workload} with `args`",
        )
    if keys.args and keys.workload is None:
        raise JobFileProblem(
            f"{_name(path)}: `args` belong to a `workload`", "put them into `command`"
        )
    return JobFile(_request(keys, path), keys.count)


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def _shown(path: Path, key: str, value: str) -> str:
    """How a line of this file is written."""
    return f'`{key} = "{value}"`' if path.suffix == ".toml" else f"`{key}: {value}`"


def _request(keys: _Keys, path: Path) -> JobRequest:
    types = keys.gpu_type
    if keys.gpus is not None and keys.gpus.types:
        types = keys.gpus.types
    return JobRequest(
        argv=keys.command,
        workload=keys.workload,
        workload_options=keys.args,
        name=keys.name,
        cwd=None if keys.cwd is None else str((path.parent / keys.cwd).absolute()),
        env=keys.env,
        gpus=None if keys.gpus is None else keys.gpus.count,
        gpu_types=types,
        nodes=keys.nodes,
        cpus=keys.cpus,
        memory_bytes=keys.mem,
        time_limit_s=keys.time,
        time_estimate_s=keys.estimate,
        grace_s=keys.grace,
        priority=keys.priority,
        qos=keys.qos,
        hold=keys.hold,
        on_node_fail=None if keys.on_node_fail is None else OnNodeFail[keys.on_node_fail.upper()],
        partition=keys.partition,
        min_gpu_memory_bytes=keys.gpu_mem,
        mix_gpu_types=keys.mix_gpu_types,
    )


# ------------------------------------------------------------------ reading

LineOf = Callable[[tuple[str | int, ...]], int | None]
"""The line of the value at a path, from 1."""


def _read(path: Path) -> str:
    try:
        if path == STDIN:
            # Without a standard input (`<&-`) Python has None there.
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if sys.stdin else b""
        else:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise JobFileProblem(f"{_name(path)}: {error.strerror}", "is the path right?") from None
    if len(data) > MAX_FILE_BYTES:
        raise JobFileProblem(
            f"{_name(path)} is larger than {MAX_FILE_BYTES:,} bytes", "is it a job file?"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JobFileProblem(
            f"{_name(path)}: line {line} is not UTF-8", "save it as UTF-8"
        ) from None


def _toml(path: Path, text: str) -> tuple[Mapping[str, Any], LineOf]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobFileProblem(f"{path}: {error}", "it is not TOML") from None

    def line_of(where: tuple[str | int, ...]) -> int | None:
        key = re.escape(str(where[-1]))
        lines = text.splitlines()
        return next(
            (n for n, line in enumerate(lines, 1) if re.match(rf"\s*[\"']?{key}[\"']?\s*=", line)),
            None,
        )

    return values, line_of


def _yaml(path: Path, text: str) -> tuple[Mapping[str, Any], LineOf]:
    try:
        values, lines = load_yaml(text)
    except YamlProblem as error:
        raise JobFileProblem(f"{_name(path)}: line {error.line}: {error}", error.hint) from None
    if not isinstance(values, dict):
        raise JobFileProblem(f"{_name(path)} holds no keys", "write e.g. `workload: resnet50`")
    return values, lines.get


_WORDINGS = {
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is not a whole number",
    "int_from_float": "is not a whole number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "string_type": "is not a text",
    "dict_type": "is not a table of names and values",
    "tuple_type": "is neither a text nor a list of words",
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le:,}",
    "literal_error": "is not {expected}",
    "value_error": "{error}",
}
"""Pydantic's kinds of problems in our words; they follow the key and its value."""


def _problem(path: Path, error: pydantic.ValidationError, line_of: LineOf) -> JobFileProblem:
    """The first problem, in our words, with the line where it is."""
    first = error.errors()[0]
    where = first["loc"]
    line = line_of(where) or line_of(where[:1])
    place = f"{_name(path)}: " + (f"line {line}: " if line else "")
    if first["type"] == "extra_forbidden":
        return JobFileProblem(f"{place}unknown key {where[0]!r}", did_you_mean(str(where[0]), KEYS))
    name = ".".join(str(part) for part in where)
    wording = _WORDINGS.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    text = wording if first["type"] == "value_error" else f"{_quoted(first['input'])} {wording}"
    more = len(error.errors()) - 1
    return JobFileProblem(
        f"{place}{name}: {text}", f"mend it; there are {more} more problems" if more else ""
    )
