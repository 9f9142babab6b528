"""What can be wrong with a solver or with what it is asked."""

from __future__ import annotations


class SolverMissing(Exception):
    """A solver cannot be loaded; the message says why and what to install."""


class NotLinear(ValueError):
    """A model is not a mixed-integer linear program with one objective at most."""
