"""The demo's mix, what it reads from job logs, and its plain output."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from protos.messages import (
    AdminState,
    AttemptState,
    AttemptView,
    GpuFacts,
    GpuSample,
    GpuView,
    JobSpec,
    JobState,
    JobView,
    NodeFacts,
    NodeView,
    RankPhase,
    RankView,
)
from testbed.cli.demo_view import (
    LiveShow,
    PlainShow,
    account_rows,
    failure_lines,
    summary_lines,
)
from testbed.command_lines import _mock_cpus
from testbed.demo import Failure, Progress, Snapshot, last_progress
from testbed.mix import MIX_16, arrivals_s, job_request
from testbed.report.metrics import summarize
from testbed.report.records import gpu_slots, job_record


def gpu(index, job_id=None):
    facts = GpuFacts(f"GPU-{index}", index, "Tesla P100-PCIE-16GB", "P100", f"0000:{index}:00.0")
    sample = GpuSample(f"GPU-{index}", memory_used_bytes=2**30, gpu_utilization_pct=40.0)
    return GpuView("node-1", facts, None if index else sample, job_id, healthy=True, reasons=())


def node(*gpus):
    return NodeView(
        name="node-1",
        state="UP",
        admin=AdminState.ACTIVE,
        reasons=(),
        address="127.0.0.1",
        facts=NodeFacts("here", "Linux", 16, 2**34, tuple(gpu.facts for gpu in gpus)),
        host=None,
        gpus=gpus,
        cpus_used=0,
        memory_used_bytes=0,
        last_seen_s_ago=0.1,
        telemetry_age_s=0.1,
        jobs=(),
    )


def job(job_id=1, state=JobState.RUNNING, name="train", started=True):
    rank = RankView("node-1", 0, ("GPU-1",), (1,), RankPhase.RUNNING, 7, None, None)
    ended = 130.0 if state.is_final else None
    attempt = AttemptView(
        1, AttemptState.RUNNING, None, 101.0, 102.0, ended, (rank,), gpu_utilization_mean_pct=60.0
    )
    return JobView(
        job_id=job_id,
        spec=JobSpec(name, "ada", ("true",), "/", gpus=1),
        state=state,
        completing=False,
        reason="" if started else "Resources",
        reason_text="",
        submitted_at_s=100.0,
        eligible_at_s=100.0,
        started_at_s=102.0 if started else None,
        ended_at_s=ended,
        wait_s=2.0,
        run_s=28.0 if started else 0.0,
        gpu_s=29.0,
        exit=None,
        exit_node_rank=None,
        attempts=(attempt,) if started else (),
    )


def test_the_mix_is_the_authors_sixteen_jobs():
    assert len(MIX_16) == 16
    assert Counter(entry.gpus for entry in MIX_16) == {1: 2, 2: 8, 4: 6}
    families = Counter(re.match("[a-z]+", entry.model)[0] for entry in MIX_16)
    assert families == {"resnet": 5, "densenet": 3, "opt": 7, "bloom": 1}
    assert {entry.mode for entry in MIX_16} == {"single", "dp", "ddp"}


@pytest.mark.parametrize("entry", MIX_16, ids=lambda entry: entry.name)
def test_every_job_of_the_mix_is_a_valid_submission(entry):
    spec = job_request(entry, cwd=Path("/tmp"), seed=3).to_spec(user="ada")
    assert spec.gpus == entry.gpus
    assert spec.gpu_types == ("P100",)
    assert spec.env["OMP_NUM_THREADS"] == "1"
    assert spec.time_limit_s == 900
    assert "workloads.train" in spec.argv
    assert spec.argv[spec.argv.index("--batch-size") + 1] == str(entry.batch_size)
    steps = 20 if entry.epochs is None else 15 * entry.epochs
    assert spec.argv[spec.argv.index("--steps") + 1] == str(steps)


def test_arrivals_start_at_once_and_are_the_same_for_a_seed():
    first = arrivals_s(16, np.random.default_rng(1))
    assert first[0] == 0
    assert first == sorted(first)
    assert len(first) == 16
    assert first == arrivals_s(16, np.random.default_rng(1))
    assert first != arrivals_s(16, np.random.default_rng(2))
    assert arrivals_s(1, np.random.default_rng(1)) == [0.0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"", None),
        (b'"step": 3, "of": 9}\n{"step": 4, "of": 9}\nwords\n{"event": "x"}\n', Progress(4, 9)),
        (b'{"step": 5, "of": 9}\n{"step": 6, "of"', Progress(5, 9)),
        (b"[1, 2]\n7\n\xff\xfe\n", None),
        (b'{"step": 1, "of": 4}\r\n', Progress(1, 4)),
    ],
)
def test_last_progress(output, expected):
    assert last_progress(output) == expected


def test_progress_of_nothing_is_zero():
    assert Progress(0, 0).ratio == 0
    assert Progress(1, 4).ratio == 0.25


def test_plain_show_writes_one_line_a_change():
    lines = []
    show = PlainShow(lines.append)
    show.update(Snapshot(1.0, 2, (job(1, JobState.PENDING, started=False),), ()))
    show.update(Snapshot(1.5, 2, (job(1, JobState.PENDING, started=False),), ()))
    show.update(Snapshot(2.0, 2, (job(1), job(2, name="[red]\x1b[2J")), ()))
    assert len(lines) == 3
    assert "PENDING" in lines[0]
    assert "RUNNING on node-1:1" in lines[1]
    assert "[red]\\x1b[2J" in lines[2]


def test_live_show_draws_gpus_progress_and_queue():
    out = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    jobs = (job(1), job(2, JobState.PENDING, "wait[er]", started=False))
    with LiveShow(out) as show:
        show.update(Snapshot(3.0, 5, jobs, (node(gpu(0), gpu(1, 1)),), {1: Progress(3, 8)}))
    drawn = out.file.getvalue()
    for said in ("3 to come", "node-1:0", "40 %", "1.0 GiB", "3/8", "wait[er]", "Resources"):
        assert said in drawn


def test_account_names_every_job_and_the_whole():
    jobs = (job(1, JobState.COMPLETED), job(2, JobState.FAILED, "bad"))
    records = tuple(job_record(view) for view in jobs)
    rows = account_rows(records)
    assert rows[0] == (
        ("1", "train", "COMPLETED", "1", "node-1", "2.0 s", "28.0 s", "30.0 s", "60 %")
    )
    assert rows[1][1:3] == ("bad", "FAILED")
    assert account_rows([job_record(job(3, JobState.PENDING, started=False))])[0][4:] == (
        *("–", "2.0 s", "–", "–", "–"),
    )
    said = "\n".join(summary_lines(summarize(records, gpus=2)))
    assert "1 of 2" in said
    assert "makespan          30.0 s" in said


def test_failures_show_the_end_of_the_output_without_its_terminal_codes():
    lines = list(failure_lines([Failure(job(2, JobState.FAILED, "bad"), "one\n\x1b[31mtwo\n")]))
    assert lines[0].startswith("job 2 bad: FAILED")
    assert lines[1:] == ["  one", "  \\x1b[31mtwo"]
    assert "  (no output)" in failure_lines([Failure(job(2, JobState.FAILED), "")])


def test_records_keep_what_the_controller_said():
    record = job_record(job(4, JobState.COMPLETED))
    assert (record.job_id, record.nodes, record.jct_s) == (4, ("node-1",), 30.0)
    assert record.spans[0].start_s == 101.0
    assert record.spans[0].gpu_uuids == ("GPU-1",)
    assert job_record(job(5)).ended_at_s is None
    assert job_record(job(6, JobState.PENDING, started=False)).gpu_utilization_pct is None


def test_gpu_slots_are_in_order():
    assert [slot.index for slot in gpu_slots([node(gpu(1), gpu(0))])] == [0, 1]


def test_a_mock_node_offers_four_cores_a_gpu():
    assert _mock_cpus("P100:64,T4:32") == 4 * 96
