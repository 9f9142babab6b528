"""The demo: the 16-job mix on a cluster of mock GPUs, every job trained to its real end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from protos.messages import JobState, JobView, LogStream, NodeView
from testbed.client import Client
from testbed.client_errors import NodeUnreachable, RltuneError, TryAgain
from testbed.interrupts import Interrupts
from testbed.local import LocalCluster
from testbed.mix import MixJob, arrivals_s, job_request
from testbed.report.html import Run
from testbed.report.records import gpu_slots, job_record

NODES = ("P100:4", "P100:4")
POLICY = "multifactor"
ALLOCATOR = "milp"
SEED = 16
REFRESH_S = 0.5
PROGRESS_TAIL_BYTES = 4096
FAILURE_TAIL_BYTES = 4096


class Interrupted(RltuneError):
    """Somebody asked to stop before all jobs had ended."""

    default_code = "interrupted"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training run says it is."""

    step: int
    of: int

    @property
    def ratio(self) -> float:
        """Done share, 0 to 1."""
        return self.step / self.of if self.of else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the demo at one moment."""

    elapsed_s: float
    expected: int
    """Jobs in the mix, those not submitted yet included."""
    jobs: tuple[JobView, ...]
    """Submitted jobs in the order of their numbers."""
    nodes: tuple[NodeView, ...]
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """By job number, for running jobs that have said something."""


class Show(Protocol):
    """Whoever shows the demo while it runs."""

    wants_progress: bool
    """Whether the progress of running jobs is worth asking for."""

    def update(self, snapshot: Snapshot) -> None:
        """Show the newest state."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that did not complete, with the end of its output."""

    job: JobView
    log_tail: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of the demo."""

    run: Run
    failures: tuple[Failure, ...]


def run_mix(
    cluster: LocalCluster,
    mix: Sequence[MixJob],
    show: Show,
    *,
    interrupts: Interrupts,
    seed: int = SEED,
    now: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Submit the jobs as they arrive and follow them to their end.

    Raises:
        Interrupted: somebody asked to stop; the caller's cluster cancels the jobs.
        ProcessDied: the controller or an agent ended.
    """
    client = cluster.client
    started_s = monotonic()
    arrivals = arrivals_s(len(mix), np.random.default_rng(seed))
    submitted: list[int] = []
    while True:
        cluster.check()
        if interrupts.stop:
            raise Interrupted("interrupted: the demo's jobs were cancelled")
        elapsed_s = monotonic() - started_s
        for position in range(len(submitted), len(mix)):
            if arrivals[position] > elapsed_s:
                break
            request = job_request(mix[position], cwd=cluster.state_dir, seed=seed + position)
            submitted.append(client.submit(request))
        jobs = tuple(sorted(client.jobs(), key=lambda job: job.job_id))
        nodes = tuple(client.nodes())
        progress = read_progress(client, jobs) if show.wants_progress else {}
        show.update(Snapshot(elapsed_s, len(mix), jobs, nodes, progress))
        if len(submitted) == len(mix) and all(job.state.is_final for job in jobs):
            return _outcome(client, jobs, nodes, now())
        next_s = arrivals[len(submitted)] if len(submitted) < len(mix) else elapsed_s + REFRESH_S
        interrupts.pause(min(REFRESH_S, max(0.0, next_s - (monotonic() - started_s))))


def read_progress(client: Client, jobs: Sequence[JobView]) -> dict[int, Progress]:
    """What running jobs last said about their progress on stdout; a node too busy to tell is
    left out.
    """
    found: dict[int, Progress] = {}
    for job in jobs:
        if job.state is not JobState.RUNNING:
            continue
        with suppress(NodeUnreachable, TryAgain):
            output = _tail(client, job.job_id, (LogStream.STDOUT,), PROGRESS_TAIL_BYTES)
            if (progress := last_progress(output)) is not None:
                found[job.job_id] = progress
    return found


def last_progress(output: bytes) -> Progress | None:
    """The last step that `workloads.train` reported in the end of its output.

    The first line may be cut and a user's line may be anything: what is no JSON object with a
    step is passed over.
    """
    for line in reversed(output.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"step", "of"} <= event.keys():
            return Progress(int(event["step"]), int(event["of"]))
    return None


def _tail(client: Client, job_id: int, streams: Sequence[LogStream], tail_bytes: int) -> bytes:
    messages = client.logs(job_id, streams=streams, tail_bytes=tail_bytes)
    return b"".join(message.data or message.notice.encode() for message in messages)


def _outcome(
    client: Client, jobs: Sequence[JobView], nodes: Sequence[NodeView], now_s: float
) -> Outcome:
    slots = gpu_slots(nodes)
    info = client.info()
    failures = tuple(
        Failure(job, _tail(client, job.job_id, (), FAILURE_TAIL_BYTES).decode("utf-8", "replace"))
        for job in jobs
        if job.state is not JobState.COMPLETED
    )
    run = Run(
        title=f"RLTune demo: {len(jobs)} training jobs on {len(slots)} mock GPUs",
        policy=info.policy,
        allocator=info.allocator,
        jobs=tuple(job_record(job) for job in jobs),
        slots=slots,
        now_s=now_s,
    )
    return Outcome(run, failures)
