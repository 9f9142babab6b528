"""A Pyomo model as arrays, for solvers that run inside this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StandardForm:
    """Minimize `cost @ x` with `row_lower <= A @ x <= row_upper`, `lower <= x <= upper`.

    A is kept by columns: the entries of column j are `starts[j]:starts[j + 1]` of `rows` and
    `coefficients`.
    """

    cost: Floats
    lower: Floats
    upper: Floats
    is_integer: npt.NDArray[np.bool_]
    row_lower: Floats
    row_upper: Floats
    starts: Ints
    rows: Ints
    coefficients: Floats
    position: tuple[int | None, ...]
    """Column of each variable asked for; None if no row and no cost mentions it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to decide, or nothing that binds: no case for a solver."""
        return not self.cost.size or not self.row_lower.size or not self.coefficients.size

    def answer(self, columns: Sequence[float]) -> tuple[float, ...]:
        """The values of the variables asked for, from those of the columns."""
        return tuple(0.0 if column is None else columns[column] for column in self.position)


def translate(model: Any, variables: Sequence[Any]) -> StandardForm:
    """Compiles a linear Pyomo model.

    Variables without a bound get infinity; those of integers are rounded inwards.
    """
    from pyomo.repn.plugins.standard_form import (  # noqa: PLC0415 (0.4 s to load)
        LinearStandardFormCompiler,
    )

    compiled = LinearStandardFormCompiler().write(model, mixed_form=True)
    columns = compiled.columns
    bounds = [column.bounds for column in columns]
    lower = np.array([-np.inf if low is None else low for low, _ in bounds], dtype=np.float64)
    upper = np.array([np.inf if high is None else high for _, high in bounds], dtype=np.float64)
    is_integer = np.array([not column.is_continuous() for column in columns], dtype=np.bool_)
    lower[is_integer] = np.ceil(lower[is_integer])
    upper[is_integer] = np.floor(upper[is_integer])
    side = np.array([row.bound_type for row in compiled.rows], dtype=np.int8)
    rhs = np.array(compiled.rhs, dtype=np.float64)
    matrix = compiled.A
    where = {id(column): number for number, column in enumerate(columns)}
    return StandardForm(
        cost=np.asarray(compiled.c.toarray()[0], dtype=np.float64),
        lower=lower,
        upper=upper,
        is_integer=is_integer,
        row_lower=np.where(side <= 0, rhs, -np.inf),
        row_upper=np.where(side >= 0, rhs, np.inf),
        starts=np.asarray(matrix.indptr, dtype=np.int32),
        rows=np.asarray(matrix.indices, dtype=np.int32),
        coefficients=np.asarray(matrix.data, dtype=np.float64),
        position=tuple(where.get(id(variable)) for variable in variables),
    )


def solve_empty(form: StandardForm) -> tuple[float, ...] | None:
    """The optimum of a form that `is_empty`: each column at its cheaper bound.

    None if there is none: rows that nothing can satisfy, crossed or missing bounds.
    """
    if np.any(form.row_lower > 0) or np.any(form.row_upper < 0) or np.any(form.lower > form.upper):
        return None
    values = np.where(form.cost > 0, form.lower, np.where(form.cost < 0, form.upper, 0.0))
    values = np.where(form.cost == 0, np.clip(0.0, form.lower, form.upper), values)
    return form.answer([float(value) for value in values]) if np.isfinite(values).all() else None
