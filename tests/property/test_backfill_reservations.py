"""A reserved job is never delayed by jobs behind it, whatever the allocator."""

from math import inf, isfinite

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import decide
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankPlacement,
    RunningJob,
    WaitingJob,
)
from controller.solvers import make_solver
from protos.messages import JobSpec

NOW_S = 100.0
ALLOCATORS = {
    "greedy": make_allocator("greedy"),
    "worst-fit": make_allocator("worst-fit"),
    "milp": make_allocator("milp", solver=make_solver("auto"), time_limit_s=30.0),
}
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def clusters(draw):
    nodes, running = [], []
    for n in range(draw(st.integers(1, 4))):
        gpu_type = draw(st.sampled_from(["P100", "P100", "T4"]))
        size = draw(st.integers(1, 4))
        taken = 0
        cpus = 8
        while taken < size and draw(st.integers(0, 3)):
            gpus = draw(st.integers(1, size - taken))
            held = range(taken, taken + gpus)
            taken += gpus
            cpus -= 1
            running.append(
                RunningJob(
                    *(1000 + len(running), "ada", gpus, draw(st.sampled_from([NOW_S - 5, None]))),
                    draw(st.sampled_from([None, 4.0, 10.0, 20.0, 30.0, 50.0])),
                    (RankPlacement(f"n{n}", tuple(f"n{n}-{i}" for i in held), tuple(held)),),
                    cpus=1,
                )
            )
        slots = tuple(GpuSlot(f"n{n}-{i}", i, gpu_type, i >= taken) for i in range(size))
        nodes.append(NodeCapacity(f"n{n}", True, slots, 8, cpus, 64, 64))
    return ClusterView(tuple(nodes), running=tuple(running))


@st.composite
def queues(draw):
    return [
        WaitingJob(
            i,
            JobSpec(
                *("j", "ada", ("true",), "/"),
                gpus=draw(st.integers(1, 6)),
                nodes=draw(st.sampled_from([1, 1, 1, 0])),
                gpu_types=draw(st.sampled_from([(), (), ("P100",)])),
                time_limit_s=draw(st.sampled_from([None, 5.0, 15.0, 25.0, 100.0])),
                cpus=draw(st.sampled_from([1, 1, 4])),
            ),
            *(0.0, 0.0),
        )
        for i in range(draw(st.integers(2, 7)))
    ]


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("mode", [Backfill.EASY, Backfill.CONSERVATIVE])
@settings(CHECKED, max_examples=150)
@given(view=clusters(), queue=queues())
def test_reserved_resources_are_there_when_the_time_comes(mode, name, view, queue):
    decision = decide(
        queue,
        view,
        NOW_S,
        prioritizer=make_prioritizer("fcfs"),
        allocator=ALLOCATORS[name],
        backfill=mode,
    )
    if mode is Backfill.EASY:
        assert len(decision.reservations) <= 1
    specs = {job.job_id: job for job in queue}
    types = {gpu.uuid: gpu.gpu_type for node in view.nodes for gpu in node.gpus}
    started = {start.job_id for start in decision.starts}
    holdings = [(job.ranks, max(job.ends_s(NOW_S), NOW_S + 1), job.cpus) for job in view.running]
    for start in decision.starts:
        job = specs[start.job_id]
        holdings.append((start.ranks, NOW_S + job.planned_run_s, job.spec.cpus))
    for reservation in decision.reservations:
        assert reservation.job_id not in started
        at_s = reservation.begins_s
        assert at_s > NOW_S
        if not isfinite(at_s):
            continue
        spec = specs[reservation.job_id].spec
        free: dict[str, int] = {}
        for node in view.nodes:
            if node.name not in reservation.nodes:
                continue
            busy = {
                uuid
                for ranks, ends_s, _ in holdings
                if ends_s > at_s
                for rank in ranks
                if rank.node == node.name
                for uuid in rank.gpu_uuids
            }
            cpus = sum(
                cpus
                for ranks, ends_s, cpus in holdings
                if ends_s > at_s and any(rank.node == node.name for rank in ranks)
            )
            assert node.cpus_total - cpus >= spec.cpus
            for gpu in node.gpus:
                if gpu.uuid not in busy:
                    free[types[gpu.uuid]] = free.get(types[gpu.uuid], 0) + 1
        assert max(free.values()) >= spec.gpus


@settings(CHECKED, max_examples=100)
@given(view=clusters(), queue=queues())
def test_backfill_starts_what_stays_out_of_the_way(view, queue):
    """Nothing overtakes where jobs block; backfill starts no fewer jobs than that."""
    starts = {}
    for mode in Backfill:
        decision = decide(
            *(queue, view, NOW_S),
            prioritizer=make_prioritizer("fcfs"),
            allocator=ALLOCATORS["greedy"],
            backfill=mode,
        )
        starts[mode] = [start.job_id for start in decision.starts]
        waiting = (entry.job.job_id for entry in decision.ranking)
        first = next((job_id for job_id in waiting if job_id not in starts[mode]), None)
        if mode is Backfill.BLOCKING and first is not None:
            assert all(job_id < first for job_id in starts[mode])
    assert set(starts[Backfill.BLOCKING]) <= set(starts[Backfill.EASY])
    assert set(starts[Backfill.BLOCKING]) <= set(starts[Backfill.CONSERVATIVE])


def test_a_large_job_gets_its_turn_and_says_when():
    slots = tuple(GpuSlot(f"g{i}", i, "P100", i > 1) for i in range(4))
    held = (RankPlacement("n1", ("g0", "g1"), (0, 1)),)
    view = ClusterView(
        (NodeCapacity("n1", True, slots, 8, 8, 64, 64),),
        running=(RunningJob(17, "ada", 2, NOW_S - 10, 30.0, held, cpus=1),),
    )

    def job(job_id, gpus, limit_s):
        spec = JobSpec("j", "a", ("true",), "/", gpus=gpus, time_limit_s=limit_s)
        return WaitingJob(job_id, spec, float(job_id), 0.0)

    queue = [job(1, 4, 60.0), job(2, 1, 60.0), job(3, 1, 15.0), job(4, 1, None)]
    decision = decide(
        *(queue, view, NOW_S),
        prioritizer=make_prioritizer("fcfs"),
        allocator=ALLOCATORS["milp"],
        backfill=Backfill.EASY,
    )
    assert [start.job_id for start in decision.starts] == [3]
    (reservation,) = decision.reservations
    assert (reservation.job_id, reservation.begins_s) == (1, NOW_S + 20.0)
    assert (reservation.nodes, reservation.after_job_id) == (("n1",), 17)
    assert decision.waits[1].reserved_nodes == ("n1",)
    assert decision.waits[1].until_s == NOW_S + 20.0
    assert decision.waits[2].reason == "Reserved"
    without = decide(
        *(queue, view, NOW_S),
        prioritizer=make_prioritizer("fcfs"),
        allocator=ALLOCATORS["milp"],
        backfill=Backfill.NONE,
    )
    assert [start.job_id for start in without.starts] == [2, 3]


def test_a_job_that_nobody_can_time_is_reserved_for_the_end_of_time():
    slots = tuple(GpuSlot(f"g{i}", i, "P100", i > 1) for i in range(4))
    held = (RankPlacement("n1", ("g0", "g1"), (0, 1)),)
    view = ClusterView(
        (NodeCapacity("n1", True, slots, 8, 8, 64, 64),),
        running=(RunningJob(17, "ada", 2, NOW_S - 10, None, held, cpus=1),),
    )
    spec = JobSpec("j", "a", ("true",), "/", gpus=4)
    small = JobSpec("j", "a", ("true",), "/", gpus=1)
    short = JobSpec("j", "a", ("true",), "/", gpus=1, time_limit_s=600.0)
    queue = [WaitingJob(i, s, float(i), 0.0) for i, s in enumerate([spec, small, short])]
    decision = decide(
        *(queue, view, NOW_S),
        prioritizer=make_prioritizer("fcfs"),
        allocator=ALLOCATORS["greedy"],
        backfill=Backfill.EASY,
    )
    assert decision.reservations[0].begins_s == inf
    assert [start.job_id for start in decision.starts] == [2]
