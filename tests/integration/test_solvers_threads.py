"""Solvers beside other threads, at their limits: in processes of their own where one may end."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyomo.environ as pyo
import pytest

from controller.scheduler.allocator.milp.solvers import SolveStatus
from controller.solvers import SolverMissing, glpk, make_solver


@pytest.fixture(params=["glpk", "glpsol", "highs"])
def solver(request):
    try:
        return make_solver(request.param)
    except SolverMissing as missing:
        pytest.skip(str(missing))


def market_split(columns=40, rows=5):
    """Equations over 0/1 variables that branch and bound takes very long for."""
    rng = np.random.default_rng(3)
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(columns), domain=pyo.Binary)
    model.over = pyo.Var(range(rows), domain=pyo.NonNegativeReals)
    model.rows = pyo.ConstraintList()
    for i in range(rows):
        weights = rng.integers(0, 100, columns).tolist()
        body, half = sum(w * model.x[j] for j, w in enumerate(weights)), sum(weights) // 2
        model.rows.add(body + model.over[i] >= half)
        model.rows.add(body - model.over[i] <= half)
    model.goal = pyo.Objective(expr=sum(model.over.values()))
    return model, list(model.x.values())


THREADS = """
import threading, sys
import numpy as np
import pyomo.environ as pyo
from controller.solvers import make_solver

def knapsack(seed):
    rng = np.random.default_rng(seed)
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(15), domain=pyo.Binary)
    model.rows = pyo.ConstraintList()
    for _ in range(3):
        weights = rng.integers(1, 30, 15).tolist()
        model.rows.add(sum(w * model.x[i] for i, w in enumerate(weights)) <= sum(weights) // 3)
    gains = rng.integers(1, 30, 15).tolist()
    model.goal = pyo.Objective(
        expr=sum(g * model.x[i] for i, g in enumerate(gains)), sense=pyo.maximize)
    return model, list(model.x.values()), gains

def gain(solver, seed):
    model, variables, gains = knapsack(seed)
    return round(float(np.dot(gains, solver.solve(model, variables, 20.0).values)))

solver = make_solver(sys.argv[1])
expected = {seed: gain(solver, seed) for seed in range(20)}
wrong = []

def work(first):
    for turn in range(60):
        seed = (first + turn) % 20
        if gain(solver, seed) != expected[seed]:
            wrong.append(seed)

threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("wrong", wrong)
"""


@pytest.mark.parametrize("name", ["glpk", "highs"])
def test_threads_that_solve_at_once_neither_end_the_process_nor_mix_up_answers(name):
    try:
        make_solver(name)
    except SolverMissing as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-c", THREADS, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # The last line: HiGHS 1.16 prints its banner whatever it is told.
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["wrong []"]), done.stderr


def test_other_threads_go_on_while_a_model_is_solved(solver):
    gaps = []
    stop = threading.Event()

    def tick():
        before_s = time.monotonic()
        while not stop.wait(0.002):
            now_s = time.monotonic()
            gaps.append(now_s - before_s)
            before_s = now_s

    model, variables = market_split()
    solver.solve(model, variables, 0.05)  # loads what it needs
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        solution = solver.solve(model, variables, 0.8)
    finally:
        stop.set()
        thread.join()
    assert solution.elapsed_s > 0.7
    # A solver that holds the interpreter's lock makes one gap as long as the solve.
    assert max(gaps) < 0.5 * solution.elapsed_s
    assert len(gaps) > 20


def test_the_best_answer_is_returned_at_the_limit_and_the_limit_is_held(solver):
    model, variables = market_split()
    solution = solver.solve(model, variables, 0.4)
    if solver.name == "glpsol":  # it is killed, and its answer is lost
        assert (solution.status, solution.values) == (SolveStatus.LIMIT, ())
    else:
        assert solution.status is SolveStatus.FEASIBLE
        assert len(solution.values) == 40
        assert set(np.round(solution.values, 6)) <= {0.0, 1.0}
    assert 0.3 < solution.elapsed_s < 3.0


def test_waiting_for_another_solve_counts_towards_the_limit():
    solver = make_solver("glpk")
    model, variables = market_split()
    with ThreadPoolExecutor(1) as executor:
        long = executor.submit(solver.solve, model, variables, 1.5)
        while not glpk._LIBRARY_IN_USE.locked():
            pass
        short = solver.solve(*market_split(10), 0.2)
        assert short.status is SolveStatus.LIMIT
        assert short.elapsed_s < 1.0
        assert long.result().status is SolveStatus.FEASIBLE
    assert solver.solve(*market_split(10), 10.0).status is SolveStatus.OPTIMAL
