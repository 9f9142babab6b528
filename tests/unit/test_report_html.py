"""The HTML page: whole, self-contained, and safe for whatever people name their jobs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from protos.messages import JobState
from testbed.report.charts import ROW, Span, curve
from testbed.report.html import Run, render
from testbed.report.metrics import Step
from testbed.report.records import AttemptSpan, GpuSlot, JobRecord
from testbed.report.svg import text, ticks, time_ticks
from testbed.report.text import clock, duration

VOID = {"meta"}
T0 = 1_700_000_000.0


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order; collects what tests look at."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def slots(nodes=2, gpus=2):
    return tuple(
        GpuSlot(f"node-{node}", index, f"GPU-{node}{index}", "P100")
        for node in range(1, nodes + 1)
        for index in range(gpus)
    )


def job(job_id=1, name="train", state=JobState.COMPLETED, gpus=("GPU-10", "GPU-11")):
    ended = T0 + 20 if state.is_final else None
    return JobRecord(
        job_id=job_id,
        name=name,
        user="ada",
        gpus=len(gpus),
        state=state,
        submitted_at_s=T0,
        ended_at_s=ended,
        wait_s=2.0,
        run_s=18.0,
        spans=(AttemptSpan(1, T0 + 2, ended, ("node-1",), gpus),),
        gpu_utilization_pct=71.0,
    )


def run(*jobs, title="A run", gpus=None):
    return Run(title, "multifactor", "milp", jobs, slots() if gpus is None else gpus, T0 + 30)


def bars(html):
    page = Page(html)
    return [value for tag, key, value in page.attributes if tag == "rect" and "bar" in value]


def test_page_tells_the_account():
    words = " ".join(Page(render(run(job(), job(2, "other", JobState.FAILED)))).words)
    for said in ("A run", "1 of 2", "COMPLETED", "FAILED", "multifactor", "4 GPUs (P100)", "71 %"):
        assert said in words


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=y>',
        "a\nb\tc\x00\x1b[31m",
        "']]>&amp;--><!--",
        "名" * 85,
        "</title></svg></body>",
        "x" * 255,
    ],
)
def test_odd_names_are_shown_and_never_become_markup(name):
    html = render(run(job(name=name), title=name))
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert "\x00" not in html
    assert "\x1b" not in html
    shown = name.replace("\x00", "�").replace("\x1b", "�")
    assert shown in page.words


def test_page_asks_for_nothing_from_outside():
    html = render(run(job()))
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "use"} & set(page.tags)
    assert not {"href", "src", "srcset", "onload"} & {key for _, key, _ in page.attributes}
    assert "url(" not in html
    assert "@import" not in html


def test_every_chart_is_well_formed_svg():
    html = render(run(job(name="<&>\"'")))
    charts = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in html.split("<svg")[1:]]
    assert len(charts) == 3
    for chart in charts:
        ET.fromstring(chart)


def test_a_gang_on_neighbouring_gpus_is_one_block_and_on_scattered_ones_several():
    together = render(run(job(gpus=("GPU-10", "GPU-11"))))
    assert len(bars(together)) == 1
    assert f'height="{2 * ROW - 4:g}"' in together
    across = render(run(job(gpus=("GPU-11", "GPU-20"))))
    assert len(bars(across)) == 2
    apart = render(run(job(gpus=("GPU-10", "GPU-12")), gpus=slots(1, 3)))
    assert len(bars(apart)) == 2


def test_a_job_that_did_not_complete_is_marked():
    assert " bad" not in bars(render(run(job())))[0]
    assert " bad" in bars(render(run(job(state=JobState.TIMEOUT))))[0]
    assert " bad" not in bars(render(run(job(state=JobState.RUNNING))))[0]


def test_an_open_attempt_is_drawn_up_to_now():
    html = render(run(job(state=JobState.RUNNING)))
    assert "held 28.0 s" in html
    assert "1 unfinished" in html


def test_a_step_shorter_than_a_pixel_is_not_drawn():
    shown = Span(T0, T0 + 1000)
    dip = [Step(T0, 4), Step(T0 + 500, 0), Step(T0 + 500.01, 4), Step(T0 + 1000, 0)]
    titles = Page(curve(dip, shown, top=4, label="x", unit="u")).words
    assert [word for word in titles if word.startswith("0 u")] == ["0 u at 16m 40s"]


def test_runs_without_jobs_or_gpus_have_a_page_too():
    assert "No job was submitted." in Page(render(run())).words
    assert "0 GPUs (none) on 0 nodes" in render(run(job(gpus=()), gpus=()))


def test_text_escapes_quotes_and_control_characters():
    assert text('<a href="x">\'\x07') == "&lt;a href=&quot;x&quot;&gt;&#x27;�"


@pytest.mark.parametrize(
    ("high", "expected"),
    [(8, [0, 2, 4, 6, 8]), (1, [0, 0.5, 1]), (0.3, [0, 0.1, 0.2, 0.3]), (130, [0, 50, 100])],
)
def test_ticks_are_round(high, expected):
    assert ticks(high, 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("high_s", "step_s"), [(100, 10), (1000, 120), (86_400, 7200), (40 * 86_400, 7 * 86_400)]
)
def test_time_ticks_step_as_people_count_time(high_s, step_s):
    marks = time_ticks(high_s, 12)
    assert marks[0] == 0
    assert marks[1] == step_s
    assert len(marks) <= 13
    assert marks[-1] <= high_s


def test_time_ticks_of_years_stay_few():
    assert len(time_ticks(3e9, 12)) <= 13


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1m 40s"),
        (3599.6, "1h 00m"),
        (7800, "2h 10m"),
        (4 * 86_400 + 3 * 3600, "4d 03h"),
    ],
)
def test_duration(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (0.5, "0.5s"), (90, "1m30s"), (3900, "1h5m"), (172_800, "2d"), (60, "1m")],
)
def test_clock(seconds, said):
    assert clock(seconds) == said
