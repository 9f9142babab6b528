"""What clients see of jobs and nodes, made out of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controller.leases import Heard
from controller.lifecycle.attempt import Attempt
from controller.lifecycle.job import Job
from controller.lifecycle.node import Node, reasons, state_word
from controller.lifecycle.state import StateView, held_on
from controller.scheduler import explain
from controller.scheduler.types import Decision, WaitNote, WaitReason
from controller.snapshot import NOT_CONNECTED
from protos.messages import (
    AttemptView,
    Explanation,
    GpuView,
    JobState,
    JobView,
    NodeView,
    RankView,
)


def job_view(job: Job, attempts: Sequence[Attempt], note: WaitNote | None, now_s: float) -> JobView:
    """A job with its attempts, oldest first.

    Args:
        job: the job.
        attempts: all of its attempts.
        note: why the last scheduling cycle did not start it.
        now_s: the time to which a wait or a run still counts.
    """
    newest = attempts[-1] if attempts else None
    # An attempt out of sight stops counting when its job has ended without it.
    until_s = now_s if job.ended_at_s is None else job.ended_at_s
    reason, text = _reason(job, note)
    return JobView(
        job_id=job.job_id,
        spec=job.spec,
        state=job.state,
        completing=job.state.is_active and newest is not None and newest.is_stopping,
        reason=reason,
        reason_text=text,
        submitted_at_s=job.submitted_at_s,
        eligible_at_s=job.eligible_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        wait_s=_wait_s(job, now_s),
        run_s=sum(attempt.run_s(until_s) for attempt in attempts),
        gpu_s=sum(attempt.gpus * attempt.run_s(until_s) for attempt in attempts),
        exit=job.exit,
        exit_node_rank=job.exit_node_rank,
        attempts=tuple(_attempt_view(attempt) for attempt in attempts),
    )


def _reason(job: Job, note: WaitNote | None) -> tuple[str, str]:
    if job.state is JobState.HELD:
        return WaitReason.HELD, "held; release it to let it run"
    if job.state is JobState.PENDING and note is not None:
        return note.reason, explain.describe(note, job.spec)
    return job.reason, job.reason_text


def _wait_s(job: Job, now_s: float) -> float:
    """From when it could first have run to its start, its end, or now."""
    if job.eligible_at_s is None:
        return 0.0
    until_s = next((t for t in (job.started_at_s, job.ended_at_s) if t is not None), now_s)
    return max(0.0, until_s - job.eligible_at_s)


def _attempt_view(attempt: Attempt) -> AttemptView:
    return AttemptView(
        attempt=attempt.number,
        state=attempt.state,
        stop_reason=attempt.stop_reason,
        created_at_s=attempt.created_at_s,
        started_at_s=attempt.started_at_s,
        ended_at_s=attempt.ended_at_s,
        ranks=tuple(
            RankView(
                node=rank.node,
                node_rank=node_rank,
                gpu_uuids=rank.gpu_uuids,
                gpu_indices=rank.gpu_indices,
                phase=rank.phase,
                pid=rank.pid,
                exit=rank.exit,
                usage=rank.usage,
            )
            for node_rank, rank in enumerate(attempt.ranks)
        ),
        gpu_utilization_mean_pct=attempt.gpu_utilization_mean_pct,
        gpu_memory_peak_bytes=attempt.gpu_memory_peak_bytes,
    )


def explanation(view: JobView, attempt: Attempt | None, decision: Decision | None) -> Explanation:
    """Why a job waits, or why its newest attempt went where it went."""
    if view.state is JobState.PENDING:
        return _explained_wait(view, decision)
    text = view.reason_text
    if view.state.is_active:
        text = "being stopped" if view.completing else view.state.lower()
    return Explanation(
        job_id=view.job_id,
        state=view.state,
        reason=view.reason,
        text=text,
        lines=() if attempt is None else attempt.why,
        terms={} if attempt is None else attempt.terms,
    )


def _explained_wait(view: JobView, decision: Decision | None) -> Explanation:
    lines: tuple[str, ...] = ()
    terms: Mapping[str, float] = {}
    if decision is not None:
        lines = explain.explain_wait(view.job_id, view.spec, decision)
        entries = (entry for entry in decision.ranking if entry.job.job_id == view.job_id)
        terms = next((entry.terms for entry in entries), {})
    if not lines:
        lines = ("no scheduling cycle has looked at it yet",)
    return Explanation(view.job_id, view.state, view.reason, lines[0], lines[1:], terms)


def node_view(
    state: StateView, node: Node, heard: Heard | None, *, is_connected: bool, monotonic_s: float
) -> NodeView:
    """A node with its GPUs and who holds them."""
    held = held_on(state, node.name)
    holders: dict[str, int] = {}
    jobs: list[int] = []
    cpus = memory_bytes = 0
    for node_rank, attempt in held:
        job = state.job(attempt.job_id)
        assert job is not None, f"attempt {attempt.key} without a job"
        holders.update(dict.fromkeys(attempt.ranks[node_rank].gpu_uuids, job.job_id))
        cpus += job.spec.cpus
        memory_bytes += job.spec.memory_bytes
        if not attempt.ranks[node_rank].has_ended:
            jobs.append(job.job_id)
    against = reasons(node)
    if node.is_connected and not is_connected:
        against = (NOT_CONNECTED, *against)
    return NodeView(
        name=node.name,
        state=state_word(node, is_busy=bool(held)),
        admin=node.admin,
        reasons=against,
        address=node.address,
        facts=node.facts,
        host=None if heard is None else heard.telemetry.host,
        gpus=_gpu_views(node, heard, holders),
        cpus_used=cpus,
        memory_used_bytes=memory_bytes,
        last_seen_s_ago=None if heard is None else monotonic_s - heard.at_s,
        telemetry_age_s=None if heard is None else heard.telemetry.telemetry_age_s,
        jobs=tuple(jobs),
    )


def _gpu_views(node: Node, heard: Heard | None, holders: dict[str, int]) -> tuple[GpuView, ...]:
    samples = {} if heard is None else {sample.uuid: sample for sample in heard.telemetry.gpus}
    views = []
    for gpu in node.facts.gpus:
        against = node.gpu_reasons(gpu.uuid)
        views.append(
            GpuView(
                node=node.name,
                facts=gpu,
                sample=samples.get(gpu.uuid),
                job_id=holders.get(gpu.uuid),
                healthy=not against,
                reasons=against,
            )
        )
    return tuple(views)
