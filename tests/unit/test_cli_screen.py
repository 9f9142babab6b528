"""The live screen: fits, tells what it leaves out, shows nothing raw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.messages import (
    AdminState,
    ClusterInfo,
    GpuFacts,
    GpuSample,
    GpuView,
    JobSpec,
    JobState,
    JobView,
    NodeFacts,
    NodeView,
)
from testbed.cli.screen import BAR_CELLS, bar, render
from testbed.cli.text import cell_width

INFO = ClusterInfo(
    "rltune", "0.1", "fcfs", "milp", 0.0, 1.0, {"RUNNING": 1}, 2, 2, 8, 1, 0, None, 0
)


def node(name: str, gpus: int, state: str = "UP") -> NodeView:
    facts = tuple(
        GpuFacts(f"GPU-{name}-{i}", i, "Tesla P100", "P100", "0", 16 * 2**30) for i in range(gpus)
    )
    views = tuple(
        GpuView(name, f, GpuSample(f.uuid, gpu_utilization_pct=50.0), 7, healthy=True, reasons=())
        for f in facts
    )
    return NodeView(
        name=name, state=state, admin=AdminState.ACTIVE,
        reasons=("disk\x1b[31m",) * (state != "UP"),
        address="", facts=NodeFacts(name, "", 8, 2**30, facts), host=None, gpus=views, cpus_used=0,
        memory_used_bytes=0, last_seen_s_ago=0.1, telemetry_age_s=None, jobs=(),
    )  # fmt: skip


def job(job_id: int, name: str = "job", state: JobState = JobState.PENDING) -> JobView:
    return JobView(
        job_id=job_id, spec=JobSpec(name, "ann", ("true",), "/"), state=state, completing=False,
        reason="", reason_text="", submitted_at_s=0.0, eligible_at_s=None, started_at_s=None,
        ended_at_s=None, wait_s=0.0, run_s=0.0, gpu_s=0.0, exit=None, exit_node_rank=None,
        attempts=(),
    )  # fmt: skip


@given(st.floats(-10, 200))
def test_a_bar_is_always_as_wide(percent):
    assert cell_width(bar(percent)) == BAR_CELLS


def test_a_bar_shows_how_much_and_whether_it_is_known():
    assert bar(0) == " " * BAR_CELLS
    assert bar(100) == "█" * BAR_CELLS
    assert bar(55) == "█████▌    "
    assert bar(None) == "·" * BAR_CELLS


@pytest.mark.parametrize(
    ("nodes", "gpus", "jobs"), [(0, 0, 0), (2, 4, 3), (2, 4, 500), (40, 8, 9), (500, 16, 0)]
)
@pytest.mark.parametrize("height", [20, 24, 60])
def test_the_screen_fits_and_says_what_it_leaves_out(nodes, gpus, jobs, height):
    screen = render(
        INFO,
        [node(f"node-{i}", gpus) for i in range(nodes)],
        [job(i + 1) for i in range(jobs)],
        100,
        height,
    ).plain
    lines = screen.split("\n")
    assert len(lines) <= height
    shown = sum(
        line.split()[:1] in [[str(i + 1)] for i in range(jobs)] and "PENDING" in line
        for line in lines
    )
    if shown < jobs:
        assert f"{jobs - shown} more jobs" in screen
    if f"node-{nodes - 1} " not in screen and nodes:
        assert "more nodes" in screen


def test_what_runs_comes_first_and_names_play_no_tricks():
    waiting, running = job(1, "w"), job(2, "[red]\x1b[31mx\n", JobState.RUNNING)
    screen = render(INFO, [node("n", 2), node("m", 1, "DRAINED")], [waiting, running], 120, 40)
    lines = screen.plain.split("\n")
    assert [line.split()[0] for line in lines[-2:]] == ["2", "1"]
    assert "[red]\\x1b[31mx\\n" in lines[-2]
    assert any(line.startswith("m  DRAINED") and "disk\\x1b[31m" in line for line in lines)
    assert "\x1b" not in screen.plain
    assert any("█████" in line and " 50%" in line and "job 7" in line for line in lines)


def test_a_card_without_a_reading_shows_dots_not_zero():
    silent = node("n", 1)
    silent = replace(silent, gpus=(replace(silent.gpus[0], sample=None),))
    assert "··········    -  P100  -/16GiB" in render(INFO, [silent], [], 100, 24).plain
