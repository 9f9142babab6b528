"""Processes of jobs that have lost their controller or agent: finds them, and ends them in order.

Used by `LocalCluster.stop` and by the watchdog, which must start fast and never hang: no gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

ATTEMPT_MARK = "RLTUNE_ATTEMPT_DIR"
"""In the environment of every process of a job: a folder of its node's state."""
KILL_PATIENCE_S = 5.0
"""What is left after so long under SIGKILL (state D) is left behind."""
RECORD_PATIENCE_S = 1.0
"""How long a supervisor may take to record the end of a job that was killed, and to end."""
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a job, or its supervisor, that is still there."""

    process: psutil.Process
    attempt_dir: str
    command: str
    is_supervisor: bool

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid


@dataclass(frozen=True, slots=True)
class EndedJobs:
    """What `end_jobs` found and did."""

    job_ids: tuple[int, ...]
    killed: tuple[Leftover, ...]
    """Processes that were still there after the grace."""


def leftovers(state_dir: Path) -> tuple[Leftover, ...]:
    """Processes of jobs and their supervisors whose attempt folder lies under `state_dir`."""
    me = psutil.Process().pid
    return tuple(
        Leftover(process, attempt_dir, " ".join(argv), is_supervisor)
        for process, environ, argv in processes()
        if process.pid != me
        for attempt_dir, is_supervisor in _attempt(environ, argv)
        if Path(attempt_dir).is_relative_to(state_dir)
    )


def processes() -> Iterator[tuple[psutil.Process, dict[str, str], list[str]]]:
    """Living processes that we may read, with environment and arguments.

    Each process is held by pid and start time, so that no signal meets a later one.
    """
    for process in psutil.process_iter(["environ", "cmdline"]):
        # None: another user's, and so not ours; or it has ended and nobody has asked for its code.
        if process.info["environ"] is not None and process.info["cmdline"]:
            yield process, process.info["environ"], process.info["cmdline"]


def end_jobs(
    state_dir: Path,
    *,
    grace_s: float,
    monotonic: Callable[[], float],
    pause: Callable[[float], object],
    hurry: Callable[[], bool] = lambda: False,
) -> EndedJobs:
    """End the jobs below `state_dir`; only when no agent runs there that could start more.

    Supervisors get SIGTERM, which they pass on; each job has its own grace, but `grace_s` at
    most, and none once `hurry()`. Then the jobs get SIGKILL and their supervisors, which record
    it, only if they do not end by themselves.

    Only attempts that are there at the beginning are ended: the state folder may soon be
    another cluster's.
    """
    first = leftovers(state_dir)
    attempts = {found.attempt_dir for found in first}

    def left() -> list[Leftover]:
        return [found for found in leftovers(state_dir) if found.attempt_dir in attempts]

    supervised = {found.attempt_dir for found in first if found.is_supervisor}
    for found in first:
        if found.is_supervisor or found.attempt_dir not in supervised:
            with suppress(psutil.NoSuchProcess):
                found.process.terminate()
    deadline_s = monotonic() + grace_s
    while left() and monotonic() < deadline_s and not hurry():
        pause(LOOK_EVERY_S)
    killed: dict[int, Leftover] = {}
    began_s = monotonic()
    while (still := left()) and monotonic() - began_s < KILL_PATIENCE_S:
        for found in still:
            if found.is_supervisor and monotonic() - began_s < RECORD_PATIENCE_S:
                kill_descendants(found.process)
            else:
                killed[found.pid] = found
                kill_tree(found.process)
        pause(LOOK_EVERY_S)
    job_ids = {int(Path(folder).name.partition(".")[0]) for folder in attempts}
    return EndedJobs(tuple(sorted(job_ids)), tuple(killed.values()))


def kill_tree(root: psutil.Process) -> None:
    """SIGKILL a process and its descendants, also those that dropped the mark."""
    kill_descendants(root)
    with suppress(psutil.NoSuchProcess):
        root.kill()


def kill_descendants(root: psutil.Process) -> None:
    """SIGKILL all that is below a process."""
    with suppress(psutil.NoSuchProcess):
        for process in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _attempt(environ: dict[str, str], argv: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The attempt folder that a process belongs to, and whether it supervises it, if it does.

    Supervisors run as `python ... STATE/supervisor-*.pyc STATE/attempts/ATTEMPT`, or from their
    source where nothing could be compiled.
    """
    for word, following in pairwise(argv):
        program, folder = Path(word), Path(following)
        is_source = program.name == "supervisor.py" and folder.parent.name == "attempts"
        is_compiled = program.name.startswith("supervisor-") and program.suffix == ".pyc"
        if is_source or (is_compiled and folder.parent == program.parent / "attempts"):
            yield following, True
            return
    if ATTEMPT_MARK in environ:
        yield environ[ATTEMPT_MARK], False
