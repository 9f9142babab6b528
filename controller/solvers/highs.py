"""HiGHS inside this process, an optional second solver (`pip install highspy`).

It releases the interpreter lock while it solves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus
from controller.solvers.glpk import SolverMissing
from controller.solvers.standard_form import StandardForm, solve_empty, translate


@dataclass(frozen=True, slots=True)
class Highs:
    """Solves with highspy, in one thread. Can be sent to a worker process."""

    monotonic: Callable[[], float] = time.monotonic

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. On the limit, the best answer found is returned."""
        began_s = self.monotonic()
        form = translate(model, variables)
        left_s = time_limit_s - (self.monotonic() - began_s)
        status, values, message = _solve(form, left_s)
        return Solution(status, values, self.monotonic() - began_s, message)


def find_highs() -> Highs:
    """The solver.

    Raises:
        SolverMissing: highspy is not installed, or cannot be loaded here.
    """
    try:
        import_module("highspy")
    except (ImportError, OSError) as error:
        raise SolverMissing(f"pip install highspy ({error})") from error
    return Highs()


def _solve(form: StandardForm, time_limit_s: float) -> tuple[SolveStatus, tuple[float, ...], str]:
    if form.is_empty:
        values = solve_empty(form)
        return (
            (SolveStatus.INFEASIBLE, (), "")
            if values is None
            else (SolveStatus.OPTIMAL, values, "")
        )
    if time_limit_s <= 0:
        return SolveStatus.LIMIT, (), ""
    highspy = import_module("highspy")
    solver = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("mip_rel_gap", RELATIVE_GAP),
        ("time_limit", time_limit_s),
    ):
        solver.setOptionValue(option, value)
    if solver.passModel(_program(form, highspy)) == highspy.HighsStatus.kError:
        return SolveStatus.ERROR, (), "HiGHS does not accept the model"
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return SolveStatus.INFEASIBLE, (), ""
    has_values = (
        solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    )
    if status not in {highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit}:
        return SolveStatus.ERROR, (), f"HiGHS ended with {solver.modelStatusToString(status)}"
    if not has_values:
        return SolveStatus.LIMIT, (), ""
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    values = form.answer(list(solver.getSolution().col_value))
    return SolveStatus.OPTIMAL if is_optimal else SolveStatus.FEASIBLE, values, ""


def _program(form: StandardForm, highspy: Any) -> Any:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = form.cost.size, form.row_lower.size
    program.col_cost_, program.col_lower_, program.col_upper_ = form.cost, form.lower, form.upper
    program.row_lower_, program.row_upper_ = form.row_lower, form.row_upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = form.starts
    program.a_matrix_.index_ = form.rows
    program.a_matrix_.value_ = form.coefficients
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[int(integer)] for integer in np.asarray(form.is_integer)]
    return program
