"""When the folders of ended ranks leave the disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from node_agent.attempts import attempt_dirs

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long and how much is kept of ranks whose end the controller has recorded."""

    max_age_s: float = 7 * DAY_S
    max_bytes: int = 20 << 30


DEFAULT_RETENTION = Retention()


def remove_expired(
    attempts_dir: Path, checkpoints_dir: Path, retention: Retention, now_s: float
) -> list[str]:
    """Removes acknowledged folders that are too old, then the oldest beyond the size limit.

    A job's checkpoints go once no folder of the job is left and they have not been touched
    for the same age. Returns the names of the removed attempt folders.
    """
    folders = attempt_dirs(attempts_dir)
    done = sorted((f for f in folders if f.is_acknowledged), key=lambda f: f.acknowledged_at_s)
    sizes = {folder.path: folder.size_bytes() for folder in done}
    total = sum(sizes.values())
    removed = []
    for folder in done:
        too_old = now_s - folder.acknowledged_at_s > retention.max_age_s
        if too_old or total > retention.max_bytes:
            shutil.rmtree(folder.path)
            total -= sizes[folder.path]
            removed.append(folder.path.name)
    jobs = {str(f.rank.job_id) for f in folders if f.path.name not in removed}
    for path in checkpoints_dir.iterdir():
        if path.name not in jobs and now_s - _newest_change_s(path) > retention.max_age_s:
            shutil.rmtree(path)
    return removed


def _newest_change_s(path: Path) -> float:
    return max(entry.stat().st_mtime for entry in (path, *path.rglob("*")) if entry.exists())
