"""The charts of a report as inline SVG: Gantt of the GPUs and step curves over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protos.messages import JobState
from testbed.report.metrics import Step
from testbed.report.records import AttemptSpan, GpuSlot, JobRecord
from testbed.report.svg import Scale, element, number, text, ticks, time_ticks
from testbed.report.text import clock, duration

WIDTH = 1120.0
LEFT = 132.0
RIGHT = 16.0
ROW = 26.0
NODE_GAP = 10.0
AXIS = 30.0
CURVE_HEIGHT = 150.0
HUES = 8
"""Colours that jobs take in turn; the page's style sheet defines as many."""
LABEL_MIN_WIDTH = 18.0
CHARACTER_WIDTH = 6.4


@dataclass(frozen=True, slots=True)
class Span:
    """The time that all charts of a report show, in UTC seconds."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is; never 0, so that it can be an axis."""
        return max(self.end_s - self.start_s, 1.0)


@dataclass(frozen=True, slots=True)
class _Bar:
    """Adjacent GPUs of one node that one attempt held."""

    job: JobRecord
    span: AttemptSpan
    slots: tuple[GpuSlot, ...]


def gantt(jobs: Sequence[JobRecord], slots: Sequence[GpuSlot], shown: Span) -> str:
    """One row per GPU, one block per attempt; GPUs of a gang that lie together form one block."""
    tops = _row_tops(slots)
    height = (max(tops.values()) + ROW if tops else 0.0) + AXIS
    scale = Scale(0.0, shown.length_s, LEFT, WIDTH - RIGHT)
    parts = [
        *_time_axis(scale, shown, height),
        *(_row(slot, tops[slot.uuid]) for slot in slots),
        *_node_names(slots, tops),
        *(_block(bar, tops, scale, shown) for bar in _bars(jobs, slots)),
    ]
    return _chart(parts, height, "Gantt chart: which job held which GPU when")


def curve(steps: Sequence[Step], shown: Span, *, top: int, label: str, unit: str) -> str:
    """A step function over time, filled; `top` is the least height of its axis."""
    height = CURVE_HEIGHT + AXIS
    scale = Scale(0.0, shown.length_s, LEFT, WIDTH - RIGHT)
    steps = _visible(steps, shown, scale)
    highest = max([top, 1, *(step.value for step in steps)])
    vertical = Scale(0.0, highest, CURVE_HEIGHT, 10.0)
    parts = [
        *_time_axis(scale, shown, height),
        *(_level(level, vertical) for level in ticks(highest, 4) if level == int(level)),
        *_step_area(steps, shown, scale, vertical),
        *(
            _hover(step, until_s, shown, scale, f"{step.value} {unit}")
            for step, until_s in _held_until(steps, shown)
        ),
    ]
    return _chart(parts, height, label)


def _chart(parts: Iterable[str], height: float, label: str) -> str:
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        role="img",
        aria_label=label,
    )


def _time_axis(scale: Scale, shown: Span, height: float) -> Iterator[str]:
    bottom = height - AXIS
    for at_s in time_ticks(shown.length_s, 12):
        x = scale(at_s)
        yield element("line", class_="grid", x1=x, x2=x, y1=0.0, y2=bottom + 4)
        yield element("text", clock(at_s), class_="tick mid", x=x, y=bottom + 19)


def _row_tops(slots: Sequence[GpuSlot]) -> dict[str, float]:
    tops: dict[str, float] = {}
    y = 0.0
    for position, slot in enumerate(slots):
        if position and slots[position - 1].node != slot.node:
            y += NODE_GAP
        tops[slot.uuid] = y
        y += ROW
    return tops


def _row(slot: GpuSlot, top: float) -> str:
    lane = element(
        "rect", class_="lane", x=LEFT, y=top + 1, width=WIDTH - LEFT - RIGHT, height=ROW - 2
    )
    name = element(
        "text",
        f"{slot.index} {element('title', text(slot.uuid))}",
        class_="tick end",
        x=LEFT - 8,
        y=top + ROW / 2 + 4,
    )
    return lane + name


def _node_names(slots: Sequence[GpuSlot], tops: Mapping[str, float]) -> Iterator[str]:
    for position, slot in enumerate(slots):
        if position and slots[position - 1].node == slot.node:
            continue
        y = tops[slot.uuid] + ROW / 2 + 4
        yield element(
            "text",
            text(_fitting(slot.node, 90.0)) + element("title", text(slot.node)),
            class_="node",
            x=0.0,
            y=y,
        )
        mates = [other for other in slots if other.node == slot.node]
        if len(mates) > 1:
            types = ", ".join(dict.fromkeys(mate.gpu_type for mate in mates))
            yield element("text", text(_fitting(types, 105.0)), class_="tick", x=0.0, y=y + ROW - 8)


def _bars(jobs: Sequence[JobRecord], slots: Sequence[GpuSlot]) -> Iterator[_Bar]:
    for job in jobs:
        for span in job.spans:
            run: list[GpuSlot] = []
            for slot in slots:
                held = slot.uuid in span.gpu_uuids
                if run and (not held or slot.node != run[-1].node):
                    yield _Bar(job, span, tuple(run))
                    run = []
                if held:
                    run.append(slot)
            if run:
                yield _Bar(job, span, tuple(run))


def _block(bar: _Bar, tops: Mapping[str, float], scale: Scale, shown: Span) -> str:
    job, span = bar.job, bar.span
    end_s = shown.end_s if span.end_s is None else span.end_s
    left = scale(span.start_s - shown.start_s)
    width = max(scale(end_s - shown.start_s) - left - 1, 1.5)
    top = tops[bar.slots[0].uuid] + 2
    height = tops[bar.slots[-1].uuid] + ROW - 2 - top
    ended_badly = job.state.is_final and job.state is not JobState.COMPLETED
    box = element(
        "rect",
        class_=f"bar hue{job.job_id % HUES}" + (" bad" if ended_badly else ""),
        x=left,
        y=top,
        width=width,
        height=height,
        rx=3.0,
    )
    label = _label(job, left, top + height / 2 + 4, width)
    return element("g", element("title", text(_tooltip(job, span, end_s))) + box + label)


def _label(job: JobRecord, left: float, y: float, width: float) -> str:
    if width < LABEL_MIN_WIDTH:
        return ""
    named = f"{job.job_id} {job.name}"
    said = _fitting(named, width - 10)
    if len(said) < len(str(job.job_id)) + 4:
        said = str(job.job_id)
    return element("text", text(said), class_="on-bar", x=left + 5, y=y)


def _fitting(words: str, width: float) -> str:
    room = max(int(width / CHARACTER_WIDTH), 1)
    return words if len(words) <= room else words[: room - 1] + "…"


def _tooltip(job: JobRecord, span: AttemptSpan, end_s: float) -> str:
    lines = [
        f"job {job.job_id} · {job.name}",
        f"{job.state} · {job.gpus} GPUs · attempt {span.attempt} on {', '.join(span.nodes)}",
        f"held {duration(end_s - span.start_s)} · waited {duration(job.wait_s)}",
    ]
    return "\n".join(lines)


def _level(level: float, vertical: Scale) -> str:
    y = vertical(level)
    line = element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
    return line + element("text", f"{level:g}", class_="tick end", x=LEFT - 8, y=y + 4)


def _visible(steps: Sequence[Step], shown: Span, scale: Scale) -> list[Step]:
    """Steps without those that last less than a pixel, such as the moment between two jobs."""
    return [
        step
        for step, until_s in _held_until(steps, shown)
        if scale(until_s) - scale(step.at_s) >= 1 or step is steps[-1]
    ]


def _held_until(steps: Sequence[Step], shown: Span) -> Iterator[tuple[Step, float]]:
    for position, step in enumerate(steps):
        following = steps[position + 1].at_s if position + 1 < len(steps) else shown.end_s
        yield step, following


def _step_area(steps: Sequence[Step], shown: Span, scale: Scale, vertical: Scale) -> Iterator[str]:
    base = vertical(0)
    path = f"M{number(scale(0))} {number(base)}"
    for step, until_s in _held_until(steps, shown):
        y = number(vertical(step.value))
        path += f"H{number(scale(step.at_s - shown.start_s))}V{y}"
        path += f"H{number(scale(until_s - shown.start_s))}"
    yield element("path", class_="area", d=f"{path}V{number(base)}Z")
    yield element("path", class_="curve", d=path)


def _hover(step: Step, until_s: float, shown: Span, scale: Scale, words: str) -> str:
    left = scale(step.at_s - shown.start_s)
    title = f"{words} at {duration(step.at_s - shown.start_s)}"
    return element(
        "rect",
        element("title", text(title)),
        class_="hover",
        x=left,
        y=0.0,
        width=max(scale(until_s - shown.start_s) - left, 0.0),
        height=CURVE_HEIGHT,
    )
