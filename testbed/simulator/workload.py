"""From a trace to the jobs of a simulation on a given cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from controller.scheduler.shape import acceptable_types
from protos.messages import JobSpec
from testbed.client_errors import InvalidRequest
from testbed.simulator.engine import SimJob
from testbed.traces.clusters import Cluster
from testbed.traces.table import Trace

LEAST_RUN_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a trace is used."""

    jobs: int | None = None
    """Only the first so many."""
    skip: int = 0
    """Not the first so many."""
    load: float | None = None
    """Offered load that arrivals are stretched or squeezed to; None: as recorded."""
    clairvoyant: bool = False
    """The user's estimate and limit are the run time itself."""


def make_jobs(trace: Trace, cluster: Cluster, options: Options) -> list[SimJob]:
    """The jobs, in order of submission, from second 0 on.

    A job keeps its partition and GPU type where the cluster has them, and may otherwise go
    anywhere. One that is larger than the largest node is spread over as few nodes as possible.

    Raises:
        InvalidRequest: no job is left.
    """
    end = None if options.jobs is None else options.skip + options.jobs
    rows = trace.jobs.slice(options.skip, None if end is None else options.jobs).to_dicts()
    if not rows:
        raise InvalidRequest(
            f"{trace.source}: no job is left", f"it has {trace.jobs.height}; use fewer --skip"
        )
    first_s = rows[0]["submit_s"]
    jobs = [
        SimJob(
            number,
            _spec(row, cluster, clairvoyant=options.clairvoyant),
            row["submit_s"] - first_s,
            max(LEAST_RUN_S, row["run_s"]),
        )
        for number, row in enumerate(rows, options.skip + 1)
    ]
    return jobs if options.load is None else _at_load(jobs, cluster, options.load)


def offered_load(jobs: list[SimJob], cluster: Cluster) -> float:
    """GPU-seconds asked over GPU-seconds there are while jobs arrive."""
    span_s = jobs[-1].submitted_at_s - jobs[0].submitted_at_s
    asked = sum(job.spec.gpus * job.run_s for job in jobs)
    return asked / (cluster.gpus * span_s) if span_s and cluster.gpus else float("inf")


def _at_load(jobs: list[SimJob], cluster: Cluster, load: float) -> list[SimJob]:
    factor = offered_load(jobs, cluster) / load
    return [replace(job, submitted_at_s=job.submitted_at_s * factor) for job in jobs]


def _spec(row: dict[str, Any], cluster: Cluster, *, clairvoyant: bool) -> JobSpec:
    gpus = row["gpus"]
    asked = tuple(row["gpu_type"].split("|")) if row["gpu_type"] else ()
    types = tuple(word for word in asked if acceptable_types((word,), cluster.gpu_types))
    run_s = max(LEAST_RUN_S, row["run_s"])
    partition = row["partition"] if row["partition"] in cluster.partitions else ""
    return JobSpec(
        name=row["name"] or "job",
        user=row["user"] or "somebody",
        argv=("true",),
        cwd="/",
        gpus=gpus,
        gpu_types=types if gpus else (),
        nodes=1 if gpus <= cluster.largest_node else 0,
        cpus=0,
        time_limit_s=run_s if clairvoyant else row["time_limit_s"],
        time_estimate_s=run_s if clairvoyant else None,
        partition=partition,
    )
