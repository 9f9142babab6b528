"""All solvers on random small programs, against each other and against trying every point."""

from itertools import product

import numpy as np
import pyomo.environ as pyo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, SolveStatus
from controller.solvers import SolverMissing, make_solver


@st.composite
def programs(draw):
    """Integers within small bounds, rows of all kinds, and (cost, bounds, rows) beside it."""
    count = draw(st.integers(1, 4))
    bounds = [(low, low + draw(st.integers(0, 3))) for low in draw(_lists(count, -2, 2))]
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        factors = draw(_lists(count, -5, 5))
        low = draw(st.none() | st.integers(-12, 8))
        high = draw(st.none() | st.integers(-8, 12))
        if draw(st.integers(0, 4)) == 0:
            high = low
        if (low, high) != (None, None) and (low is None or high is None or low <= high):
            rows.append((factors, low, high))
    return draw(_lists(count, -5, 5)), bounds, rows


def _lists(count, least, most):
    return st.lists(st.integers(least, most), min_size=count, max_size=count)


def build(cost, bounds, rows):
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(len(cost)), domain=pyo.Integers)
    for i, (low, high) in enumerate(bounds):
        model.x[i].setlb(low)
        model.x[i].setub(high)
    model.rows = pyo.ConstraintList()
    for factors, low, high in rows:
        model.rows.add((low, sum(f * model.x[i] for i, f in enumerate(factors)), high))
    model.goal = pyo.Objective(expr=sum(c * model.x[i] for i, c in enumerate(cost)))
    return model, list(model.x.values())


def is_allowed(point, rows):
    values = [(np.dot(factors, point), low, high) for factors, low, high in rows]
    return all((a is None or a <= v) and (b is None or v <= b) for v, a, b in values)


@pytest.mark.parametrize("name", ["glpk", "glpsol", "highs"])
@settings(max_examples=250, deadline=None)
@given(case=programs())
def test_the_optimum_is_that_of_trying_every_point(name, case):
    try:
        solver = make_solver(name)
    except SolverMissing as missing:
        pytest.skip(str(missing))
    cost, bounds, rows = case
    points = product(*(range(low, high + 1) for low, high in bounds))
    best = min((np.dot(cost, p) for p in points if is_allowed(p, rows)), default=None)
    solution = solver.solve(*build(*case), 20.0)
    if best is None:
        assert solution.status is SolveStatus.INFEASIBLE
        return
    assert solution.status is SolveStatus.OPTIMAL, solution.message
    point = [round(value) for value in solution.values]
    assert solution.values == pytest.approx(point, abs=1e-6)
    assert is_allowed(point, rows)
    assert all(low <= value <= high for value, (low, high) in zip(point, bounds, strict=True))
    assert np.dot(cost, point) <= best + RELATIVE_GAP * abs(best) + 1e-6
