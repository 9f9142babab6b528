"""The solver paths: alike in what they answer, guarded where a library would end the process."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count

import numpy as np
import pyomo.environ as pyo
import pytest

from controller import solvers
from controller.scheduler.allocator.milp.solvers import SolveStatus
from controller.solvers import SolverMissing, glpk, highs, make_solver
from controller.solvers.glpsol import Glpsol

NAMES = ("glpk", "glpsol", "highs")
HAS_HIGHS = find_spec("highspy") is not None


@pytest.fixture(params=NAMES)
def solver(request):
    try:
        return make_solver(request.param)
    except SolverMissing as missing:
        pytest.skip(str(missing))


def program(rows, *, cost=(3, 4, 5), bounds=(0, 4), sense=pyo.maximize):
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(len(cost)), domain=pyo.Integers, bounds=bounds)
    model.unused = pyo.Var(domain=pyo.Binary)
    model.rows = pyo.ConstraintList()
    for coefficients, low, high in rows:
        body = sum(c * model.x[i] for i, c in enumerate(coefficients) if c)
        model.rows.add(pyo.inequality(low, body, high))
    model.goal = pyo.Objective(
        expr=sum(c * model.x[i] for i, c in enumerate(cost)) + 7, sense=sense
    )
    return model, [*model.x.values(), model.unused]


def market_split(size):
    """Equations over 0/1 variables that branch and bound takes very long for."""
    rng = np.random.default_rng(3)
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(size), domain=pyo.Binary)
    model.over = pyo.Var(range(5), domain=pyo.NonNegativeReals)
    model.rows = pyo.ConstraintList()
    for i in range(5):
        weights = rng.integers(0, 100, size)
        body = sum(int(w) * model.x[j] for j, w in enumerate(weights))
        model.rows.add(body + model.over[i] >= int(weights.sum()) // 2)
        model.rows.add(body - model.over[i] <= int(weights.sum()) // 2)
    model.goal = pyo.Objective(expr=sum(model.over.values()))
    return model, list(model.x.values())


@pytest.mark.parametrize(
    ("rows", "kwargs", "expected"),
    [
        ([((2, 3, 4), None, 9)], {}, (3, 1, 0)),
        ([((1, 1, 1), 5, 5), ((0, 0, 1), 2, 3)], {"sense": pyo.minimize}, (3, 0, 2)),
        ([((1, 0, 0), 1, None)], {"bounds": (2, 2)}, (2, 2, 2)),
    ],
)
def test_every_path_finds_the_same_optimum(solver, rows, kwargs, expected):
    model, variables = program(rows, **kwargs)
    solution = solver.solve(model, variables, 10.0)
    assert solution.status is SolveStatus.OPTIMAL, solution.message
    gain = np.dot(solution.values[:3], (3, 4, 5))
    assert gain == pytest.approx(np.dot(expected, (3, 4, 5)))
    assert solution.values[3] == 0


@pytest.mark.parametrize("rows", [[((1, 1, 1), 20, None)], [((2, 2, 2), 3, 3)]])
def test_infeasible_is_told_and_is_no_error(solver, rows):
    assert solver.solve(*program(rows), 10.0).status is SolveStatus.INFEASIBLE


def test_no_time_is_a_limit(solver):
    assert solver.solve(*program([((2, 3, 4), None, 9)]), 0.0).status is SolveStatus.LIMIT


IN_PROCESS = pytest.mark.parametrize(
    "name",
    ["glpk", pytest.param("highs", marks=pytest.mark.skipif(not HAS_HIGHS, reason="no highspy"))],
)


@IN_PROCESS
def test_models_that_would_end_the_process_are_answered_without_the_library(name):
    solver = make_solver(name)
    model, variables = program([])
    assert solver.solve(model, variables, 1.0).values == (4, 4, 4, 0)
    model, variables = program([], bounds=(0, None))
    assert solver.solve(model, variables, 1.0).status is SolveStatus.ERROR
    model, variables = program([((1, 1, 0), None, 3)], bounds=(0.5, 2.5))
    assert solver.solve(model, variables, 1.0).values == (1, 2, 2, 0)
    nothing = pyo.ConcreteModel()
    nothing.x = pyo.Var(domain=pyo.Binary)
    nothing.goal = pyo.Objective(expr=0.0 * nothing.x)
    solution = solver.solve(nothing, [nothing.x], 1.0)
    assert (solution.status, solution.values) == (SolveStatus.OPTIMAL, (0.0,))
    crossed, variables = program([((1, 1, 1), None, 5)], bounds=(2, 1))
    assert solver.solve(crossed, variables, 1.0).status is SolveStatus.INFEASIBLE


@IN_PROCESS
def test_best_answer_is_returned_at_the_limit(name):
    solution = make_solver(name).solve(*market_split(40), 0.3)
    assert solution.status is SolveStatus.FEASIBLE
    assert len(solution.values) == 40
    assert set(np.round(solution.values, 6)) <= {0.0, 1.0}
    assert solution.elapsed_s < 3


async def test_loop_goes_on_while_glpk_solves():
    solver = make_solver("glpk")
    gaps = []

    async def tick():
        for _ in count():
            before_s = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before_s)

    loop = asyncio.get_running_loop()
    ticking = asyncio.create_task(tick())
    with ThreadPoolExecutor(1) as executor:
        solution = await loop.run_in_executor(executor, solver.solve, *market_split(40), 1.0)
    ticking.cancel()
    assert solution.elapsed_s > 0.9
    assert max(gaps) < 0.5


def test_two_threads_that_solve_do_not_end_the_process():
    solver = make_solver("glpk")
    models = [program([((2, 3, 4), None, 9)]) for _ in range(200)]
    with ThreadPoolExecutor(2) as executor:
        solved = list(executor.map(lambda case: solver.solve(*case, 10.0), models))
    assert {(s.status, s.values) for s in solved} == {(SolveStatus.OPTIMAL, (3, 1, 0, 0))}


def test_what_cannot_be_loaded_is_told(monkeypatch):
    def missing():
        raise SolverMissing("pip install swiglpk (gone)")

    monkeypatch.setattr(solvers, "find_glpk", missing)
    assert isinstance(make_solver("auto"), Glpsol)
    monkeypatch.setattr(solvers, "find_glpsol", lambda: None)
    with pytest.raises(SolverMissing, match="glpk-utils"):
        make_solver("auto")
    with pytest.raises(SolverMissing, match="swiglpk"):
        make_solver("glpk")
    with pytest.raises(ValueError, match="auto, glpk, glpsol, highs"):
        make_solver("cplex")


@pytest.mark.parametrize(
    ("find", "module"), [(glpk.find_glpk, "swiglpk"), (highs.find_highs, "highspy")]
)
def test_missing_package_is_named(monkeypatch, find, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    glpk.load_library.cache_clear()
    with pytest.raises(SolverMissing, match=f"pip install {module}"):
        find()
