"""Time of one whole `place()` call, for every allocator and solver.

    python benchmarks/allocator.py [--quick] [--runs N] [--json FILE] [--only NAME ...]

A cell is a cluster size, a load (GPUs in use) and a number of waiting jobs. Instances are random
but seeded: four GPU types on nodes of 4 or 8, jobs of 1, 2, 4, 8 or 16 GPUs (half of them 1), a
third of them content with any type, CPUs for each GPU. `place()` is counted from the cluster's
view to concrete GPUs; the index of a view is made from the one before it, as the controller does,
and that is counted too (ten nodes have changed). Wall time of one thread; GLPK's limit is 200 ms.

Then: the same 64 waiting jobs placed jointly and one by one as published, on the same instances.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from controller.scheduler.allocator.milp.solvers import Solution, SolveStatus
from controller.scheduler.allocator.objective import PRESETS, value_of
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.index import index_of
from controller.scheduler.policies import make_allocator
from controller.scheduler.types import (
    ClusterView,
    GpuSlot,
    NodeCapacity,
    Placement,
    RankedJob,
    WaitingJob,
)
from controller.solvers import SolverMissing, make_solver
from controller.solvers.glpsol import load_pyomo
from controller.solvers.standard_form import translate
from protos.messages import JobSpec

GIB = 1024**3
TYPES = {"K80": 4, "P100": 4, "V100": 8, "A100": 8}
JOBS = (1, 16, 64, 128)
NODES = (4, 36, 128, 1_000, 4_000, 10_000)
LOADS = (0.5, 0.8, 0.95)
SLOW = {"rltune": (64, 128)}
"""Most jobs and nodes of the cells that an allocator is measured on."""
CHANGED_NODES = 10


@dataclass(frozen=True, slots=True)
class Instance:
    """A queue and a cluster, with the cluster of a moment before."""

    ranked: tuple[RankedJob, ...]
    view: ClusterView
    before: ClusterView


def make_instance(jobs: int, nodes: int, load: float, seed: int) -> Instance:
    rng = np.random.default_rng([seed, jobs, nodes, int(100 * load)])
    now = [_node(rng, n, load) for n in range(nodes)]
    before = list(now)
    for n in rng.choice(nodes, min(CHANGED_NODES, nodes), replace=False):
        before[n] = _node(rng, int(n), load)
    ranked = tuple(RankedJob(_job(rng, j), -float(j)) for j in range(jobs))
    return Instance(ranked, ClusterView(tuple(now)), ClusterView(tuple(before)))


def _node(rng: np.random.Generator, number: int, load: float) -> NodeCapacity:
    gpu_type = list(TYPES)[number % len(TYPES)]
    size = TYPES[gpu_type]
    used = int(rng.binomial(1, load)) * size
    if rng.random() < 0.35:
        used = int(rng.binomial(size, load))
    slots = tuple(GpuSlot(f"{number}-{i}", i, gpu_type, i >= used) for i in range(size))
    cpus, memory = 14 * size, 64 * size * GIB
    return NodeCapacity(
        *(f"n{number:05d}", True, slots, cpus, cpus - 8 * used, memory, memory - 32 * used * GIB)
    )


def _job(rng: np.random.Generator, number: int) -> WaitingJob:
    gpus = int(rng.choice([1, 2, 4, 8, 16], p=[0.5, 0.2, 0.15, 0.1, 0.05]))
    types: tuple[str, ...] = ()
    if rng.random() > 0.3:
        types = tuple(rng.choice(list(TYPES), int(rng.integers(1, 4)), replace=False).tolist())
    nodes = 2 if gpus > 8 else 1
    spec = JobSpec(
        *("bench", "bench", ("true",), "/"),
        gpus=gpus,
        gpu_types=types,
        nodes=nodes,
        cpus=4 * gpus // nodes,
        memory_bytes=16 * gpus // nodes * GIB,
    )
    return WaitingJob(number, spec, float(number), float(number))


def timed(allocator: Allocator, instance: Instance) -> tuple[float, Placement]:
    """Milliseconds of one decision: index of the new view, placement, GPUs."""
    before = index_of(instance.before)
    view = replace(instance.view, index=None)
    began_s = time.perf_counter()
    index_of(view, before)
    placement = allocator.place(instance.ranked, view, 0.0)
    return 1e3 * (time.perf_counter() - began_s), placement


def measure(allocator: Allocator, instances: Sequence[Instance]) -> dict[str, Any]:
    times, cut_short, starts = [], 0, []
    for instance in instances:
        spent_ms, placement = timed(allocator, instance)
        times.append(spent_ms)
        cut_short += placement.cut_short
        starts.append(len(placement.starts))
        if placement.fallback:
            print(f"{allocator.name}: {placement.fallback}", file=sys.stderr)
    return {
        "p50_ms": round(float(np.median(times)), 2),
        "p99_ms": round(float(np.percentile(times, 99)), 2),
        "starts": round(float(np.mean(starts)), 1),
        "cut_short": cut_short,
        "runs": len(instances),
    }


def against_published(runs: int, allocators: dict[str, Allocator]) -> dict[str, Any]:
    """The same 64 jobs on 128 nodes: time, and value by the default weights, of each allocator."""
    weights = PRESETS["completion-time"]
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in allocators}
    never_worse = 0
    for seed in range(runs):
        instance = make_instance(64, 128, 0.5, 1000 + seed)
        values = {}
        for name, allocator in allocators.items():
            spent_ms, placement = timed(allocator, instance)
            value = value_of(placement.starts, instance.ranked, instance.view, weights)
            values[name] = value
            rows[name].append((spent_ms, sum(value.started), value.cost))
        ours = values["milp/glpk"]
        never_worse += not any(other.is_better_than(ours) for other in values.values())
    table = {
        name: {
            "p50_ms": round(float(np.median([row[0] for row in found])), 2),
            "starts": round(float(np.mean([row[1] for row in found])), 2),
            "cost": round(float(np.mean([row[2] for row in found])), 2),
        }
        for name, found in rows.items()
    }
    for figures in table.values():
        for name in table.keys() & {"rltune", "rltune-glpsol", "rltune-cvxpy"}:
            ratio = table[name]["p50_ms"] / figures["p50_ms"]
            figures[f"times_faster_than_{name}"] = round(ratio, 1)
    return {"instances": runs, "milp_never_worse": never_worse, "allocators": table}


class CvxpyGlpk:
    """CVXPY with GLPK_MI, the solver path of the published code (`pip install cvxpy cvxopt`).

    It gets the rows as one matrix, which is quicker than the published row by row.
    """

    def __init__(self) -> None:
        self.cvxpy = import_module("cvxpy")
        if "GLPK_MI" not in self.cvxpy.installed_solvers():
            raise SolverMissing("pip install cvxpy cvxopt")

    def solve(self, model: Any, variables: Sequence[Any], _time_limit_s: float) -> Solution:
        """See `MilpSolver.solve`; no limit, as published."""
        began_s = time.perf_counter()
        form = translate(model, variables)
        cp = self.cvxpy
        whole = (np.flatnonzero(form.is_integer),)
        x = cp.Variable(form.cost.size, integer=whole)
        shape = (form.row_lower.size, form.cost.size)
        matrix = csr_array((form.coefficients, form.columns, form.starts), shape=shape)
        low, high = np.isfinite(form.row_lower), np.isfinite(form.row_upper)
        rows = [matrix[low] @ x >= form.row_lower[low], matrix[high] @ x <= form.row_upper[high]]
        capped = np.isfinite(form.upper)
        rows += [x >= form.lower, x[capped] <= form.upper[capped]]
        problem = cp.Problem(cp.Minimize(form.cost @ x), rows)
        problem.solve(solver="GLPK_MI")
        spent_s = time.perf_counter() - began_s
        if x.value is None:
            return Solution(SolveStatus.ERROR, (), spent_s, str(problem.status))
        return Solution(SolveStatus.OPTIMAL, form.answer(x.value.tolist()), spent_s)


def make_allocators() -> dict[str, Allocator]:
    found: dict[str, Allocator] = {"greedy": make_allocator("greedy")}
    for name in ("glpk", "glpsol", "highs"):
        try:
            solver = make_solver(name)
        except SolverMissing as missing:
            print(f"left out: {missing}", file=sys.stderr)
            continue
        found[f"milp/{name}"] = make_allocator("milp", solver=solver, monotonic=time.monotonic)
    solver = make_solver("auto")
    found["rltune"] = make_allocator("rltune", solver=solver)
    found["rltune-mended"] = make_allocator("rltune-mended", solver=solver)
    found["rltune-glpsol"] = make_allocator("rltune", solver=make_solver("glpsol"))
    try:
        found["rltune-cvxpy"] = make_allocator("rltune", solver=CvxpyGlpk())
    except (ImportError, SolverMissing) as missing:
        print(f"left out: {missing}", file=sys.stderr)
    return found


def run(
    allocators: dict[str, Allocator], runs: int, *, quick: bool, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    rows = []
    for allocator in allocators.values():  # what is loaded on demand is loaded now
        measure(allocator, [make_instance(16, 36, 0.5, seed) for seed in range(3)])
    for nodes in NODES:
        for load in LOADS:
            for jobs in JOBS:
                if quick and load != 0.8:
                    continue
                instances = [make_instance(jobs, nodes, load, seed) for seed in range(runs)]
                for instance in instances:
                    index_of(instance.before)
                gc.collect()
                gc.freeze()
                for name, allocator in allocators.items():
                    most_jobs, most_nodes = SLOW.get(name.split("-")[0], (max(JOBS), max(NODES)))
                    if jobs > most_jobs or nodes > most_nodes:
                        continue
                    cell = {"allocator": name, "jobs": jobs, "nodes": nodes, "load": load}
                    rows.append({**cell, **measure(allocator, instances)})
                    tell(" | ".join(str(value) for value in rows[-1].values()))
                gc.unfreeze()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="load 0.8 only")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="allocators by name")
    parser.add_argument("--same-jobs", action="store_true", help="only the last comparison")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    allocators = make_allocators()
    chosen = {n: a for n, a in allocators.items() if not options.only or n in options.only}
    print("allocator | jobs | nodes | load | p50_ms | p99_ms | starts | cut_short | runs")
    load_pyomo()
    gc.freeze()  # as the controller does
    if options.same_jobs:
        print(json.dumps(against_published(options.runs, allocators), indent=2))
        return
    rows = run(chosen, options.runs, quick=options.quick, tell=lambda line: print(line, flush=True))
    compared = against_published(max(5, options.runs // 2), allocators)
    print(json.dumps(compared, indent=2))
    if options.json:
        about = {"python": platform.python_version(), "cpus": os.cpu_count()}
        told = {"machine": about, "rows": rows, "same_64_jobs": compared}
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
