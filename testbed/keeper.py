"""Starts parts of a local cluster that died again, as a service manager does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from testbed.children import ProcessDied
from testbed.local import LocalCluster

DEATHS_LIMIT = 5
DEATHS_WINDOW_S = 60.0
FIRST_DELAY_S = 1.0


class Deaths:
    """The latest deaths of one part, and what they mean for the next start."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=DEATHS_LIMIT)

    def add(self, now_s: float) -> float | None:
        """Count a death; returns how long to wait before a start, None to give up.

        No delay after the first death within a minute, then 1, 2, 4 s.
        """
        self._at_s.append(now_s)
        recent = sum(now_s - at_s < DEATHS_WINDOW_S for at_s in self._at_s)
        if recent >= DEATHS_LIMIT:
            return None
        return 0.0 if recent == 1 else FIRST_DELAY_S * 2 ** (recent - 2)


class Keeper:
    """Keeps a started cluster up. Every part keeps its state on disk, so that jobs go on."""

    def __init__(
        self,
        cluster: LocalCluster,
        tell: Callable[[str], object],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` gets a line for each death and each start."""
        self._cluster = cluster
        self._tell = tell
        self._monotonic = monotonic
        self._deaths = {name: Deaths() for name in cluster.parts}
        self._start_at_s: dict[str, float] = {}

    def check(self) -> None:
        """Start what died and is due; never waits.

        Raises:
            ProcessDied: a part died too often; the message has the end of its log.
        """
        now_s = self._monotonic()
        for name, part in self._cluster.parts.items():
            code = part.ended()
            if code is None:
                continue
            if name not in self._start_at_s:
                delay_s = self._deaths[name].add(now_s)
                if delay_s is None:
                    raise ProcessDied(
                        f"{part.how_ended()}, the death no. {DEATHS_LIMIT} within "
                        f"{DEATHS_WINDOW_S:.0f} s; {part.log_end()}",
                        code,
                    )
                when = f"in {delay_s:g} s" if delay_s else "at once"
                self._tell(f"{part.how_ended()}; it is started again {when}, jobs go on")
                self._start_at_s[name] = now_s + delay_s
            if now_s >= self._start_at_s[name]:
                del self._start_at_s[name]
                self._cluster.respawn(name)
                self._tell(f"started {name} again, process {part.pid}")
