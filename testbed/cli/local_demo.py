"""`rltune demo`: the authors' job mix on a cluster of mock GPUs, and its account."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.cli.demo_view import (
    ACCOUNT,
    LiveShow,
    PlainShow,
    account_rows,
    failure_lines,
    summary_lines,
)
from testbed.cli.exit_codes import ExitCode
from testbed.cli.json_output import iso_utc, print_json, print_json_error
from testbed.cli.local_up import stopped_lines
from testbed.cli.text import say, say_lines, show_table, tell
from testbed.client_errors import InvalidRequest
from testbed.demo import ALLOCATOR, NODES, POLICY, Interrupted, Outcome, run_mix
from testbed.interrupts import Interrupts
from testbed.local import LocalCluster, StartInterrupted, Stopped
from testbed.mix import MIX_16
from testbed.report.html import render
from testbed.report.metrics import Summary, summarize


def run_demo(jobs: int, report: Path, *, json_output: bool) -> int:
    """Run the first `jobs` of the mix and write the report; returns the exit code.

    Raises:
        RltuneError: the report cannot be written, or the cluster failed.
    """
    _check_writable(report)
    try:
        outcome, stopped = _run(jobs, json_output=json_output)
    except (StartInterrupted, Interrupted) as error:
        if json_output:
            print_json_error(error)
        else:
            tell(error.message)
        return ExitCode.INTERRUPTED
    for line in (*stopped_lines(stopped), *failure_lines(outcome.failures)):
        tell(line)
    report.write_text(render(outcome.run), encoding="utf-8")
    summary = summarize(outcome.run.jobs, len(outcome.run.slots))
    if json_output:
        print_json(_value(outcome, summary, report))
    else:
        say()
        show_table(ACCOUNT, account_rows(outcome.run.jobs))
        say_lines(["", *summary_lines(summary), f"report            {report.absolute()}"])
    return ExitCode.FAILED if outcome.failures or stopped.leftovers else ExitCode.OK


def _run(jobs: int, *, json_output: bool) -> tuple[Outcome, Stopped]:
    with Interrupts() as interrupts:
        cluster = LocalCluster(
            NODES, policy=POLICY, allocator=ALLOCATOR, name="demo", interrupts=interrupts
        )
        cluster.start()
        try:
            with _show(json_output=json_output) as show:
                outcome = run_mix(cluster, MIX_16[:jobs], show, interrupts=interrupts)
        finally:
            stopped = cluster.stop()
    return outcome, stopped


def _show(*, json_output: bool) -> LiveShow | PlainShow:
    if json_output:
        return PlainShow(tell)
    console = Console()
    return LiveShow(console) if console.is_terminal else PlainShow(_say_at_once)


def _say_at_once(line: str) -> None:
    say(line)
    sys.stdout.flush()


def _value(outcome: Outcome, summary: Summary, report: Path) -> dict[str, Any]:
    run = outcome.run
    return {
        "policy": run.policy,
        "allocator": run.allocator,
        "jobs": [
            {
                "job_id": job.job_id,
                "name": job.name,
                "state": job.state,
                "gpus": job.gpus,
                "nodes": job.nodes,
                "submitted_at": iso_utc(job.submitted_at_s),
                "wait_s": job.wait_s,
                "run_s": job.run_s,
                "jct_s": job.jct_s,
                "gpu_utilization_pct": job.gpu_utilization_pct,
            }
            for job in run.jobs
        ],
        "summary": summary,
        "failures": [
            {"job_id": failure.job.job_id, "log_tail": failure.log_tail}
            for failure in outcome.failures
        ],
        "report": str(report.absolute()),
    }


def _check_writable(report: Path) -> None:
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.touch()
    except OSError as error:
        raise InvalidRequest(
            f"--report: cannot write {report}: {error.strerror}", "name another file"
        ) from None
