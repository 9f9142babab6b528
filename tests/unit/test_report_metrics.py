"""Metrics of a run, against figures that can be checked by hand."""

from __future__ import annotations

import pytest

from protos.messages import JobState
from testbed.report.metrics import (
    Step,
    held_gpu_seconds,
    held_series,
    makespan_s,
    mean,
    percentile,
    queue_series,
    summarize,
    waiting_spans,
)
from testbed.report.records import AttemptSpan, JobRecord


def span(start_s, end_s, *gpus, attempt=1):
    return AttemptSpan(attempt, start_s, end_s, ("n1",), gpus)


def job(job_id=1, *spans, submitted_at_s=0.0, ended_at_s=None, **changes):
    given = {
        "name": f"job{job_id}",
        "user": "ada",
        "gpus": len(spans[0].gpu_uuids) if spans else 1,
        "state": JobState.COMPLETED if ended_at_s is not None else JobState.PENDING,
        "wait_s": spans[0].start_s - submitted_at_s if spans else 0.0,
        "run_s": 0.0,
        "gpu_utilization_pct": 50.0,
    }
    return JobRecord(
        job_id=job_id,
        submitted_at_s=submitted_at_s,
        ended_at_s=ended_at_s,
        spans=spans,
        **(given | changes),
    )


TWO = (
    job(1, span(100, 110, "a", "b"), submitted_at_s=100, ended_at_s=110),
    job(2, span(110, 130, "a"), submitted_at_s=102, ended_at_s=130),
)


def test_summary_of_two_jobs_on_two_gpus():
    summary = summarize(TWO, gpus=2)
    assert summary.jobs == summary.completed == 2
    assert summary.makespan_s == 30
    assert summary.wait_mean_s == 4
    assert summary.jct_mean_s == (10 + 28) / 2
    assert summary.gpu_seconds == 2 * 10 + 20
    assert summary.held_ratio == pytest.approx(40 / 60)
    assert summary.gpu_utilization_pct == pytest.approx(50 * 40 / 60)


def test_a_job_that_was_not_measured_leaves_utilization_unknown_not_lower():
    unmeasured = job(
        3, span(100, 110, "b"), submitted_at_s=100, ended_at_s=110, gpu_utilization_pct=None
    )
    assert summarize((*TWO, unmeasured), gpus=2).gpu_utilization_pct is None


def test_unfinished_jobs_are_counted_and_stay_out_of_completion_times():
    waiting = job(3, submitted_at_s=105)
    summary = summarize((*TWO, waiting), gpus=2)
    assert summary.unfinished == 1
    assert summary.jct_mean_s == summarize(TWO, gpus=2).jct_mean_s
    assert summary.jobs == 3


def test_a_run_without_an_ended_job_has_no_figures():
    summary = summarize([job(1, span(0, None, "a"), state=JobState.RUNNING)], gpus=1)
    assert summary.makespan_s is None
    assert summary.jct_mean_s is None
    assert summary.held_ratio is None
    assert summary.gpu_seconds == 0


def test_a_cluster_without_gpus_has_no_utilization():
    cpu_job = job(1, span(0, 5), ended_at_s=5.0, gpu_utilization_pct=None)
    summary = summarize([cpu_job], gpus=0)
    assert summary.held_ratio is None
    assert summary.gpu_utilization_pct is None
    assert summary.makespan_s == 5


def test_failed_jobs_count_in_every_mean_but_not_as_completed():
    failed = job(1, span(0, 4, "a"), ended_at_s=4.0, state=JobState.FAILED)
    summary = summarize([failed], gpus=1)
    assert (summary.completed, summary.jct_mean_s, summary.unfinished) == (0, 4, 0)


def test_held_gpu_seconds_cuts_open_attempts():
    running = job(1, span(10, 20, "a", "b"), span(30, None, "a", "b", attempt=2))
    assert held_gpu_seconds(running, until_s=35) == 2 * 10 + 2 * 5
    assert held_gpu_seconds(running, until_s=15) == 2 * 5


def test_makespan_runs_from_the_first_submission_to_the_last_end():
    assert makespan_s(TWO) == 30
    assert makespan_s([job(1)]) is None


def test_held_series_merges_what_happens_at_once():
    assert held_series(TWO) == (Step(100, 2), Step(110, 1), Step(130, 0))


def test_queue_series_counts_waiting_jobs():
    assert queue_series(TWO) == (Step(102, 1), Step(110, 0))


def test_a_requeued_job_waits_again():
    requeued = job(
        1, span(5, 10, "a"), span(20, 30, "b", attempt=2), submitted_at_s=1, ended_at_s=30.0
    )
    assert waiting_spans(requeued) == [(1, 5), (10, 20)]


def test_a_job_cancelled_in_the_queue_waited_until_then():
    cancelled = job(1, submitted_at_s=3, ended_at_s=9.0, state=JobState.CANCELLED)
    assert waiting_spans(cancelled) == [(3, 9.0)]


def test_a_waiting_job_waits_without_end_and_a_running_one_does_not_wait():
    assert waiting_spans(job(1, submitted_at_s=3)) == [(3, None)]
    assert waiting_spans(job(1, span(4, None, "a"), submitted_at_s=3)) == [(3, 4)]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 95, None),
        ([7], 95, 7),
        ([4, 2], 50, 3),
        ([1, 2, 3, 4, 5], 100, 5),
        ([1, 2, 3, 4, 5], 0, 1),
        (list(range(101)), 95, 95),
    ],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == expected


def test_mean_of_nothing_is_none():
    assert mean([]) is None
    assert mean([1, 2]) == 1.5
