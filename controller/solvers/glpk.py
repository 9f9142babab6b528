"""GLPK inside this process, without holding the interpreter lock while it solves.

The library is the one in swiglpk's wheel. swiglpk itself keeps the lock during a solve, so that
heartbeats would stop; the same functions called through ctypes release it. From swiglpk come the
constants and the layout of the options.

GLPK ends the whole process (`abort()`) on a call that it does not allow, such as adding 0 rows.
So models without rows, columns or entries never reach it, and bounds and numbers are checked
first. The library in the wheel is built without thread-local storage: its list of memory blocks
belongs to the whole process, and two solves at once corrupt it and abort (seen within seconds).
So one lock is held from the creation of a problem to its end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import numpy as np

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus
from controller.solvers.standard_form import StandardForm, solve_empty, translate


class SolverMissing(Exception):
    """A solver cannot be loaded; the message says why and what to install."""


_LIBRARY_IN_USE = threading.Lock()


@dataclass(frozen=True, slots=True)
class GlpkInProcess:
    """Solves with the library that swiglpk brings. Can be sent to a worker process."""

    monotonic: Callable[[], float] = time.monotonic

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. On the limit, the best answer found is returned.

        GLPK does not look at the clock in presolving and in the first relaxation, so it may
        overrun the limit there.
        """
        began_s = self.monotonic()
        form = translate(model, variables)
        left_s = time_limit_s - (self.monotonic() - began_s)
        status, values, message = _solve(form, left_s)
        return Solution(status, values, self.monotonic() - began_s, message)


def find_glpk() -> GlpkInProcess:
    """The in-process solver.

    Raises:
        SolverMissing: swiglpk is not installed, or brings no library for this machine.
    """
    load_library()
    return GlpkInProcess()


@cache
def load_library() -> tuple[Any, ctypes.CDLL]:
    """The module swiglpk and its libglpk, with the functions declared that are used here.

    Raises:
        SolverMissing: see `find_glpk`.
    """
    try:
        module = import_module("swiglpk")
        files = metadata.files("swiglpk") or []
        paths = [str(file.locate()) for file in files if file.name.startswith("libglpk")]
        if not paths:
            raise SolverMissing("swiglpk is installed without its libglpk: take its wheel")
        library = ctypes.CDLL(paths[0])
    except (ImportError, OSError) as error:
        raise SolverMissing(f"pip install swiglpk ({error})") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return module, library


_PROBLEM = ctypes.c_void_p
_INT, _DOUBLE = ctypes.c_int, ctypes.c_double
_INTS = np.ctypeslib.ndpointer(np.int32, flags="C_CONTIGUOUS")
_DOUBLES = np.ctypeslib.ndpointer(np.float64, flags="C_CONTIGUOUS")
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "glp_create_prob": (_PROBLEM, []),
    "glp_delete_prob": (None, [_PROBLEM]),
    "glp_term_out": (_INT, [_INT]),
    "glp_add_rows": (_INT, [_PROBLEM, _INT]),
    "glp_add_cols": (_INT, [_PROBLEM, _INT]),
    "glp_set_row_bnds": (None, [_PROBLEM, _INT, _INT, _DOUBLE, _DOUBLE]),
    "glp_set_col_bnds": (None, [_PROBLEM, _INT, _INT, _DOUBLE, _DOUBLE]),
    "glp_set_obj_coef": (None, [_PROBLEM, _INT, _DOUBLE]),
    "glp_set_col_kind": (None, [_PROBLEM, _INT, _INT]),
    "glp_load_matrix": (None, [_PROBLEM, _INT, _INTS, _INTS, _DOUBLES]),
    "glp_intopt": (_INT, [_PROBLEM, ctypes.c_void_p]),
    "glp_mip_status": (_INT, [_PROBLEM]),
    "glp_mip_col_val": (_DOUBLE, [_PROBLEM, _INT]),
}

_Answer = tuple[SolveStatus, tuple[float, ...], str]


def _solve(form: StandardForm, time_limit_s: float) -> _Answer:
    """Solves a form, or answers without GLPK what GLPK must not be asked."""
    if form.is_empty:
        values = solve_empty(form)
        return (
            (SolveStatus.INFEASIBLE, (), "")
            if values is None
            else (SolveStatus.OPTIMAL, values, "")
        )
    limit_ms = int(1e3 * time_limit_s)
    if limit_ms <= 0:
        return SolveStatus.LIMIT, (), ""
    if not np.isfinite(form.cost).all() or not np.isfinite(form.coefficients).all():
        return SolveStatus.ERROR, (), "the model has numbers that are not finite"
    if np.any(form.lower > form.upper):
        return SolveStatus.INFEASIBLE, (), ""
    module, library = load_library()
    with _LIBRARY_IN_USE:
        library.glp_term_out(module.GLP_OFF)
        problem = library.glp_create_prob()
        try:
            _load(form, problem, module, library)
            options = _options(module, limit_ms)
            code = library.glp_intopt(problem, int(options.this))
            status = _status(module, code, library.glp_mip_status(problem))
            if status not in {SolveStatus.OPTIMAL, SolveStatus.FEASIBLE}:
                message = f"GLPK ended with code {code}" if status is SolveStatus.ERROR else ""
                return status, (), message
            numbers = range(1, form.cost.size + 1)
            columns = [library.glp_mip_col_val(problem, j) for j in numbers]
        finally:
            library.glp_delete_prob(problem)
    return status, form.answer(columns), ""


def _load(form: StandardForm, problem: int, module: Any, library: ctypes.CDLL) -> None:
    rows, columns = form.row_lower.size, form.cost.size
    library.glp_add_rows(problem, rows)
    library.glp_add_cols(problem, columns)
    limits = zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    for i, (low, high) in enumerate(limits, 1):
        library.glp_set_row_bnds(problem, i, _bound_kind(module, low, high), low, high)
    limits = zip(form.lower.tolist(), form.upper.tolist(), strict=True)
    costs, is_integer = form.cost.tolist(), form.is_integer.tolist()
    for j, (low, high) in enumerate(limits, 1):
        if is_integer[j - 1]:
            library.glp_set_col_kind(problem, j, module.GLP_IV)
        library.glp_set_col_bnds(problem, j, _bound_kind(module, low, high), low, high)
        if costs[j - 1]:
            library.glp_set_obj_coef(problem, j, costs[j - 1])
    # GLPK counts from 1 and does not look at the first element of an array.
    entries = form.coefficients.size
    row_of, column_of = np.zeros(entries + 1, np.int32), np.zeros(entries + 1, np.int32)
    value = np.zeros(entries + 1)
    row_of[1:] = form.rows + 1
    column_of[1:] = np.repeat(np.arange(1, columns + 1, dtype=np.int32), np.diff(form.starts))
    value[1:] = form.coefficients
    library.glp_load_matrix(problem, entries, row_of, column_of, value)


def _bound_kind(module: Any, low: float, high: float) -> int:
    if low == high:
        return int(module.GLP_FX)
    if low == -np.inf:
        return int(module.GLP_FR if high == np.inf else module.GLP_UP)
    return int(module.GLP_LO if high == np.inf else module.GLP_DB)


def _options(module: Any, limit_ms: int) -> Any:
    options = module.glp_iocp()
    module.glp_init_iocp(options)
    options.msg_lev = module.GLP_MSG_OFF
    options.presolve = module.GLP_ON
    options.gmi_cuts = options.mir_cuts = options.cov_cuts = options.clq_cuts = module.GLP_ON
    options.mip_gap = RELATIVE_GAP
    options.tm_lim = limit_ms
    return options


def _status(module: Any, code: int, mip_status: int) -> SolveStatus:
    if mip_status == module.GLP_OPT or (
        code == module.GLP_EMIPGAP and mip_status == module.GLP_FEAS
    ):
        return SolveStatus.OPTIMAL
    if mip_status == module.GLP_FEAS:
        return SolveStatus.FEASIBLE
    if code == module.GLP_ENOPFS or (code == 0 and mip_status == module.GLP_NOFEAS):
        return SolveStatus.INFEASIBLE
    return SolveStatus.LIMIT if code == module.GLP_ETMLIM else SolveStatus.ERROR
