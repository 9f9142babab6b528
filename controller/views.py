"""What clients see of jobs and nodes, made out of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from controller.core import Core
from controller.leases import Heard
from controller.lifecycle.attempt import Attempt, end_words
from controller.lifecycle.job import Job
from controller.lifecycle.node import Node, gpus_out_of_service, reasons, state_word
from controller.lifecycle.state import StateView, held_on, lost_since_s
from controller.partitions import ClusterConfig
from controller.scheduler import explain
from controller.scheduler.types import ClusterView, Decision, WaitNote, WaitReason
from controller.snapshot import NOT_CONNECTED
from protos.messages import (
    AttemptState,
    AttemptView,
    Explanation,
    GpuView,
    JobState,
    JobView,
    NodeView,
    PartitionView,
    RankView,
    Telemetry,
)

NODE_IS_DOWN = "node is DOWN"
ENDS_TOLD = 5
"""As many earlier attempts as an explanation tells of, the last ones."""


def job_view(core: Core, job: Job, attempts: Sequence[Attempt]) -> JobView:
    """A job with all of its attempts, oldest first."""
    now_s = core.now()
    newest = attempts[-1] if attempts else None
    runs_s = _runs_s(core.state, job, attempts, now_s)
    reason, text = _reason(core, job, newest)
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
        run_s=runs_s[-1] if runs_s else 0.0,
        gpu_s=sum(a.gpus * run_s for a, run_s in zip(attempts, runs_s, strict=True)),
        exit=job.exit,
        exit_node_rank=job.exit_node_rank,
        attempts=tuple(_attempt_view(attempt) for attempt in attempts),
    )


def _runs_s(
    state: StateView, job: Job, attempts: Sequence[Attempt], now_s: float
) -> tuple[float, ...]:
    """How long each attempt ran. One out of sight counts up to its loss.

    When its node is back, or the loss is no longer known, it counts at most until its job went on
    without it: waited again, got the next attempt, or ended.
    """
    runs_s = []
    for attempt, later in zip(attempts, (*attempts[1:], None), strict=False):
        bounds = [lost_since_s(state, attempt), job.ended_at_s]
        if later is not None:
            bounds.append(later.created_at_s)
        elif job.state is JobState.PENDING:
            bounds.append(job.eligible_at_s)
        runs_s.append(attempt.run_s(min((b for b in bounds if b is not None), default=now_s)))
    return tuple(runs_s)


def _reason(core: Core, job: Job, newest: Attempt | None) -> tuple[str, str]:
    if job.state is JobState.HELD:
        return WaitReason.HELD, "held; release it to let it run"
    if job.state is JobState.PENDING:
        return _wait_reason(job, newest, core.note_of(job.job_id))
    if newest is not None and _waits_for_its_node(job, newest):
        return WaitReason.NODE_DOWN, _silence(core, job, newest)
    return job.reason, job.reason_text


def _wait_reason(job: Job, newest: Attempt | None, note: WaitNote | None) -> tuple[str, str]:
    """Why it waits, with how its last attempt ended if it waits again."""
    if note is None:
        reason, text = str(job.reason), ""
    else:
        reason, text = note.reason, explain.describe(note, job.spec)
    if newest is not None:
        text = f"{end_words(newest)}; waits again{f': {text}' if text else ''}"
    return reason, text


def _waits_for_its_node(job: Job, newest: Attempt) -> bool:
    return job.state.is_active and newest.state is AttemptState.LOST


def _silence(core: Core, job: Job, attempt: Attempt) -> str:
    """Which nodes of an attempt are away, for how long, and what that means to its job."""
    away = [
        f"node {name} is silent for {core.silent_s(node):.0f} s"
        for name in dict.fromkeys(rank.node for rank in attempt.ranks if not rank.has_ended)
        if (node := core.state.node(name)) is not None and not node.is_connected
    ]
    policy = f"on-node-fail {job.spec.on_node_fail.lower()}"
    return f"{', '.join(away)}; {policy}: it waits for the node's return"


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


def explanation(
    view: JobView, attempts: Sequence[Attempt], decision: Decision | None
) -> Explanation:
    """Why a job waits, or why its newest attempt went where it went; how earlier ones ended."""
    if view.state is JobState.PENDING:
        return _explained_wait(view, attempts, decision)
    newest = attempts[-1] if attempts else None
    text = view.reason_text
    if view.state.is_active:
        word = "being stopped" if view.completing else view.state.lower()
        text = f"{word}, out of sight: {text}" if text else word
    why = () if newest is None else newest.why
    return Explanation(
        job_id=view.job_id,
        state=view.state,
        reason=view.reason,
        text=text,
        lines=(*why, *map(end_words, attempts[:-1][-ENDS_TOLD:])),
        terms={} if newest is None else newest.terms,
    )


def _explained_wait(
    view: JobView, attempts: Sequence[Attempt], decision: Decision | None
) -> Explanation:
    lines: tuple[str, ...] = ()
    terms: Mapping[str, float] = {}
    if decision is not None:
        lines = explain.explain_wait(view.job_id, view.spec, decision)
        entries = (entry for entry in decision.ranking if entry.job.job_id == view.job_id)
        terms = next((entry.terms for entry in entries), {})
    if not lines:
        lines = ("no scheduling cycle has looked at it yet",)
    further = (*lines[1:], *_when(decision, view.job_id), *map(end_words, attempts[-ENDS_TOLD:]))
    return Explanation(view.job_id, view.state, view.reason, lines[0], further, terms)


def _when(decision: Decision | None, job_id: int) -> tuple[str, ...]:
    """When it starts at the latest, as far as the last decision knew."""
    note = None if decision is None else decision.waits.get(job_id)
    if note is None or note.until_s is None:
        return ()
    at = datetime.fromtimestamp(note.until_s, UTC).isoformat(timespec="seconds")
    at = at.replace("+00:00", "Z")
    if note.reserved_nodes:
        return (f"starts at {at} at the latest: jobs behind it leave the room",)
    if note.reason is WaitReason.RESOURCES:
        return (f"enough is free at {at} at the latest, if no other job takes it",)
    return ()


def node_view(
    state: StateView, node: Node, heard: Heard | None, *, is_connected: bool, monotonic_s: float
) -> NodeView:
    """A node with its GPUs and who holds them.

    Readings of a node that is DOWN are not shown: they are not current.
    """
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
    sick = gpus_out_of_service(node)
    telemetry = None if heard is None or not node.is_connected else heard.telemetry
    return NodeView(
        name=node.name,
        state=state_word(node, is_busy=bool(held)),
        admin=node.admin,
        reasons=(*against, sick) if sick else against,
        address=node.address,
        facts=node.facts,
        host=None if telemetry is None else telemetry.host,
        gpus=_gpu_views(node, telemetry, holders),
        cpus_used=cpus,
        memory_used_bytes=memory_bytes,
        last_seen_s_ago=None if heard is None else monotonic_s - heard.at_s,
        telemetry_age_s=None if telemetry is None else telemetry.telemetry_age_s,
        jobs=tuple(jobs),
    )


def _gpu_views(
    node: Node, telemetry: Telemetry | None, holders: dict[str, int]
) -> tuple[GpuView, ...]:
    samples = {} if telemetry is None else {sample.uuid: sample for sample in telemetry.gpus}
    views = []
    for gpu in node.facts.gpus:
        against = node.gpu_reasons(gpu.uuid)
        if not node.is_connected:
            against = (NODE_IS_DOWN, *against)
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


def partition_views(config: ClusterConfig, cluster: ClusterView) -> tuple[PartitionView, ...]:
    """The partitions with what is in them and what of it is in use."""
    views = []
    for rules in config.partitions:
        nodes = [node for node in cluster.nodes if rules.name in node.partitions]
        views.append(
            PartitionView(
                name=rules.name,
                is_default=rules.is_default,
                nodes=tuple(node.name for node in nodes),
                nodes_up=sum(node.accepts_work for node in nodes),
                gpus_total=sum(len(node.gpus) for node in nodes),
                gpus_used=sum(job.gpus for job in cluster.running if job.partition == rules.name),
                everybody=rules.allow_users is None,
                allow_users=tuple(sorted(rules.allow_users or ())),
                max_gpus=rules.max_gpus,
                max_gpus_per_user=rules.max_gpus_per_user,
                max_time_s=rules.max_time_s,
            )
        )
    return tuple(views)
