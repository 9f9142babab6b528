"""The simulator against a brute-force loop, and against what public simulators agree on."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import GpuSlot, NodeCapacity
from protos.messages import JobSpec
from testbed.simulator.engine import SimJob, simulate
from testbed.simulator.metrics import summarize

ORACLE = Path(__file__).parents[2].parent / "shared" / "data" / "oracle" / "philly_a.csv"
GREEDY = make_allocator("greedy")
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cluster(*sizes):
    return [
        NodeCapacity(
            *(f"n{i:03d}", True),
            tuple(GpuSlot(f"n{i}-{k}", k, "P100", True) for k in range(size)),
            *(10**6, 10**6, 2**50, 2**50),
        )
        for i, size in enumerate(sizes)
    ]


def job(job_id, at_s, gpus, run_s, nodes=1):
    spec = JobSpec(
        *("j", "u", ("true",), "/"),
        gpus=gpus,
        nodes=nodes,
        time_limit_s=run_s,
        time_estimate_s=run_s,
    )
    return SimJob(job_id, spec, at_s, run_s)


def scheduler(policy, backfill, window=100_000):
    return Scheduler(make_prioritizer(policy), GREEDY, backfill, window)


def brute_force(jobs, sizes, *, key, blocks):
    """Jobs on one node each, best fit; looks at every job and node at every event."""
    free = list(sizes)
    waiting, running, started = [], [], {}
    arrivals = sorted(jobs, key=lambda j: (j.submitted_at_s, j.job_id))
    while arrivals or running:
        now = min([j.submitted_at_s for j in arrivals[:1]] + [end for end, _, _ in running])
        for entry in [r for r in running if r[0] == now]:
            running.remove(entry)
            free[entry[1]] += entry[2]
        while arrivals and arrivals[0].submitted_at_s == now:
            waiting.append(arrivals.pop(0))
        for j in sorted(waiting, key=key):
            room = [n for n in range(len(free)) if free[n] >= j.spec.gpus]
            if room:
                n = min(
                    room,
                    key=lambda n: (
                        free[n] - j.spec.gpus,
                        (0 < free[n] - j.spec.gpus < sizes[n]) - (0 < free[n] < sizes[n]),
                        n,
                    ),
                )
                free[n] -= j.spec.gpus
                running.append((now + j.run_s, n, j.spec.gpus))
                started[j.job_id] = now
                waiting.remove(j)
            elif blocks:
                break
    return started


@st.composite
def workloads(draw):
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    jobs = [
        job(
            i,
            float(draw(st.integers(0, 40))),
            draw(st.integers(1, max(sizes))),
            float(draw(st.integers(1, 20))),
        )
        for i in range(draw(st.integers(1, 25)))
    ]
    return sizes, jobs


KEYS = {
    "fcfs": lambda j: (j.submitted_at_s, j.job_id),
    "sjf": lambda j: (j.run_s, j.submitted_at_s, j.job_id),
}


@pytest.mark.parametrize("policy", KEYS)
@pytest.mark.parametrize("backfill", [Backfill.NONE, Backfill.BLOCKING])
@settings(CHECKED, max_examples=120)
@given(workload=workloads())
def test_the_engine_does_what_a_loop_over_everything_does(policy, backfill, workload):
    sizes, jobs = workload
    replay = simulate(jobs, cluster(*sizes), scheduler(policy, backfill))
    blocks = backfill is Backfill.BLOCKING
    expected = brute_force(jobs, sizes, key=KEYS[policy], blocks=blocks)
    assert {o.job.job_id: o.started_at_s for o in replay.outcomes} == expected
    assert replay.never_started == ()


@settings(CHECKED, max_examples=60)
@given(workload=workloads(), mode=st.sampled_from(list(Backfill)))
def test_every_job_ends_once_and_gpus_are_never_given_twice(workload, mode):
    sizes, jobs = workload
    replay = simulate(jobs, cluster(*sizes), scheduler("fcfs", mode))
    assert [o.job.job_id for o in replay.outcomes] == [j.job_id for j in jobs]
    spans = {}
    for o in replay.outcomes:
        assert o.ended_at_s == o.started_at_s + o.job.run_s
        assert o.started_at_s >= o.job.submitted_at_s
        for rank in o.ranks:
            for uuid in rank.gpu_uuids:
                spans.setdefault(uuid, []).append((o.started_at_s, o.ended_at_s))
    for times in spans.values():
        times.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))
    assert replay == simulate(jobs, cluster(*sizes), scheduler("fcfs", mode))


def test_figures_of_a_small_replay():
    jobs = [job(1, 0.0, 4, 100.0), job(2, 0.0, 4, 50.0), job(3, 10.0, 2, 5.0)]
    replay = simulate(jobs, cluster(4), scheduler("fcfs", Backfill.NONE))
    told = summarize(replay, np.random.default_rng(0))
    assert told.wait_s.mean == pytest.approx((0 + 100 + 140) / 3)
    assert told.jct_s.mean == pytest.approx((100 + 150 + 145) / 3)
    assert told.makespan_s == 155.0
    assert told.gpu_utilization == pytest.approx((400 + 200 + 10) / (4 * 155))
    assert told.bounded_slowdown.mean == pytest.approx((1 + 3 + 14.5) / 3)
    assert told.partly_used_nodes == pytest.approx(5 / 155)
    assert told.wait_s.low <= told.wait_s.mean <= told.wait_s.high


@pytest.mark.skipif(not ORACLE.exists(), reason="the shared traces are not on this machine")
@pytest.mark.parametrize(
    ("policy", "sizes", "jct_s"),
    [("fcfs", (8,) * 6, 38_936.1), ("sjf", (8,) * 6, 9_917.7), ("fcfs", (48,), 31_143.9)],
)
def test_public_simulators_agree(policy, sizes, jct_s):
    """Blocking at the head: consolidated on six nodes, or GPUs merely counted (one node)."""
    with ORACLE.open() as file:
        rows = list(csv.DictReader(file))
    jobs = []
    for row in rows:
        gpus = int(row["num_gpu"])
        nodes = -(-gpus // sizes[0])
        jobs.append(
            job(
                *(int(row["job_id"]), float(row["submit_time"]), gpus, float(row["duration"])),
                nodes=nodes,
            )
        )
    replay = simulate(jobs, cluster(*sizes), scheduler(policy, Backfill.BLOCKING))
    assert np.mean([o.jct_s for o in replay.outcomes]) == pytest.approx(jct_s, abs=0.1)
