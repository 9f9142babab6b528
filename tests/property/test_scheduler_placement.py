"""Random queues and clusters: no rule is ever broken, and the MILP equals brute force."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.allocator.greedy import GreedyAllocator
from controller.scheduler.allocator.milp.milp import MilpAllocator
from controller.scheduler.allocator.milp.solvers import SolveStatus
from controller.scheduler.allocator.objective import ObjectiveWeights, value_of
from controller.scheduler.allocator.verify import verify
from controller.scheduler.cycle import decide
from controller.scheduler.explain import describe, explain_start, explain_wait
from controller.scheduler.policies import PRIORITIZERS, make_prioritizer
from controller.scheduler.shape import type_matches
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankedJob,
    WaitingJob,
    WaitReason,
)
from controller.solvers.glpsol import find_glpsol
from protos.messages import JobSpec

TYPES = ("P100", "T4", "V100-16GB")
NAMES = ("n1", "n2", "n3", "n4")
WEIGHTS = ObjectiveWeights(type_preference=1.0, packing=0.0, fragmentation=0.25)
GREEDY = GreedyAllocator(WEIGHTS)
MILP = MilpAllocator(find_glpsol(), time_limit_s=30.0, weights=WEIGHTS)
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def nodes(draw, name, max_gpus, odd):
    pools = draw(
        st.lists(
            st.sampled_from(TYPES[:2] if not odd else TYPES), min_size=odd < 1, max_size=1 + odd
        )
    )
    slots = []
    for gpu_type in sorted(set(pools)):
        for _ in range(draw(st.integers(1, max_gpus))):
            state = draw(st.sampled_from(["free", "free", "busy", *(["lost"] * odd)]))
            slots.append(
                GpuSlot(
                    f"{name}-{len(slots)}", len(slots), gpu_type, state == "free", state != "lost"
                )
            )
    return NodeCapacity(
        name,
        accepts_work=not odd or draw(st.integers(0, 5)) > 0,
        gpus=tuple(slots),
        cpus_total=16,
        cpus_free=draw(st.sampled_from([1, 3, 4, 16, 16])),
        memory_total_bytes=64,
        memory_free_bytes=draw(st.sampled_from([8, 10, 64, 64])),
    )


@st.composite
def jobs(draw, job_id, max_gpus):
    count = draw(st.sampled_from([1, 1, 1, 2]))
    gpus = draw(st.integers(0, max_gpus)) * count
    spec = JobSpec(
        name="j",
        user=draw(st.sampled_from(["ada", "bob"])),
        argv=("true",),
        cwd="/",
        gpus=gpus,
        gpu_types=tuple(
            draw(st.lists(st.sampled_from(["P100", "t4", "V100"]), max_size=2, unique=True))
        ),
        nodes=count,
        cpus=draw(st.sampled_from([0, 1, 1, 2, 3])),
        memory_bytes=draw(st.sampled_from([0, 0, 4, 5])),
        priority=draw(st.integers(-1, 1)),
        time_limit_s=draw(st.sampled_from([None, 60.0])),
    )
    excluded = draw(st.sets(st.sampled_from(NAMES), max_size=1)) if draw(st.booleans()) else set()
    return WaitingJob(job_id, spec, 0.0, 0.0, excluded_nodes=frozenset(excluded))


@st.composite
def instances(draw, max_nodes, max_jobs, max_gpus, odd=0):
    view = ClusterView(
        tuple(
            draw(nodes(NAMES[i], max_gpus, odd))
            for i in range(draw(st.integers(odd < 1, max_nodes)))
        )
    )
    queue = [draw(jobs(i, max_gpus)) for i in range(draw(st.integers(1, max_jobs)))]
    return queue, view


@st.composite
def gpu_contests(draw):
    """GPUs are all that is short, and the jobs want about what is free."""
    view = ClusterView(
        tuple(
            NodeCapacity(
                name,
                True,
                tuple(GpuSlot(f"{name}-{k}", k, gpu_type, k < free) for k in range(4)),
                *(64, 64, 64, 64),
            )
            for name, gpu_type, free in zip(
                NAMES,
                draw(st.sampled_from([("P100",) * 4, ("P100", "P100", "T4", "T4")])),
                draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)),
                strict=False,
            )
        )
    )
    wanted = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    types = st.sampled_from([(), ("P100",), ("T4", "P100"), ("P100", "T4")])
    queue = [
        WaitingJob(
            i, JobSpec("j", "ada", ("true",), "/", gpus=gpus, gpu_types=draw(types)), 0.0, 0.0
        )
        for i, gpus in enumerate(wanted)
    ]
    return queue, view


def in_given_order(queue):
    return [RankedJob(job, float(-i)) for i, job in enumerate(queue)]


def brute_force(queue, view):
    """The best (starts, cost) over every joint placement, by trying all of them."""
    free = {
        (node.name, gpu_type): sum(g.is_free for g in node.gpus if g.gpu_type == gpu_type)
        for node in view.nodes
        for gpu_type in {g.gpu_type for g in node.gpus}
    }
    capacity = {
        (node.name, gpu_type): sum(g.is_in_service for g in node.gpus if g.gpu_type == gpu_type)
        for node in view.nodes
        for gpu_type in {g.gpu_type for g in node.gpus}
    }
    cpus = {node.name: node.cpus_free for node in view.nodes}
    memory = {node.name: node.memory_free_bytes for node in view.nodes}
    has_gpus = {node.name: any(g.is_in_service for g in node.gpus) for node in view.nodes}
    open_nodes = [node.name for node in view.nodes if node.accepts_work]
    best = [((), 0.0)]

    def choices(job):
        spec = job.spec
        types = [""] if not spec.gpus else list(TYPES)
        for gpu_type in types:
            asked = [type_matches(word, gpu_type) for word in spec.gpu_types]
            if spec.gpus and spec.gpu_types and not any(asked):
                continue
            cost = float(asked.index(True)) if spec.gpus and any(asked) else 0.0
            room = [
                name
                for name in open_nodes
                if name not in job.excluded_nodes
                and (not spec.gpus or free.get((name, gpu_type), 0) >= spec.gpus_per_node)
                and cpus[name] >= spec.cpus
                and memory[name] >= spec.memory_bytes
            ]
            for names in combinations(room, spec.nodes):
                extra = 0.0 if spec.gpus else 0.05 * sum(has_gpus[name] for name in names)
                yield gpu_type, names, cost + extra

    def book(spec, gpu_type, names, sign):
        for name in names:
            if spec.gpus:
                free[name, gpu_type] -= sign * spec.gpus_per_node
            cpus[name] -= sign * spec.cpus
            memory[name] -= sign * spec.memory_bytes

    def search(i, started, cost):
        if i == len(queue):
            partly = sum(0 < free[key] < capacity[key] for key in free if key[0] in open_nodes)
            value = (started, -(cost + 0.25 * partly))
            best[0] = max(best[0], value) if best[0][0] else value
            return
        for gpu_type, names, more in list(choices(queue[i])):
            book(queue[i].spec, gpu_type, names, 1)
            search(i + 1, (*started, True), cost + more)
            book(queue[i].spec, gpu_type, names, -1)
        if not best[0][0] or best[0][0][: i + 1] <= (*started, False):
            search(i + 1, (*started, False), cost)

    search(0, (), 0.0)
    return best[0][0], -best[0][1]


@settings(CHECKED, max_examples=300)
@given(instances(max_nodes=3, max_jobs=5, max_gpus=3) | gpu_contests())
def test_milp_equals_brute_force(instance):
    queue, view = instance
    ranked = in_given_order(queue)
    placement = MILP.place(ranked, view, 0.0)
    verify(placement.starts, ranked, view)
    assert (placement.cut_short, placement.fallback) == (False, "")
    value = value_of(placement.starts, ranked, view, WEIGHTS)
    starts, cost = brute_force(queue, view)
    assert value.started == starts
    assert value.cost == pytest.approx(cost)
    assert placement.objective == pytest.approx(value.as_float())
    assert placement.objective >= GREEDY.place(ranked, view, 0.0).objective


@settings(CHECKED, max_examples=60)
@given(instances(max_nodes=4, max_jobs=14, max_gpus=4, odd=1))
def test_milp_is_valid_deterministic_and_never_worse_than_greedy(instance):
    queue, view = instance
    ranked = in_given_order(queue)
    greedy = GREEDY.place(ranked, view, 0.0)
    milp = MILP.place(ranked, view, 0.0)
    verify(greedy.starts, ranked, view)
    verify(milp.starts, ranked, view)
    assert (milp.cut_short, milp.fallback) == (False, "")
    assert milp == MILP.place(ranked, view, 0.0)
    greedy_value = value_of(greedy.starts, ranked, view, WEIGHTS)
    assert not greedy_value.is_better_than(value_of(milp.starts, ranked, view, WEIGHTS))


class StopsAfter:
    """A solver that gives up after some answers, as at a time limit."""

    def __init__(self, answers):
        self.answers = answers
        self.solver = find_glpsol()

    def solve(self, model, variables, time_limit_s):
        self.answers -= 1
        solution = self.solver.solve(model, variables, time_limit_s)
        if self.answers >= 0:
            return solution
        return type(solution)(SolveStatus.FEASIBLE, solution.values, solution.elapsed_s)


@settings(CHECKED, max_examples=40)
@given(instances(max_nodes=4, max_jobs=12, max_gpus=4), st.integers(0, 1))
def test_milp_cut_short_is_valid_and_never_worse_than_greedy(instance, answers):
    queue, view = instance
    ranked = in_given_order(queue)
    solver = StopsAfter(answers)
    milp = MilpAllocator(solver, time_limit_s=30.0, weights=WEIGHTS).place(ranked, view, 0.0)
    verify(milp.starts, ranked, view)
    assert milp.cut_short is (solver.answers < 0)
    greedy_value = value_of(GREEDY.place(ranked, view, 0.0).starts, ranked, view, WEIGHTS)
    assert not greedy_value.is_better_than(value_of(milp.starts, ranked, view, WEIGHTS))


@settings(CHECKED, max_examples=200)
@given(
    instances(max_nodes=4, max_jobs=14, max_gpus=5, odd=1),
    st.sampled_from(PRIORITIZERS),
    st.integers(0, 20),
)
def test_a_cycle_accounts_for_every_job(instance, policy, window):
    queue, view = instance
    decision = decide(
        queue, view, 10.0, prioritizer=make_prioritizer(policy), allocator=GREEDY, window=window
    )
    started = {start.job_id for start in decision.starts}
    assert started.isdisjoint(decision.waits)
    assert started | set(decision.waits) == {job.job_id for job in queue}
    assert len(decision.ranking) <= window
    specs = {job.job_id: job.spec for job in queue}
    for job_id, note in decision.waits.items():
        assert describe(note, specs[job_id])
        assert explain_wait(job_id, specs[job_id], decision)
        if note.reason is WaitReason.PRIORITY:
            assert note.ahead > 0
            assert started
        if note.short_of == "gpus":
            assert note.best_node_free_gpus < note.gpus_needed
    for start in decision.starts:
        assert explain_start(start, specs[start.job_id], decision)


@settings(CHECKED, max_examples=100)
@given(instances(max_nodes=4, max_jobs=10, max_gpus=4, odd=1), st.randoms(use_true_random=False))
def test_greedy_does_not_depend_on_the_order_of_nodes(instance, rng):
    queue, view = instance
    shuffled = list(view.nodes)
    rng.shuffle(shuffled)
    ranked = in_given_order(queue)
    assert (
        GREEDY.place(ranked, view, 0.0).starts
        == GREEDY.place(ranked, ClusterView(tuple(shuffled)), 0.0).starts
    )
