"""One scheduling cycle: a pure function from queue and cluster to a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.backfill import Backfill, Planned, place_with_backfill
from controller.scheduler.feasibility import never_fits
from controller.scheduler.notes import Diagnosis
from controller.scheduler.prioritizer.protocol import Prioritizer
from controller.scheduler.types import (
    ClusterView,
    Decision,
    RankedJob,
    WaitingJob,
    WaitNote,
    WaitReason,
)

DEFAULT_WINDOW = 128
"""Jobs that one cycle tries to place (the window of the RLTune paper)."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The parts of a cycle that a configuration chooses."""

    prioritizer: Prioritizer
    allocator: Allocator
    backfill: Backfill = Backfill.EASY
    window: int = DEFAULT_WINDOW

    def decide(self, queue: Sequence[WaitingJob], cluster: ClusterView, now_s: float) -> Decision:
        """One cycle, see `decide`."""
        return decide(
            queue,
            cluster,
            now_s,
            prioritizer=self.prioritizer,
            allocator=self.allocator,
            window=self.window,
            backfill=self.backfill,
        )


def decide(
    queue: Sequence[WaitingJob],
    cluster: ClusterView,
    now_s: float,
    *,
    prioritizer: Prioritizer,
    allocator: Allocator,
    window: int = DEFAULT_WINDOW,
    backfill: Backfill = Backfill.NONE,
    explains: bool = True,
) -> Decision:
    """Decides which waiting jobs start now, where, and why the others wait.

    Jobs in the pause after a failed launch and jobs that no known node could ever hold are left
    out of the order, so that they take no place in the window. Without `explains` nothing is
    said of the jobs of the window that wait, which takes as long as deciding.

    Raises:
        InvalidPlacement: the allocator broke a rule (a defect; nothing must be started).
    """
    waits: dict[int, WaitNote] = {}
    contenders = _without_never_fitting(_without_paused(queue, now_s, waits), cluster, waits)
    order = prioritizer.rank(contenders, cluster, now_s)
    ranked = order[:window]
    planned = place_with_backfill(ranked, cluster, now_s, allocator, backfill)
    placement = planned.placement
    if explains:
        waits.update(_explain_window(ranked, planned, now_s))
    for ahead, entry in enumerate(order[window:], start=window):
        waits[entry.job.job_id] = WaitNote(
            WaitReason.NOT_CONSIDERED,
            gpus_needed=entry.job.spec.gpus_per_node,
            nodes_needed=entry.job.spec.nodes,
            ahead=ahead,
        )
    return Decision(
        starts=placement.starts,
        waits=waits,
        ranking=ranked,
        policy=prioritizer.name,
        allocator=allocator.name,
        objective=placement.objective,
        cut_short=placement.cut_short,
        fallback=placement.fallback,
        wake_at_s=min(
            (job.not_before_s for job in queue if job.not_before_s > now_s), default=None
        ),
        reservations=planned.cluster.reservations,
    )


def _without_paused(
    queue: Sequence[WaitingJob], now_s: float, waits: dict[int, WaitNote]
) -> list[WaitingJob]:
    ready = []
    for job in queue:
        if job.not_before_s > now_s:
            waits[job.job_id] = WaitNote(
                WaitReason.BACKOFF,
                gpus_needed=job.spec.gpus_per_node,
                nodes_needed=job.spec.nodes,
                until_s=job.not_before_s,
            )
        else:
            ready.append(job)
    return ready


def _without_never_fitting(
    jobs: Sequence[WaitingJob], cluster: ClusterView, waits: dict[int, WaitNote]
) -> list[WaitingJob]:
    known: dict[tuple[object, ...], str | None] = {}
    possible = []
    for job in jobs:
        spec = job.spec
        key = (
            *(spec.gpus, spec.nodes, spec.cpus, spec.memory_bytes, spec.gpu_types),
            *(spec.partition, spec.min_gpu_memory_bytes, spec.mix_gpu_types),
        )
        if key not in known:
            known[key] = never_fits(spec, cluster)
        reason = known[key]
        if reason is None:
            possible.append(job)
        else:
            waits[job.job_id] = WaitNote(
                WaitReason.NEVER_FITS,
                gpus_needed=job.spec.gpus_per_node,
                nodes_needed=job.spec.nodes,
                detail=reason,
            )
    return possible


def _explain_window(
    ranked: Sequence[RankedJob], planned: Planned, now_s: float
) -> Mapping[int, WaitNote]:
    started = {start.job_id for start in planned.placement.starts}
    if len(started) == len(ranked):
        return {}
    diagnosis = Diagnosis(planned, ranked, now_s)
    return {
        entry.job.job_id: diagnosis.note(entry.job, ahead)
        for ahead, entry in enumerate(ranked)
        if entry.job.job_id not in started
    }
