"""The small interface behind which a solver of mixed-integer programs stands.

The core builds the model; whoever owns processes and libraries (the shell) solves it, so nothing
here starts a program. `controller.solvers.glpsol` runs GLPK's command line solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

RELATIVE_GAP = 1e-3
"""A solver may stop when its answer is proven to be this close to the optimum.

The objectives here are scaled so that this is close enough to be exact (see `milp.py`).
"""


class SolveStatus(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """Proven optimal within `RELATIVE_GAP`."""
    FEASIBLE = "feasible"
    """A limit struck; the values are the best answer found."""
    LIMIT = "limit"
    """A limit struck before any answer was found."""
    INFEASIBLE = "infeasible"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver answers."""

    status: SolveStatus
    values: tuple[float, ...] = ()
    """Of the variables asked for, in that order; empty unless OPTIMAL or FEASIBLE."""
    elapsed_s: float = 0.0
    message: str = ""
    """What went wrong, for ERROR."""

    @property
    def has_values(self) -> bool:
        """Whether there is an answer to use."""
        return self.status in {SolveStatus.OPTIMAL, SolveStatus.FEASIBLE}


class MilpSolver(Protocol):
    """Solves Pyomo models."""

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """Solves a Pyomo `ConcreteModel` and reads the values of the given variables.

        Never raises for a solver that is missing, fails or hangs: that is an answer with status
        ERROR or LIMIT.
        """
        ...
