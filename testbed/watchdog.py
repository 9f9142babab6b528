"""`python -m testbed.watchdog SCRATCH`: ends a local cluster whose starter died without a word.

Whoever starts a cluster holds the only write end of our stdin. The kernel closes it when that
process ends, be it by SIGKILL; then what is still there of the cluster is ended, within 10 s:
agents first, so that nothing new begins, then the jobs with some grace, then the rest and the
scratch folder. After an orderly stop nothing is there, and that is all.

Nothing is ever told to us about processes, so that there is no moment between a start and the
word of it: they are found by their TMPDIR, which is a scratch folder that no other cluster has.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from testbed.leftovers import KILL_PATIENCE_S, LOOK_EVERY_S, end_jobs, processes

OWNED = "owned-state"
"""In the scratch folder: a link to the state folder, once the cluster has it for itself."""
AGENTS_PATIENCE_S = 2.0
JOBS_GRACE_S = 4.0
REST_PATIENCE_S = 2.5
"""The controller gives open calls 2 s."""


def main() -> int:
    """Wait for the starter's end, then end its cluster."""
    scratch = Path(sys.argv[1])
    sys.stdin.buffer.read()
    end_cluster(scratch, monotonic=time.monotonic, pause=threading.Event().wait)
    return 0


def end_cluster(
    scratch: Path, *, monotonic: Callable[[], float], pause: Callable[[float], object]
) -> None:
    """End all processes of the cluster and remove its scratch folder; not a given state folder.

    The controller goes last: it keeps the state folder locked, so that no later cluster runs
    there meanwhile.
    """

    def end(find: Callable[[], list[psutil.Process]], patience_s: float) -> None:
        for process in find():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        deadline_s = monotonic() + patience_s
        while find() and monotonic() < deadline_s:
            pause(LOOK_EVERY_S)
        while (left := find()) and monotonic() < deadline_s + KILL_PATIENCE_S:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            pause(LOOK_EVERY_S)

    end(lambda: _of_cluster(scratch, "node_agent"), AGENTS_PATIENCE_S)
    if (scratch / OWNED).exists():
        state_dir = (scratch / OWNED).resolve()
        end_jobs(state_dir, grace_s=JOBS_GRACE_S, monotonic=monotonic, pause=pause)
    end(lambda: _of_cluster(scratch), REST_PATIENCE_S)
    shutil.rmtree(scratch, ignore_errors=True)


def _of_cluster(scratch: Path, module: str = "") -> list[psutil.Process]:
    """Processes that inherited the cluster's TMPDIR; of `module`, if one is given."""
    return [
        process
        for process, environ, argv in processes()
        if environ.get("TMPDIR") == str(scratch)
        and process.pid != os.getpid()
        and (not module or module in argv)
    ]


if __name__ == "__main__":
    sys.exit(main())
