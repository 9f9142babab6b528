"""The screen of `rltune watch`: cluster, GPUs as bars, queue. Data in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from protos.messages import ClusterInfo, GpuView, JobView, NodeView
from testbed.cli.jobs import COLUMNS, job_color, job_row
from testbed.cli.nodes import node_row
from testbed.cli.text import plain, table
from testbed.values import format_size

BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
FRAME_LINES = 5
"""Lines besides GPUs and jobs: title, an empty one, the queue's head, two that say "and more"."""


def render(
    info: ClusterInfo, nodes: Sequence[NodeView], jobs: Sequence[JobView], width: int, height: int
) -> Text:
    """The whole screen; it fits into `width` x `height` cells, and says what it leaves out."""
    screen = Text(no_wrap=True, overflow="ellipsis")
    screen.append(_title(info), style="bold")
    room = max(4, (height - FRAME_LINES) // 2)
    detailed = sum(1 + len(node.gpus) for node in nodes) <= room
    shown = nodes if detailed else nodes[:room]
    for node in shown:
        screen.append_text(_node(node, detailed=detailed))
    if len(nodes) > len(shown):
        screen.append(f"\n… and {len(nodes) - len(shown)} more nodes", style="dim")
    left = height - FRAME_LINES - str(screen).count("\n")
    for line in _queue(jobs, width, max(1, left)):
        screen.append_text(line)
    return screen


def _title(info: ClusterInfo) -> str:
    waiting = info.jobs_by_state.get("PENDING", 0)
    running = info.jobs_by_state.get("RUNNING", 0)
    return plain(
        f"{info.cluster}  {info.policy} + {info.allocator}  "
        f"nodes {info.nodes_up}/{info.nodes_total}  GPUs {info.gpus_used}/{info.gpus_total}  "
        f"running {running}  waiting {waiting}"
    )


def _node(node: NodeView, *, detailed: bool) -> Text:
    row = node_row(node)
    healthy = node.state == "UP"
    reason = "" if healthy else f"  {row[-1]}"
    facts = f"{row[0]}  {row[1]}  GPUs {row[2]}  CPUs {row[7]}  mem {row[8]}{reason}"
    text = Text("\n" + plain(facts), style="" if healthy else "red")
    if not detailed:
        text.append("  " + "".join(_column(gpu) for gpu in node.gpus))
        return text
    for gpu in node.gpus:
        text.append(f"\n  {gpu.facts.index:>2} ")
        text.append(bar(_utilization_pct(gpu)), style="green" if gpu.healthy else "red")
        text.append(plain(_gpu_facts(gpu)))
    return text


def _gpu_facts(gpu: GpuView) -> str:
    sample = gpu.sample
    percent = _utilization_pct(gpu)
    used = None if sample is None else sample.memory_used_bytes
    power = None if sample is None or sample.power_w is None else f"{sample.power_w:.0f} W"
    job = "" if gpu.job_id is None else f"  job {gpu.job_id}"
    trouble = "" if gpu.healthy else f"  {'; '.join(gpu.reasons) or 'unhealthy'}"
    return (
        f" {'-' if percent is None else f'{percent:.0f}%':>4}  {gpu.facts.gpu_type}  "
        f"{format_size(used)}/{format_size(gpu.facts.memory_bytes)}  {power or '-'}{job}{trouble}"
    )


def _utilization_pct(gpu: GpuView) -> float | None:
    return None if gpu.sample is None else gpu.sample.gpu_utilization_pct


def bar(percent: float | None) -> str:
    """A bar of `BAR_CELLS` cells, exact to an eighth of one; dots when nothing is known."""
    if percent is None:
        return "·" * BAR_CELLS
    eighths = round(min(100.0, max(0.0, percent)) / 100 * BAR_CELLS * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(BAR_CELLS)


def _column(gpu: GpuView) -> str:
    percent = _utilization_pct(gpu)
    if percent is None:
        return "·"
    return _HEIGHTS[min(7, int(min(100.0, max(0.0, percent)) / 12.5))]


def _queue(jobs: Sequence[JobView], width: int, lines: int) -> Iterator[Text]:
    ordered = sorted(jobs, key=lambda job: (not job.state.is_active, job.job_id))
    shown = ordered[:lines]
    rows = table(COLUMNS, [job_row(job) for job in shown], width=width)
    yield Text(f"\n\n{rows[0]}", style="bold")
    for job, row in zip(shown, rows[1:], strict=True):
        yield Text(f"\n{row}", style=job_color(job) or "")
    if len(ordered) > len(shown):
        yield Text(f"\n… and {len(ordered) - len(shown)} more jobs", style="dim")
