"""JSON for programs: what is printed with `--json` (docs/cli.md).

One value a command, or one a line for streams. Points in time lose their `_s` and become
ISO 8601 in UTC; durations stay seconds, sizes bytes; what is missing is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from testbed.cli.secrets_hidden import hide_secret_values
from testbed.client_errors import RltuneError

SCHEMA_VERSION = 1
"""Grows when a field is removed or changes its meaning; new fields do not count."""

_POINT_IN_TIME = re.compile(r"(?:(?:\w+_)?at|now)_s")


def iso_utc(at_s: float) -> str:
    """`2026-11-30T23:59:59.250Z` for seconds since the epoch."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def to_json(value: Any) -> Any:
    """What `json` can write, of dataclasses, mappings, sequences and plain values."""
    if dataclasses.is_dataclass(value):
        return _fields_to_json({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _fields_to_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if _POINT_IN_TIME.fullmatch(name):
            result[name.removesuffix("_s")] = None if value is None else iso_utc(value)
        elif name == "env":
            result[name] = hide_secret_values(value)
        else:
            result[name] = to_json(value)
    return result


def print_json(fields: Mapping[str, Any]) -> None:
    """One JSON value on standard output, on one line."""
    document = {"schema_version": SCHEMA_VERSION, **{k: to_json(v) for k, v in fields.items()}}
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_error(error: RltuneError) -> None:
    """An error as the one JSON value."""
    told = {"code": error.code, "message": error.message, "hint": error.hint or None}
    if error.field:
        told["field"] = error.field
    print_json({"error": told})
