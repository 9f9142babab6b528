"""The event loop: arrivals and ends in virtual time, each followed by the real scheduling cycle.

All events of one instant are handled before one decision, so jobs that are submitted together
are seen together. The clock is virtual and nothing is random, so the same input gives the same
result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from controller.scheduler.cycle import Scheduler, decide
from controller.scheduler.index import ClusterIndex, index_of
from controller.scheduler.prediction import RunTimeModel
from controller.scheduler.types import (
    ClusterView,
    Decision,
    NodeCapacity,
    Partition,
    RankPlacement,
    RunningJob,
    Start,
    WaitingJob,
)
from protos.messages import JobSpec


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job of a workload."""

    job_id: int
    spec: JobSpec
    submitted_at_s: float
    run_s: float
    """How long it runs on GPUs of speed 1 on as few nodes as possible."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job."""

    job: SimJob
    started_at_s: float
    ended_at_s: float
    ranks: tuple[RankPlacement, ...]

    @property
    def wait_s(self) -> float:
        """From submission to start."""
        return self.started_at_s - self.job.submitted_at_s

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.ended_at_s - self.job.submitted_at_s


@dataclass(frozen=True, slots=True)
class Instant:
    """The cluster right after a decision."""

    at_s: float
    waiting: int
    running: int
    gpus_used: int
    partly_used_nodes: int
    """Nodes with some GPUs free and some not."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a simulation yields."""

    outcomes: tuple[Outcome, ...]
    """In order of job id; jobs that never started are not in it."""
    never_started: tuple[int, ...]
    instants: tuple[Instant, ...]
    gpus: int
    decisions: int
    cut_short: int
    fallbacks: int


RunTime = Callable[[SimJob, Start, Mapping[str, NodeCapacity]], float]
"""How long a job runs where it was started, in seconds."""


def as_given(job: SimJob, _start: Start, _nodes: Mapping[str, NodeCapacity]) -> float:
    """Every GPU type is alike, and so is every place."""
    return job.run_s


@dataclass(frozen=True, slots=True)
class Moment:
    """What a decision was made from, and the decision, for whoever watches."""

    queue: tuple[WaitingJob, ...]
    cluster: ClusterView
    now_s: float
    decision: Decision


def simulate(
    jobs: Iterable[SimJob],
    nodes: Sequence[NodeCapacity],
    scheduler: Scheduler,
    *,
    run_time: RunTime = as_given,
    partitions: Mapping[str, Partition] | None = None,
    gpu_speed: Mapping[str, float] | None = None,
    predictor: RunTimeModel | None = None,
    watch: Callable[[Moment], None] | None = None,
) -> Replay:
    """Runs a workload to its end.

    Args:
        jobs: the workload, in any order.
        nodes: the cluster, empty.
        scheduler: the policy, allocator and backfill that decide.
        run_time: how long a job runs where it was started.
        partitions: limits by name.
        gpu_speed: speed for its price, by GPU type.
        predictor: asked as jobs come, and taught as they end.
        watch: told of each decision.
    """
    return _Simulation(
        *(jobs, nodes, scheduler, run_time, partitions or {}, gpu_speed or {}, predictor, watch)
    ).run()


class _Simulation:
    def __init__(
        self,
        jobs: Iterable[SimJob],
        nodes: Sequence[NodeCapacity],
        scheduler: Scheduler,
        run_time: RunTime,
        partitions: Mapping[str, Partition],
        gpu_speed: Mapping[str, float],
        predictor: RunTimeModel | None,
        watch: Callable[[Moment], None] | None,
    ) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        self.nodes = {node.name: node for node in nodes}
        self.scheduler = scheduler
        self.run_time = run_time
        self.partitions = partitions
        self.gpu_speed = gpu_speed
        self.predictor = predictor
        self.watch = watch
        self.waiting: dict[int, WaitingJob] = {}
        self.running: dict[int, RunningJob] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.instants: list[Instant] = []
        self.index: ClusterIndex | None = None
        self.decisions = self.cut_short = self.fallbacks = 0
        self.sequence = count()
        self.events: list[tuple[float, int, int, bool]] = [
            (job.submitted_at_s, next(self.sequence), job.job_id, True)
            for job in self.jobs.values()
        ]
        heapq.heapify(self.events)

    def run(self) -> Replay:
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] == now_s:
                _, _, job_id, is_arrival = heapq.heappop(self.events)
                if is_arrival:
                    self.waiting[job_id] = self._arrived(self.jobs[job_id], now_s)
                else:
                    self._free(self.running.pop(job_id))
            if self.waiting:
                self._decide(now_s)
            self._note(now_s)
        return Replay(
            outcomes=tuple(self.outcomes[job_id] for job_id in sorted(self.outcomes)),
            never_started=tuple(sorted(self.waiting)),
            instants=tuple(self.instants),
            gpus=sum(len(node.gpus) for node in self.nodes.values()),
            decisions=self.decisions,
            cut_short=self.cut_short,
            fallbacks=self.fallbacks,
        )

    def _decide(self, now_s: float) -> None:
        cluster = ClusterView(
            nodes=tuple(self.nodes.values()),
            running=tuple(self.running.values()),
            usage_at_s=now_s,
            partitions=self.partitions,
            gpu_speed=self.gpu_speed,
        )
        self.index = index_of(cluster, self.index)
        queue = tuple(self.waiting.values())
        decision = decide(
            queue,
            cluster,
            now_s,
            prioritizer=self.scheduler.prioritizer,
            allocator=self.scheduler.allocator,
            window=self.scheduler.window,
            backfill=self.scheduler.backfill,
            explains=False,
        )
        self.decisions += 1
        self.cut_short += decision.cut_short
        self.fallbacks += bool(decision.fallback)
        if self.watch is not None:
            self.watch(Moment(queue, cluster, now_s, decision))
        for start in decision.starts:
            self._start(start, now_s)

    def _start(self, start: Start, now_s: float) -> None:
        job = self.jobs[start.job_id]
        spec = self.waiting.pop(start.job_id).spec
        run_s = self.run_time(job, start, self.nodes)
        self.running[job.job_id] = RunningJob(
            job_id=job.job_id,
            user=spec.user,
            gpus=spec.gpus,
            started_at_s=now_s,
            time_limit_s=spec.time_limit_s,
            ranks=start.ranks,
            partition=spec.partition,
            cpus=spec.cpus,
            memory_bytes=spec.memory_bytes,
        )
        self._hold(self.running[job.job_id], free=False)
        self.outcomes[job.job_id] = Outcome(job, now_s, now_s + run_s, start.ranks)
        heapq.heappush(self.events, (now_s + run_s, next(self.sequence), job.job_id, False))

    def _arrived(self, job: SimJob, now_s: float) -> WaitingJob:
        expected_s = None
        if self.predictor is not None:
            expected_s = self.predictor.predict(job.spec).median_s
        return WaitingJob(job.job_id, job.spec, now_s, now_s, expected_run_s=expected_s)

    def _free(self, job: RunningJob) -> None:
        self._hold(job, free=True)
        if self.predictor is not None:
            outcome = self.outcomes[job.job_id]
            self.predictor.observe(outcome.job.spec, outcome.ended_at_s - outcome.started_at_s)

    def _hold(self, job: RunningJob, *, free: bool) -> None:
        sign = 1 if free else -1
        for rank in job.ranks:
            node = self.nodes[rank.node]
            held = set(rank.gpu_uuids)
            gpus = tuple(
                replace(gpu, is_free=free) if gpu.uuid in held else gpu for gpu in node.gpus
            )
            self.nodes[rank.node] = replace(
                node,
                gpus=gpus,
                cpus_free=node.cpus_free + sign * job.cpus,
                memory_free_bytes=node.memory_free_bytes + sign * job.memory_bytes,
            )

    def _note(self, now_s: float) -> None:
        used = partly = 0
        for node in self.nodes.values():
            free = sum(gpu.is_free for gpu in node.gpus)
            used += len(node.gpus) - free
            partly += 0 < free < len(node.gpus)
        self.instants.append(Instant(now_s, len(self.waiting), len(self.running), used, partly))
