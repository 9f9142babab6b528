"""GLPK inside this process, without holding the interpreter lock while it solves.

swiglpk wraps all of GLPK, but holds the lock during a solve: heartbeats would stop. So problems
are built and read by its functions, which take a sixth of the time of a call through ctypes, and
solved by the same library's functions through ctypes, which releases the lock.

Three things about libglpk shape this module:

- Its environment (list of memory blocks, terminal, error state) is one for the process in the
  library of swiglpk's wheels: they are built without thread-local storage (`glp_config("TLS")`
  answers NULL). Two solves at once corrupt the list and abort. So one lock is held from the
  creation of a problem to its end; waiting for it counts towards the time limit.
- It ends the process (`abort()`) on a call that it does not allow, such as adding 0 rows. What it
  must not be asked is answered by `standard_form.answer_without_solver`.
- Its presolver has assertions that ordinary models break (5 of 6,000 random ones), which ends the
  process as well. So it is off: the relaxation is solved first, which takes no longer.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from controller.scheduler.allocator.milp.solvers import RELATIVE_GAP, Solution, SolveStatus
from controller.solvers.errors import SolverMissing
from controller.solvers.standard_form import (
    UNBOUNDED,
    Answer,
    Floats,
    StandardForm,
    answer_without_solver,
    translate,
)

_LIBRARY_IN_USE = threading.Lock()
_LONGEST_LIMIT_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GlpkInProcess:
    """Solves with the library that swiglpk brings. Can be sent to a worker process."""

    monotonic: Callable[[], float] = time.monotonic
    name: ClassVar[str] = "glpk"

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`. On the limit, the best answer found is returned.

        GLPK looks at the clock between the nodes of its search, not while it makes cuts or solves
        a node: it may overrun the limit there (docs/solvers.md says how far).

        Raises:
            NotLinear: the model is no mixed-integer linear program.
        """
        ends_s = self.monotonic() + time_limit_s
        form = translate(model, variables)
        answer = answer_without_solver(form) or self._ask(form, ends_s)
        status, values, message = answer
        return Solution(status, values, self.monotonic() - ends_s + time_limit_s, message)

    def _ask(self, form: StandardForm, ends_s: float) -> Answer:
        left_s = min(ends_s - self.monotonic(), threading.TIMEOUT_MAX)
        if left_s <= 0 or not _LIBRARY_IN_USE.acquire(timeout=left_s):
            return SolveStatus.LIMIT, (), ""
        try:
            with loaded(form) as problem:
                return optimize(form, problem, lambda: ends_s - self.monotonic())
        finally:
            _LIBRARY_IN_USE.release()


def find_glpk() -> GlpkInProcess:
    """The in-process solver.

    Raises:
        SolverMissing: swiglpk is not installed, or brings no library for this machine.
    """
    load_library()
    return GlpkInProcess()


@cache
def load_library() -> tuple[Any, ctypes.CDLL]:
    """The functions of swiglpk, and the libglpk behind them for the calls made by ctypes.

    A symbol asked of the extension module is looked for in the libraries that it is linked to:
    so it is the same libglpk, wherever that lies.

    Raises:
        SolverMissing: see `find_glpk`.
    """
    try:
        functions = import_module("swiglpk")
        library = ctypes.CDLL(import_module("swiglpk._swiglpk").__file__)
        library.glp_simplex.argtypes = library.glp_intopt.argtypes = [ctypes.c_void_p] * 2
        library.glp_load_matrix.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 3]
        library.glp_load_matrix.restype = None
    except (ImportError, OSError, AttributeError) as error:
        raise SolverMissing(f"pip install swiglpk ({error})") from error
    return functions, library


@contextmanager
def loaded(form: StandardForm) -> Iterator[Any]:
    """A GLPK problem of that form. The library must be nobody else's until it is deleted."""
    functions, library = load_library()
    functions.glp_term_out(functions.GLP_OFF)  # scaling tells about itself
    problem = functions.glp_create_prob()
    try:
        _set_rows(functions, problem, form)
        _set_columns(functions, problem, form)
        _set_matrix(library, problem, form)
        yield problem
    finally:
        functions.glp_delete_prob(problem)


def _set_rows(functions: Any, problem: Any, form: StandardForm) -> None:
    functions.glp_add_rows(problem, form.row_lower.size)
    set_bounds = functions.glp_set_row_bnds
    kinds = _bound_kinds(functions, form.row_lower, form.row_upper)
    limits = zip(kinds, form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    for i, (kind, low, high) in enumerate(limits, 1):
        set_bounds(problem, i, kind, low, high)


def _set_columns(functions: Any, problem: Any, form: StandardForm) -> None:
    functions.glp_add_cols(problem, form.cost.size)
    set_bounds, set_kind = functions.glp_set_col_bnds, functions.glp_set_col_kind
    kinds = _bound_kinds(functions, form.lower, form.upper)
    limits = zip(kinds, form.lower.tolist(), form.upper.tolist(), strict=True)
    for j, (kind, low, high) in enumerate(limits, 1):
        set_bounds(problem, j, kind, low, high)
    for j in (np.flatnonzero(form.is_integer) + 1).tolist():
        set_kind(problem, j, functions.GLP_IV)
    costly = np.flatnonzero(form.cost)
    for j, cost in zip((costly + 1).tolist(), form.cost[costly].tolist(), strict=True):
        functions.glp_set_obj_coef(problem, j, cost)


def _set_matrix(library: ctypes.CDLL, problem: Any, form: StandardForm) -> None:
    # GLPK counts from 1 and does not look at the first element of an array.
    entries = form.coefficients.size
    row_of, column_of = np.empty(entries + 1, np.int32), np.empty(entries + 1, np.int32)
    coefficient = np.empty(entries + 1, np.float64)
    rows = np.arange(1, form.row_lower.size + 1, dtype=np.int32)
    row_of[1:] = np.repeat(rows, np.diff(form.starts))
    column_of[1:] = form.columns + 1
    coefficient[1:] = form.coefficients
    arrays = (row_of.ctypes.data, column_of.ctypes.data, coefficient.ctypes.data)
    library.glp_load_matrix(int(problem), entries, *arrays)


def _bound_kinds(functions: Any, lower: Floats, upper: Floats) -> list[int]:
    conditions = [lower == upper, (lower == -np.inf) & (upper == np.inf)]
    conditions += [lower == -np.inf, upper == np.inf]
    kinds = [functions.GLP_FX, functions.GLP_FR, functions.GLP_UP, functions.GLP_LO]
    found: list[int] = np.select(conditions, kinds, functions.GLP_DB).tolist()
    return found


def optimize(form: StandardForm, problem: Any, left_s: Callable[[], float]) -> Answer:
    """Solves a loaded problem while there is time left, and reads the answer."""
    functions, library = load_library()
    relaxed = _relax(functions, library, problem, left_s())
    if relaxed is not None:
        return relaxed
    limit_ms = _limit_ms(left_s())
    if not limit_ms:
        return SolveStatus.LIMIT, (), ""
    options = _search_options(functions, limit_ms)
    code = library.glp_intopt(int(problem), int(options.this))
    status = _status(functions, code, functions.glp_mip_status(problem))
    if status in {SolveStatus.OPTIMAL, SolveStatus.FEASIBLE}:
        read = functions.glp_mip_col_val
        columns = [read(problem, j) for j in range(1, form.cost.size + 1)]
        return status, form.answer(columns), ""
    return status, (), f"glp_intopt ended with code {code}" if status is SolveStatus.ERROR else ""


def _limit_ms(time_limit_s: float) -> int:
    return max(0, min(int(1e3 * time_limit_s), _LONGEST_LIMIT_MS))


def _relax(
    functions: Any, library: ctypes.CDLL, problem: Any, time_limit_s: float
) -> Answer | None:
    """Solves the relaxation, from which the search starts; an answer if that is the end."""
    limit_ms = _limit_ms(time_limit_s)
    if not limit_ms:
        return SolveStatus.LIMIT, (), ""
    functions.glp_scale_prob(problem, functions.GLP_SF_AUTO)
    options = functions.glp_smcp()
    functions.glp_init_smcp(options)
    options.msg_lev, options.tm_lim = functions.GLP_MSG_OFF, limit_ms
    code = library.glp_simplex(int(problem), int(options.this))
    match functions.glp_get_status(problem):
        case functions.GLP_OPT:
            return None
        case functions.GLP_NOFEAS:
            return SolveStatus.INFEASIBLE, (), ""
        case functions.GLP_UNBND:
            return UNBOUNDED
    if code == functions.GLP_ETMLIM:
        return SolveStatus.LIMIT, (), ""
    return SolveStatus.ERROR, (), f"glp_simplex ended with code {code}"


def _search_options(functions: Any, limit_ms: int) -> Any:
    options = functions.glp_iocp()
    functions.glp_init_iocp(options)
    options.msg_lev = functions.GLP_MSG_OFF
    options.gmi_cuts = options.mir_cuts = options.cov_cuts = options.clq_cuts = functions.GLP_ON
    options.mip_gap = RELATIVE_GAP
    options.tm_lim = limit_ms
    return options


def _status(functions: Any, code: int, mip_status: int) -> SolveStatus:
    is_feasible = mip_status == functions.GLP_FEAS
    if mip_status == functions.GLP_OPT or (is_feasible and code == functions.GLP_EMIPGAP):
        return SolveStatus.OPTIMAL
    if is_feasible:
        return SolveStatus.FEASIBLE
    if code == 0 and mip_status == functions.GLP_NOFEAS:
        return SolveStatus.INFEASIBLE
    return SolveStatus.LIMIT if code == functions.GLP_ETMLIM else SolveStatus.ERROR
