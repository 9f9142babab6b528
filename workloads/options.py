"""What a run was asked for: the command line, read once, checked before torch is loaded."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NoReturn

from workloads.families import (
    DATASETS,
    Kind,
    UsageError,
    Workload,
    default_learning_rate,
    find,
    nearest,
)

ANY_DATASET = tuple(dict.fromkeys(name for names in DATASETS.values() for name in names))


class Exit(IntEnum):
    """How the program ends; part of its contract (docs/workloads.md)."""

    OK = 0
    CRASHED = 1
    USAGE = 2
    NO_DATA = 3
    NOT_FINITE = 4
    CHECKPOINT = 5
    SAVED = 143
    """128 + SIGTERM: asked to stop, and a checkpoint to go on from is on disk."""


class Mode(StrEnum):
    """How a run is spread over GPUs."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"


class Task(StrEnum):
    """Whether weights change."""

    TRAIN = "train"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that decides a run."""

    workload: Workload
    task: Task
    dataset: str
    data_dir: Path | None
    download: bool
    mode: Mode
    nproc: int | None
    """Ranks on this machine; None: as many as there are GPUs, or as the environment says."""
    batch_size: int
    """Samples a step: of each rank under ddp, of all GPUs together otherwise."""
    epochs: int
    steps: int | None
    """Steps in all; when given, it counts instead of `epochs`."""
    lr: float
    amp: bool
    seed: int
    workers: int
    scale: float | None
    """Fraction of the published size; None: 1 on a GPU, `models.CPU_SCALE` on a CPU."""
    seq_len: int | None
    """Tokens a sample; None: 512 times the scale."""
    checkpoint_dir: Path | None
    checkpoint_every: int
    """Steps between two checkpoints; 0: only on SIGTERM and at the end."""
    progress_every_s: float
    progress_file: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _one_of(what: str, known: Sequence[str]) -> Callable[[str], str]:
    def check(word: str) -> str:
        if word in known:
            return word
        hint = nearest(word, known)
        listed = ", ".join(known)
        raise argparse.ArgumentTypeError(f"unknown {what} {word!r}{hint} (known: {listed})")

    return check


def _integer(least: int) -> Callable[[str], int]:
    def check(word: str) -> int:
        # Eighteen digits fit the 64 bits that torch counts and seeds with.
        if word.isdecimal() and len(word) <= 18 and int(word) >= least:
            return int(word)
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a whole number of {least} or more (18 digits at most)"
        )

    return check


def _number(least: float, *, exclusive: bool = False) -> Callable[[str], float]:
    bound = f"above {least:g}" if exclusive else f"of {least:g} or more"

    def check(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and (value > least if exclusive else value >= least):
            return value
        raise argparse.ArgumentTypeError(f"{word!r} is not a number {bound}")

    return check


def _scale(word: str) -> float | None:
    if word == "auto":
        return None
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if 0 < value <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{word!r} is neither 'auto' nor a number above 0 up to 1")


def _add(
    group: argparse._ActionsContainer,
    name: str,
    read: Callable[[str], object],
    text: str,
    default: object = None,
) -> None:
    value = name.removeprefix("--").replace("-", "_").upper()
    group.add_argument(name, type=read, help=text, default=default, metavar=value)


def parser() -> argparse.ArgumentParser:
    """The command line of ``python -m workloads.train``."""
    made = _Parser(
        prog="python -m workloads.train",
        description="Train a torchvision or transformers model for real, from random weights.",
        allow_abbrev=False,
        epilog="Exit codes: 0 done, 1 crashed, 2 usage, 3 data not found, 4 loss not finite, "
        "5 checkpoint of another run or folder not usable, 143 saved on SIGTERM.",
    )
    add = made.add_argument
    datasets, tasks, modes = ", ".join(ANY_DATASET), list(Task), list(Mode)
    add("model", nargs="?", help="resnet50, opt-125m, ...; --list names all")
    add("--list", action="store_true", help="print the names of all models and stop")
    _add(made, "--task", _one_of("task", tasks), "train | inference (default train)", Task.TRAIN)
    _add(made, "--dataset", _one_of("dataset", ANY_DATASET), datasets)
    _add(made, "--data-dir", Path, "where downloaded datasets lie")
    add("--download", action="store_true", help="fetch MNIST or CIFAR if it is not there")
    _add(made, "--mode", _one_of("mode", modes), "single | dp | ddp (default single)", Mode.SINGLE)
    _add(made, "--nproc", _integer(1), "ddp ranks on this machine (default: one a GPU)")
    _add(made, "--batch-size", _integer(1), "a step, a rank under ddp (default 32, text 8)")
    length = made.add_mutually_exclusive_group()
    _add(length, "--epochs", _integer(1), "times through the data (default 1)")
    _add(length, "--steps", _integer(1), "stop after so many steps instead")
    _add(made, "--lr", _number(0, exclusive=True), "learning rate (default by family)")
    add("--amp", action="store_true", help="mixed precision (bfloat16, float16 on older GPUs)")
    _add(made, "--seed", _integer(0), "default 0", 0)
    _add(made, "--workers", _integer(0), "processes that load data (default 0)", 0)
    _add(made, "--scale", _scale, "share of the full size, 0 < S <= 1 (default auto)", "auto")
    _add(made, "--seq-len", _integer(2), "tokens a sample (default 512 times the scale)")
    _add(made, "--checkpoint-dir", Path, "save and resume here (default RLTUNE_CHECKPOINT_DIR)")
    _add(made, "--checkpoint-every", _integer(0), "also save every so many steps (default 0)", 0)
    _add(made, "--progress-every", _number(0), "seconds between progress lines (default 2)", 2.0)
    return made


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options | None:
    """Read a command line; None means that ``--list`` was asked for.

    Args:
        argv: Arguments after the program's name.
        environ: Read for RLTUNE_CHECKPOINT_DIR and RLTUNE_PROGRESS_FILE.

    Raises:
        UsageError: what was written cannot be meant; the message names the nearest that can.
        SystemExit: ``--help`` was asked for and has been printed.
    """
    made = parser()
    args, unknown = made.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        known = re.findall(r"--[a-z-]+", made.format_help())
        raise UsageError(f"unknown argument {word!r}{nearest(word, known)}")
    if args.list:
        return None
    if args.model is None:
        raise UsageError("which model? e.g. resnet50 or opt-125m; --list names all")
    workload = find(args.model)
    _check_combination(workload, args)
    language = workload.kind is Kind.LANGUAGE
    saved_under = args.checkpoint_dir or _path(environ, "RLTUNE_CHECKPOINT_DIR")
    return Options(
        workload=workload,
        task=Task(args.task),
        dataset=args.dataset or DATASETS[workload.kind][0],
        data_dir=args.data_dir,
        download=args.download,
        mode=Mode(args.mode),
        nproc=args.nproc,
        batch_size=args.batch_size or (8 if language else 32),
        epochs=args.epochs or 1,
        steps=args.steps,
        lr=args.lr or default_learning_rate(workload),
        amp=args.amp,
        seed=args.seed,
        workers=args.workers,
        scale=args.scale,
        seq_len=args.seq_len,
        checkpoint_dir=saved_under,
        checkpoint_every=args.checkpoint_every,
        progress_every_s=args.progress_every,
        progress_file=_path(environ, "RLTUNE_PROGRESS_FILE"),
    )


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether torchrun (or something like it) started this process as one of several ranks."""
    return "RANK" in environ and "LOCAL_RANK" in environ


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    return Path(value) if value else None


def _check_combination(workload: Workload, args: argparse.Namespace) -> None:
    """Refuse options that are right alone and wrong together."""
    name, language = workload.name, workload.kind is Kind.LANGUAGE
    allowed = DATASETS[workload.kind]
    if args.dataset is not None and args.dataset not in allowed:
        reads = "text" if language else "images"
        raise UsageError(f"{name} reads {reads}: --dataset {' | '.join(allowed)}")
    if args.download and args.dataset not in {"mnist", "cifar10", "cifar100"}:
        raise UsageError("--download works with --dataset mnist | cifar10 | cifar100")
    if args.seq_len is not None and not language:
        raise UsageError(f"--seq-len is for language models; {name} reads images")
    if args.nproc is not None and args.mode != Mode.DDP:
        raise UsageError("--nproc is for --mode ddp")
    if args.task == Task.INFERENCE:
        if not language:
            raise UsageError(f"--task inference is for language models; {name} is trained")
        if args.mode == Mode.DP:
            raise UsageError("--task inference has nothing to gather: use --mode single or ddp")
