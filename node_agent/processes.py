"""Finds and ends what an attempt left behind when its supervisor could not do it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from node_agent.attempts import MARK, ProcessIdentity, read_start_ticks
from node_agent.supervisor import Process, descendants, kill_all, send_signal

SWEEP_PATIENCE_S = 10.0


def has_mark(pid: int, attempt_dir: Path) -> bool:
    """Whether the process inherited the attempt's environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, or is another user's
        return False
    return f"{MARK}={attempt_dir}".encode("utf-8", "surrogateescape") in environ.split(b"\0")


def find_marked(attempt_dir: Path) -> list[int]:
    """Living processes of the attempt, by their environment; never our own."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and has_mark(pid, attempt_dir)]


def kill_marked(attempt_dir: Path) -> tuple[ProcessIdentity, ...]:
    """SIGKILLs the attempt's processes and all below them; returns those that it found.

    One pass: call it again until it finds nothing.
    """
    found: dict[int, Process] = {}
    for pid in find_marked(attempt_dir):
        for process in (*_read([pid]), *descendants(pid)):
            found[process.pid] = process
    found.pop(os.getpid(), None)
    # A group whose leader lives and is not the attempt's may hold others: spare those.
    groups = {p.pgid for p in found.values() if p.pgid in found or not _exists(p.pgid)}
    kill_all([process for process in found.values() if process.pgid in groups])
    for process in found.values():
        if process.pgid not in groups:
            send_signal(process.pid, signal.SIGKILL)
    return tuple(ProcessIdentity("", p.pid, p.start_ticks) for p in found.values())


async def sweep_marked(
    attempt_dir: Path,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> tuple[ProcessIdentity, ...]:
    """Kills until nothing of the attempt is left; returns what survives 10 s of it."""
    deadline_s = monotonic() + SWEEP_PATIENCE_S
    while True:
        found = await asyncio.to_thread(kill_marked, attempt_dir)
        if not found or monotonic() >= deadline_s:
            return found
        await sleep(0.02)


def belongs(pid: int, attempt_dir: Path, survivors: Iterable[ProcessIdentity]) -> bool:
    """Whether a process is the attempt's: by mark, or named as one that SIGKILL did not end.

    A process stuck in the kernel may already have lost its environment.
    """
    if has_mark(pid, attempt_dir):
        return True
    ticks = read_start_ticks(pid)
    return any(p.pid == pid and p.start_ticks == ticks for p in survivors)


def _exists(pid: int) -> bool:
    return read_start_ticks(pid) is not None


def _read(pids: Iterable[int]) -> list[Process]:
    processes = []
    for pid in pids:
        try:
            processes.append(Process(Path(f"/proc/{pid}/stat").read_bytes()))
        except OSError:
            continue
    return processes
