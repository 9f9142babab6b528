"""`rltune demo`: the authors' job mix on a cluster of mock GPUs, and its account."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.cli.local_output import SCHEMA_VERSION, console_of, tell_stopped, write_json
from testbed.client_errors import InvalidRequest
from testbed.demo import ALLOCATOR, NODES, POLICY, Interrupted, Outcome, run_mix
from testbed.demo_view import LiveShow, PlainShow, print_account, print_failures
from testbed.interrupts import Interrupts
from testbed.local import LocalCluster, StartInterrupted, Stopped
from testbed.mix import MIX_16
from testbed.report.html import render
from testbed.report.metrics import summarize

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run_demo(jobs: int, report: Path, *, json_output: bool) -> int:
    """Run the first `jobs` of the mix and write the report; returns the exit code.

    Raises:
        RltuneError: the report cannot be written, or the cluster failed.
    """
    console = console_of(stderr=json_output)
    _check_writable(report)
    try:
        outcome, stopped = _run(console, jobs)
    except (StartInterrupted, Interrupted):
        console.print("interrupted: the demo's jobs were cancelled")
        return EXIT_INTERRUPTED
    tell_stopped(console, stopped)
    _finish(console, outcome, report, json_output=json_output)
    return EXIT_FAILED if outcome.failures or stopped.leftovers else 0


def _run(console: Console, jobs: int) -> tuple[Outcome, Stopped]:
    show = LiveShow(console) if console.is_terminal else PlainShow(console)
    with Interrupts() as interrupts:
        cluster = LocalCluster(
            NODES, policy=POLICY, allocator=ALLOCATOR, name="demo", interrupts=interrupts
        )
        cluster.start()
        try:
            with show:
                outcome = run_mix(cluster, MIX_16[:jobs], show, interrupts=interrupts)
        finally:
            stopped = cluster.stop()
    return outcome, stopped


def _finish(console: Console, outcome: Outcome, report: Path, *, json_output: bool) -> None:
    report.write_text(render(outcome.run), encoding="utf-8")
    summary = summarize(outcome.run.jobs, len(outcome.run.slots))
    print_failures(console, outcome)
    if json_output:
        write_json(_value(outcome, report))
        return
    print_account(console, outcome, summary)
    console.print(f"report            {report.absolute()}", soft_wrap=True, markup=False)


def _value(outcome: Outcome, report: Path) -> dict[str, Any]:
    run = outcome.run
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": run.policy,
        "allocator": run.allocator,
        "jobs": [
            {
                "job_id": job.job_id,
                "name": job.name,
                "state": str(job.state),
                "gpus": job.gpus,
                "nodes": list(job.nodes),
                "submitted_at": datetime.fromtimestamp(job.submitted_at_s, UTC)
                .isoformat()
                .replace("+00:00", "Z"),
                "wait_s": job.wait_s,
                "run_s": job.run_s,
                "jct_s": job.jct_s,
                "gpu_utilization_pct": job.gpu_utilization_pct,
            }
            for job in run.jobs
        ],
        "summary": asdict(summarize(run.jobs, len(run.slots))),
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
