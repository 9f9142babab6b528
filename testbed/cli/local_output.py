"""What `rltune up` and `rltune demo` write alike."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from testbed.local import Stopped

SCHEMA_VERSION = 1


def tell_stopped(console: Console, stopped: Stopped) -> None:
    """What stopping took, where it was more than nothing."""
    lines = []
    if stopped.cancelled:
        lines.append(f"cancelled jobs: {', '.join(map(str, stopped.cancelled))}")
    if stopped.unfinished:
        lines.append(f"did not end in time: jobs {', '.join(map(str, stopped.unfinished))}")
    lines += [f"{name} had to be killed" for name in stopped.killed]
    lines += [
        f"killed a process that a job left behind: {left.pid} {left.command}"
        for left in stopped.leftovers
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def console_of(*, stderr: bool) -> Console:
    """Where words for people go; stderr when stdout is for JSON."""
    return Console(stderr=stderr, highlight=False)


def write_json(value: dict[str, Any]) -> None:
    """The one JSON value of a command, on stdout at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
