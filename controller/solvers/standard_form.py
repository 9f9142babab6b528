"""A Pyomo model as arrays, for solvers that run inside this process.

Pyomo's own `LinearStandardFormCompiler` does the same in twice the time: it walks every
expression. Here the terms of a `LinearExpression`, which is what our models are made of, are
taken as they are, and Pyomo is asked only about other expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.scheduler.allocator.milp.solvers import SolveStatus
from controller.solvers.errors import NotLinear

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Answer = tuple[SolveStatus, tuple[float, ...], str]
"""Status, values of the variables asked for, and what went wrong."""

UNBOUNDED: Answer = (SolveStatus.ERROR, (), "the model is unbounded: a variable lacks a bound")
FACTORS = (1e-2, 1e4)
"""Smallest and largest magnitude of a factor in a row; GLPK's assertions hold within (measured)."""
COSTS = (1e-6, 1e6)
"""Of a factor of the objective."""
LARGEST_LIMIT = 1e7
"""Of a bound or a right hand side that is not infinite."""
_TOLERANCE = 1e-9
"""Of numbers that arithmetic has blurred."""


@dataclass(frozen=True, slots=True)
class StandardForm:
    """Minimize `cost @ x` with `row_lower <= A @ x <= row_upper`, `lower <= x <= upper`.

    A is kept by rows, each column at most once in a row: the entries of row i are
    `starts[i]:starts[i + 1]` of `columns` and `coefficients`. Absent bounds are infinite.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    is_integer: npt.NDArray[np.bool_]
    row_lower: Floats
    row_upper: Floats
    starts: Ints
    columns: Ints
    coefficients: Floats
    position: tuple[int | None, ...]
    """Column of each variable asked for; None if no row and no cost mentions it."""
    absent: tuple[float, ...]
    """Values of the variables asked for that have no column, in their order."""

    def answer(self, columns: Sequence[float]) -> tuple[float, ...]:
        """The values of the variables asked for, from those of the columns."""
        absent = iter(self.absent)
        return tuple(next(absent) if c is None else columns[c] for c in self.position)


def translate(model: Any, variables: Sequence[Any]) -> StandardForm:
    """Compiles a linear Pyomo model.

    Bounds of integers are rounded inwards; a fixed variable gets its value for both.

    Raises:
        NotLinear: an expression is not linear, or there are several objectives.
    """
    return _Compiler().compile(model, variables)


def value_without_column(variable: Any) -> float:
    """What a variable is that a model does not mention: its fixed value, else the nearest to 0."""
    if variable.fixed:
        return float(variable.value)
    low, high = _bounds(variable)
    return min(max(0.0, low), high)


class _Compiler:
    """Collects columns and rows; each column is numbered when it is first met."""

    def __init__(self) -> None:
        # Here and not above, since Pyomo takes 0.4 s to load.
        from pyomo.core.base import Constraint, Objective  # noqa: PLC0415
        from pyomo.core.expr import LinearExpression, MonomialTermExpression, value  # noqa: PLC0415
        from pyomo.core.expr.numvalue import native_numeric_types  # noqa: PLC0415

        self.constraint_type, self.objective_type = Constraint, Objective
        self.sum_type, self.term_type = LinearExpression, MonomialTermExpression
        self.native_types, self.value = native_numeric_types, value
        self.column_of: dict[int, int] = {}
        self.variables: list[Any] = []
        self.starts, self.columns, self.coefficients = [0], list[int](), list[float]()
        self.row_lower, self.row_upper = list[float](), list[float]()

    def compile(self, model: Any, variables: Sequence[Any]) -> StandardForm:
        for constraint in model.component_data_objects(self.constraint_type, active=True):
            self._add_row(*constraint.to_bounded_expression(evaluate_bounds=True))
        goals = list(model.component_data_objects(self.objective_type, active=True))
        if len(goals) > 1:
            raise NotLinear(f"the model has {len(goals)} objectives; deactivate all but one")
        terms = self._terms(goals[0].expr)[1] if goals else {}
        cost = np.zeros(len(self.variables))
        cost[list(terms)] = list(terms.values())
        lower, upper, is_integer = self._columns()
        position = tuple(self.column_of.get(id(variable)) for variable in variables)
        return StandardForm(
            cost=-cost if goals and goals[0].sense < 0 else cost,
            lower=lower,
            upper=upper,
            is_integer=is_integer,
            row_lower=np.array(self.row_lower, np.float64),
            row_upper=np.array(self.row_upper, np.float64),
            starts=np.array(self.starts, np.int32),
            columns=np.array(self.columns, np.int32),
            coefficients=np.array(self.coefficients, np.float64),
            position=position,
            absent=tuple(
                value_without_column(variable)
                for variable, column in zip(variables, position, strict=True)
                if column is None
            ),
        )

    def _add_row(self, low: float | None, body: Any, high: float | None) -> None:
        constant, terms = self._terms(body)
        if 0.0 in terms.values():
            terms = {column: factor for column, factor in terms.items() if factor}
        self.columns += terms
        self.coefficients += terms.values()
        self.starts.append(len(self.columns))
        self.row_lower.append(-math.inf if low is None else low - constant)
        self.row_upper.append(math.inf if high is None else high - constant)

    def _terms(self, expression: Any) -> tuple[float, dict[int, float]]:
        """The constant of a linear expression, and the factor of each column."""
        if expression.__class__ is not self.sum_type:
            return self._terms_by_pyomo(expression)
        constant = 0.0
        found: dict[int, float] = {}
        # Not `linear_coefs` and `linear_vars`: Pyomo keeps those of one expression at a time for
        # the whole process, so that threads would read each other's.
        for part in expression.args:
            if part.__class__ is self.term_type:
                factor, variable = part.args
                column = self._column(variable)
                factor = factor if factor.__class__ is float else self.value(factor)
                found[column] = found[column] + factor if column in found else factor
            elif part.__class__ in self.native_types or not part.is_potentially_variable():
                constant += self.value(part)
            else:
                column = self._column(part)
                found[column] = found.get(column, 0.0) + 1.0
        return constant, found

    def _terms_by_pyomo(self, expression: Any) -> tuple[float, dict[int, float]]:
        from pyomo.repn import generate_standard_repn  # noqa: PLC0415 (0.4 s to load)

        linear = generate_standard_repn(expression, compute_values=True, quadratic=False)
        if linear.nonlinear_expr is not None:
            raise NotLinear(f"not linear: {expression}")
        found: dict[int, float] = {}
        for variable, factor in zip(linear.linear_vars, linear.linear_coefs, strict=True):
            column = self._column(variable)
            found[column] = found.get(column, 0.0) + factor
        return linear.constant, found

    def _column(self, variable: Any) -> int:
        column = self.column_of.setdefault(id(variable), len(self.variables))
        if column == len(self.variables):
            self.variables.append(variable)
        return column

    def _columns(self) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        limits = [_bounds(variable) for variable in self.variables]
        bounds = np.array(limits, np.float64).reshape(-1, 2)
        lower, upper = bounds[:, 0].copy(), bounds[:, 1].copy()
        is_integer = np.array([not v.is_continuous() for v in self.variables], np.bool_)
        lower[is_integer] = np.ceil(lower[is_integer] - _TOLERANCE)
        upper[is_integer] = np.floor(upper[is_integer] + _TOLERANCE)
        return lower, upper, is_integer


def _bounds(variable: Any) -> tuple[float, float]:
    if variable.fixed:
        return variable.value, variable.value
    low, high = variable.bounds
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def answer_without_solver(form: StandardForm) -> Answer | None:
    """The answer, where a solver must not be asked or need not be; None if it must.

    GLPK ends the process when it is asked to add no rows or columns, and when numbers that are
    not finite, or many powers of ten apart, break an assertion.
    """
    problem = _bad_numbers(form)
    if problem:
        return SolveStatus.ERROR, (), problem
    is_empty_row = np.diff(form.starts) == 0
    if (
        _is_crossed(form.lower, form.upper)
        or _is_crossed(form.row_lower, form.row_upper)
        or np.any(form.row_lower[is_empty_row] > _TOLERANCE)
        or np.any(form.row_upper[is_empty_row] < -_TOLERANCE)
    ):
        return SolveStatus.INFEASIBLE, (), ""
    return None if form.coefficients.size else _optimum_without_rows(form)


def _bad_numbers(form: StandardForm) -> str:
    """What is wrong with the numbers, "" if nothing."""
    named = (("a factor", form.coefficients, FACTORS), ("a cost", form.cost, COSTS))
    for name, numbers, (least, most) in named:
        size = np.abs(numbers)
        if not np.all((numbers == 0) | ((size >= least) & (size <= most))):
            return f"the model has {name} that is not within {least:g} and {most:g}: scale it"
    for numbers in (form.lower, form.upper, form.row_lower, form.row_upper):
        if not np.all(np.isinf(numbers) | (np.abs(numbers) <= LARGEST_LIMIT)):
            return f"the model has a bound that is not within {LARGEST_LIMIT:g}: scale it"
    return ""


def _is_crossed(lower: Floats, upper: Floats) -> bool:
    return bool(np.any((lower > upper) | (lower == np.inf) | (upper == -np.inf)))


def _optimum_without_rows(form: StandardForm) -> Answer:
    """Each column at its cheaper bound, or at the value nearest to 0 if it costs nothing."""
    values = np.clip(0.0, form.lower, form.upper)
    values = np.where(form.cost > 0, form.lower, values)
    values = np.where(form.cost < 0, form.upper, values)
    if not np.all(np.isfinite(values)):
        return UNBOUNDED
    return SolveStatus.OPTIMAL, form.answer(values.tolist()), ""
