"""Processes of a local cluster: start, watch and end them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.client_errors import RltuneError

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 16 * 1024


class ProcessDied(RltuneError):
    """A part of the cluster that we started ended by itself."""

    default_code = "process_died"

    def __init__(self, message: str, returncode: int) -> None:
        """`returncode` is negative for a signal."""
        super().__init__(message)
        self.returncode = returncode


class Child:
    """One part of a cluster, in a session of its own, with its output in a file."""

    def __init__(
        self, name: str, log_path: Path, env: Mapping[str, str], *, is_tied: bool = False
    ) -> None:
        """`env` is added to our own environment.

        The stdin of a tied child is a pipe of which nobody else has the write end: it reads the
        end of the file when we end, however we do, or when we `untie` it.
        """
        self.name = name
        self.log_path = log_path
        self._env = dict(env)
        self._stdin = subprocess.PIPE if is_tied else subprocess.DEVNULL
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
        self.untie()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=self._stdin,
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

    def how_ended(self) -> str:
        """In words for people; only once it has ended."""
        code = self.ended()
        assert code is not None, f"{self.name} has not ended"
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"{self.name} ended {how}"

    def check(self) -> None:
        """Raise ProcessDied, with the end of its log, if it has ended."""
        code = self.ended()
        if code is not None:
            raise ProcessDied(f"{self.how_ended()}; {self.log_end()}", code)

    def log_end(self) -> str:
        """Where its log is, and the last lines of it."""
        return f"the end of its log ({self.log_path}):\n{self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines of its log, indented."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "backslashreplace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:]) or "  (empty)"

    def untie(self) -> None:
        """Close the pipe to a tied child."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

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
