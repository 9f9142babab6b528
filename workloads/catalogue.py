"""The workloads by name, for a command line that submits them.

    >>> from workloads import catalogue
    >>> catalogue.command("facebook/opt1.3b", ["--steps", "20"], python="python")
    ('python', '-P', '-m', 'workloads.train', 'opt-1.3b', '--steps', '20')

This is the one module of the package that others import. It loads no torch.
"""

import sys
from collections.abc import Sequence

from workloads.families import (
    DATASETS,
    WORKLOADS,
    Kind,
    UnknownWorkloadError,
    UsageError,
    Workload,
    find,
)
from workloads.options import Options, parse

__all__ = [
    "DATASETS",
    "Kind",
    "Options",
    "UnknownWorkloadError",
    "UsageError",
    "Workload",
    "command",
    "families",
    "find",
    "names",
    "parse",
]


def names() -> tuple[str, ...]:
    """Canonical names of all workloads, vision first, in the order of their families."""
    return tuple(WORKLOADS)


def families() -> dict[str, tuple[str, ...]]:
    """Canonical names by family."""
    found: dict[str, tuple[str, ...]] = {}
    for workload in WORKLOADS.values():
        found[workload.family] = (*found.get(workload.family, ()), workload.name)
    return found


def command(
    name: str, options: Sequence[str] = (), *, python: str = sys.executable
) -> tuple[str, ...]:
    """The argument vector that trains a workload.

    Args:
        name: A workload's name as people write it (see `find`).
        options: Options of ``python -m workloads.train``, checked here and passed on as they are.
        python: The interpreter on the machine where it will run.

    Raises:
        UsageError: the name or an option is wrong; the message names the nearest right one.
    """
    workload = find(name)
    for word in options:
        if word in {"-h", "--help", "--list"}:
            raise UsageError(f"{word} asks for a text, not for a run")
    parse([workload.name, *options], {})
    # -P: a folder called `workloads` where the job starts must not be taken for ours.
    return (python, "-P", "-m", "workloads.train", workload.name, *options)
