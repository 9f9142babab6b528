"""The scheduler's side of the service: decisions are checked against the present, then stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

from controller.lifecycle import attempt as attempts
from controller.lifecycle.events import JobPlaced, Place
from controller.lifecycle.state import ClusterState, StateView
from controller.scheduler.explain import explain_start
from controller.scheduler.types import Decision, Start
from controller.snapshot import node_capacity
from controller.writer import Transaction
from protos.messages import JobState

log = logging.getLogger("rltune.placing")


def place_all(
    transaction: Transaction,
    decision: Decision,
    state: ClusterState,
    is_connected: Callable[[str], bool],
    now_s: float,
) -> int:
    """Places every job of the decision whose start is still possible.

    Returns:
        How many were placed. Those that are not stay in the queue for the next cycle.
    """
    taken: set[int] | None = None
    placed = 0
    for start in decision.starts:
        stale = why_stale(transaction.draft, start, is_connected)
        if stale:
            log.info("the start of job %d is overtaken by events: %s", start.job_id, stale)
            continue
        job = transaction.draft.job(start.job_id)
        assert job is not None
        port = 0
        if len(start.ranks) > 1:
            if taken is None:
                taken = {a.master_port for a in state.attempts.values() if a.is_held}
            port = attempts.master_port(job.job_id, job.attempt + 1, frozenset(taken))
            taken.add(port)
        places = tuple(Place(r.node, r.gpu_uuids, r.gpu_indices) for r in start.ranks)
        why = explain_start(start, job.spec, decision)
        transaction.apply(JobPlaced(start.job_id, places, now_s, port, start.terms, why))
        placed += 1
    return placed


def why_stale(state: StateView, start: Start, is_connected: Callable[[str], bool]) -> str:
    """Why a decided start is no longer possible; empty when it is."""
    job = state.job(start.job_id)
    if job is None or job.state is not JobState.PENDING or job.cancel is not None:
        return "it no longer waits"
    for rank in start.ranks:
        node = state.node(rank.node)
        if node is None:
            return f"there is no node {rank.node}"
        capacity = node_capacity(state, node, is_connected=is_connected(node.name))
        if not capacity.accepts_work:
            return f"node {node.name} takes no work: {', '.join(capacity.reasons)}"
        free = {slot.uuid for slot in capacity.gpus if slot.is_free}
        if not free.issuperset(rank.gpu_uuids):
            return f"its GPUs on {node.name} are no longer free"
        if capacity.cpus_free < job.spec.cpus:
            return f"too few CPU cores are free on {node.name}"
        if capacity.memory_free_bytes < job.spec.memory_bytes:
            return f"too little memory is free on {node.name}"
    return ""
