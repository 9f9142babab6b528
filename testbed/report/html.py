"""One self-contained HTML page about a run: no script, no request to anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

from testbed.report.charts import Span, curve, gantt
from testbed.report.metrics import Summary, held_series, last_end_s, queue_series, summarize
from testbed.report.records import GpuSlot, JobRecord
from testbed.report.svg import element, text
from testbed.report.text import ABSENT, duration, percent


@dataclass(frozen=True, slots=True)
class Run:
    """What a report tells of."""

    title: str
    policy: str
    allocator: str
    jobs: tuple[JobRecord, ...]
    slots: tuple[GpuSlot, ...]
    now_s: float
    """UTC seconds until which the run is known; open spans are drawn up to here."""


def render(run: Run) -> str:
    """The page. A run without jobs gives a page that says so."""
    body = _run_body(run) if run.jobs else element("p", "No job was submitted.", class_="sub")
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        + element("title", text(run.title))
        + element("style", files(__package__).joinpath("style.css").read_text("utf-8"))
    )
    page = element("head", head) + element("body", element("h1", text(run.title)) + body)
    return f"<!DOCTYPE html>\n{element('html', page, lang='en')}\n"


def _run_body(run: Run) -> str:
    jobs = sorted(run.jobs, key=lambda job: job.job_id)
    summary = summarize(jobs, len(run.slots))
    shown = _shown(jobs, run.now_s)
    held = curve(
        held_series(jobs), shown, top=len(run.slots), label="GPUs held over time", unit="GPUs held"
    )
    queue = curve(
        queue_series(jobs), shown, top=4, label="Waiting jobs over time", unit="jobs waiting"
    )
    return "".join(
        (
            element("p", text(_subtitle(run, shown)), class_="sub"),
            element("div", "".join(_tiles(summary)), class_="tiles"),
            _section("GPUs", gantt(jobs, run.slots, shown), _GANTT_NOTE),
            _section(f"GPUs held (of {len(run.slots)})", held),
            _section("Jobs waiting", queue),
            _section("Jobs", _job_table(jobs), _TABLE_NOTE),
        )
    )


_GANTT_NOTE = (
    "A block is one attempt, as tall as the GPUs it held; colours only tell neighbours apart. "
    "A dashed red outline marks a job that did not complete. Point at a block for details."
)
_TABLE_NOTE = (
    "JCT: job completion time, from submission to the end. Utilization: mean of the job's GPUs "
    "while it held them, as telemetry measured it."
)


def _shown(jobs: Sequence[JobRecord], now_s: float) -> Span:
    start_s = min(job.submitted_at_s for job in jobs)
    end_s = last_end_s(jobs) if all(job.state.is_final for job in jobs) else now_s
    return Span(start_s, start_s if end_s is None else end_s)


def _subtitle(run: Run, shown: Span) -> str:
    started = datetime.fromtimestamp(shown.start_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    nodes = len({slot.node for slot in run.slots})
    types = ", ".join(sorted({slot.gpu_type for slot in run.slots}))
    return (
        f"{started} · policy {run.policy} · allocator {run.allocator} · "
        f"{len(run.slots)} GPUs ({types or 'none'}) on {nodes} nodes"
    )


def _tiles(summary: Summary) -> Iterable[str]:
    held_pct = None if summary.held_ratio is None else summary.held_ratio * 100
    unfinished = f"{summary.unfinished} unfinished" if summary.unfinished else ""
    tiles = (
        (f"{summary.completed} of {summary.jobs}", "jobs completed", unfinished),
        (duration(summary.makespan_s), "makespan", ""),
        (duration(summary.wait_mean_s), "mean wait", f"p95 {duration(summary.wait_p95_s)}"),
        (duration(summary.jct_mean_s), "mean JCT", f"p95 {duration(summary.jct_p95_s)}"),
        (percent(held_pct), "of GPU time held", ""),
        (percent(summary.gpu_utilization_pct), "GPU utilization", "idle GPUs count as 0"),
    )
    return (
        element(
            "div",
            element("b", text(figure)) + element("span", text(meaning)) + element("i", text(more)),
            class_="tile",
        )
        for figure, meaning, more in tiles
    )


def _section(title: str, content: str, note: str = "") -> str:
    under = element("p", text(note), class_="note") if note else ""
    return element("h2", text(title)) + element("div", content, class_="wide") + under


def _job_table(jobs: Iterable[JobRecord]) -> str:
    heads = (
        ("Job", "num"),
        ("Name", ""),
        ("State", ""),
        ("GPUs", "num"),
        ("Node", ""),
        ("Wait", "num"),
        ("Run", "num"),
        ("JCT", "num"),
        ("Utilization", "num"),
    )
    head = "".join(element("th", name, class_=kind) for name, kind in heads)
    rows = "".join(element("tr", _job_cells(job)) for job in jobs)
    return element("table", element("thead", element("tr", head)) + element("tbody", rows))


def _job_cells(job: JobRecord) -> str:
    cells = (
        (str(job.job_id), "num"),
        (job.name, "name"),
        (str(job.state), str(job.state)),
        (str(job.gpus), "num"),
        (", ".join(job.nodes) or ABSENT, ""),
        (duration(job.wait_s), "num"),
        (duration(job.run_s if job.spans else None), "num"),
        (duration(job.jct_s), "num"),
        (percent(job.gpu_utilization_pct), "num"),
    )
    return "".join(element("td", text(words), class_=kind) for words, kind in cells)
