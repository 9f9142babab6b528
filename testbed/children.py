"""Processes of a local cluster: start, watch and end them; find what their jobs left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from testbed.client_errors import RltuneError

ATTEMPT_MARK = b"RLTUNE_ATTEMPT_DIR="
"""In the environment of every process of a job, followed by a folder of its node's state."""
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 16 * 1024


class ProcessDied(RltuneError):
    """A controller or agent that we started ended by itself."""

    default_code = "process_died"

    def __init__(self, message: str, returncode: int) -> None:
        """`returncode` is negative for a signal."""
        super().__init__(message)
        self.returncode = returncode


class Child:
    """One controller or agent, in a session of its own, with its output in a file."""

    def __init__(self, name: str, log_path: Path, env: Mapping[str, str]) -> None:
        """`env` is added to our own environment."""
        self.name = name
        self.log_path = log_path
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; only once it was started."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self, argv: Sequence[str]) -> None:
        """Start it (again); output is added to its log.

        A session of its own keeps the terminal's Ctrl-C from it: whoever started the cluster
        ends it in order.
        """
        assert self.ended() is not None or self._process is None, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._env,
            )

    def ended(self) -> int | None:
        """Its return code (negative: a signal), or None while it runs or was not started."""
        return None if self._process is None else self._process.poll()

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise ProcessDied, with the end of its log, if it has ended."""
        code = self.ended()
        if code is not None:
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            raise ProcessDied(
                f"{self.name} ended {how}; the end of its log ({self.log_path}):\n"
                f"{self.log_tail()}",
                code,
            )

    def log_tail(self) -> str:
        """The last lines of its log, indented."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "backslashreplace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:]) or "  (empty)"

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self, patience_s: float = 10.0) -> None:
        """End it by SIGKILL and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(patience_s)

    def end(self, patience_s: float) -> bool:
        """Wait for its end after `terminate`, then SIGKILL; whether it ended without."""
        if self._process is None:
            return True
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a job that is still there."""

    pid: int
    attempt_dir: str
    command: str


def leftovers(state_dir: Path) -> tuple[Leftover, ...]:
    """Processes of jobs (and their supervisors) whose attempt folder lies under `state_dir`."""
    found = (_leftover(entry, state_dir) for entry in Path("/proc").iterdir())
    return tuple(process for process in found if process is not None)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and its descendants, also those that dropped the mark."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _leftover(entry: Path, state_dir: Path) -> Leftover | None:
    if not entry.name.isdecimal() or int(entry.name) == os.getpid():
        return None
    try:
        environ = (entry / "environ").read_bytes().split(b"\0")
        argv = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's and so not ours
        return None
    for attempt_dir in _attempt_dirs(environ, argv):
        if Path(attempt_dir).is_relative_to(state_dir):
            command = os.fsdecode(b" ".join(argv)).strip()
            return Leftover(int(entry.name), attempt_dir, command)
    return None


def _attempt_dirs(environ: Sequence[bytes], argv: Sequence[bytes]) -> Iterator[str]:
    for variable in environ:
        if variable.startswith(ATTEMPT_MARK):
            yield os.fsdecode(variable.removeprefix(ATTEMPT_MARK))
    for word, following in pairwise(argv):
        if word.endswith(b"/supervisor.py"):
            yield os.fsdecode(following)
