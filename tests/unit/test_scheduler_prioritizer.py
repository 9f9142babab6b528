"""Orders of the queue: heuristics and Slurm's multifactor sum."""

import math
import pickle

import pytest

from controller.scheduler.policies import PRIORITIZERS, make_prioritizer
from controller.scheduler.prioritizer.multifactor import (
    Multifactor,
    MultifactorWeights,
    age_factor,
    decayed_usage_gpu_s,
    fair_share_factors,
)
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RunningJob,
    WaitingJob,
)
from protos.messages import JobSpec

HOUR = 3600.0


def job(job_id=1, *, at=None, eligible=None, **spec):
    at = float(job_id) if at is None else at
    fields = {"name": "j", "user": "ada", "argv": ("true",), "cwd": "/", "gpus": 1} | spec
    return WaitingJob(job_id, JobSpec(**fields), at, at if eligible is None else eligible)


def cluster(gpus=8, **fields):
    slots = tuple(GpuSlot(f"g{i}", i, "P100", True) for i in range(gpus))
    return ClusterView((NodeCapacity("n1", True, slots, 64, 64, 1, 1),), **fields)


def order(name, *jobs, now_s=100.0):
    return [r.job.job_id for r in make_prioritizer(name).rank(jobs, cluster(), now_s)]


@pytest.mark.parametrize(
    ("policy", "jobs", "expected"),
    [
        ("fcfs", [job(2, at=5.0), job(1, at=9.0), job(3, at=1.0)], [3, 2, 1]),
        ("fcfs", [job(2, at=5.0), job(1, at=5.0)], [1, 2]),
        ("fcfs", [job(1), job(2, priority=1), job(3, priority=-1)], [2, 1, 3]),
        ("sjf", [job(1, time_limit_s=60.0), job(2, time_limit_s=30.0)], [2, 1]),
        (
            "sjf",
            [job(1, time_limit_s=60.0, time_estimate_s=10.0), job(2, time_limit_s=30.0)],
            [1, 2],
        ),
        ("sjf", [job(1), job(2, time_limit_s=1e7)], [2, 1]),
        ("sjf", [job(1, time_limit_s=1.0), job(2, priority=1)], [2, 1]),
        ("sjf", [job(1, time_limit_s=86401.0), job(2, time_limit_s=86400.0)], [2, 1]),
        ("smallest", [job(1, gpus=4), job(2, gpus=1), job(3, gpus=0)], [3, 2, 1]),
        ("smallest", [job(1, gpus=1), job(2, gpus=8, priority=1)], [2, 1]),
        ("smallest", [job(1, gpus=2, at=9.0), job(2, gpus=2, at=1.0)], [2, 1]),
    ],
)
def test_heuristics_order(policy, jobs, expected):
    assert order(policy, *jobs) == expected


@pytest.mark.parametrize("policy", PRIORITIZERS)
def test_every_policy_is_deterministic_picklable_and_ranks_all(policy):
    jobs = [
        job(i, gpus=i % 3, time_limit_s=float(i % 4) or None, at=float(i % 5)) for i in range(40)
    ]
    prioritizer = pickle.loads(pickle.dumps(make_prioritizer(policy)))
    ranked = prioritizer.rank(jobs, cluster(), 100.0)
    assert prioritizer.name == policy
    assert prioritizer.rank(list(reversed(jobs)), cluster(), 100.0) == ranked
    assert sorted(r.job.job_id for r in ranked) == list(range(40))
    keys = [(-r.score, r.job.submitted_at_s, r.job.job_id) for r in ranked]
    assert keys == sorted(keys)


def test_unknown_policy_names_those_that_exist():
    with pytest.raises(ValueError, match="'lifo'; there are fcfs, multifactor, sjf, smallest, f1"):
        make_prioritizer("lifo")


def test_multifactor_terms_add_up_to_the_score():
    weights = MultifactorWeights(age=100, max_age_s=10, job_size=10, fair_share=20, qos=40)
    view = cluster(gpus=8, usage_gpu_s={"ada": 300.0, "bob": 100.0}, usage_at_s=50.0)
    jobs = [
        job(1, user="ada", gpus=2, at=45.0, qos="high", priority=3),
        job(2, user="bob", gpus=8, at=0.0, qos="low"),
        job(3, user="eve", gpus=0, at=50.0),
    ]
    ranked = {r.job.job_id: r for r in Multifactor(weights).rank(jobs, view, 50.0)}
    assert ranked[1].terms == pytest.approx(
        {
            "age": 50.0,
            "job_size": 7.5,
            "fair_share": 20 * 2 ** (-0.75 * 3),
            "qos": 40.0,
            "priority": 3.0,
        }
    )
    assert ranked[2].terms == pytest.approx(
        {
            "age": 100.0,
            "job_size": 0.0,
            "fair_share": 20 * 2 ** (-0.25 * 3),
            "qos": 0.0,
            "priority": 0.0,
        }
    )
    assert ranked[3].terms["fair_share"] == 20.0
    assert ranked[3].terms["qos"] == 20.0
    for entry in ranked.values():
        assert entry.score == pytest.approx(sum(entry.terms.values()))


def test_multifactor_can_favour_large_jobs_and_keeps_order_of_arrival_otherwise():
    large = Multifactor(MultifactorWeights(favour_small=False))
    assert [r.job.job_id for r in large.rank([job(1), job(2, gpus=8)], cluster(), 2.0)] == [2, 1]
    assert order("multifactor", job(2), job(1), job(3)) == [1, 2, 3]


def test_unknown_qos_counts_as_normal():
    ranked = Multifactor().rank([job(1, qos="gold"), job(2, qos="normal")], cluster(), 2.0)
    assert ranked[0].terms["qos"] == ranked[1].terms["qos"] == 500.0


@pytest.mark.parametrize(
    ("age_s", "expected"), [(-5.0, 0.0), (0.0, 0.0), (6 * HOUR, 0.5), (12 * HOUR, 1.0), (1e9, 1.0)]
)
def test_age_saturates(age_s, expected):
    assert age_factor(age_s, 12 * HOUR) == expected


def test_fair_share_is_half_for_who_used_exactly_the_share():
    assert fair_share_factors({"ada": 10.0, "bob": 10.0}, set()) == {"ada": 0.5, "bob": 0.5}
    assert fair_share_factors({}, {"ada"}) == {"ada": 1.0}
    assert fair_share_factors({"ada": 10.0}, {"bob"}) == {"ada": 0.25, "bob": 1.0}


def test_usage_decays_by_its_half_life_and_running_jobs_add_to_it():
    running = RunningJob(7, "bob", 2, started_at_s=0.0, time_limit_s=None, ranks=())
    starting = RunningJob(8, "eve", 2, started_at_s=None, time_limit_s=None, ranks=())
    view = cluster(usage_gpu_s={"ada": 100.0}, usage_at_s=10.0, running=(running, starting))
    usage = decayed_usage_gpu_s(view, 30.0, half_life_s=20.0)
    assert usage["ada"] == pytest.approx(50.0)
    steps = 20_000
    summed = sum(2 * 2 ** (-(20.0 * (i + 0.5) / steps) / 20.0) * 20.0 / steps for i in range(steps))
    assert usage["bob"] == pytest.approx(summed)
    assert "eve" not in usage
    assert math.isclose(decayed_usage_gpu_s(view, 10.0, 20.0)["ada"], 100.0)


def test_who_used_less_goes_first():
    view = cluster(usage_gpu_s={"ada": 1000.0, "bob": 10.0})
    ranked = Multifactor().rank([job(1, user="ada"), job(2, user="bob")], view, 2.0)
    assert [r.job.job_id for r in ranked] == [2, 1]


@pytest.mark.parametrize(
    ("policy", "jobs", "expected"),
    [
        ("lcfs", [job(1, at=1.0), job(2, at=9.0)], [2, 1]),
        ("ljf", [job(1, time_limit_s=10.0), job(2, time_limit_s=99.0)], [2, 1]),
        ("largest", [job(1, gpus=2), job(2, gpus=8), job(3, gpus=0)], [2, 1, 3]),
        ("saf", [job(1, gpus=4, time_limit_s=10.0), job(2, time_limit_s=50.0)], [1, 2]),
        ("laf", [job(1, gpus=4, time_limit_s=10.0), job(2, time_limit_s=50.0)], [2, 1]),
        # (99 + 10) / 1 against (98 + 300) / 4
        ("sexp", [job(1, time_limit_s=10.0), job(2, gpus=4, time_limit_s=300.0)], [2, 1]),
        ("srf", [job(1, time_limit_s=10.0), job(2, gpus=8, time_limit_s=72.0)], [2, 1]),
        # (90/10)^3 * 1 = 729 against (50/20)^3 * 8 = 125
        (
            "wfp3",
            [
                job(1, at=50.0, gpus=8, time_limit_s=20.0),
                job(2, at=10.0, time_limit_s=10.0),
            ],
            [2, 1],
        ),
        # 90 / 10 = 9 against 90 / (3 * 2) = 15
        (
            "unicep",
            [job(1, at=10.0, time_limit_s=10.0), job(2, at=10.0, gpus=8, time_limit_s=2.0)],
            [2, 1],
        ),
        # 3 * 8 = 24 + 870 * log10(1) against 1 * 1 + 870 * log10(1.1) = 37.0
        (
            "f1",
            [job(1, at=10.0, gpus=8, time_limit_s=1000.0), job(2, at=10.1, time_limit_s=10.0)],
            [1, 2],
        ),
        ("f2", [job(1, at=10.0, gpus=8, time_limit_s=1e6), job(2, at=10.0)], [2, 1]),
        ("f3", [job(1, at=10.0, gpus=8, time_limit_s=1e9), job(2, at=99.0)], [2, 1]),
        ("f4", [job(1, at=10.0, gpus=9, time_limit_s=90.0), job(2, at=10.5)], [1, 2]),
        ("wfp3", [job(1, time_limit_s=1.0), job(2, priority=1)], [2, 1]),
        ("saf", [job(2, at=5.0), job(1, at=5.0), job(3, time_limit_s=86_400.0)], [3, 1, 2]),
    ],
)
def test_formulas(policy, jobs, expected):
    assert order(policy, *jobs) == expected
    assert order(policy, *reversed(jobs)) == expected
