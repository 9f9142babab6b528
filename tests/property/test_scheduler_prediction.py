"""Predicted run times: what history is worth, how honest they are, and that none leaks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.prediction import RunTimeModel
from controller.scheduler.types import GpuSlot, NodeCapacity
from protos.messages import JobSpec
from testbed.simulator.engine import SimJob, simulate

NASA = Path(__file__).parents[2].parent / "shared" / "data" / "swf" / "nasa_ipsc_1993_first60.swf"
NORMAL_90 = 1.2816


def spec(user="ada", name="train", gpus=1, **fields):
    return JobSpec(name, user, ("true",), "/", gpus=gpus, **fields)


def taught(*runs):
    model = RunTimeModel()
    for job, run_s in runs:
        model.observe(job, run_s)
    return model


def test_without_history_much_is_possible():
    told = RunTimeModel().predict(spec())
    assert told.samples == 0
    assert told.quantile_s(-NORMAL_90) < 60 < told.median_s < 3600 < told.quantile_s(NORMAL_90)
    assert told.mean_s > told.median_s


def test_the_closest_group_counts_most():
    model = taught(
        *[(spec(name="short"), 60.0)] * 8,
        *[(spec(name="long"), 36_000.0)] * 8,
        *[(spec(user="bob", name="long"), 600.0)] * 8,
    )
    assert model.predict(spec(name="short")).median_s == pytest.approx(60, rel=0.5)
    assert model.predict(spec(name="long")).median_s == pytest.approx(36_000, rel=0.5)
    assert model.predict(spec(user="bob", name="long")).median_s == pytest.approx(600, rel=0.5)
    new = model.predict(spec(name="never seen"))
    assert 60 < new.median_s < 36_000
    assert new.samples == 0
    assert new.log_deviation > 2 * model.predict(spec(name="long")).log_deviation


def test_what_was_long_ago_is_forgotten():
    model = taught(*[(spec(), 60.0)] * 200, *[(spec(), 6_000.0)] * 100)
    assert model.predict(spec()).median_s == pytest.approx(6_000, rel=0.3)


def test_never_beyond_the_limit():
    model = taught(*[(spec(), 6_000.0)] * 20)
    assert model.predict(spec(time_limit_s=100.0)).median_s == 100.0


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_intervals_hold_what_they_promise(seed):
    """Users with templates of their own, run times log-normal around them."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(np.log(900), 1.5, (12, 4))
    model, inside, count = RunTimeModel(), 0, 0
    for i in range(1500):
        user, name = rng.integers(12), rng.integers(4)
        run_s = float(np.exp(rng.normal(centers[user, name], 0.4)))
        job = spec(user=f"u{user}", name=f"n{name}", gpus=int(2 ** rng.integers(4)))
        told = model.predict(job)
        if i > 300:
            count += 1
            inside += told.quantile_s(-NORMAL_90) <= run_s <= told.quantile_s(NORMAL_90)
        model.observe(job, run_s)
    assert 0.72 < inside / count < 0.92


def cluster():
    return [
        NodeCapacity(
            *(f"n{n}", True),
            tuple(GpuSlot(f"{n}-{k}", k, "P100", True) for k in range(4)),
            *(10**6, 10**6, 2**50, 2**50),
        )
        for n in range(2)
    ]


class Recording(RunTimeModel):
    """Notes each answer in order."""

    def __init__(self):
        super().__init__()
        self.told = []

    def predict(self, spec):
        self.told.append((spec.name, super().predict(spec).median_s))
        return super().predict(spec)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(5, 30))
def test_nothing_leaks_from_the_future(seed, cut):
    """Whatever jobs that have not ended yet will take, predictions made before are the same."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(30.0, 40))
    jobs = [
        SimJob(
            i,
            spec(user=f"u{rng.integers(3)}", name=f"job{i % 5}", gpus=int(rng.integers(1, 5))),
            float(at_s[i]),
            float(rng.lognormal(4, 1)),
        )
        for i in range(40)
    ]
    answers = []
    for factor in (1.0, 7.0):
        model = Recording()
        changed = []
        for job in jobs:
            late = job.submitted_at_s >= jobs[cut].submitted_at_s
            changed.append(replace(job, run_s=job.run_s * factor) if late else job)
        scheduler = Scheduler(
            make_prioritizer("fcfs"), make_allocator("greedy"), Backfill.NONE, 100
        )
        simulate(changed, cluster(), scheduler, predictor=model)
        answers.append(model.told[: cut + 1])
    assert answers[0] == answers[1]


@pytest.mark.skipif(not NASA.exists(), reason="the shared traces are not on this machine")
def test_a_real_log_with_users_can_be_predicted():
    with NASA.open() as file:
        rows = [
            list(map(float, line.split())) for line in file if line.strip()[:1] not in (";", "")
        ]
    model, errors, blind, inside = RunTimeModel(), [], [], 0
    ends = []
    seen = []
    for row in rows:
        at_s, run_s = row[1], max(1.0, row[3])
        for end in sorted((e for e in ends if e[0] <= at_s), key=lambda e: e[0]):
            model.observe(*end[2:])
            seen.append(np.log(end[3]))
        ends = [e for e in ends if e[0] > at_s]
        job = spec(user=str(row[11]), name=str(row[13]), gpus=int(row[4]))
        told = model.predict(job)
        if len(seen) > 500:
            errors.append(abs(np.log(told.median_s / run_s)))
            blind.append(abs(np.median(seen[-500:]) - np.log(run_s)))
            inside += told.quantile_s(-NORMAL_90) <= run_s <= told.quantile_s(NORMAL_90)
        ends.append((at_s + run_s, len(ends), job, run_s))
    assert np.median(errors) < 0.6 * np.median(blind)
    assert 0.72 < inside / len(errors) < 0.88
