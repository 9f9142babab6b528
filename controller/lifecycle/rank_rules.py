"""What agents' reports, or their silence about a rank, do to attempts."""

from __future__ import annotations

from dataclasses import replace

from controller.lifecycle import attempt as attempts
from controller.lifecycle import ending
from controller.lifecycle import node as nodes
from controller.lifecycle.attempt import PHASE_ORDER, Attempt, AttemptKey, Rank
from controller.lifecycle.effects import Launch, Record, Stop
from controller.lifecycle.events import RankReported
from controller.lifecycle.node import GpuFault, GpuFaultKind
from controller.lifecycle.state import Draft, StateView
from protos.messages import (
    AttemptState,
    ExitFacts,
    RankId,
    RankPhase,
    RankReport,
    StopReason,
)

UNKNOWN_RANK_GRACE_S = 30.0
"""For a rank that no row knows, so that its job's own grace is not known either."""


def attempt_of(state: StateView, node: str, rank_id: RankId) -> Attempt | None:
    """The attempt of a rank, if that rank is on that node."""
    attempt = state.attempt((rank_id.job_id, rank_id.attempt))
    if attempt is None or not 0 <= rank_id.node_rank < len(attempt.ranks):
        return None
    return attempt if attempt.ranks[rank_id.node_rank].node == node else None


def rank_reported(draft: Draft, event: RankReported) -> None:
    """A rank is as far as its agent says; a report that is not news changes nothing."""
    report, at_s = event.report, event.at_s
    rank_id = report.rank
    if report.phase is RankPhase.RELEASED:
        _note_dirty(draft, event)
    attempt = attempt_of(draft, event.node, rank_id)
    if attempt is None:
        _stop_unknown(draft, event)
        return
    before = attempt.ranks[rank_id.node_rank]
    if PHASE_ORDER[report.phase] <= PHASE_ORDER[before.phase]:
        _repeat_stop(draft, attempt, rank_id.node_rank)
        return
    rank = _as_reported(before, report, at_s)
    attempt = attempts.with_rank(attempt, rank_id.node_rank, rank)
    draft.put(attempt)
    if rank.has_ended and not before.has_ended:
        ending.rank_ended(draft, attempt, rank_id.node_rank, at_s)
    elif attempt.state is AttemptState.LAUNCHING and attempts.has_started(attempt):
        ending.start(draft, attempt, at_s)
    if rank.phase is RankPhase.RELEASED:
        record_release(draft, attempt, rank_id.node_rank, at_s)
    _repeat_stop(draft, attempt, rank_id.node_rank)


def _as_reported(rank: Rank, report: RankReport, at_s: float) -> Rank:
    exit_facts = report.exit
    has_ended = report.phase in {RankPhase.ENDED, RankPhase.RELEASED}
    if has_ended and exit_facts is None:
        exit_facts = ExitFacts(message="Its agent did not say how it ended.")
    return replace(
        rank,
        phase=report.phase,
        pid=report.pid if report.pid is not None else rank.pid,
        # The first exit stays: RELEASED repeats what ENDED told.
        exit=rank.exit if rank.exit is not None else exit_facts,
        usage=report.usage if report.usage is not None else rank.usage,
        released_at_s=at_s if report.phase is RankPhase.RELEASED else None,
    )


def _repeat_stop(draft: Draft, attempt: Attempt, node_rank: int) -> None:
    """A rank that runs although it should stop missed its order: it is ordered again."""
    current = draft.attempt(attempt.key)
    assert current is not None
    rank = current.ranks[node_rank]
    if rank.has_ended or not (current.fenced or current.stop_reason is not None):
        return
    grace_s = ending.job_of(draft, current).spec.grace_s
    reason = current.stop_reason or StopReason.FENCED
    stop = Stop(rank.node, current.rank_id(node_rank), reason, grace_s)
    if stop not in draft.effects:
        draft.effects.append(stop)


def _stop_unknown(draft: Draft, event: RankReported) -> None:
    if event.report.phase in {RankPhase.ENDED, RankPhase.RELEASED}:
        return
    rank_id = event.report.rank
    draft.effects.append(Stop(event.node, rank_id, StopReason.FENCED, UNKNOWN_RANK_GRACE_S))


def _note_dirty(draft: Draft, event: RankReported) -> None:
    """GPUs that the rank left dirty go out of service; a later clean report clears them."""
    before = draft.node(event.node)
    if before is None:
        return
    rank_id = event.report.rank
    dirty = event.report.dirty_gpus
    node = nodes.without_gpu_faults(before, GpuFaultKind.DIRTY, rank=rank_id)
    for uuid, why in dirty.items():
        text = f"left dirty by job {rank_id.job_id}: {why}"
        previous = next(
            (f for f in before.gpu_faults.get(uuid, ()) if f.rank == rank_id and f.text == text),
            None,
        )
        fault = previous or GpuFault(GpuFaultKind.DIRTY, text, event.at_s, rank_id)
        node = nodes.with_gpu_fault(node, uuid, fault)
    if node == before:
        return
    draft.put(node)
    what = "; ".join(f"{uuid} {why}" for uuid, why in dirty.items()) or "clean again"
    kind = "GpuFaulted" if dirty else "GpuCleared"
    text = f"GPUs of node {node.name} after job {rank_id.job_id}: {what}."
    draft.records.append(
        Record(event.at_s, kind, text, node.name, rank_id.job_id, rank_id.attempt, node.name)
    )


def record_release(draft: Draft, attempt: Attempt, node_rank: int, at_s: float) -> None:
    """Writes down that a rank gave its resources back."""
    rank = attempt.ranks[node_rank]
    gpus = ",".join(map(str, rank.gpu_indices))
    text = f"Attempt {attempt.number} gave back GPUs {gpus or '-'} of {rank.node}."
    data = {"node_rank": str(node_rank), "gpus": gpus}
    draft.records.append(
        Record(
            at_s, "RankReleased", text, rank.node, attempt.job_id, attempt.number, rank.node, data
        )
    )


def rank_missing(
    draft: Draft, key: AttemptKey, node_rank: int, at_s: float, *, is_new_boot: bool
) -> None:
    """An agent that just connected does not know a rank that we have on its node.

    With the same boot and a launch that was never acknowledged, the order was lost: it is sent
    again. Otherwise the process is gone, and so is its hold on the GPUs.
    """
    attempt = draft.attempt(key)
    assert attempt is not None
    rank = attempt.ranks[node_rank]
    is_wanted = not attempt.fenced and attempt.stop_reason is None
    if rank.phase is RankPhase.LAUNCHING and is_wanted and not is_new_boot:
        draft.effects.append(Launch(rank.node, attempt.rank_id(node_rank)))
        return
    why = "booted again" if is_new_boot else "lost it"
    failure = f"Node {rank.node} {why} while the job was there."
    released = replace(rank, phase=RankPhase.RELEASED, released_at_s=at_s)
    if rank.has_ended:
        attempt = attempts.with_rank(attempt, node_rank, released)
        draft.put(attempt)
    else:
        released = replace(released, exit=ExitFacts(message=failure))
        attempt = attempts.with_rank(attempt, node_rank, released)
        if is_wanted:
            attempt = _failed_by_node(draft, replace(attempt, node_failure=failure), at_s)
        draft.put(attempt)
        ending.rank_ended(draft, attempt, node_rank, at_s)
    record_release(draft, attempt, node_rank, at_s)


def _failed_by_node(draft: Draft, attempt: Attempt, at_s: float) -> Attempt:
    """The attempt with the node's failure as the cause of its end; other ranks are stopped."""
    if all(rank.has_ended for rank in attempt.ranks):
        return attempts.with_stop(attempt, StopReason.FENCED)
    ending.stop(draft, attempt, StopReason.FENCED, at_s)
    stopped = draft.attempt(attempt.key)
    assert stopped is not None
    return stopped
