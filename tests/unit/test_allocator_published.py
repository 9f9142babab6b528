"""The published allocator: its ways, its inert fragmentation term, and the mended one."""

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.scheduler.allocator.milp.solvers import Solution, SolveStatus
from controller.scheduler.allocator.published import ALPHA, BETA, GAMMA, rltune
from controller.scheduler.allocator.published_model import build_model
from controller.scheduler.allocator.verify import verify
from controller.scheduler.allocator.ways import PoolNode, Request, candidates, tier_1
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankedJob,
    WaitingJob,
)
from controller.solvers import make_solver
from protos.messages import JobSpec

SOLVER = make_solver("auto")
CHECKED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pool(*words):
    """Nodes from words such as `3/8` (3 of 8 free)."""
    return [PoolNode(f"n{i}", *map(int, word.split("/"))) for i, word in enumerate(words)]


def shares(ways):
    return {way.gpus for way in ways}


def node(name, free, capacity, gpu_type="P100", **fields):
    slots = tuple(GpuSlot(f"{name}-{i}", i, gpu_type, i < free) for i in range(capacity))
    given = {"cpus_free": 64, "memory_free_bytes": 64} | fields
    return NodeCapacity(name, True, slots, 64, given["cpus_free"], 64, given["memory_free_bytes"])


def ranked(*jobs):
    return [
        RankedJob(
            WaitingJob(i, JobSpec("j", "u", ("t",), "/", gpus=g, **fields), 0.0, 0.0), -float(i)
        )
        for i, (g, fields) in enumerate(jobs)
    ]


def test_a_large_job_is_split_as_the_published_order_has_it():
    ways = tier_1(Request(9, 0), pool("8/8", "8/8"))
    assert shares(ways) == {
        (("n0", 8), ("n1", 1)), (("n0", 7), ("n1", 2)),
        (("n0", 6), ("n1", 3)), (("n0", 5), ("n1", 4)),
    }  # fmt: skip
    view = ClusterView((node("n0", 8, 8), node("n1", 8, 8)))
    start = rltune(None, "rltune-tier1").place(ranked((9, {"nodes": 0})), view, 0.0).starts[0]
    assert [len(rank.gpu_uuids) for rank in start.ranks] == [5, 4]


def test_the_list_leaves_out_what_is_published_to_be_left_out():
    """A group always gives as much as it can, so no way fills the hole of 3 and leaves the 8."""
    ways = tier_1(Request(4, 2), pool("8/8", "3/8", "5/8"))
    assert (("n1", 2), ("n2", 2)) in shares(ways)
    uneven = candidates(Request(4, 0), pool("8/8", "3/8", "5/8"))
    assert all(len(way.gpus) == 1 for way in uneven)


def test_tier_2_must_not_grow_fragmentation_and_never_rescues():
    ways = candidates(Request(4, 0), pool("3/4", "1/4", "4/4"))
    assert (("n2", 4),) in shares(ways)
    assert (("n0", 3), ("n1", 1)) in shares(ways)
    assert candidates(Request(4, 0), pool("3/4", "1/4")) == []
    assert all(len(w.gpus) == 1 for w in candidates(Request(1, 0), pool("3/4", "1/4")))


def test_scores_of_a_way():
    (way,) = tier_1(Request(2, 1), pool("2/4", "0/4"))
    assert (way.fragmentation, way.waste) == (-1, -2)
    assert way.variance == pytest.approx(0.0 - 0.0625)


def objective(way, nodes, next_gpus, *, inert):
    taken = dict(way.gpus)
    free = [n.free - taken.get(n.name, 0) for n in nodes]
    partly = sum(0 < f < n.capacity for f, n in zip(free, nodes, strict=True))
    fits = sum(f >= next_gpus for f in free) if next_gpus else 0
    return (0 if inert else ALPHA * partly) + BETA * (max(free) - min(free)) - GAMMA * fits


@settings(CHECKED, max_examples=80)
@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=5),
    st.integers(1, 10),
    st.integers(0, 8),
    st.booleans(),
)
def test_the_model_chooses_as_its_formula_says(free, gpus, next_gpus, mended):
    """Published: as if the fragmentation term were not there. Mended: with it."""
    nodes = pool(*(f"{f}/8" for f in free))
    ways = candidates(Request(gpus, 0), nodes)
    if len(ways) < 2:
        return
    model, picks = build_model(ways, nodes, next_gpus, mended=mended)
    solution = SOLVER.solve(model, picks, 30.0)
    assert solution.status is SolveStatus.OPTIMAL
    touched = [n for n in nodes if any(n.name == name for way in ways for name, _ in way.gpus)]
    values = [objective(way, touched, next_gpus, inert=not mended) for way in ways]
    chosen = max(range(len(ways)), key=lambda w: solution.values[w])
    assert values[chosen] == pytest.approx(min(values), abs=2e-3 * (1 + abs(min(values))))


def test_only_the_mended_form_sees_fragmentation():
    """Two ways of equal balance: one closes a node, the other breaks one."""
    view = ClusterView((node("n0", 4, 4), node("n1", 2, 4), node("n2", 0, 4)))
    places = {}
    for name in ("rltune", "rltune-mended"):
        jobs = ranked((2, {"nodes": 1}))
        placement = rltune(SOLVER, name).place(jobs, view, 0.0)
        verify(placement.starts, jobs, view)
        places[name] = placement.starts[0].ranks[0].node
    assert places == {"rltune": "n0", "rltune-mended": "n1"}


class Broken:
    def solve(self, model, variables, time_limit_s):
        return Solution(SolveStatus.ERROR, message="out of licences")


def test_a_solver_that_fails_is_told_and_the_first_way_is_taken():
    view = ClusterView((node("n0", 4, 4), node("n1", 2, 4), node("n2", 0, 4)))
    jobs = ranked((2, {"nodes": 1}))
    told = rltune(Broken()).place(jobs, view, 0.0)
    assert "out of licences" in told.fallback
    assert told.starts[0].ranks[0].node == "n1"
    assert "no MILP solver" in rltune(None).place(jobs, view, 0.0).fallback


@settings(CHECKED, max_examples=60)
@given(st.data())
def test_whatever_is_asked_no_rule_is_broken(data):
    nodes = [
        node(
            f"n{i}", data.draw(st.integers(0, size)), size, data.draw(st.sampled_from("AB")),
            cpus_free=data.draw(st.sampled_from([1, 4, 64])),
        )
        for i, size in enumerate(data.draw(st.lists(st.integers(1, 8), max_size=5)))
    ]  # fmt: skip
    wanted = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 5), st.sampled_from([0, 1, 1, 2]), st.sampled_from([(), ("B", "A")])
            ),
            max_size=5,
        )
    )
    jobs = ranked(
        *(
            (g * max(1, n), {"nodes": n if g else max(1, n), "gpu_types": types if g else ()})
            for g, n, types in wanted
        )
    )
    view = ClusterView(tuple(nodes))
    for name, solver in product(["rltune", "rltune-mended", "rltune-tier1"], [SOLVER]):
        verify(rltune(solver, name).place(jobs, view, 0.0).starts, jobs, view)


def test_equal_nodes_do_not_multiply_the_ways():
    many = [PoolNode(f"n{i:05d}", 8, 8) for i in range(10_000)]
    assert len(tier_1(Request(64, 0), many)) == 1
