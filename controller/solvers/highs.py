"""HiGHS inside this process, an optional second solver (`pip install highspy`).

It releases the interpreter lock while it solves, and solves of several threads do not disturb
each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus
from controller.solvers.errors import SolverMissing
from controller.solvers.standard_form import (
    UNBOUNDED,
    Answer,
    StandardForm,
    answer_without_solver,
    translate,
)


@dataclass(frozen=True, slots=True)
class Highs:
    """Solves with highspy, in one thread. Can be sent to a worker process."""

    monotonic: Callable[[], float] = time.monotonic
    name: ClassVar[str] = "highs"

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. On the limit, the best answer found is returned.

        Raises:
            NotLinear: the model is no mixed-integer linear program.
        """
        began_s = self.monotonic()
        form = translate(model, variables)
        answer = answer_without_solver(form)
        if answer is None:
            answer = _ask(form, time_limit_s - (self.monotonic() - began_s))
        status, values, message = answer
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


def _ask(form: StandardForm, time_limit_s: float) -> Answer:
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
    return _answer(form, solver, highspy)


def _answer(form: StandardForm, solver: Any, highspy: Any) -> Answer:
    status = solver.getModelStatus()
    known = highspy.HighsModelStatus
    if status == known.kInfeasible:
        return SolveStatus.INFEASIBLE, (), ""
    if status in {known.kUnbounded, known.kUnboundedOrInfeasible}:
        return UNBOUNDED
    if status not in {known.kOptimal, known.kTimeLimit}:
        return SolveStatus.ERROR, (), f"HiGHS ended with {solver.modelStatusToString(status)}"
    found = solver.getInfo().primal_solution_status
    if found != highspy.SolutionStatus.kSolutionStatusFeasible:
        return SolveStatus.LIMIT, (), ""
    values = form.answer(list(solver.getSolution().col_value))
    return (
        SolveStatus.OPTIMAL if status == known.kOptimal else SolveStatus.FEASIBLE,
        values,
        "",
    )


def _program(form: StandardForm, highspy: Any) -> Any:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = form.cost.size, form.row_lower.size
    program.col_cost_, program.col_lower_, program.col_upper_ = form.cost, form.lower, form.upper
    program.row_lower_, program.row_upper_ = form.row_lower, form.row_upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.num_col_, program.a_matrix_.num_row_ = form.cost.size, form.row_lower.size
    program.a_matrix_.start_ = form.starts
    program.a_matrix_.index_ = form.columns
    program.a_matrix_.value_ = form.coefficients
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[is_integer] for is_integer in form.is_integer.tolist()]
    return program
