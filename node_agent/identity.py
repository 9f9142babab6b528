"""Who this node is: an id that lasts, and the lock that keeps a state folder to one agent."""

from __future__ import annotations

import errno
import fcntl
import uuid
from pathlib import Path
from typing import IO


class StateDirBusy(RuntimeError):
    """Another agent uses the state folder."""


def lock_state_dir(state_dir: Path) -> IO[str]:
    """Create and lock an agent's state folder; the lock lasts as long as the returned file.

    Raises StateDirBusy if another agent holds it, OSError if it cannot be made.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = _open_lock(state_dir / "agent.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StateDirBusy(
            f"another agent uses {state_dir}; give this one another --name or --state-dir"
        ) from None
    return lock


def _open_lock(path: Path) -> IO[str]:
    try:
        return path.open("a")
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return path.open()  # jobs that run are adopted also when their disk became read-only


def node_id(state_dir: Path) -> str:
    """The id made at the agent's first start, kept in its state folder."""
    path = state_dir / "node_id"
    if not path.exists():
        _write(path, str(uuid.uuid4()))
    return path.read_text().strip()


class Membership:
    """Which cluster this state folder's jobs belong to: the first that the agent joined.

    Job numbers begin at 1 in every cluster, so a folder never serves two of them.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "cluster_id"

    def cluster_id(self) -> str:
        """The cluster's id; empty before the agent joined one."""
        return self._path.read_text().strip() if self._path.exists() else ""

    def join(self, cluster_id: str) -> None:
        """Remember the cluster at the first welcome. Raises OSError if it cannot be stored."""
        if not self._path.exists():
            _write(self._path, cluster_id)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(f"{text}\n")
    fresh.rename(path)
