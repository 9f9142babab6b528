"""`rltune simulate`, `rltune trace`: replays of workloads, and what they are made of."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli.json_output import print_json
from testbed.cli.options import JsonFlag
from testbed.cli.text import Column, say, show_table, tell
from testbed.client_errors import InvalidRequest
from testbed.values import format_duration

if TYPE_CHECKING:
    from testbed.simulator.metrics import Summary

COLUMNS = (
    Column("POLICY"),
    Column("BACKFILL"),
    Column("ALLOCATOR"),
    Column("JOBS", right=True),
    Column("MEAN WAIT", right=True),
    Column("95 %", right=True),
    Column("MEAN JCT", right=True),
    Column("BSLD", right=True),
    Column("P95 WAIT", right=True),
    Column("MAKESPAN", right=True),
    Column("UTIL", right=True),
    Column("TOOK", right=True),
)
TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="A workload trace.")]
FormatFlag = Annotated[
    str | None, typer.Option("--format", help="Format of the trace (default: told by its start).")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("simulate")(simulate)
    trace = typer.Typer(no_args_is_help=True, help="Workload traces.")
    trace.command("describe")(describe)
    trace.command("convert")(convert)
    app.add_typer(trace, name="trace")


def simulate(
    trace: TraceArgument,
    cluster: Annotated[
        str, typer.Option(help="philly, helios, alibaba, chameleon, or a YAML file.")
    ],
    policy: Annotated[
        str, typer.Option(help="Orders of the queue, with commas.")
    ] = "fcfs,multifactor,psjf",
    allocator: Annotated[str, typer.Option(help="Allocators, with commas.")] = "greedy",
    backfill: Annotated[str, typer.Option(help="Backfill modes, with commas.")] = "easy",
    jobs: Annotated[int | None, typer.Option(min=1, help="Only so many jobs.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Not the first so many jobs.")] = 0,
    load: Annotated[
        float | None, typer.Option(help="Stretch arrivals to this offered load, e.g. 0.9.")
    ] = None,
    clairvoyant: Annotated[
        bool, typer.Option("--clairvoyant", help="Users' estimates are the run times themselves.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap samples.")] = 0,
    trace_format: FormatFlag = None,
    json: JsonFlag = False,
) -> None:
    """Replay a trace under several schedulers, by the very code that schedules a live cluster."""
    from testbed.simulator.compare import run_all  # noqa: PLC0415 - loads polars
    from testbed.simulator.workload import Options  # noqa: PLC0415
    from testbed.traces.clusters import load_cluster  # noqa: PLC0415
    from testbed.traces.readers import read_trace  # noqa: PLC0415

    if load is not None and not 0 < load < 1000:
        raise InvalidRequest("--load must be between 0 and 1000", "0.9 is a busy cluster")
    results = []
    read = read_trace(trace, trace_format)
    where = load_cluster(cluster)
    options = Options(jobs, skip, load, clairvoyant)
    began_s = time.monotonic()
    for result in run_all(
        *(read, where, options),
        policies=_words("--policy", policy),
        allocators=_words("--allocator", allocator),
        backfills=_words("--backfill", backfill),
        seed=seed,
        monotonic=time.monotonic,
    ):
        results.append(result)
        if sys.stderr.isatty() or not json:
            done = f"{result.policy}/{result.backfill}/{result.allocator}"
            tell(f"{done}: mean wait {result.summary.wait_s.mean:,.0f} s "
                 f"({time.monotonic() - began_s:.0f} s so far)")  # fmt: skip
    if json:
        print_json({"trace": read.source, "cluster": where.name, "results": results})
        return
    show_table(COLUMNS, [_row(result) for result in results])


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidRequest(f"{option} is empty", "name one, or several with commas")
    return words


def _row(result: Any) -> tuple[str, ...]:
    told: Summary = result.summary
    left = f" ({told.never_started} never)" if told.never_started else ""
    return (
        result.policy,
        result.backfill,
        result.allocator,
        f"{told.jobs}{left}",
        f"{told.wait_s.mean:,.0f} s",
        f"{told.wait_s.low:,.0f}-{told.wait_s.high:,.0f}",
        f"{told.jct_s.mean:,.0f} s",
        f"{told.bounded_slowdown.mean:,.1f}",
        f"{told.wait_p95_s:,.0f} s",
        format_duration(told.makespan_s),
        f"{100 * told.gpu_utilization:.1f}%",
        f"{result.took_s:.1f} s",
    )


def describe(trace: TraceArgument, trace_format: FormatFlag = None, json: JsonFlag = False) -> None:
    """Show what is in a trace."""
    from testbed.traces.describe import describe as figures_of  # noqa: PLC0415 - loads polars
    from testbed.traces.readers import read_trace  # noqa: PLC0415

    figures = figures_of(read_trace(trace, trace_format))
    if json:
        print_json({"trace": figures})
        return
    for name, value in figures.items():
        say(f"{name:<20}  {value}")


def convert(
    trace: TraceArgument,
    to: Annotated[Path, typer.Argument(metavar="OUT.csv", help="Where the table is written.")],
    trace_format: FormatFlag = None,
    json: JsonFlag = False,
) -> None:
    """Write a trace as our own table (CSV)."""
    from testbed.traces.readers import read_trace  # noqa: PLC0415 - loads polars

    read = read_trace(trace, trace_format)
    if to.suffix != ".csv":
        raise InvalidRequest(f"{to}: the table is written as CSV", "call it .csv")
    if to.exists():
        raise InvalidRequest(f"{to} is there already", "name another file, or remove it")
    read.jobs.write_csv(to)
    if json:
        print_json({"jobs": read.jobs.height, "left_out": read.left_out, "path": str(to)})
    else:
        say(f"wrote {read.jobs.height:,} jobs to {to}; {read.left_out:,} rows are no job that ran")
