"""`rltune history`: the account of jobs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from protos.messages import FINAL_JOB_STATES, JobState, JobView
from testbed.cli import complete
from testbed.cli.jobs import exit_word, job_color, nodes_word, state_word
from testbed.cli.json_output import print_json
from testbed.cli.options import (
    INT32_MAX,
    ControllerFlag,
    JsonFlag,
    connect,
    read_states,
    some_text,
)
from testbed.cli.text import ABSENT, Column, say, show_table, tell
from testbed.client_errors import InvalidRequest
from testbed.values import format_size

DEFAULT_LIMIT = 1000

COLUMNS = (
    Column("JOBID", right=True),
    Column("NAME", cut=True),
    Column("USER"),
    Column("STATE"),
    Column("EXIT"),
    Column("WAIT S", right=True),
    Column("RUN S", right=True),
    Column("GPUS", right=True),
    Column("GPU S", right=True),
    Column("GPU UTIL", right=True),
    Column("PEAK GPU MEM", right=True),
    Column("NODES", cut=True),
)


@dataclass(frozen=True, slots=True)
class Account:
    """What one job took."""

    job_id: int
    name: str
    user: str
    state: JobState
    exit_code: int | None
    signal: int | None
    attempts: int
    submitted_at_s: float
    ended_at_s: float | None
    wait_s: float
    run_s: float
    gpus: int
    gpu_s: float
    """GPUs times run time, over all attempts."""
    gpu_utilization_mean_pct: float | None
    """Of the newest attempt that was measured."""
    gpu_memory_peak_bytes: int | None
    """Largest on any GPU of any attempt."""
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """What all jobs took together."""

    jobs: int
    gpu_s: float
    wait_mean_s: float | None
    run_mean_s: float | None
    gpu_utilization_mean_pct: float | None
    """Weighted by GPU time."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("history")(history)


def history(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            autocompletion=complete.final_states,
            help="Only these final states.",
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", callback=some_text, help="Only this user's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-J", callback=some_text, help="Only this name.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=INT32_MAX, help="Only the newest so many.")
    ] = DEFAULT_LIMIT,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Account for jobs that have ended: wait, run, GPU time, utilization, memory, exit, nodes."""
    states = read_states(state) if state else tuple(s for s in JobState if s.is_final)
    if not FINAL_JOB_STATES.issuperset(states):
        raise InvalidRequest(
            "--state: history is about jobs that have ended", "`rltune jobs --state` shows others"
        )
    with connect(controller) as client:
        found = client.jobs(states=states, user=user, name=name, limit=limit + 1)
    jobs = sorted(found[:limit], key=lambda job: job.job_id)
    accounts = [account(job) for job in jobs]
    totals = total(accounts)
    if json:
        print_json({"jobs": accounts, "totals": totals, "more": len(found) > limit})
        return
    rows = [_row(job, line) for job, line in zip(jobs, accounts, strict=True)]
    show_table(COLUMNS, rows, [job_color(job) for job in jobs])
    say(
        f"{totals.jobs} jobs, {totals.gpu_s:.1f} GPU s, mean wait {_seconds(totals.wait_mean_s)} s,"
        f" mean run {_seconds(totals.run_mean_s)} s,"
        f" mean GPU utilization {_percent(totals.gpu_utilization_mean_pct)}"
    )
    if len(found) > limit:
        tell(f"only the newest {limit} are shown; say --limit to see more")


def account(job: JobView) -> Account:
    """The account of one job."""
    means = [a.gpu_utilization_mean_pct for a in job.attempts]
    measured = [mean for mean in means if mean is not None]
    peaks = [a.gpu_memory_peak_bytes for a in job.attempts]
    nodes = job.attempts[-1].ranks if job.attempts else ()
    return Account(
        job_id=job.job_id,
        name=job.spec.name,
        user=job.spec.user,
        state=job.state,
        exit_code=None if job.exit is None else job.exit.exit_code,
        signal=None if job.exit is None else job.exit.signal,
        attempts=len(job.attempts),
        submitted_at_s=job.submitted_at_s,
        ended_at_s=job.ended_at_s,
        wait_s=job.wait_s,
        run_s=job.run_s,
        gpus=job.spec.gpus,
        gpu_s=job.gpu_s,
        gpu_utilization_mean_pct=measured[-1] if measured else None,
        gpu_memory_peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        nodes=tuple(dict.fromkeys(rank.node for rank in nodes)),
    )


def total(accounts: Sequence[Account]) -> Totals:
    """Sums and means over jobs."""
    ran = [line for line in accounts if line.attempts]
    weighted = [
        (line.gpu_utilization_mean_pct, line.gpu_s)
        for line in accounts
        if line.gpu_utilization_mean_pct is not None and line.gpu_s > 0
    ]
    weight_s = sum(gpu_s for _, gpu_s in weighted)
    return Totals(
        jobs=len(accounts),
        gpu_s=sum(line.gpu_s for line in accounts),
        wait_mean_s=sum(line.wait_s for line in ran) / len(ran) if ran else None,
        run_mean_s=sum(line.run_s for line in ran) / len(ran) if ran else None,
        gpu_utilization_mean_pct=(
            sum(pct * gpu_s for pct, gpu_s in weighted) / weight_s if weighted else None
        ),
    )


def _row(job: JobView, line: Account) -> tuple[str, ...]:
    return (
        str(line.job_id),
        line.name,
        line.user,
        state_word(job),
        ABSENT if job.exit is None else exit_word(job.exit),
        _seconds(line.wait_s),
        _seconds(line.run_s),
        str(line.gpus),
        _seconds(line.gpu_s),
        _percent(line.gpu_utilization_mean_pct),
        format_size(line.gpu_memory_peak_bytes),
        nodes_word(job),
    )


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}%"
