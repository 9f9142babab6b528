"""Reservations for jobs that wait, so that jobs behind them may start but never delay them.

EASY backfill (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995) gives one to the first job
that cannot start; conservative backfill (Mu'alem and Feitelson, TPDS 2001) to each. A job's end is
known from its time limit or a prediction; reservations are made anew in every cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.allocator.verify import verify
from controller.scheduler.index import index_of
from controller.scheduler.ledger import Ledger, place_of
from controller.scheduler.quota import Quotas
from controller.scheduler.shape import JobShape, ShapeIndex, shapes_of
from controller.scheduler.timeline import Timeline
from controller.scheduler.types import ClusterView, Placement, RankedJob, Start


class Backfill(StrEnum):
    """What jobs behind one that cannot start may do."""

    NONE = "none"
    """Start whenever they fit: a large job may wait for as long as small ones come."""
    EASY = "easy"
    """Start if they do not delay the first job that cannot start."""
    CONSERVATIVE = "conservative"
    """Start if they delay no job before them."""
    BLOCKING = "blocking"
    """Wait: nothing overtakes (the published base policies; for comparison)."""

    @property
    def reservations(self) -> int:
        """How many jobs get one at most."""
        return {Backfill.EASY: 1, Backfill.CONSERVATIVE: MAX_RESERVATIONS}.get(self, 0)


MAX_RESERVATIONS = 16
"""Conservative backfill looks no further: each reservation may cost one more placement."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A placement with the reservations that it respects."""

    placement: Placement
    cluster: ClusterView
    """The view with reservations and rooms, in order of their begin."""
    quota_bound: frozenset[int]
    """Jobs that wait because a quota is used up."""


def place_with_backfill(
    ranked: Sequence[RankedJob],
    cluster: ClusterView,
    now_s: float,
    allocator: Allocator,
    backfill: Backfill,
) -> Planned:
    """Places jobs so that no reservation is broken.

    Raises:
        InvalidPlacement: the allocator broke a rule.
    """
    if backfill is Backfill.BLOCKING:
        return _blocking(ranked, cluster, now_s, allocator)
    placement = _place(ranked, cluster, now_s, allocator)
    quota_bound = _quota_bound(ranked, cluster, placement.starts)
    reserved: set[int] = set()
    while len(reserved) < MAX_RESERVATIONS and len(cluster.reservations) < backfill.reservations:
        started = {start.job_id for start in placement.starts}
        looked_at = started | reserved | quota_bound
        head = next((n for n, e in enumerate(ranked) if e.job.job_id not in looked_at), None)
        if head is None:
            break
        planned = _reserve(ranked, head, placement.starts, reserved, cluster, now_s)
        reserved.add(ranked[head].job.job_id)
        if planned is None:
            continue
        cluster = planned
        if not _respects(ranked, placement.starts, cluster, now_s):
            others = [entry for entry in ranked if entry.job.job_id not in reserved]
            placement = _place(others, cluster, now_s, allocator)
            quota_bound = _quota_bound(others, cluster, placement.starts)
    return Planned(placement, cluster, quota_bound)


def _place(
    ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float, allocator: Allocator
) -> Placement:
    """Asks the allocator; drops starts that break a quota or a reservation it did not look at."""
    placement = allocator.place(ranked, cluster, now_s)
    verify(placement.starts, ranked, cluster)
    if not cluster.rooms and not cluster.partitions:
        return placement
    index = index_of(cluster)
    jobs = {entry.job.job_id: entry.job for entry in ranked}
    shapes = shapes_of(ranked, cluster, ShapeIndex(index), now_s)
    ledger, quotas = Ledger(index, cluster.rooms), Quotas(cluster)
    kept = []
    for start in placement.starts:
        shape, place = shapes[start.job_id], place_of(start, index)
        if quotas.allows(jobs[start.job_id].spec) and ledger.fits(shape, place):
            quotas.take(jobs[start.job_id].spec)
            ledger.take(shape, place)
            kept.append(start)
    return (
        placement if len(kept) == len(placement.starts) else replace(placement, starts=tuple(kept))
    )


def _blocking(
    ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float, allocator: Allocator
) -> Planned:
    """Starts the longest beginning of the order that the allocator can start as a whole."""
    placement = _place(ranked, cluster, now_s, allocator)
    while True:
        started = {start.job_id for start in placement.starts}
        head = next((n for n, e in enumerate(ranked) if e.job.job_id not in started), len(ranked))
        if len(started) <= head:
            return Planned(placement, cluster, _quota_bound(ranked, cluster, placement.starts))
        placement = _place(ranked[:head], cluster, now_s, allocator)


def _reserve(
    ranked: Sequence[RankedJob],
    head: int,
    starts: Sequence[Start],
    reserved: set[int],
    cluster: ClusterView,
    now_s: float,
) -> ClusterView | None:
    """The view with one more reservation, for the job at `head`; None if it can get none."""
    index = index_of(cluster)
    plain = ShapeIndex(index)
    timeline = Timeline(cluster, now_s)
    by_id = {start.job_id: start for start in starts}
    for entry in ranked[:head]:
        start = by_id.get(entry.job.job_id)
        if start is not None:
            ends_s = now_s + entry.job.planned_run_s
            timeline.start(start.job_id, plain.of(entry.job), place_of(start, index), ends_s)
    for entry in ranked[: head + 1]:
        if entry.job.job_id in reserved or entry is ranked[head]:
            timeline.reserve(entry.job.job_id, plain.of(entry.job), entry.job.planned_run_s)
    if not any(p.reservation.job_id == ranked[head].job.job_id for p in timeline.planned):
        return None
    return replace(
        cluster,
        reservations=tuple(
            replace(planned.reservation, ahead=_ahead(ranked, planned.reservation.job_id))
            for planned in timeline.planned
        ),
        rooms=timeline.rooms(),
    )


def _ahead(ranked: Sequence[RankedJob], job_id: int) -> frozenset[int]:
    ids = [entry.job.job_id for entry in ranked]
    return frozenset(ids[: ids.index(job_id)])


def _respects(
    ranked: Sequence[RankedJob], starts: Sequence[Start], cluster: ClusterView, now_s: float
) -> bool:
    index = index_of(cluster)
    shapes = shapes_of(ranked, cluster, ShapeIndex(index), now_s)
    ledger = Ledger(index, cluster.rooms)
    for start in starts:
        shape: JobShape = shapes[start.job_id]
        place = place_of(start, index)
        if not ledger.fits(shape, place):
            return False
        ledger.take(shape, place)
    return True


def _quota_bound(
    ranked: Sequence[RankedJob], cluster: ClusterView, starts: Sequence[Start]
) -> frozenset[int]:
    if not cluster.partitions:
        return frozenset()
    quotas = Quotas(cluster)
    started = {start.job_id for start in starts}
    bound = []
    for entry in ranked:
        if entry.job.job_id in started:
            quotas.take(entry.job.spec)
        elif not quotas.allows(entry.job.spec):
            bound.append(entry.job.job_id)
    return frozenset(bound)
