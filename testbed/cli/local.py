"""`rltune up` and `rltune demo`: a whole cluster on this machine.

Only the options are here: what the commands do is imported when one of them runs, so that
the other commands of `rltune` start fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonFlag
from testbed.settings import DEFAULT_CONTROLLER

DEFAULT_REPORT = Path("demo-out/report.html")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("up")(up)
    app.command("demo")(demo)


def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="How many nodes.")] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:N[,TYPE:N]",
            help="Mock GPUs of each node, e.g. P100:4. Without it: this machine's real GPUs.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Order of the queue.")] = "multifactor",
    allocator: Annotated[str, typer.Option(help="Placement.")] = "milp",
    solver: Annotated[
        str, typer.Option(help="Of the allocators that solve: auto, glpk, glpsol or highs.")
    ] = "auto",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port on loopback; 0: any free one.")
    ] = int(DEFAULT_CONTROLLER.rpartition(":")[2]),
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keep databases, logs and job folders here. Default: a temporary folder."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Partitions and GPU speeds (docs/partitions.md).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Start a controller and nodes on this machine; Ctrl-C stops them and cancels their jobs."""
    from testbed.cli.local_up import UpOptions, run_up  # noqa: PLC0415

    run_up(UpOptions(nodes, gpus, policy, allocator, solver, port, state_dir, config, json_output))


def demo(
    jobs: Annotated[
        int, typer.Option(min=1, max=16, help="Run only the first so many jobs of the mix.")
    ] = 16,
    report: Annotated[
        Path, typer.Option(help="Where the HTML report is written.")
    ] = DEFAULT_REPORT,
    json_output: JsonFlag = False,
) -> None:
    """Train the RLTune authors' 16-job mix, scaled to CPU, on two nodes of four mock P100."""
    from testbed.cli.local_demo import run_demo  # noqa: PLC0415

    raise typer.Exit(run_demo(jobs, report, json_output=json_output))
