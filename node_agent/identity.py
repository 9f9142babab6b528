"""Who this node is: an id that lasts, and the lock that keeps a state folder to one agent."""

from __future__ import annotations

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
    lock = (state_dir / "agent.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StateDirBusy(
            f"another agent uses {state_dir}; give this one another --name or --state-dir"
        ) from None
    return lock


def node_id(state_dir: Path) -> str:
    """The id made at the agent's first start, kept in its state folder."""
    path = state_dir / "node_id"
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{uuid.uuid4()}\n")
        fresh.rename(path)
    return path.read_text().strip()
