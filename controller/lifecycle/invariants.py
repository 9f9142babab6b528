"""What must hold in every state, as one check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from controller.lifecycle.attempt import Attempt, Rank
from controller.lifecycle.job import Job
from controller.lifecycle.state import ClusterState
from protos.messages import AttemptState, JobState, RankPhase


def check_all(state: ClusterState) -> list[str]:
    """Every broken invariant in a sentence; empty when all hold."""
    return [
        *_gpus_held_once(state),
        *_index_is_true(state),
        *(fault for job in state.jobs.values() for fault in _job(state, job)),
        *(fault for attempt in state.attempts.values() for fault in _attempt(state, attempt)),
    ]


def _gpus_held_once(state: ClusterState) -> Iterator[str]:
    holders = Counter(
        (rank.node, uuid)
        for attempt in state.attempts.values()
        for rank in attempt.ranks
        if rank.is_held
        for uuid in rank.gpu_uuids
    )
    for (node, uuid), count in holders.items():
        if count > 1:
            yield f"GPU {uuid} of {node} is held {count} times"


def _index_is_true(state: ClusterState) -> Iterator[str]:
    for attempt in state.attempts.values():
        for rank in attempt.ranks:
            if rank.is_held and attempt.key not in state.held_keys(rank.node):
                yield f"attempt {attempt.key} holds resources of {rank.node} unknown to the index"


def _job(state: ClusterState, job: Job) -> Iterator[str]:
    name = f"job {job.job_id} ({job.state})"
    newest = state.attempt((job.job_id, job.attempt)) if job.attempt else None
    if job.state.is_active:
        if newest is None or newest.state is AttemptState.ENDED or newest.fenced:
            yield f"{name} has no live attempt"
        elif (job.state is JobState.RUNNING) != (newest.started_at_s is not None):
            yield f"{name} and its attempt disagree whether it runs"
    elif newest is not None and newest.state is not AttemptState.ENDED and not newest.fenced:
        yield f"{name} has a live attempt that is not fenced"
    if job.state.is_final != (job.ended_at_s is not None):
        yield f"{name} ended at {job.ended_at_s}"
    if job.cancel is not None and job.state in {JobState.PENDING, JobState.HELD}:
        yield f"{name} waits although it was cancelled"
    if (job.state is JobState.HELD) != (job.eligible_at_s is None and not job.state.is_final):
        yield f"{name} is eligible at {job.eligible_at_s}"


def _attempt(state: ClusterState, attempt: Attempt) -> Iterator[str]:
    name = f"attempt {attempt.job_id}.{attempt.number} ({attempt.state})"
    job = state.job(attempt.job_id)
    if job is None:
        yield f"{name} has no job"
        return
    has_ended = attempt.state is AttemptState.ENDED
    if attempt.number > job.attempt:
        yield f"{name} is newer than its job's newest attempt {job.attempt}"
    if attempt.number < job.attempt and not (attempt.fenced or has_ended):
        yield f"{name} is superseded and not fenced"
    if has_ended != all(rank.has_ended for rank in attempt.ranks):
        yield f"{name}: {[str(rank.phase) for rank in attempt.ranks]}"
    if attempt.state is AttemptState.RUNNING and attempt.started_at_s is None:
        yield f"{name} runs without a start"
    if has_ended != (attempt.ended_at_s is not None):
        yield f"{name} ended at {attempt.ended_at_s}"
    for rank in attempt.ranks:
        yield from (f"{name}: {fault}" for fault in _rank(state, attempt, rank))


def _rank(state: ClusterState, attempt: Attempt, rank: Rank) -> Iterator[str]:
    if rank.has_ended != (rank.exit is not None):
        yield f"a rank in phase {rank.phase} with exit {rank.exit}"
    if (rank.phase is RankPhase.RELEASED) != (rank.released_at_s is not None):
        yield f"a rank in phase {rank.phase} released at {rank.released_at_s}"
    node = state.node(rank.node)
    is_visible = attempt.state in {AttemptState.LAUNCHING, AttemptState.RUNNING}
    if is_visible and not rank.has_ended and node is not None and not node.is_connected:
        yield f"a rank on {rank.node}, which is lost"
