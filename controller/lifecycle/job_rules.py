"""What people, the scheduler and deadlines do to jobs."""

from __future__ import annotations

from dataclasses import replace

from controller.lifecycle import attempt as attempts
from controller.lifecycle import ending
from controller.lifecycle import job as jobs
from controller.lifecycle.attempt import Attempt, Rank
from controller.lifecycle.effects import Launch, Record
from controller.lifecycle.errors import IllegalTransition, NotAllowed
from controller.lifecycle.events import (
    SCHEDULER,
    CancelRequested,
    HoldRequested,
    JobPlaced,
    JobSubmitted,
    ReleaseRequested,
    RequeueRequested,
    StartDeadlinePassed,
    UsageMeasured,
)
from controller.lifecycle.job import CancelWish, Job
from controller.lifecycle.state import Draft
from protos.messages import AttemptState, JobState, RankPhase, StopReason


def job_submitted(draft: Draft, event: JobSubmitted) -> None:
    """A new job waits, or is held from the start."""
    spec = event.spec
    job = Job(
        job_id=event.job_id,
        request_id=event.request_id,
        spec=spec,
        state=JobState.HELD if spec.hold else JobState.PENDING,
        submitted_at_s=event.at_s,
        eligible_at_s=None if spec.hold else event.at_s,
    )
    draft.put(job)
    data = {
        "user": spec.user,
        "name": spec.name,
        "gpus": str(spec.gpus),
        "nodes": str(spec.nodes),
        "state": str(job.state),
    }
    _record(draft, job, "JobSubmitted", f"Job {job.job_id} submitted.", event.actor, event.at_s)
    draft.records[-1] = replace(draft.records[-1], data=data)


def job_placed(draft: Draft, event: JobPlaced) -> None:
    """A waiting job gets an attempt that holds its GPUs; every rank is launched."""
    job = _known(draft, event.job_id)
    if job.cancel is not None:
        raise IllegalTransition(f"job {job.job_id}", job.state, "a start after a cancel")
    number = job.attempt + 1
    attempt = Attempt(
        job_id=job.job_id,
        number=number,
        state=AttemptState.LAUNCHING,
        ranks=tuple(Rank(p.node, p.gpu_uuids, p.gpu_indices) for p in event.places),
        created_at_s=event.at_s,
        master_port=event.master_port,
        terms=event.terms,
        why=event.why,
    )
    starting = replace(
        jobs.move(job, JobState.STARTING),
        attempt=number,
        reason=jobs.EndReason.NONE,
        reason_text="",
    )
    draft.put(starting, attempt)
    for node_rank, rank in enumerate(attempt.ranks):
        draft.effects.append(Launch(rank.node, attempt.rank_id(node_rank)))
    where = "; ".join(f"{p.node}:{','.join(map(str, p.gpu_indices))}" for p in event.places)
    text = f"Attempt {number} of job {job.job_id} placed on {where}."
    data = {"places": where}
    draft.records.append(
        Record(event.at_s, "AttemptPlaced", text, SCHEDULER, job.job_id, number, None, data)
    )


def cancel_requested(draft: Draft, event: CancelRequested) -> None:
    """A waiting job is cancelled at once; a running one when its processes have ended."""
    job = _known(draft, event.job_id)
    if job.state.is_final or job.cancel is not None:
        return
    job = replace(job, cancel=CancelWish(event.at_s, event.actor, event.reason))
    if not job.state.is_active:
        verdict = ending.cancelled(job)
        draft.put(jobs.finish(job, verdict, event.at_s, None, None))
        ending.record_end(draft, job, verdict, event.at_s)
        return
    draft.put(job)
    text = ending.cancelled(job).text
    _record(draft, job, "JobCancelRequested", text, event.actor, event.at_s)
    ending.stop(draft, _newest(draft, job), StopReason.CANCEL, event.at_s)


def hold_requested(draft: Draft, event: HoldRequested) -> None:
    """A waiting job is held.

    Raises:
        NotAllowed: it does not wait.
    """
    job = _known(draft, event.job_id)
    if job.state is JobState.HELD:
        return
    if job.state is not JobState.PENDING:
        raise NotAllowed(f"job {job.job_id} is {job.state}: only a waiting job can be held")
    held = replace(jobs.move(job, JobState.HELD), eligible_at_s=None)
    draft.put(held)
    text = f"Job {job.job_id} held by {event.actor}."
    _record(draft, held, "JobHeld", text, event.actor, event.at_s)


def release_requested(draft: Draft, event: ReleaseRequested) -> None:
    """A held job waits again.

    Raises:
        NotAllowed: it is neither held nor waiting.
    """
    job = _known(draft, event.job_id)
    if job.state is JobState.PENDING:
        return
    if job.state is not JobState.HELD:
        raise NotAllowed(f"job {job.job_id} is {job.state}: only a held job can be released")
    released = replace(jobs.move(job, JobState.PENDING), eligible_at_s=event.at_s)
    draft.put(released)
    text = f"Job {job.job_id} released by {event.actor}."
    _record(draft, released, "JobReleased", text, event.actor, event.at_s)


def requeue_requested(draft: Draft, event: RequeueRequested) -> None:
    """A finished job waits again; a running one is stopped first.

    Raises:
        NotAllowed: it waits already, or is being cancelled.
    """
    job = _known(draft, event.job_id)
    if job.state.is_final:
        waiting = jobs.requeue(
            job, event.at_s, jobs.EndReason.REQUEUED, f"Requeued by {event.actor}."
        )
        draft.put(replace(waiting, failed_launches=(), not_before_s=0.0))
        text = f"Job {job.job_id} requeued by {event.actor}."
        _record(draft, job, "JobRequeued", text, event.actor, event.at_s)
        return
    if not job.state.is_active:
        raise NotAllowed(f"job {job.job_id} is {job.state}: it has not run yet")
    if job.cancel is not None:
        raise NotAllowed(f"job {job.job_id} is being cancelled: requeue it when it has ended")
    text = f"Requeue of job {job.job_id} asked by {event.actor}."
    _record(draft, job, "JobRequeueRequested", text, event.actor, event.at_s)
    ending.stop(draft, _newest(draft, job), StopReason.REQUEUE, event.at_s)


def start_deadline_passed(draft: Draft, event: StartDeadlinePassed) -> None:
    """An attempt that did not start in time is stopped; the nodes that kept it are blamed."""
    attempt = draft.attempt((event.job_id, event.attempt))
    waits = attempt is not None and attempt.state in {AttemptState.LAUNCHING, AttemptState.LOST}
    if not waits or attempt is None or attempt.fenced or attempt.stop_reason is not None:
        return
    if attempts.has_started(attempt):
        return
    slow = tuple(rank.node for rank in attempt.ranks if rank.phase is RankPhase.LAUNCHING)
    why = f"a job did not start in {event.deadline_s:g} s"
    ending.blame(draft, ending.job_of(draft, attempt), slow, event.at_s, why)
    text = f"Attempt {attempt.number} did not start on {', '.join(slow)} in {event.deadline_s:g} s."
    ending.record(draft, attempt, "AttemptStartTimedOut", text, event.at_s)
    ending.stop(draft, attempt, StopReason.START_TIMEOUT, event.at_s)


def usage_measured(draft: Draft, event: UsageMeasured) -> None:
    """Telemetry's account of an attempt goes into its row; no event, for nothing happened."""
    attempt = draft.attempt((event.job_id, event.attempt))
    if attempt is not None:
        draft.put(
            replace(
                attempt,
                gpu_utilization_mean_pct=event.gpu_utilization_mean_pct,
                gpu_memory_peak_bytes=event.gpu_memory_peak_bytes,
                gpu_sampled_s=event.gpu_sampled_s,
            )
        )


def _known(draft: Draft, job_id: int) -> Job:
    job = draft.job(job_id)
    if job is None:
        raise NotAllowed(f"there is no job {job_id}")
    return job


def _newest(draft: Draft, job: Job) -> Attempt:
    attempt = draft.attempt((job.job_id, job.attempt))
    assert attempt is not None, f"job {job.job_id} is {job.state} without an attempt"
    return attempt


def _record(draft: Draft, job: Job, kind: str, text: str, actor: str, at_s: float) -> None:
    attempt = job.attempt or None
    draft.records.append(Record(at_s, kind, text, actor, job.job_id, attempt))
