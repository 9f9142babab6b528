"""What one model costs in each solver, and how far limits are overrun.

    python -m benchmarks.solvers [--json FILE]

Models are those that `milp` builds for the instances of `benchmarks/allocator.py` (36 and 1,000
nodes, 16 to 128 jobs, loads 0.8 and 0.95). Wall time of one thread, medians over models of 180 to
330 variables. Overruns are measured on market-split models, which no solver here finishes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyomo.environ as pyo

from benchmarks.allocator import make_instance
from controller.scheduler.allocator.milp.solvers import Solution
from controller.scheduler.policies import make_allocator
from controller.solvers import Solver, SolverMissing, make_solver
from controller.solvers.glpk import loaded
from controller.solvers.glpsol import load_pyomo
from controller.solvers.standard_form import translate

CELLS = ((16, 36), (64, 36), (128, 36), (128, 1_000))
SEEDS = 24
LIMITS_S = (0.05, 0.2, 1.0)
Model = tuple[Any, Sequence[Any]]


class Recorder:
    """Passes models on and keeps them."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.models: list[Model] = []

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver`."""
        self.models.append((model, variables))
        return self.solver.solve(model, variables, time_limit_s)


def recorded() -> list[Model]:
    recorder = Recorder(make_solver("auto"))
    milp = make_allocator("milp", solver=recorder, monotonic=time.monotonic)
    for jobs, nodes in CELLS:
        for load in (0.8, 0.95):
            for seed in range(SEEDS):
                instance = make_instance(jobs, nodes, load, seed)
                milp.place(instance.ranked, instance.view, 0.0)
    return [case for case in recorder.models if 180 <= translate(*case).cost.size <= 330]


def median_ms(call: Callable[[Model], object], cases: Sequence[Model]) -> float:
    times = []
    for case in cases:
        for _ in range(3):
            began_s = time.perf_counter()
            call(case)
            times.append(1e3 * (time.perf_counter() - began_s))
    return round(float(np.median(times)), 2)


def load_glpk(case: Model) -> float:
    """Milliseconds from arrays to a GLPK problem and its end."""
    form = translate(*case)
    began_s = time.perf_counter()
    with loaded(form):
        return 1e3 * (time.perf_counter() - began_s)


def market_split(rows: int, columns: int, seed: int) -> Model:
    """A model that branch and bound takes very long for (Cornuejols and Dawande, 1998)."""
    weights = np.random.default_rng(seed).integers(0, 100, (rows, columns))
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(columns), domain=pyo.Binary)
    model.over = pyo.Var(range(rows), domain=pyo.NonNegativeReals)
    model.rows = pyo.ConstraintList()
    for i, row in enumerate(weights.tolist()):
        body, half = sum(w * model.x[j] for j, w in enumerate(row)), sum(row) // 2
        model.rows.add(body + model.over[i] >= half)
        model.rows.add(body - model.over[i] <= half)
    model.goal = pyo.Objective(expr=sum(model.over.values()))
    return model, list(model.x.values())


def overruns(solver: Solver, limit_s: float) -> dict[str, float]:
    found = []
    for rows, columns in ((5, 40), (20, 120), (75, 250)):
        for seed in range(4):
            solution = solver.solve(*market_split(rows, columns, seed), limit_s)
            found.append(1e3 * (solution.elapsed_s - limit_s))
    return {"median_ms": round(float(np.median(found)), 1), "most_ms": round(max(found), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_pyomo()
    cases = recorded()
    sizes = [(form.cost.size, form.row_lower.size) for form in (translate(*c) for c in cases)]
    told: dict[str, Any] = {
        "models": len(cases),
        "median_columns_and_rows": np.median(sizes, axis=0).tolist(),
        "translate_ms": median_ms(lambda case: translate(*case), cases),
        "load_glpk_ms": round(float(np.median([load_glpk(case) for case in cases])), 2),
    }
    for name in ("glpk", "glpsol", "highs"):
        try:
            solver = make_solver(name)
        except SolverMissing as missing:
            print(f"left out: {missing}")
            continue
        told[name] = {
            "whole_ms": median_ms(lambda case, s=solver: s.solve(*case, 5.0), cases),  # type: ignore[misc]
            "overrun": {limit_s: overruns(solver, limit_s) for limit_s in LIMITS_S},
        }
    print(json.dumps(told, indent=2))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
