"""One trace under several schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.scheduler.backfill import Backfill
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import NEED_SOLVER, make_allocator, make_prioritizer
from controller.scheduler.prediction import RunTimeModel
from controller.solvers import make_solver
from testbed.client_errors import InvalidRequest
from testbed.simulator.engine import simulate
from testbed.simulator.metrics import Summary, summarize
from testbed.simulator.workload import Options, make_jobs, offered_load
from testbed.traces.clusters import Cluster
from testbed.traces.table import Trace


@dataclass(frozen=True, slots=True)
class Result:
    """One replay."""

    policy: str
    backfill: str
    allocator: str
    offered_load: float
    decisions: int
    cut_short: int
    fallbacks: int
    took_s: float
    summary: Summary


def run_all(
    trace: Trace,
    cluster: Cluster,
    options: Options,
    *,
    policies: Sequence[str],
    allocators: Sequence[str],
    backfills: Sequence[str],
    seed: int,
    monotonic: Callable[[], float],
) -> Iterator[Result]:
    """Replays the trace once for each combination; every one sees the same jobs.

    Run times are predicted as jobs end, for the policies that use that.

    Raises:
        InvalidRequest: a policy, allocator or mode of that name does not exist.
    """
    schedulers = [
        (policy, mode, allocator, _scheduler(policy, mode, allocator))
        for policy in policies
        for mode in backfills
        for allocator in allocators
    ]
    jobs = make_jobs(trace, cluster, options)
    load = offered_load(jobs, cluster)
    for policy, mode, allocator, scheduler in schedulers:
        began_s = monotonic()
        replay = simulate(
            *(jobs, cluster.nodes, scheduler),
            partitions=cluster.partitions,
            predictor=RunTimeModel(),
        )
        yield Result(
            *(policy, mode, allocator, load),
            decisions=replay.decisions,
            cut_short=replay.cut_short,
            fallbacks=replay.fallbacks,
            took_s=monotonic() - began_s,
            summary=summarize(replay, np.random.default_rng(seed)),
        )


def _scheduler(policy: str, mode: str, allocator: str) -> Scheduler:
    try:
        solver = make_solver("auto") if allocator in NEED_SOLVER else None
        return Scheduler(
            make_prioritizer(policy), make_allocator(allocator, solver=solver), Backfill(mode)
        )
    except ValueError as error:
        if mode not in list(Backfill):
            modes = ", ".join(Backfill)
            raise InvalidRequest(f"no backfill mode is named {mode!r}", modes) from None
        raise InvalidRequest(str(error)) from None
