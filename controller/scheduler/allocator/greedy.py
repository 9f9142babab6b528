"""List scheduling with best fit: jobs in order, each where it leaves the fewest GPUs over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from controller.scheduler.allocator.objective import ObjectiveWeights, evaluate, start_terms
from controller.scheduler.ledger import Ledger, NodeLedger
from controller.scheduler.shape import JobShape, ShapeIndex
from controller.scheduler.types import ClusterView, Placement, RankedJob, Start, WaitingJob


@dataclass(frozen=True, slots=True)
class GreedyAllocator:
    """Packs jobs one after the other; one that does not fit is skipped and later ones may start."""

    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)
    name: str = "greedy"

    def place(
        self,
        ranked: Sequence[RankedJob],
        cluster: ClusterView,
        now_s: float,  # noqa: ARG002 (protocol)
    ) -> Placement:
        """Best fit on the nodes that accept work."""
        jobs = [entry.job for entry in ranked]
        starts = pack(jobs, Ledger(cluster), ShapeIndex(cluster))
        value = evaluate(starts, ranked, cluster, self.weights)
        return Placement(starts=tuple(starts), objective=value.as_float())


def pack(jobs: Iterable[WaitingJob], ledger: Ledger, shapes: ShapeIndex) -> list[Start]:
    """Starts each job that fits in what the ones before it left, and books it in the ledger."""
    starts = []
    failed: set[JobShape] = set()
    for job in jobs:
        shape = shapes.of(job)
        if shape in failed:
            continue
        place = best_fit(ledger, shape)
        if place is None:
            failed.add(shape)
            continue
        starts.append(book(job.job_id, shape, *place, ledger))
    return starts


def book(
    job_id: int, shape: JobShape, gpu_type: str, nodes: Sequence[NodeLedger], ledger: Ledger
) -> Start:
    """Takes a job's place out of the ledger. Ranks are in order of node name."""
    ordered = sorted(nodes, key=lambda node: node.name)
    terms = start_terms(shape, gpu_type, ordered)
    return Start(job_id, ledger.take(shape, gpu_type, ordered), terms)


def best_fit(ledger: Ledger, shape: JobShape) -> tuple[str, list[NodeLedger]] | None:
    """The GPU type and the nodes that leave the fewest GPUs over; None if the job does not fit.

    The first acceptable type in the job's order of preference wins; types of equal preference
    compete by what they leave over. Ties: fewer partly used nodes, then names. Jobs without
    GPUs go where the fewest GPUs are free, so that GPU nodes stay free for GPU jobs; then
    where the fewest CPUs are.
    """
    if shape.gpus == 0:
        room = ledger.with_room(shape, "")
        room.sort(key=lambda node: (node.free_gpus, node.cpus, node.name))
        return ("", room[: shape.nodes]) if len(room) >= shape.nodes else None
    for _, tier in groupby(shape.types, key=lambda choice: choice.preference):
        places = [
            place
            for choice in tier
            if (place := _best_of_type(ledger, shape, choice.gpu_type)) is not None
        ]
        if places:
            _, gpu_type, nodes = min(places, key=lambda place: place[:2])
            return gpu_type, nodes
    return None


def _best_of_type(
    ledger: Ledger, shape: JobShape, gpu_type: str
) -> tuple[tuple[int, int], str, list[NodeLedger]] | None:
    room = [
        (node.free[gpu_type] - shape.gpus, node.partly_used_change(shape, gpu_type), node.name)
        for node in ledger.with_room(shape, gpu_type)
    ]
    if len(room) < shape.nodes:
        return None
    best = sorted(room)[: shape.nodes]
    key = (sum(left for left, _, _ in best), sum(change for _, change, _ in best))
    return key, gpu_type, [ledger.node(name) for _, _, name in best]
