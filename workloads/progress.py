"""What a run says about itself: one JSON object a line, on stdout and in RLTUNE_PROGRESS_FILE.

Nothing else is written to stdout, so a log is also a table. Words for people go to stderr.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TextIO, TypeAlias

Value: TypeAlias = str | int | float | bool | list[int] | None


def process_age_s() -> float:
    """Seconds since this process was started (before the interpreter ran), to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def peak_host_memory_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def note(text: str) -> None:
    """Tell people something, on stderr."""
    sys.stderr.write(f"workloads.train: {text}\n")
    sys.stderr.flush()


class Reporter:
    """Writes events; silent on every rank but the first.

    A progress file that cannot be opened or written is noted once and then left out: it must
    never end a training run.
    """

    def __init__(self, file: Path | None, *, silent: bool, stream: TextIO) -> None:
        self._stream = None if silent else stream
        self._file: FileIO | None = None
        if file is not None and not silent:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered: what could not be written must not be tried again when it is closed.
                self._file = file.open("ab", buffering=0)
            except OSError as error:
                note(f"no progress file: {error}")

    def event(self, kind: str, **fields: Value) -> None:
        """Write one event; fields that are None are left out, as absent is not 0."""
        if self._stream is None:
            return
        shown = {key: _json(value) for key, value in fields.items() if value is not None}
        line = json.dumps({"event": kind, **shown}) + "\n"
        self._stream.write(line)
        self._stream.flush()
        if self._file is not None:
            try:
                self._file.write(line.encode())
            except OSError as error:
                note(f"progress file given up: {error}")
                self.close()

    def close(self) -> None:
        """Close the progress file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Pace:
    """Says when the next progress line is due, and how fast samples went by since the last."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last_s = clock()
        self._samples = 0

    def count(self, samples: int) -> None:
        """Add samples that have been processed."""
        self._samples += samples

    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return self._clock() - self._last_s >= self._every_s

    def take(self) -> float:
        """Samples a second since the last call; a new interval begins."""
        now_s = self._clock()
        rate = self._samples / max(now_s - self._last_s, 1e-9)
        self._last_s = now_s
        self._samples = 0
        return rate


def _json(value: Value) -> Value:
    """Numbers that JSON can hold: six digits, and null for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
