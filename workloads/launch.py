"""Starts the ranks of ``--mode ddp`` when nobody else did: torchrun, without typing it.

torchrun folds every end into exit code 1. This keeps the ranks' own code, so that 4 still means a
loss that is not finite and 143 a saved checkpoint.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from workloads.checkpoint import Folder, Manifest
from workloads.options import Exit, Options
from workloads.progress import note


def ranks_here(asked: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks to start on this machine.

    As asked; else one for each GPU that CUDA sees; else what the environment says
    (PET_NPROC_PER_NODE, NPROC_PER_NODE, the entries of CUDA_VISIBLE_DEVICES, which may name mock
    GPUs); else one.
    """
    if asked is not None:
        return asked
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    for name in ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"):
        if environ.get(name, "").isdecimal():
            return max(1, int(environ[name]))
    named = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return max(1, len(named))


def launch(argv: Sequence[str], options: Options) -> int:
    """Start the ranks, wait for them, return the exit code of the run.

    Args:
        argv: The program's arguments, which each rank gets again.
        options: The same, read.
    """
    before = _saved_on_signal(options)
    args = run.parse_args(  # type: ignore[no-untyped-call]
        [
            # Alone on one machine the ranks meet on a port that the kernel chooses.
            *(["--nnodes=1", "--standalone"] if _is_alone() else []),
            f"--nproc-per-node={ranks_here(options.nproc)}",
            "--no-python",
            sys.executable,
        ]
    )
    # Set here, because its parser would take our options for abbreviations of its own.
    args.training_script_args = [
        "-u",
        *(["-P"] if sys.flags.safe_path else []),
        "-m",
        "workloads.train",
        *argv,
    ]
    try:
        run.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        return code_of(failure.exitcode, rank)
    except SignalException as stopped:
        if _saved_on_signal(options) != before:
            return Exit.SAVED
        die_of(stopped.sigval)
    return Exit.OK


def _is_alone() -> bool:
    return os.environ.get("PET_NNODES", "1") == "1"


def die_of(signum: int) -> None:
    """End as a program that does not handle the signal: what waits for it sees the true cause."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def code_of(exitcode: int, rank: int) -> int:
    """Exit code of the run whose rank ended so (negative: by that signal); does not return on -15.

    128 + 15 would claim that a checkpoint was saved, so SIGTERM ends this process too.
    """
    if exitcode >= 0:
        return exitcode
    note(f"rank {rank} was ended by {signal.Signals(-exitcode).name}")
    if -exitcode == signal.SIGTERM:
        die_of(signal.SIGTERM)
    return 128 - exitcode


def _saved_on_signal(options: Options) -> list[tuple[Path, int]]:
    """Checkpoints that were written because of a signal, with the time of their writing."""
    if options.checkpoint_dir is None:
        return []
    found = []
    for path in Folder(options.checkpoint_dir, {}).manifests():
        try:
            if Manifest.read(path).reason == "sigterm":
                found.append((path, path.stat().st_mtime_ns))
        except (OSError, ValueError):
            continue  # damaged: told by the rank that would load it
    return found
