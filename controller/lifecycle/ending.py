"""How attempts stop and end, and what their end makes of their jobs."""

from __future__ import annotations

from dataclasses import replace

from controller.lifecycle import attempt as attempts
from controller.lifecycle import job as jobs
from controller.lifecycle.attempt import Attempt, Rank
from controller.lifecycle.effects import Record, Stop
from controller.lifecycle.events import CONTROLLER
from controller.lifecycle.job import End, Job
from controller.lifecycle.node import with_launch_fault
from controller.lifecycle.state import Draft
from protos.messages import AttemptState, ExitFacts, JobState, LaunchFault, StopReason

JUDGED_ON_NODE = frozenset({None, StopReason.TIME_LIMIT, StopReason.MEMORY_LIMIT})
"""Ends that are the job's own: nobody but its node's limits stopped it."""

AGENTS_NEWS = frozenset({"AttemptStarted", "AttemptEnded", "AttemptRecovered"})
"""Kinds of event whose cause is an agent's report."""


def job_of(draft: Draft, attempt: Attempt) -> Job:
    """The job of an attempt."""
    job = draft.job(attempt.job_id)
    assert job is not None, f"attempt {attempt.key} without a job"
    return job


def stop(draft: Draft, attempt: Attempt, reason: StopReason, at_s: float) -> None:
    """Wishes an attempt to end and orders its ranks to stop.

    An attempt on a lost node cannot be stopped now: the job is settled at once, and the attempt
    is killed when its node turns up.
    """
    stopped = attempts.with_stop(attempt, reason)
    if stopped.stop_reason is attempt.stop_reason:
        return
    draft.put(stopped)
    order_stop(draft, stopped)
    if stopped.state is AttemptState.LOST and not stopped.fenced:
        give_up(draft, stopped, at_s, stopped.stop_reason)


def order_stop(draft: Draft, attempt: Attempt) -> None:
    """Orders all ranks that have not ended to stop, for the reason that the attempt carries."""
    reason = attempt.stop_reason or StopReason.FENCED
    grace_s = job_of(draft, attempt).spec.grace_s
    for node_rank, rank in enumerate(attempt.ranks):
        if not rank.has_ended:
            draft.effects.append(Stop(rank.node, attempt.rank_id(node_rank), reason, grace_s))


def give_up(draft: Draft, attempt: Attempt, at_s: float, cause: StopReason | None) -> None:
    """Fences an attempt that cannot be seen, and settles its job without it."""
    fenced = replace(attempt, fenced=True)
    draft.put(fenced)
    text = f"Attempt {attempt.number} is given up: it is killed where it turns up."
    record(draft, fenced, "AttemptFenced", text, at_s)
    if any(not rank.has_ended and _is_connected(draft, rank) for rank in fenced.ranks):
        stopped = attempts.with_stop(fenced, StopReason.FENCED)
        draft.put(stopped)
        order_stop(draft, stopped)
    settle(draft, fenced, at_s, cause)


def _is_connected(draft: Draft, rank: Rank) -> bool:
    node = draft.node(rank.node)
    return node is not None and node.is_connected


def rank_ended(draft: Draft, attempt: Attempt, node_rank: int, at_s: float) -> None:
    """Goes on after one rank of an attempt has ended: stop the others, or end the attempt."""
    exit_facts = attempt.ranks[node_rank].exit
    assert exit_facts is not None
    if attempt.exit is None and attempts.is_bad_end(exit_facts):
        attempt = replace(attempt, exit=exit_facts, exit_node_rank=node_rank)
        draft.put(attempt)
    if all(rank.has_ended for rank in attempt.ranks):
        end(draft, attempt, at_s)
    elif attempt.exit is not None:
        stop(draft, attempt, StopReason.RANK_FAILED, at_s)


def start(draft: Draft, attempt: Attempt, at_s: float) -> Attempt:
    """All ranks run: so does the job, and earlier failed launches are forgiven.

    A start after its deadline forgives nothing: the attempt is being stopped for it.
    """
    running = replace(attempts.move(attempt, AttemptState.RUNNING), started_at_s=at_s)
    draft.put(running)
    record(draft, running, "AttemptStarted", f"Attempt {running.number} runs.", at_s)
    if not running.fenced:
        job = jobs.move(job_of(draft, running), JobState.RUNNING)
        draft.put(replace(job, started_at_s=at_s))
    if running.stop_reason is not StopReason.START_TIMEOUT:
        _forgive(draft, running)
    return running


def _forgive(draft: Draft, attempt: Attempt) -> None:
    for rank in attempt.ranks:
        node = draft.node(rank.node)
        if node is not None and node.launch_fault_jobs:
            draft.put(replace(node, launch_fault_jobs=()))
    if not attempt.fenced:
        job = job_of(draft, attempt)
        draft.put(replace(job, failed_launches=(), not_before_s=0.0))


def end(draft: Draft, attempt: Attempt, at_s: float) -> None:
    """All ranks have ended: so has the attempt, and its job is settled unless it is fenced."""
    elapsed_s = max((r.usage.elapsed_s for r in attempt.ranks if r.usage is not None), default=None)
    if attempt.started_at_s is None and _ran(attempt):
        # Too short for its RUNNING report to come first.
        began_s = max(attempt.created_at_s, at_s - (elapsed_s or 0.0))
        if attempt.state is AttemptState.LAUNCHING:
            attempt = start(draft, attempt, began_s)
        else:
            attempt = replace(attempt, started_at_s=began_s)
    ended_at_s = at_s
    if attempt.started_at_s is not None and elapsed_s is not None:
        # The report may be late (its agent was away); the duration was measured on the node.
        ended_at_s = min(at_s, attempt.started_at_s + elapsed_s)
    exit_facts, node_rank = attempt.exit, attempt.exit_node_rank
    if exit_facts is None:
        exit_facts, node_rank = attempt.ranks[0].exit, 0
    ended = replace(
        attempts.move(attempt, AttemptState.ENDED),
        ended_at_s=ended_at_s,
        exit=exit_facts,
        exit_node_rank=node_rank,
    )
    draft.put(ended)
    text = f"Attempt {ended.number} ended: {attempts.exit_words(ended)}."
    record(draft, ended, "AttemptEnded", text, at_s)
    if not ended.fenced:
        settle(draft, ended, at_s, ended.stop_reason)
    else:
        _accept_late_end(draft, ended, at_s)


def _ran(attempt: Attempt) -> bool:
    """Whether any rank's process ever ran."""
    return any(
        rank.exit is not None
        and rank.exit.launch_fault is LaunchFault.NONE
        and (rank.exit.exit_code is not None or rank.exit.signal is not None)
        for rank in attempt.ranks
    )


def _accept_late_end(draft: Draft, attempt: Attempt, at_s: float) -> None:
    """A lost attempt turned out to have ended by itself before its job ran again: that counts."""
    job = job_of(draft, attempt)
    exits = [rank.exit for rank in attempt.ranks]
    is_own_end = attempt.stop_reason is None and all(
        facts is not None
        and facts.stop_reason in JUDGED_ON_NODE
        and facts.launch_fault is not LaunchFault.NODE
        and (facts.exit_code is not None or facts.signal is not None)
        for facts in exits
    )
    is_superseded = job.attempt != attempt.number or job.state is not JobState.PENDING
    if is_own_end and not is_superseded:
        draft.put(replace(job, started_at_s=attempt.started_at_s))
        settle(draft, attempt, at_s, attempt.stop_reason)


def settle(draft: Draft, attempt: Attempt, at_s: float, cause: StopReason | None) -> None:
    """Puts the job where its attempt's end leaves it."""
    job = job_of(draft, attempt)
    exit_facts = attempt.exit or ExitFacts(message=attempt.node_failure)
    verdict = jobs.end_of(cause, exit_facts, job.spec.on_node_fail, attempt.node_failure)
    if verdict.is_node_fault:
        if cause is not StopReason.START_TIMEOUT:
            job = blame(draft, job, _faulty_nodes(attempt), at_s, verdict.text)
        verdict = jobs.launch_verdict(job, verdict.text) or verdict
    if verdict.state is JobState.PENDING:
        draft.put(jobs.requeue(job, at_s, verdict.reason, verdict.text))
        text = f"Job {job.job_id} waits again: {verdict.text}"
        record(draft, attempt, "JobRequeued", text, at_s, reason=verdict.reason)
        return
    if verdict.state is JobState.CANCELLED and job.cancel is not None:
        verdict = cancelled(job)
    ended_at_s = attempt.ended_at_s if attempt.ended_at_s is not None else at_s
    draft.put(jobs.finish(job, verdict, ended_at_s, attempt.exit, attempt.exit_node_rank))
    record_end(draft, job, verdict, at_s)


def cancelled(job: Job) -> End:
    """The end of a job that somebody cancelled, with who and why."""
    assert job.cancel is not None
    why = f": {job.cancel.reason}" if job.cancel.reason else "."
    text = f"Cancelled by {job.cancel.actor}{why}"
    return End(JobState.CANCELLED, jobs.EndReason.CANCELLED, text)


def _faulty_nodes(attempt: Attempt) -> tuple[str, ...]:
    if attempt.exit_node_rank is None:
        return ()
    return (attempt.ranks[attempt.exit_node_rank].node,)


def blame(draft: Draft, job: Job, nodes: tuple[str, ...], at_s: float, why: str) -> Job:
    """Notes a failed launch on the job and on the nodes whose fault it was, with why it failed."""
    for name in nodes:
        node = draft.node(name)
        if node is None:
            continue
        blamed = with_launch_fault(node, job.job_id, why)
        if blamed.faults != node.faults:
            text = f"Node {name} is out of service: {blamed.faults[-1]}."
            draft.records.append(Record(at_s, "NodeFaulted", text, CONTROLLER, node=name))
        draft.put(blamed)
    noted = jobs.with_failed_launches(job, nodes, at_s)
    draft.put(noted)
    return noted


def record_end(draft: Draft, job: Job, verdict: End, at_s: float) -> None:
    """Writes down that a job reached its final state."""
    actor = job.cancel.actor if job.cancel is not None else CONTROLLER
    text = f"Job {job.job_id} is {verdict.state}: {verdict.text}"
    data = {"state": str(verdict.state), "reason": str(verdict.reason)}
    attempt = job.attempt or None
    draft.records.append(Record(at_s, "JobEnded", text, actor, job.job_id, attempt, None, data))


def record(draft: Draft, attempt: Attempt, kind: str, text: str, at_s: float, **data: str) -> None:
    """Writes down what happened to an attempt."""
    actor = attempt.ranks[0].node if kind in AGENTS_NEWS else CONTROLLER
    values = {key: str(value) for key, value in data.items()}
    node = attempt.ranks[0].node if len(attempt.ranks) == 1 else None
    draft.records.append(
        Record(at_s, kind, text, actor, attempt.job_id, attempt.number, node, values)
    )
