"""Greedy and MILP placement on small tables, and glpsol's faults by real programs."""

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pyomo.environ as pyo
import pytest

from controller.scheduler.allocator.greedy import GreedyAllocator
from controller.scheduler.allocator.milp.bounds import cost_lower_bound
from controller.scheduler.allocator.milp.classes import AMPLE, make_problem
from controller.scheduler.allocator.milp.expand import UnusableAnswer, expand
from controller.scheduler.allocator.milp.milp import MilpAllocator
from controller.scheduler.allocator.milp.network import NetworkTooLarge, build_network
from controller.scheduler.allocator.milp.solvers import Solution, SolveStatus
from controller.scheduler.allocator.objective import ObjectiveValue, ObjectiveWeights, value_of
from controller.scheduler.allocator.verify import InvalidPlacement, verify
from controller.scheduler.index import index_of
from controller.scheduler.ledger import Ledger
from controller.scheduler.policies import make_allocator
from controller.scheduler.shape import ShapeIndex, type_matches
from controller.scheduler.slots import choose_slots
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    RankedJob,
    RankPlacement,
    Start,
    WaitingJob,
)
from controller.solvers.glpsol import Glpsol, find_glpsol
from protos.messages import JobSpec

GIB = 1024**3


def job(job_id, gpus=1, *, types=(), excluded=(), **spec):
    fields = {"name": "j", "user": "ada", "argv": ("true",), "cwd": "/"} | spec
    return WaitingJob(
        job_id,
        JobSpec(gpus=gpus, gpu_types=tuple(types), **fields),
        float(job_id),
        float(job_id),
        excluded_nodes=frozenset(excluded),
    )


def node(name, gpus, *, cpus=64, memory=256 * GIB, accepts=True, in_service=True):
    """A node from words such as `4xP100`, `3/4xP100` (3 of 4 free) or `2xT4+1/2xP100`."""
    slots = []
    for word in filter(None, gpus.split("+")):
        free, capacity, gpu_type = re.fullmatch(r"(?:(\d+)/)?(\d+)x(.+)", word).groups()
        busy = int(capacity) - int(free or capacity)
        slots += [
            GpuSlot(f"{name}-{len(slots) + i}", len(slots) + i, gpu_type, i >= busy, in_service)
            for i in range(int(capacity))
        ]
    return NodeCapacity(name, accepts, tuple(slots), 64, cpus, 256 * GIB, memory)


def cluster(*nodes):
    return ClusterView(
        tuple(node(f"n{i}", n) if isinstance(n, str) else n for i, n in enumerate(nodes, 1))
    )


def ranked(*jobs):
    return [RankedJob(entry, float(-i)) for i, entry in enumerate(jobs)]


def where(placement):
    """{job: "n1 n2"} for reading."""
    return {s.job_id: " ".join(r.node for r in s.ranks) for s in placement.starts}


def problem_of(view, jobs):
    shapes = ShapeIndex(index_of(view))
    by_id = {entry.job_id: shapes.of(entry) for entry in jobs}
    return make_problem(list(by_id), by_id, Ledger(index_of(view)))


WEIGHTS = ObjectiveWeights(type_preference=1.0, packing=0.0, fragmentation=0.25)
"""Counts partly used nodes: a cost that is easy to see."""
GREEDY = GreedyAllocator(WEIGHTS)
MILP = MilpAllocator(find_glpsol(), time_limit_s=30.0, weights=WEIGHTS)


def place(allocator, view, *jobs):
    placement = allocator.place(ranked(*jobs), view, 0.0)
    verify(placement.starts, ranked(*jobs), view)
    return placement


@pytest.mark.parametrize(
    ("asked", "gpu_type", "expected"),
    [
        ("P100", "P100", True),
        ("p100", "P100", True),
        ("V100", "V100-16GB", True),
        ("v100 16gb", "V100-16GB", True),
        ("rtx 3090", "RTX_3090", True),
        ("3090", "RTX 3090", True),
        ("V100-32GB", "V100-16GB", False),
        ("A100", "V100-16GB", False),
    ],
)
def test_type_matches(asked, gpu_type, expected):
    assert type_matches(asked, gpu_type) is expected


BOTH = pytest.mark.parametrize("allocator", [GREEDY, MILP], ids=lambda a: a.name)


@BOTH
@pytest.mark.parametrize(
    ("view", "jobs", "expected"),
    [
        pytest.param(cluster("4xP100"), [], {}, id="no jobs"),
        pytest.param(cluster(), [job(1)], {}, id="no nodes"),
        pytest.param(cluster("0/4xP100"), [job(1)], {}, id="all full"),
        pytest.param(cluster("4xP100"), [job(1, 8)], {}, id="larger than the cluster"),
        pytest.param(cluster("4xP100", "3/4xP100"), [job(1)], {1: "n2"}, id="best fit"),
        pytest.param(cluster("4xP100", "2xP100"), [job(1, 2)], {1: "n2"}, id="whole node first"),
        pytest.param(
            cluster("1/4xP100", "1/4xP100"),
            [job(1, 2), job(2)],
            {2: "n1"},
            id="skips, no gang over nodes",
        ),
        pytest.param(cluster("4xP100", "4xP100"), [job(1, 8, nodes=2)], {1: "n1 n2"}, id="gang"),
        pytest.param(cluster("4xP100"), [job(1, 2, nodes=2)], {}, id="distinct nodes"),
        pytest.param(cluster("4xP100", "4xT4"), [job(1, 8, nodes=2)], {}, id="no mixed types"),
        pytest.param(
            cluster("4xP100", "4xV100-16GB"),
            [job(1, types=["v100"])],
            {1: "n2"},
            id="type by part of name",
        ),
        pytest.param(
            cluster("4xP100", "1xT4"),
            [job(1, types=["T4", "P100"])],
            {1: "n2"},
            id="preferred type",
        ),
        pytest.param(
            cluster("4xP100", "0/1xT4"),
            [job(1, types=["T4", "P100"])],
            {1: "n1"},
            id="second choice",
        ),
        pytest.param(cluster("4xP100"), [job(1, types=["A100"])], {}, id="no such type"),
        pytest.param(
            cluster("4xP100", "2/2xT4"), [job(1, 0)], {1: "n2"}, id="cpu job: fewest free GPUs"
        ),
        pytest.param(cluster("4xP100", ""), [job(1, 0)], {1: "n2"}, id="cpu job: cpu node"),
        pytest.param(cluster("", ""), [job(1, 0, nodes=2)], {1: "n1 n2"}, id="cpu gang"),
        pytest.param(cluster(""), [job(1, 0, nodes=2)], {}, id="cpu gang needs nodes"),
        pytest.param(
            cluster(node("n1", "4xP100", cpus=3)),
            [job(1, cpus=2), job(2, cpus=2), job(3, cpus=1)],
            {1: "n1", 3: "n1"},
            id="cpus are deducted",
        ),
        pytest.param(
            cluster(node("n1", "4xP100", memory=10 * GIB)),
            [job(1, memory_bytes=8 * GIB), job(2, memory_bytes=8 * GIB), job(3)],
            {1: "n1", 3: "n1"},
            id="memory is deducted",
        ),
        pytest.param(cluster(node("n1", "4xP100", accepts=False)), [job(1)], {}, id="drained"),
        pytest.param(
            cluster("4xP100", "3xP100"), [job(1, excluded=["n2"])], {1: "n1"}, id="excluded"
        ),
        pytest.param(
            cluster("2xT4+2xP100"),
            [job(1, 2, types=["P100"]), job(2, 2)],
            {1: "n1", 2: "n1"},
            id="mixed node",
        ),
        pytest.param(cluster("2xT4+2xP100"), [job(1, 3)], {}, id="mixed node, not mixed job"),
    ],
)
def test_places(allocator, view, jobs, expected):
    assert where(place(allocator, view, *jobs)) == expected


@BOTH
def test_out_of_service_gpu_is_never_given(allocator):
    slots = (
        GpuSlot("a", 0, "P100", is_free=False, is_in_service=False),
        GpuSlot("b", 1, "P100", is_free=True),
    )
    view = ClusterView((NodeCapacity("n1", True, slots, 8, 8, GIB, GIB),))
    placement = place(allocator, view, job(1), job(2))
    assert [s.ranks for s in placement.starts] == [(RankPlacement("n1", ("b",), (1,)),)]


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [0, 1]),
        ([0, 2, 3, 5], 2, [2, 3]),
        ([0, 1, 2, 5, 6], 2, [5, 6]),
        ([0, 2, 4], 2, [0, 2]),
        ([3], 1, [3]),
    ],
)
def test_gpus_are_neighbours_where_possible(free, count, expected):
    slots = [GpuSlot(str(i), i, "P100", True) for i in free]
    assert [slot.index for slot in choose_slots(slots, count)] == expected


def test_milp_gives_way_so_that_more_jobs_start():
    view = cluster("4xP100", "4xT4")
    jobs = [job(1, 4), job(2, 4, types=["P100"])]
    assert where(place(GREEDY, view, *jobs)) == {1: "n1"}
    assert where(place(MILP, view, *jobs)) == {1: "n2", 2: "n1"}


def test_milp_never_passes_over_a_job_for_more_later_ones():
    view = cluster("4xP100")
    jobs = [job(1, 4), *(job(i, 1) for i in range(2, 6))]
    assert where(place(MILP, view, *jobs)) == {1: "n1"}


def test_milp_frees_a_node_where_greedy_would_break_one():
    view = cluster("3/4xP100", "2xP100")
    assert where(place(GREEDY, view, job(1), job(2, 2))) == {1: "n2", 2: "n1"}
    placement = place(MILP, view, job(1), job(2, 2))
    assert where(placement) == {1: "n1", 2: "n1"}
    assert placement.objective > place(GREEDY, view, job(1), job(2, 2)).objective
    assert (placement.cut_short, placement.fallback) == (False, "")


def test_milp_puts_the_ranks_of_a_job_on_distinct_nodes_though_one_would_hold_both():
    view = cluster("2/4xP100", "4xP100", "4xP100")
    jobs = [job(1, 2, nodes=2, excluded=["n2"]), job(2, 4), job(3, 4, nodes=2)]
    assert where(place(MILP, view, *jobs)) == {1: "n1 n3", 2: "n2"}


def test_jobs_beyond_the_joint_window_are_placed_greedily():
    allocator = MilpAllocator(find_glpsol(), window=2, time_limit_s=30.0, weights=WEIGHTS)
    placement = place(allocator, cluster("4xP100"), *(job(i) for i in range(1, 6)))
    assert set(where(placement)) == {1, 2, 3, 4}


class NoSolver:
    """Fails the test when it is asked."""

    def solve(self, model, variables, time_limit_s):
        raise AssertionError("the solver was asked although the answer is known")


@pytest.mark.parametrize(
    ("view", "jobs", "expected"),
    [
        (cluster("4xP100", "3/4xP100"), [job(1)], {1: "n2"}),
        (cluster("3/4xP100", "2xP100"), [job(1)], {1: "n1"}),
        (cluster("0/4xP100"), [job(1), job(2)], {}),
        (cluster("4xP100"), [job(1, 2), job(2, 2), job(3, 1)], {1: "n1", 2: "n1"}),
        (cluster("4xP100", "4xP100"), [job(1, 4), job(2), job(3, 3)], {1: "n1", 2: "n2", 3: "n2"}),
        (cluster("4xP100", "4xP100"), [job(i) for i in range(1, 8)], None),
        (cluster("4xP100", "1xT4"), [job(1, types=["T4", "P100"])], {1: "n2"}),
    ],
)
def test_known_answers_need_no_solver(view, jobs, expected):
    placement = place(MilpAllocator(NoSolver(), weights=WEIGHTS), view, *jobs)
    assert expected is None or where(placement) == expected
    exact = place(MILP, view, *jobs)
    assert placement.objective == exact.objective


HARD = (cluster("3/4xP100", "2xP100"), [job(1), job(2, 2)])


def test_missing_solver_falls_back_to_greedy_and_says_so():
    placement = place(make_allocator("milp", no_solver="glpsol was not found"), HARD[0], *HARD[1])
    assert placement.starts == place(GREEDY, HARD[0], *HARD[1]).starts
    assert placement.fallback == "glpsol was not found"


def program(tmp_path, body):
    """A glpsol of ours in a folder of awkward name."""
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    path = folder / "glpsol"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


WRITES_NONSENSE = """
while [ $# -gt 0 ]; do
    [ "$1" = --write ] && echo nonsense > "$2"
    [ "$1" = --wglp ] && : > "$2"
    shift
done"""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("echo no licence; exit 3", "exit code 3: no licence"),
        ("kill -9 $$", "signal 9"),
        ("exit 0", "unreadable"),
        (WRITES_NONSENSE, "no status line"),
    ],
    ids=["fails", "dies", "writes nothing", "writes nonsense"],
)
def test_failing_glpsol_falls_back_to_greedy_and_says_so(tmp_path, body, text):
    allocator = MilpAllocator(Glpsol(program(tmp_path, body)), time_limit_s=30.0, weights=WEIGHTS)
    placement = place(allocator, HARD[0], *HARD[1])
    assert placement.starts == place(GREEDY, HARD[0], *HARD[1]).starts
    assert text in placement.fallback
    assert not placement.cut_short


def test_glpsol_that_is_no_program_falls_back(tmp_path):
    allocator = MilpAllocator(Glpsol(tmp_path / "absent"), time_limit_s=30.0, weights=WEIGHTS)
    assert "cannot be run" in place(allocator, HARD[0], *HARD[1]).fallback


def test_hanging_glpsol_is_killed_at_the_limit_with_all_that_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    path = program(tmp_path, f"sleep 600 & echo $! > {pid_file}; wait")
    began = time.monotonic()
    placement = place(
        MilpAllocator(Glpsol(path), time_limit_s=0.3, weights=WEIGHTS), HARD[0], *HARD[1]
    )
    assert time.monotonic() - began < 5.0
    assert placement.cut_short
    assert placement.fallback == ""
    assert placement.starts == place(GREEDY, HARD[0], *HARD[1]).starts
    wait_until_gone(int(pid_file.read_text()))


def test_answer_found_when_glpsols_own_limit_strikes_is_used_and_told(tmp_path):
    real = find_glpsol()
    path = program(
        tmp_path,
        f"LD_LIBRARY_PATH='{real.library_path or ''}' '{real.executable}' \"$@\"\n"
        "echo 'TIME LIMIT EXCEEDED; SEARCH TERMINATED'",
    )
    placement = place(
        MilpAllocator(Glpsol(path), time_limit_s=30.0, weights=WEIGHTS), HARD[0], *HARD[1]
    )
    assert placement.cut_short
    assert placement.fallback == ""
    assert placement.starts == place(MILP, HARD[0], *HARD[1]).starts


def wait_until_gone(pid):
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
    raise AssertionError(f"process {pid} still runs")


def test_zero_budget_cuts_short_before_the_solver_starts():
    placement = place(
        MilpAllocator(NoSolver(), time_limit_s=0.0, weights=WEIGHTS), HARD[0], *HARD[1]
    )
    assert placement.cut_short


@pytest.mark.parametrize(
    ("solution", "cut_short", "text"),
    [
        (Solution(SolveStatus.INFEASIBLE), False, "infeasible"),
        (Solution(SolveStatus.LIMIT), True, ""),
        (Solution(SolveStatus.ERROR, message="broken"), False, "broken"),
    ],
)
def test_each_solver_status_has_its_consequence(solution, cut_short, text):
    class Answers:
        def solve(self, model, variables, time_limit_s):
            return solution

    placement = place(MilpAllocator(Answers(), weights=WEIGHTS), HARD[0], *HARD[1])
    assert placement.cut_short is cut_short
    assert text in placement.fallback
    assert placement.starts == place(GREEDY, HARD[0], *HARD[1]).starts


@pytest.mark.parametrize("value", [0.5, 1e6, -1.0, float("nan")])
def test_answers_that_are_no_placement_are_refused(value):
    class Lies:
        def solve(self, model, variables, time_limit_s):
            return Solution(SolveStatus.OPTIMAL, (value,) * len(variables))

    placement = place(MilpAllocator(Lies(), weights=WEIGHTS), HARD[0], *HARD[1])
    assert "cannot be used" in placement.fallback
    assert placement.starts == place(GREEDY, HARD[0], *HARD[1]).starts


def test_glpsol_reports_limit_infeasible_and_optimal():
    def knapsack(capacity):
        model = pyo.ConcreteModel()
        model.x = pyo.Var(range(3), domain=pyo.NonNegativeIntegers, bounds=(0, 5))
        model.c = pyo.Constraint(expr=2 * model.x[0] + 3 * model.x[1] <= capacity)
        model.o = pyo.Objective(expr=3 * model.x[0] + 5 * model.x[1], sense=pyo.maximize)
        return model, [model.x[0], model.x[1], model.x[2]]

    solver = find_glpsol()
    solved = solver.solve(*knapsack(12), 10.0)
    assert (solved.status, solved.values) == (SolveStatus.OPTIMAL, (0.0, 4.0, 0.0))
    assert solved.elapsed_s > 0
    assert solver.solve(*knapsack(-1), 10.0).status is SolveStatus.INFEASIBLE
    assert solver.solve(*knapsack(12), 0.0).status is SolveStatus.LIMIT


def test_load_pyomo_leaves_nothing_to_load_for_the_first_solve():
    code = (
        "import sys, controller.solvers.glpsol as g\n"
        "assert 'pyomo' not in sys.modules\n"
        "g.load_pyomo()\n"
        "print('pyomo.environ' in sys.modules, 'pyomo.repn.plugins.lp_writer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"


def test_find_glpsol_takes_the_path_first_and_passes_over_the_python_wrapper(tmp_path):
    mine = program(tmp_path, "exit 0")
    venv_bin = str(Path(sys.executable).parent)
    assert find_glpsol(f"{venv_bin}{os.pathsep}{mine.parent}").executable == mine
    found = find_glpsol(venv_bin)
    assert found.executable.parts[-3:] == ("cmeel.prefix", "bin", "glpsol")
    assert found.library_path == found.executable.parent.parent / "lib"
    assert pickle.loads(pickle.dumps(found)) == found


def test_ample_cpus_are_left_out_of_a_nodes_state():
    view = cluster(node("n1", "4xP100", cpus=8), node("n2", "4xP100", cpus=7), node("n3", ""))
    problem = problem_of(view, [job(i, 1, cpus=2) for i in range(1, 9)])
    assert [len(group.job_ids) for group in problem.groups] == [8]
    cpus = {tuple(names): at.cpus for c in problem.classes for at, names in c.nodes.items()}
    assert cpus == {("n1",): AMPLE, ("n2",): 3}


def test_network_does_not_grow_with_the_number_of_nodes():
    jobs = [job(i, gpus) for i, gpus in enumerate([1, 2, 4, 1, 3])]
    sizes = [
        len(build_network(problem_of(cluster(*["4xP100"] * count), jobs)).arcs)
        for count in (4, 400)
    ]
    assert sizes[0] == sizes[1] > 0


def test_model_that_is_too_large_is_cut_short_not_built():
    view = cluster(*(node(f"n{i}", "8xP100", cpus=61 + i) for i in range(40)))
    jobs = [job(i, 1 + i % 3, cpus=5 + i * 7 % 31) for i in range(1, 60)]
    with pytest.raises(NetworkTooLarge):
        build_network(problem_of(view, jobs))
    placement = place(MilpAllocator(NoSolver(), weights=WEIGHTS), view, *jobs)
    assert placement.cut_short
    assert placement.starts


def test_expand_refuses_flows_that_break_the_rows():
    view = cluster("4xP100")
    network = build_network(problem_of(view, [job(1), job(2, 2)]))
    with pytest.raises(UnusableAnswer, match="too few shares"):
        expand(network, [0] * len(network.arcs), {}, {1, 2})
    with pytest.raises(UnusableAnswer, match="more nodes leave"):
        expand(network, [1] * len(network.arcs), {}, {1, 2})


@pytest.mark.parametrize(
    ("view", "jobs", "expected"),
    [
        (cluster("4xP100", "4xP100"), [job(1)], 0.25),
        (cluster("4xP100", "4xP100"), [job(1, 4)], 0.0),
        (cluster("1/4xP100", "2/4xP100", "3/4xP100"), [job(1)], 0.5),
        (cluster("4xP100", "2xP100"), [job(1)], 0.0),
        (cluster("4xP100", "0/4xT4"), [job(1, types=["T4", "P100"])], 1.0),
    ],
)
def test_cost_lower_bound(view, jobs, expected):
    shapes = [ShapeIndex(index_of(view)).of(j) for j in jobs]
    ledger = Ledger(index_of(view))
    assert cost_lower_bound(ledger, shapes, WEIGHTS) == pytest.approx(expected)


def test_objective_orders_starts_before_cost():
    first = ObjectiveValue((True, False, False), 5.0)
    later = ObjectiveValue((False, True, True), 0.0)
    cheap = ObjectiveValue((True, False, False), 4.0)
    assert first.is_better_than(later)
    assert cheap.is_better_than(first)
    assert not first.is_better_than(first)
    assert cheap.as_float() > first.as_float() > later.as_float()


def test_evaluate_counts_cost_from_the_nodes_up():
    view = cluster("4xP100", "1/2xT4")
    jobs = ranked(job(1, types=["T4", "P100"]), job(2, 0))
    starts = [
        Start(1, (RankPlacement("n1", ("n1-0",), (0,)),)),
        Start(2, (RankPlacement("n2", (), ()),)),
    ]
    value = value_of(starts, jobs, view, WEIGHTS)
    assert value == ObjectiveValue((True, True), pytest.approx(1.0 + 0.05 + 2 * 0.25))


def rank_on(name, *indices):
    return RankPlacement(name, tuple(f"{name}-{i}" for i in indices), indices)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([Start(9, (rank_on("n1", 0),))], "not asked for"),
        ([Start(1, (rank_on("n1", 0),)), Start(1, (rank_on("n1", 1),))], "starts twice"),
        ([Start(1, ())], "needs 1 nodes"),
        ([Start(4, (rank_on("n1", 0), rank_on("n1", 1)))], "needs 2 nodes"),
        ([Start(1, (rank_on("n9", 0),))], "takes no such work"),
        ([Start(1, (rank_on("n3", 0),))], "takes no such work"),
        ([Start(5, (rank_on("n1", 0),))], "takes no such work"),
        ([Start(1, (rank_on("n1", 0, 1),))], "needs 1 GPUs"),
        ([Start(1, (rank_on("n1", 0),)), Start(2, (rank_on("n1", 0),))], "is not free"),
        ([Start(1, (rank_on("n2", 0),))], "is not free"),
        ([Start(1, (RankPlacement("n1", ("n1-0",), (1,)),))], "is not free"),
        ([Start(3, (rank_on("n1", 0),))], "wants one of"),
        ([Start(4, (rank_on("n1", 0), rank_on("n2", 1)))], "got"),
        ([Start(6, (rank_on("n1", 0),)), Start(7, (rank_on("n1", 1),))], "CPUs are overbooked"),
        ([Start(8, (rank_on("n1", 0),))], "memory is overbooked"),
    ],
)
def test_verify_finds_each_broken_rule(starts, message):
    view = cluster("4xP100", "1/2xT4", node("n3", "4xP100", accepts=False))
    jobs = ranked(
        job(1),
        job(2),
        job(3, types=["T4"]),
        job(4, 2, nodes=2),
        job(5, excluded=["n1"]),
        job(6, cpus=40),
        job(7, cpus=40),
        job(8, memory_bytes=300 * GIB),
    )
    with pytest.raises(InvalidPlacement, match=message):
        verify(starts, jobs, view)


def test_unknown_allocator_names_those_that_exist():
    with pytest.raises(ValueError, match="'best'; there are greedy, milp, rltune"):
        make_allocator("best")


@BOTH
def test_allocators_and_answers_cross_to_a_worker_process(allocator):
    copy = pickle.loads(pickle.dumps(allocator))
    placement = place(copy, HARD[0], *HARD[1])
    assert pickle.loads(pickle.dumps(placement)) == place(allocator, HARD[0], *HARD[1])
