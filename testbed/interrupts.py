"""Ctrl-C, SIGTERM and a closed terminal as a wish, not as an exception out of nowhere."""

from __future__ import annotations

import math
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

PAUSE_S = 0.1
SLICE_S = 0.05
"""Python resumes a wait after a signal's handler, so that long waits are cut into slices."""


class Interrupts:
    """Counts such signals while it is entered: one asks to stop, a second one hurries.

    SIGHUP counts too, or a closed terminal would leave a cluster behind; under `nohup` it does
    not, as is asked for there.
    """

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self._never = threading.Event()

    def __enter__(self) -> Self:
        # The handler only adds to a number: setting an Event could meet its own lock.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(signum)
            if signum is not signal.SIGHUP or before is not signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @property
    def stop(self) -> bool:
        """Whether somebody asked to stop."""
        return self._count >= 1

    @property
    def hurry(self) -> bool:
        """Whether somebody asked twice."""
        return self._count >= 2

    def pause(self, seconds: float = PAUSE_S) -> None:
        """Wait a little, or until the next signal if that comes first."""
        seen = self._count
        for _ in range(math.ceil(seconds / SLICE_S)):
            if self._count != seen:
                return
            self._never.wait(min(seconds, SLICE_S))

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._count += 1
