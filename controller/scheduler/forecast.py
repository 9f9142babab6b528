"""When and where a job would start if it were submitted now."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from controller.scheduler.cycle import Scheduler
from controller.scheduler.explain import describe
from controller.scheduler.feasibility import never_fits
from controller.scheduler.index import index_of
from controller.scheduler.ledger import place_of
from controller.scheduler.shape import ShapeIndex
from controller.scheduler.timeline import Timeline
from controller.scheduler.types import ClusterView, WaitingJob
from protos.messages import Forecast

MAX_AHEAD = 256
"""Jobs before it that are planned one by one; with more, nothing is said of the time."""


def forecast(
    job: WaitingJob,
    queue: Sequence[WaitingJob],
    cluster: ClusterView,
    now_s: float,
    scheduler: Scheduler,
) -> Forecast:
    """Decides with the job in the queue; where it waits, plans all jobs before it in order.

    Expected ends are time limits (or predictions), so jobs that end earlier make it start earlier,
    and jobs that are submitted later with a higher priority make it start later.
    """
    decision = scheduler.decide([*queue, job], cluster, now_s)
    for start in decision.starts:
        if start.job_id == job.job_id:
            return Forecast(0.0, tuple(rank.node for rank in start.ranks))
    note = decision.waits[job.job_id]
    text = describe(note, job.spec)
    ready = [entry for entry in [*queue, job] if entry.not_before_s <= now_s]
    order = [entry.job for entry in scheduler.prioritizer.rank(ready, cluster, now_s)]
    ahead = next((n for n, other in enumerate(order) if other.job_id == job.job_id), len(order))
    if ahead > MAX_AHEAD:
        return Forecast(None, ahead=ahead, text=text)
    index = index_of(cluster)
    shapes = ShapeIndex(index)
    timeline = Timeline(cluster, now_s)
    starts = {start.job_id: start for start in decision.starts}
    for other in order[:ahead]:
        if other.job_id in starts:
            place = place_of(starts[other.job_id], index)
            timeline.start(other.job_id, shapes.of(other), place, now_s + other.planned_run_s)
        elif never_fits(other.spec, cluster) is None:
            timeline.reserve(other.job_id, shapes.of(other), other.planned_run_s)
    planned = timeline.reserve(job.job_id, shapes.of(job), job.planned_run_s)
    if planned is None or not isfinite(planned.reservation.begins_s):
        return Forecast(None, ahead=ahead, text=text)
    reservation = planned.reservation
    return Forecast(
        reservation.begins_s - now_s, reservation.nodes, ahead, reservation.after_job_id, text
    )
