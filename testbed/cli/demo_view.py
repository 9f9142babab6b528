"""The demo on a terminal: a live picture, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protos.messages import GpuView, JobState, JobView
from testbed.cli.text import Column, plain
from testbed.demo import Failure, Snapshot
from testbed.report.metrics import Summary
from testbed.report.records import JobRecord
from testbed.report.text import ABSENT, duration, percent

BAR_WIDTH = 16
STATE_STYLES = {
    JobState.PENDING: "yellow",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "cyan",
    JobState.COMPLETED: "green",
}
FAILURE_STYLE = "bold red"


class LiveShow:
    """Redraws one picture in place: GPUs as bars above, the queue with progress below."""

    wants_progress = True

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        """Draw the newest state."""
        self._live.update(
            Group(_headline(snapshot), _gpu_table(snapshot), _job_table(snapshot)), refresh=True
        )


class PlainShow:
    """Writes a line when a job changes its state."""

    wants_progress = False

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._said: dict[int, JobState] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def update(self, snapshot: Snapshot) -> None:
        """Write what changed since the last state."""
        for job in snapshot.jobs:
            if self._said.get(job.job_id) is not job.state:
                self._said[job.job_id] = job.state
                where = f" on {_place(job)}" if job.attempts else ""
                self._write(
                    f"{snapshot.elapsed_s:6.1f} s  job {job.job_id:>3}  {plain(job.spec.name):<22} "
                    f"{job.spec.gpus} GPU  {job.state}{where}"
                )


ACCOUNT = (
    Column("JOBID", right=True),
    Column("NAME"),
    Column("STATE"),
    Column("GPUS", right=True),
    Column("NODE"),
    Column("WAIT", right=True),
    Column("RUN", right=True),
    Column("JCT", right=True),
    Column("UTIL", right=True),
)


def account_rows(jobs: Iterable[JobRecord]) -> list[tuple[str, ...]]:
    """One row of `ACCOUNT` per job."""
    return [
        (
            str(job.job_id),
            job.name,
            str(job.state),
            str(job.gpus),
            " ".join(job.nodes) or ABSENT,
            duration(job.wait_s),
            duration(job.run_s if job.spans else None),
            duration(job.jct_s),
            percent(job.gpu_utilization_pct),
        )
        for job in jobs
    ]


def summary_lines(summary: Summary) -> list[str]:
    """The run as a whole."""
    held_pct = None if summary.held_ratio is None else summary.held_ratio * 100
    waits = (duration(summary.wait_mean_s), duration(summary.wait_p95_s))
    jcts = (duration(summary.jct_mean_s), duration(summary.jct_p95_s))
    return [
        f"completed         {summary.completed} of {summary.jobs}",
        f"makespan          {duration(summary.makespan_s)}",
        f"wait              {waits[0]} mean, {waits[1]} p95",
        f"JCT               {jcts[0]} mean, {jcts[1]} p95",
        f"GPU time held     {percent(held_pct)} of {summary.gpus} GPUs over the makespan",
        f"GPU utilization   {percent(summary.gpu_utilization_pct)} mean over all GPUs",
    ]


def failure_lines(failures: Iterable[Failure]) -> Iterator[str]:
    """Each job that did not complete, with the end of its output."""
    for failure in failures:
        job = failure.job
        why = job.reason_text or job.reason
        yield f"job {job.job_id} {plain(job.spec.name)}: {job.state} {why}"
        yield from (f"  {plain(line)}" for line in failure.log_tail.splitlines() or ["(no output)"])


def _headline(snapshot: Snapshot) -> Text:
    counts = [
        f"{sum(job.state is state for job in snapshot.jobs)} {word}"
        for state, word in (
            (JobState.PENDING, "waiting"),
            (JobState.RUNNING, "running"),
            (JobState.COMPLETED, "completed"),
        )
    ]
    later = snapshot.expected - len(snapshot.jobs)
    to_come = f" · {later} to come" if later else ""
    return Text(f"{duration(snapshot.elapsed_s)} · {' · '.join(counts)}{to_come}\n", style="bold")


def _gpu_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for head in ("GPU", "TYPE", "UTIL", "", "MEM", "POWER", "JOB"):
        table.add_column(head, no_wrap=True)
    names = {job.job_id: job.spec.name for job in snapshot.jobs}
    for node in snapshot.nodes:
        for gpu in node.gpus:
            table.add_row(*_gpu_row(gpu, names))
    return table


def _gpu_row(gpu: GpuView, names: dict[int, str]) -> Iterable[Text | ProgressBar]:
    sample = gpu.sample
    busy_pct = None if sample is None else sample.gpu_utilization_pct
    used = None if sample is None else sample.memory_used_bytes
    power_w = None if sample is None else sample.power_w
    holder = "" if gpu.job_id is None else f"{gpu.job_id} {names.get(gpu.job_id, '')}"
    return (
        Text(f"{gpu.node}:{gpu.facts.index}"),
        Text(gpu.facts.gpu_type, "dim"),
        ProgressBar(total=100, completed=busy_pct or 0.0, width=BAR_WIDTH),
        Text(percent(busy_pct).rjust(5)),
        Text(ABSENT if used is None else f"{used / 2**30:.1f} GiB"),
        Text(ABSENT if power_w is None else f"{power_w:.0f} W"),
        Text(holder) if gpu.healthy else Text(" ".join(gpu.reasons), FAILURE_STYLE),
    )


def _job_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("\nJOB", justify="right")
    for head in ("\nNAME", "\nGPUS", "\nSTATE", "\nTIME", "\nPROGRESS", "\n", "\nNODE / REASON"):
        table.add_column(head, no_wrap=True)
    order = (JobState.RUNNING, JobState.STARTING)
    jobs = sorted(snapshot.jobs, key=lambda job: (job.state.is_final, job.state not in order))
    for job in jobs:
        table.add_row(*_job_row(job, snapshot))
    return table


def _job_row(job: JobView, snapshot: Snapshot) -> Iterable[Text | ProgressBar]:
    progress = snapshot.progress.get(job.job_id)
    completed = job.state is JobState.COMPLETED
    ratio = 1.0 if completed else progress.ratio if progress else 0.0
    return (
        Text(str(job.job_id)),
        Text(job.spec.name),
        Text(str(job.spec.gpus)),
        Text(str(job.state), STATE_STYLES.get(job.state, FAILURE_STYLE)),
        Text(duration(job.run_s if job.attempts else job.wait_s), "" if job.attempts else "dim"),
        ProgressBar(total=1.0, completed=ratio, width=BAR_WIDTH),
        Text(f"{progress.step}/{progress.of}" if progress else ""),
        Text(_place(job) if job.attempts else job.reason),
    )


def _place(job: JobView) -> str:
    ranks = job.attempts[-1].ranks
    return " ".join(f"{rank.node}:{','.join(map(str, rank.gpu_indices))}" for rank in ranks)
