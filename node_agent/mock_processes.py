"""Who is on the mock GPUs: the real processes of this machine whose environment names them.

A process is on a mock GPU when its `CUDA_VISIBLE_DEVICES` holds the GPU's mock UUID, as the
launcher sets it. Its resident memory and CPU time are split over the GPUs it names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_MAX_AGE_S = 0.02
"""One NVML scan asks many times; all of it sees one reading of /proc."""
_UTILIZATION_INTERVAL_S = 0.25
"""Shortest interval for utilization: the kernel counts CPU time in ticks of 10 ms."""
_YOUNG_S = 2.0
"""A process that appears may still be between fork and exec: while so young its environment is
read again each time. What was there before the first reading counts as old."""
_ROTATION = 10
"""Each refresh reads one in so many of the older environments again (a late exec)."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_VARIABLE = b"CUDA_VISIBLE_DEVICES="


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and its share of one GPU."""

    pid: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Stat:
    """Fields of `/proc/PID/stat`."""

    state: bytes
    cpu_ticks: int
    start_ticks: int
    rss_bytes: int
    env_start: int


@dataclass(slots=True)
class _Known:
    """A process whose environment was read. The inode of /proc/PID tells a reused pid."""

    inode: int
    uuids: tuple[str, ...]
    first_seen_s: float
    env_start: int | None = None


@dataclass(slots=True)
class _Gpu:
    holders: tuple[Holder, ...] = ()
    utilization_pct: float = 0.0


class MockProcessTable:
    """Reads /proc when it is asked and the last reading is old."""

    def __init__(self, uuids: frozenset[str], *, monotonic: Callable[[], float]) -> None:
        """Reads nothing yet.

        Args:
            uuids: the mock GPUs of this node.
            monotonic: seconds of a clock that never jumps.
        """
        self._uuids = uuids
        self._monotonic = monotonic
        self._known: dict[int, _Known] = {}
        self._gpus: Mapping[str, _Gpu] = {uuid: _Gpu() for uuid in uuids}
        self._read_at_s: float | None = None
        self._turn = 0
        self._is_first_reading = True
        self._base_at_s: float | None = None
        self._base_ticks: dict[tuple[int, int], int] = {}

    def holders(self, uuid: str) -> tuple[Holder, ...]:
        """The processes on a GPU by pid, with their shares of memory."""
        self._refresh()
        return self._gpus[uuid].holders

    def live_holders(self, uuid: str) -> tuple[Holder, ...]:
        """As `holders`, but without what ended since the last reading: a GPU is free at once."""
        return tuple(holder for holder in self.holders(uuid) if _is_alive(_read_stat(holder.pid)))

    def utilization_pct(self, uuid: str) -> float:
        """CPU time of the GPU's processes over the last interval; one full core is 100 %."""
        self._refresh()
        return self._gpus[uuid].utilization_pct

    def _refresh(self) -> None:
        now_s = self._monotonic()
        if self._read_at_s is not None and now_s - self._read_at_s < _MAX_AGE_S:
            return
        self._read_at_s = now_s
        self._turn = (self._turn + 1) % _ROTATION
        stats = self._read_holders(now_s)
        shares: dict[str, list[Holder]] = {uuid: [] for uuid in self._uuids}
        for pid, stat in stats.items():
            uuids = self._known[pid].uuids
            for uuid in uuids:
                shares[uuid].append(Holder(pid, stat.rss_bytes // len(uuids)))
        for uuid, holders in shares.items():
            self._gpus[uuid].holders = tuple(sorted(holders, key=lambda holder: holder.pid))
        self._update_utilization(now_s, stats)

    def _read_holders(self, now_s: float) -> dict[int, _Stat]:
        known: dict[int, _Known] = {}
        stats: dict[int, _Stat] = {}
        with os.scandir("/proc") as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid = int(entry.name)
                process = known[pid] = self._identify(pid, entry.inode(), now_s)
                if process.uuids and (stat := self._holder_stat(pid, process)) is not None:
                    stats[pid] = stat
        self._known = known
        self._is_first_reading = False
        return stats

    def _identify(self, pid: int, inode: int, now_s: float) -> _Known:
        process = self._known.get(pid)
        if process is None or process.inode != inode:
            first_seen_s = -math.inf if self._is_first_reading else now_s
            return _Known(inode, self._read_uuids(pid), first_seen_s)
        is_young = now_s - process.first_seen_s < _YOUNG_S
        if not process.uuids and (is_young or pid % _ROTATION == self._turn):
            process.uuids = self._read_uuids(pid)
        return process

    def _holder_stat(self, pid: int, process: _Known) -> _Stat | None:
        """The figures of a process, or None if it left the GPU: ended, zombie, other program."""
        stat = _read_stat(pid)
        if stat is None or not _is_alive(stat):
            return None
        if process.env_start != stat.env_start:  # it called exec, maybe with another environment
            process.env_start = stat.env_start
            process.uuids = self._read_uuids(pid)
        return stat if process.uuids else None

    def _read_uuids(self, pid: int) -> tuple[str, ...]:
        for variable in (_read(f"/proc/{pid}/environ") or b"").split(b"\0"):
            if variable.startswith(_VARIABLE):
                value = variable[len(_VARIABLE) :].decode("ascii", errors="replace")
                names = dict.fromkeys(name.strip() for name in value.split(","))
                return tuple(name for name in names if name in self._uuids)
        return ()

    def _update_utilization(self, now_s: float, stats: Mapping[int, _Stat]) -> None:
        base_at_s = self._base_at_s
        if base_at_s is not None and now_s - base_at_s < _UTILIZATION_INTERVAL_S:
            return
        ticks = {(pid, stat.start_ticks): stat.cpu_ticks for pid, stat in stats.items()}
        if base_at_s is not None:
            busy_ticks = dict.fromkeys(self._uuids, 0.0)
            for key, total in ticks.items():
                uuids = self._known[key[0]].uuids
                # A process that was not there before spent all its time within the interval.
                spent = total - self._base_ticks.get(key, 0)
                for uuid in uuids:
                    busy_ticks[uuid] += spent / len(uuids)
            interval_ticks = (now_s - base_at_s) * _TICKS_PER_S
            for uuid, busy in busy_ticks.items():
                self._gpus[uuid].utilization_pct = min(100.0, 100.0 * busy / interval_ticks)
        self._base_at_s = now_s
        self._base_ticks = ticks


def _is_alive(stat: _Stat | None) -> bool:
    return stat is not None and stat.state not in (b"Z", b"X")


def _read_stat(pid: int) -> _Stat | None:
    data = _read(f"/proc/{pid}/stat")
    if data is None:
        return None
    # Numbers as in proc(5); the command, field 2, may itself hold spaces and parentheses.
    fields = data[data.rindex(b")") + 2 :].split()
    return _Stat(
        state=fields[3 - 3],
        cpu_ticks=int(fields[14 - 3]) + int(fields[15 - 3]),
        start_ticks=int(fields[22 - 3]),
        rss_bytes=int(fields[24 - 3]) * _PAGE_BYTES,
        env_start=int(fields[50 - 3]),
    )


def _read(path: str) -> bytes | None:
    """A file of /proc, or None if the process ended or belongs to somebody else."""
    try:
        # Three system calls; Path.read_bytes and open cost several times as much, per process.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(descriptor)
