"""What the choice of allocator does to jobs: the same jobs in the same order, simulated.

    python benchmarks/allocator_end_to_end.py [--jobs 600] [--seeds 12] [--json FILE]

Maps as in the RLTune paper: `philly` (16 nodes of 2 and 20 of 8 GPUs, one type), `helios` (virtual
clusters of 6, 4, 3, 2 and 2 nodes of 8 GPUs), `mixed` (its Alibaba map: five GPU types; half of
the jobs accept any type, the others one or two). Jobs are drawn (seeded): GPUs 1, 2, 4, 8 or 16
in Philly's proportions, log-normal run times that grow with the GPUs, arrivals at random for an
offered load of 0.7, 0.9 or 1.1, four jobs together on average. Time limits are 1 to 3 times the
run time. The order is first come first served with EASY backfill; all speeds are alike, so only
the placement differs.

`milp-counted` is the milp with the number of partly used nodes as its fragmentation, as published.
Then queue states from those runs, on which each allocator decides once: the part of the
priority weight (1/i for the i-th job in the order) that starts, and partly used nodes afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.scheduler.allocator.objective import PRESETS, ObjectiveWeights, value_of
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import GpuSlot, NodeCapacity, Partition
from controller.solvers import make_solver
from protos.messages import JobSpec
from testbed.simulator.engine import Moment, Replay, SimJob, simulate
from testbed.simulator.metrics import Interval, bootstrap, summarize, waits_s

ALLOCATORS = ("greedy", "milp", "rltune", "rltune-mended", "rltune-tier1", "worst-fit")
LOADS = (0.7, 0.9, 1.1)
GPU_COUNTS = (1, 2, 4, 8, 16)
GPU_SHARES = (0.62, 0.13, 0.12, 0.11, 0.02)
MAX_RUN_S = 6 * 3_600.0
SAMPLED_STATES = 60
JOBS_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Map:
    """A cluster, and what jobs say about where they may go."""

    nodes: tuple[NodeCapacity, ...]
    partitions: dict[str, Partition]
    shares: tuple[float, ...]
    """Of the jobs, by partition."""
    types: tuple[str, ...]


def make_map(name: str) -> Map:
    match name:
        case "philly":
            return Map((*_nodes("a", 16, 2, "P100"), *_nodes("b", 20, 8, "P100")), {}, (), ())
        case "helios":
            sizes = (6, 4, 3, 2, 2)
            nodes = [
                replace(node, partitions=frozenset({f"vc{v}"}))
                for v, size in enumerate(sizes)
                for node in _nodes(f"v{v}", size, 8, "V100")
            ]
            partitions = {f"vc{v}": Partition(f"vc{v}") for v in range(len(sizes))}
            return Map(tuple(nodes), partitions, tuple(size / 17 for size in sizes), ())
        case "mixed":
            kinds = [("T4", 8, 2), ("MISC", 8, 8), ("P100", 15, 2), ("V16", 10, 8), ("V32", 8, 8)]
            nodes = [n for kind, count, size in kinds for n in _nodes(kind, count, size, kind)]
            return Map(tuple(nodes), {}, (), tuple(kind for kind, _, _ in kinds))
    raise ValueError(name)


def _nodes(prefix: str, count: int, size: int, gpu_type: str) -> list[NodeCapacity]:
    return [
        NodeCapacity(
            *(f"{prefix}-{n:02d}", True),
            tuple(GpuSlot(f"{prefix}-{n}-{k}", k, gpu_type, True) for k in range(size)),
            *(8 * size, 8 * size, 2**40, 2**40),
        )
        for n in range(count)
    ]


def make_jobs(where: Map, count: int, load: float, seed: int) -> list[SimJob]:
    rng = np.random.default_rng([seed, count, int(100 * load)])
    gpus = rng.choice(GPU_COUNTS, count, p=GPU_SHARES)
    run_s = np.minimum(rng.lognormal(np.log(600.0) + 0.25 * np.log2(gpus), 1.3), MAX_RUN_S)
    if where.types:
        gpus = np.minimum(gpus, 8)
    capacity = sum(len(node.gpus) for node in where.nodes)
    span_s = float((gpus * run_s).sum()) / (capacity * load)
    together = np.cumsum(rng.random(count) < 1.0 / JOBS_TOGETHER)
    at_s = np.sort(rng.uniform(0.0, span_s, int(together[-1]) + 1))[together]
    jobs = []
    for j in range(count):
        types: tuple[str, ...] = ()
        if where.types and rng.random() < 0.5:
            types = tuple(rng.choice(where.types, int(rng.integers(1, 3)), replace=False).tolist())
            if gpus[j] > 2:
                types = tuple({"T4": "MISC", "P100": "V16"}.get(t, t) for t in types)
        partition = f"vc{rng.choice(len(where.shares), p=where.shares)}" if where.shares else ""
        nodes = 2 if gpus[j] > 8 else 1
        spec = JobSpec(
            *("bench", f"user{rng.integers(0, 20)}", ("true",), "/"),
            gpus=int(gpus[j]),
            gpu_types=tuple(dict.fromkeys(types)),
            nodes=nodes,
            cpus=4 * int(gpus[j]) // nodes,
            partition=partition,
            time_limit_s=float(run_s[j] * rng.uniform(1.0, 3.0)),
        )
        jobs.append(SimJob(j, spec, float(at_s[j]), float(run_s[j])))
    return jobs


def run_one(where: Map, jobs: Sequence[SimJob], allocator: Allocator, **options: Any) -> Replay:
    scheduler = Scheduler(make_prioritizer("fcfs"), allocator, Backfill.EASY)
    return simulate(jobs, where.nodes, scheduler, partitions=where.partitions, **options)


def compare_runs(
    name: str, load: float, count: int, seeds: int, allocators: dict[str, Allocator]
) -> list[dict[str, Any]]:
    where = make_map(name)
    waits: dict[str, list[Any]] = {allocator: [] for allocator in allocators}
    rows = []
    for allocator_name, allocator in allocators.items():
        told, jct, cut, began_s = [], [], 0, time.perf_counter()
        for seed in range(seeds):
            replay = run_one(where, make_jobs(where, count, load, seed), allocator)
            waits[allocator_name].append(waits_s(replay.outcomes))
            jct.append(np.array([outcome.jct_s for outcome in replay.outcomes]))
            told.append(summarize(replay, np.random.default_rng(seed)))
            cut += replay.cut_short
        difference = _paired(waits[allocator_name], waits["greedy"])
        rows.append(
            {
                "map": name,
                "load": load,
                "allocator": allocator_name,
                "wait_s": round(float(np.mean(np.concatenate(waits[allocator_name]))), 1),
                "jct_s": round(float(np.mean(np.concatenate(jct))), 1),
                "wait_minus_greedy_s": [round(x, 1) for x in (difference.mean, difference.low,
                                                              difference.high)],
                "bsld": round(float(np.mean([s.bounded_slowdown.mean for s in told])), 2),
                "utilization": round(float(np.mean([s.gpu_utilization for s in told])), 4),
                "partly_used_nodes": round(float(np.mean([s.partly_used_nodes for s in told])), 2),
                "cut_short": cut,
                "wall_s": round(time.perf_counter() - began_s, 1),
            }
        )  # fmt: skip
        print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    return rows


def _paired(ours: Sequence[Any], theirs: Sequence[Any]) -> Interval:
    """Over replays, not over jobs: one placement changes the waits of all jobs after it."""
    means = [float(np.mean(mine - other)) for mine, other in zip(ours, theirs, strict=True)]
    return bootstrap(np.array(means), np.random.default_rng(0))


def compare_states(
    name: str, load: float, count: int, allocators: dict[str, Allocator]
) -> list[dict[str, Any]]:
    where = make_map(name)
    states: list[Moment] = []
    run_one(
        *(where, make_jobs(where, count, load, 99), allocators["greedy"]),
        watch=lambda moment: states.append(moment) if len(moment.queue) > 3 else None,
    )
    picked = states[:: max(1, len(states) // SAMPLED_STATES)]
    weights = PRESETS["completion-time"]
    rows = []
    for allocator_name, allocator in allocators.items():
        started, weight, partly, better = 0, 0.0, 0.0, 0
        for moment in picked:
            ranked = make_prioritizer("fcfs").rank(moment.queue, moment.cluster, moment.now_s)[:128]
            placed = allocator.place(ranked, moment.cluster, moment.now_s)
            value = value_of(placed.starts, ranked, moment.cluster, weights)
            theirs = allocators["greedy"].place(ranked, moment.cluster, moment.now_s)
            other = value_of(theirs.starts, ranked, moment.cluster, weights)
            better += value.is_better_than(other)
            started += sum(value.started)
            weight += sum(1.0 / (i + 1) for i, s in enumerate(value.started) if s)
            partly += _partly_used_after(moment, placed.starts)
        rows.append(
            {
                "map": name,
                "load": load,
                "allocator": allocator_name,
                "states": len(picked),
                "starts": started,
                "priority_weight": round(weight, 2),
                "partly_used_nodes": round(partly / max(1, len(picked)), 2),
                "better_than_greedy": better,
            }
        )
        print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    return rows


def _partly_used_after(moment: Moment, starts: Sequence[Any]) -> int:
    taken = {uuid for start in starts for rank in start.ranks for uuid in rank.gpu_uuids}
    count = 0
    for node in moment.cluster.nodes:
        free = sum(gpu.is_free and gpu.uuid not in taken for gpu in node.gpus)
        count += 0 < free < len(node.gpus)
    return count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--maps", nargs="+", default=["philly", "helios", "mixed"])
    parser.add_argument("--only", nargs="+", default=list(ALLOCATORS), metavar="ALLOCATOR")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    solver = make_solver("auto")
    allocators: dict[str, Any] = {
        name: make_allocator(name, solver=solver) for name in options.only
    }
    if "milp" in allocators:
        counted = ObjectiveWeights(packing=0.0, fragmentation=1.0)
        allocators["milp-counted"] = replace(allocators["milp"], weights=counted)
    rows, states = [], []
    print("map | load | allocator | wait_s | jct_s | wait - greedy (mean, 95 %) | bsld | "
          "utilization | partly used | cut short | wall_s")  # fmt: skip
    for name in options.maps:
        for load in LOADS:
            rows += compare_runs(name, load, options.jobs, options.seeds, allocators)
    print("map | load | allocator | states | starts | priority weight | partly used | better")
    for name in options.maps:
        states += compare_states(name, 1.1, options.jobs, allocators)
    if options.json:
        told = {"argv": sys.argv[1:], "runs": rows, "states": states}
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
