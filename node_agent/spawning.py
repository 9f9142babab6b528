"""Prepares a rank's folder, environment and port, and starts its supervisor."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import marshal
import os
import pwd
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import Any

from node_agent import supervisor
from node_agent.attempts import AttemptDir
from node_agent.job_env import JobPlace, job_environment
from node_agent.ports import PortPool
from protos.messages import LaunchOrder

TMP_PREFIX = "rltune-"
PYC_HEADER_BYTES = 16


log = logging.getLogger("rltune.agent")


def _is_compiled(path: Path) -> bool:
    """Whether a .pyc file is whole: Python itself would only notice at each launch."""
    try:
        content = path.read_bytes()
        code = marshal.loads(content[PYC_HEADER_BYTES:])  # noqa: S302 - our own file
        return content.startswith(MAGIC_NUMBER) and isinstance(code, CodeType)
    except (OSError, EOFError, ValueError, TypeError):
        return False


def _compile(source: Path, target: Path) -> bool:
    """Compiles to a file that is whole or not there. Returns whether it is there."""
    aside = target.with_suffix(".new")
    try:
        py_compile.compile(
            str(source),
            cfile=str(aside),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        if _is_compiled(aside):  # py_compile takes a short write for a good one
            aside.replace(target)
            return True
        log.warning("the compiled supervisor is cut short in %s: is its disk full?", target.parent)
    except OSError as error:
        log.warning("the supervisor cannot be compiled into %s: %s", target.parent, error)
    with contextlib.suppress(OSError):  # a read-only disk refuses even what is not there
        aside.unlink(missing_ok=True)
    return False


class Spawner:
    """Turns launch orders into running supervisors."""

    def __init__(
        self,
        state_dir: Path,
        *,
        boot_id: str,
        log_limit_bytes: int,
        base_env: Mapping[str, str],
        ports: PortPool,
        now: Callable[[], float],
    ) -> None:
        self.checkpoints_dir = state_dir / "checkpoints"
        self._notify_path = state_dir / "notify.fifo"
        self._state_dir = state_dir
        self._boot_id = boot_id
        self._log_limit_bytes = log_limit_bytes
        self._base_env = base_env
        self._ports = ports
        self._now = now
        self._program = Path()

    def prepare(self) -> None:
        """Compiles the supervisor once: compiling it at each launch took 8 ms.

        A good file is kept, and where none can be written the source itself is run: a full disk
        must not keep the agent from its running jobs, nor spoil launches for good.
        """
        source = Path(supervisor.__file__)
        digest = hashlib.sha256(source.read_bytes() + sys.version.encode()).hexdigest()[:16]
        compiled = self._state_dir / f"supervisor-{digest}.pyc"
        is_ready = _is_compiled(compiled) or _compile(source, compiled)
        self._program = compiled if is_ready else source
        self.checkpoints_dir.mkdir(exist_ok=True, mode=0o700)

    def open_notifications(self) -> int:
        """Opens the FIFO in which supervisors tell that a status has changed.

        For both ways, so that it never reports an end of file.
        """
        if not self._notify_path.exists():
            os.mkfifo(self._notify_path, 0o600)
        return os.open(self._notify_path, os.O_RDWR | os.O_NONBLOCK)

    def spawn(self, order: LaunchOrder, folder: AttemptDir) -> int:
        """Starts the rank's supervisor and returns its pid, which the caller must reap.

        Raises:
            OSError: this node cannot start it; nothing of it runs then.
        """
        if order.master_port:
            return self._spawn(order, folder, order.master_port)
        held = self._ports.choose()
        try:
            return self._spawn(order, folder, held.port)
        finally:  # long before the job itself can bind it
            held.release()

    def _spawn(self, order: LaunchOrder, folder: AttemptDir, port: int) -> int:
        tmp_dir = Path(tempfile.mkdtemp(prefix=f"{TMP_PREFIX}{order.rank}-", dir=self._tmp_base()))
        try:
            folder.write_order(order, self._document(order, folder, tmp_dir, port))
            return self._start_supervisor(folder)
        except OSError:
            shutil.rmtree(tmp_dir)
            raise

    def _tmp_base(self) -> str:
        """Where job's TMPDIRs are made: not in the attempt's folder, whose path is too long.

        Programs bind Unix sockets in TMPDIR; such a path has 107 bytes at most, of which
        multiprocessing alone needs 32.
        """
        return self._base_env.get("TMPDIR") or "/tmp"  # noqa: S108 - mkdtemp makes it private

    def _document(
        self, order: LaunchOrder, folder: AttemptDir, tmp_dir: Path, port: int
    ) -> dict[str, Any]:
        checkpoint_dir = self.checkpoints_dir / str(order.rank.job_id)
        checkpoint_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        user = pwd.getpwuid(os.getuid())
        place = JobPlace(
            attempt_dir=str(folder.path),
            checkpoint_dir=str(checkpoint_dir),
            tmp_dir=str(tmp_dir),
            progress_path=str(folder.progress_path),
            master_port=port,
            start_time_s=self._now(),
            python_bin_dir=str(Path(sys.executable).parent),
            home=user.pw_dir,
            login=user.pw_name,
            shell=user.pw_shell,
        )
        return {
            "argv": order.argv,
            "env": job_environment(order, node=place, base_env=self._base_env),
            "cwd": order.cwd,
            "tmp_dir": str(tmp_dir),
            "time_limit_s": order.time_limit_s,
            "grace_s": order.grace_s,
            "memory_bytes": order.memory_bytes,
            "log_limit_bytes": self._log_limit_bytes,
            "boot_id": self._boot_id,
            "notify_path": str(self._notify_path),
        }

    def _start_supervisor(self, folder: AttemptDir) -> int:
        with folder.supervisor_log_path.open("wb") as log:
            # No preexec_fn, user= or group=: they would leave the vfork path, on which gRPC's
            # threads in this process do no harm.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._program), str(folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        process.returncode = 0  # the launcher reaps it by pidfd; Popen must not try
        return process.pid


def remove_tmp_dir(folder: AttemptDir) -> None:
    """Removes the job's TMPDIR, for a supervisor that did not live to do it."""
    tmp_dir = folder.read_order().get("tmp_dir")
    if tmp_dir is not None:
        shutil.rmtree(tmp_dir, ignore_errors=True)
