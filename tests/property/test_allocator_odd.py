"""However odd the cluster and the queue: nothing raises, nothing is booked twice."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import decide
from controller.scheduler.policies import ALLOCATORS, make_allocator, make_prioritizer
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    Partition,
    RankPlacement,
    RunningJob,
    WaitingJob,
)
from controller.solvers import make_solver
from protos.messages import JobSpec

SOLVER = make_solver("auto")
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.sampled_from([0, 0, 1, 2, 3, 4, 8, 16])


@st.composite
def clusters(draw):
    """No nodes, empty nodes, nodes of 1 to 16 GPUs of several types, all full, overbooked CPUs."""
    nodes, running = [], []
    fullness = draw(st.sampled_from([0, 50, 100]))
    for n in range(draw(st.integers(0, 7))):
        slots = []
        for gpu_type in draw(st.sampled_from([("A",), ("B",), ("A", "B"), ("A", "B", "C")])):
            for _ in range(draw(SIZES)):
                in_service = draw(st.integers(0, 9)) < 9
                free = in_service and draw(st.integers(0, 99)) >= fullness
                slots.append(
                    GpuSlot(
                        *(f"{n}-{len(slots)}", len(slots), gpu_type, free, in_service),
                        memory_bytes=draw(st.sampled_from([0, 16])),
                        near=(len(slots) // 4, len(slots) // 2) if n % 2 else (),
                    )
                )
        name = f"node {n}'\"\n"
        held = [slot for slot in slots if slot.is_in_service and not slot.is_free]
        if held:
            running.append(
                RunningJob(
                    *(900 + n, "ada", len(held), draw(st.sampled_from([None, 1.0]))),
                    draw(st.sampled_from([None, 5.0, 500.0])),
                    (RankPlacement(name, (held[0].uuid,), (held[0].index,)),),
                    partition="p",
                )
            )
        nodes.append(
            NodeCapacity(
                *(name, draw(st.integers(0, 9)) < 9, tuple(slots), 32),
                draw(st.sampled_from([-3, 0, 1, 32])),
                *(64, draw(st.sampled_from([-1, 0, 64]))),
                partitions=draw(st.sampled_from([frozenset(), frozenset("p"), frozenset("pq")])),
            )
        )
    partitions = {"p": Partition("p", draw(st.sampled_from([None, 0, 9]))), "q": Partition("q")}
    return ClusterView(
        tuple(nodes),
        running=tuple(running),
        partitions=partitions if draw(st.booleans()) else {},
        gpu_speed=draw(st.sampled_from([{}, {"A": 3.0, "Z": 1.0}])),
    )


@st.composite
def queues(draw):
    jobs = []
    for i in range(draw(st.integers(0, 12))):
        nodes = draw(st.sampled_from([0, 1, 1, 2, 3, 7]))
        gpus = draw(st.sampled_from([0, 1, 1, 2, 5, 16, 40, 999])) * max(1, nodes)
        spec = JobSpec(
            *("j", draw(st.sampled_from(["ada", "bob"])), ("true",), "/"),
            gpus=gpus,
            nodes=nodes if gpus else max(1, nodes),
            gpu_types=draw(st.sampled_from([(), (), ("A",), ("Z",), ("C", "A")])) if gpus else (),
            cpus=draw(st.sampled_from([0, 1, 5, 99])),
            memory_bytes=draw(st.sampled_from([0, 0, 9, 999])),
            partition=draw(st.sampled_from(["", "p", "q", "gone"])),
            min_gpu_memory_bytes=draw(st.sampled_from([0, 0, 12, 99])),
            mix_gpu_types=draw(st.booleans()),
            time_limit_s=draw(st.sampled_from([None, 1.0, 100.0])),
        )
        excluded = draw(st.sampled_from([(), (), ("node 0'\"\n", "no such node")]))
        jobs.append(WaitingJob(i, spec, float(i), 0.0, excluded_nodes=frozenset(excluded)))
    return jobs


@pytest.mark.parametrize("name", ALLOCATORS)
@settings(CHECKED, max_examples=60)
@given(view=clusters(), queue=queues(), mode=st.sampled_from(list(Backfill)))
def test_nothing_raises_and_nothing_is_booked_twice(name, view, queue, mode):
    """`decide` itself verifies every rule from scratch and raises if one is broken."""
    decision = decide(
        *(queue, view, 10.0),
        prioritizer=make_prioritizer("fcfs"),
        allocator=make_allocator(name, solver=SOLVER, time_limit_s=30.0),
        backfill=mode,
    )
    assert decision.fallback == ""
    started = {start.job_id for start in decision.starts}
    assert started.isdisjoint(decision.waits)
    assert started | set(decision.waits) == {job.job_id for job in queue}
    taken = [uuid for s in decision.starts for rank in s.ranks for uuid in rank.gpu_uuids]
    assert len(taken) == len(set(taken))
