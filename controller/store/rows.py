"""Jobs, attempts and nodes to rows and back; rows never leave the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.lifecycle.attempt import Attempt, AttemptKey, Rank
from controller.lifecycle.effects import Record
from controller.lifecycle.job import CancelWish, EndReason, FailedLaunch, Job
from controller.lifecycle.node import GpuFault, Lease, Node
from controller.store.jsonrows import dumps, loads, loads_optional
from protos.messages import (
    AdminState,
    AttemptState,
    ClusterEvent,
    ExitFacts,
    GpuFacts,
    JobSpec,
    JobState,
    NodeFacts,
    RankPhase,
    RankUsage,
    StopReason,
)

_Value = str | int | float | None
_Values = tuple[_Value, ...]


@dataclass(frozen=True, slots=True)
class JobRows:
    """Jobs with all their attempts."""

    jobs: tuple[Job, ...]
    attempts: Mapping[int, tuple[Attempt, ...]]
    """By job id, oldest first; jobs without attempts are left out."""


def _text(value: object) -> str | None:
    return None if value is None else dumps(value)


def job_values(job: Job) -> _Values:
    """Values of `UPSERT_JOB`."""
    return (
        job.job_id, job.request_id, job.spec.user, job.spec.name, job.state, dumps(job.spec),
        job.submitted_at_s, job.eligible_at_s, job.started_at_s, job.ended_at_s, job.attempt,
        job.restarts, _text(job.cancel), _text(job.exit), job.exit_node_rank, job.reason,
        job.reason_text, dumps(job.failed_launches), job.not_before_s,
    )  # fmt: skip


def job_of(row: sqlite3.Row) -> Job:
    """A row of `jobs`."""
    return Job(
        job_id=row["job_id"],
        request_id=row["request_id"],
        spec=loads(JobSpec, row["spec"]),
        state=JobState(row["state"]),
        submitted_at_s=row["submitted_at_s"],
        eligible_at_s=row["eligible_at_s"],
        started_at_s=row["started_at_s"],
        ended_at_s=row["ended_at_s"],
        attempt=row["attempt"],
        restarts=row["restarts"],
        cancel=loads_optional(CancelWish, row["cancel"]),
        exit=loads_optional(ExitFacts, row["exit"]),
        exit_node_rank=row["exit_node_rank"],
        reason=EndReason(row["reason"]),
        reason_text=row["reason_text"],
        failed_launches=loads(tuple[FailedLaunch, ...], row["failed_launches"]),
        not_before_s=row["not_before_s"],
    )


def attempt_values(attempt: Attempt) -> _Values:
    """Values of `UPSERT_ATTEMPT`."""
    return (
        attempt.job_id, attempt.number, attempt.state, attempt.created_at_s, attempt.started_at_s,
        attempt.ended_at_s, attempt.stop_reason, int(attempt.fenced), attempt.node_failure,
        _text(attempt.exit), attempt.exit_node_rank, attempt.master_port, dumps(attempt.terms),
        dumps(attempt.why), attempt.gpu_utilization_mean_pct, attempt.gpu_memory_peak_bytes,
        attempt.gpu_sampled_s,
    )  # fmt: skip


def rank_values(attempt: Attempt) -> Iterator[_Values]:
    """Values of `UPSERT_RANK` for each rank."""
    for node_rank, rank in enumerate(attempt.ranks):
        yield (
            attempt.job_id, attempt.number, node_rank, rank.node, dumps(rank.gpu_uuids),
            dumps(rank.gpu_indices), rank.phase, rank.pid, _text(rank.exit), _text(rank.usage),
            rank.released_at_s,
        )  # fmt: skip


def lease_values(attempt: Attempt) -> Iterator[_Values]:
    """Values of `UPSERT_LEASE` for each GPU of each rank."""
    for node_rank, rank in enumerate(attempt.ranks):
        for uuid in rank.gpu_uuids:
            yield (
                attempt.job_id, attempt.number, node_rank, rank.node, uuid, attempt.created_at_s,
                rank.released_at_s,
            )  # fmt: skip


def attempts_of(
    attempt_rows: Iterable[sqlite3.Row], rank_rows: Iterable[sqlite3.Row]
) -> Mapping[int, tuple[Attempt, ...]]:
    """Rows of `attempts` and `ranks`, both in order, by job id."""
    ranks: dict[AttemptKey, list[Rank]] = {}
    for row in rank_rows:
        rank = Rank(
            node=row["node"],
            gpu_uuids=loads(tuple[str, ...], row["gpu_uuids"]),
            gpu_indices=loads(tuple[int, ...], row["gpu_indices"]),
            phase=RankPhase(row["phase"]),
            pid=row["pid"],
            exit=loads_optional(ExitFacts, row["exit"]),
            usage=loads_optional(RankUsage, row["usage"]),
            released_at_s=row["released_at_s"],
        )
        ranks.setdefault((row["job_id"], row["attempt"]), []).append(rank)
    found: dict[int, tuple[Attempt, ...]] = {}
    for row in attempt_rows:
        key = (row["job_id"], row["attempt"])
        found[row["job_id"]] = (*found.get(row["job_id"], ()), _attempt_of(row, ranks[key]))
    return found


def _attempt_of(row: sqlite3.Row, ranks: Sequence[Rank]) -> Attempt:
    stop_reason = row["stop_reason"]
    return Attempt(
        job_id=row["job_id"],
        number=row["attempt"],
        state=AttemptState(row["state"]),
        ranks=tuple(ranks),
        created_at_s=row["created_at_s"],
        started_at_s=row["started_at_s"],
        ended_at_s=row["ended_at_s"],
        stop_reason=None if stop_reason is None else StopReason(stop_reason),
        fenced=bool(row["fenced"]),
        node_failure=row["node_failure"],
        exit=loads_optional(ExitFacts, row["exit"]),
        exit_node_rank=row["exit_node_rank"],
        master_port=row["master_port"],
        terms=loads(dict[str, float], row["terms"]),
        why=loads(tuple[str, ...], row["why"]),
        gpu_utilization_mean_pct=row["gpu_utilization_mean_pct"],
        gpu_memory_peak_bytes=row["gpu_memory_peak_bytes"],
        gpu_sampled_s=row["gpu_sampled_s"],
    )


def node_values(node: Node) -> _Values:
    """Values of `UPSERT_NODE`."""
    return (
        node.name, node.node_id, node.boot_id, node.instance_id, node.address,
        dumps(replace(node.facts, gpus=())), node.admin, node.admin_reason, node.admin_actor,
        node.lease, dumps(node.health), dumps(node.faults), dumps(node.launch_fault_jobs),
        dumps(node.lost_at_s),
    )  # fmt: skip


def gpu_values(node: Node) -> Iterator[_Values]:
    """Values of `INSERT_GPU` for each GPU of a node."""
    for position, gpu in enumerate(node.facts.gpus):
        health = node.gpu_health.get(gpu.uuid, ())
        faults = node.gpu_faults.get(gpu.uuid, ())
        yield (node.name, gpu.uuid, position, dumps(gpu), dumps(health), dumps(faults))


def node_of(row: sqlite3.Row, gpu_rows: Sequence[sqlite3.Row]) -> Node:
    """A row of `nodes` with its rows of `gpus` in order."""
    health = {r["gpu_uuid"]: loads(tuple[str, ...], r["health"]) for r in gpu_rows}
    faults = {r["gpu_uuid"]: loads(tuple[GpuFault, ...], r["faults"]) for r in gpu_rows}
    facts = loads(NodeFacts, row["facts"])
    return Node(
        name=row["name"],
        node_id=row["node_id"],
        boot_id=row["boot_id"],
        instance_id=row["instance_id"],
        address=row["address"],
        facts=replace(facts, gpus=tuple(loads(GpuFacts, r["facts"]) for r in gpu_rows)),
        admin=AdminState(row["admin"]),
        admin_reason=row["admin_reason"],
        admin_actor=row["admin_actor"],
        lease=Lease(row["lease"]),
        health=loads(tuple[str, ...], row["health"]),
        gpu_health={uuid: reasons for uuid, reasons in health.items() if reasons},
        faults=loads(tuple[str, ...], row["faults"]),
        gpu_faults={uuid: found for uuid, found in faults.items() if found},
        launch_fault_jobs=loads(tuple[int, ...], row["launch_fault_jobs"]),
        lost_at_s=loads(tuple[float, ...], row["lost_at_s"]),
    )


def event_values(event_id: int, record: Record) -> _Values:
    """Values of `INSERT_EVENT`."""
    return (
        event_id, record.at_s, record.kind, record.job_id, record.attempt, record.node,
        record.actor, record.text, dumps(record.data),
    )  # fmt: skip


def event_of_record(event_id: int, record: Record) -> ClusterEvent:
    """The event that a record became."""
    return ClusterEvent(
        event_id=event_id,
        at_s=record.at_s,
        kind=record.kind,
        job_id=record.job_id,
        attempt=record.attempt,
        node=record.node,
        actor=record.actor,
        text=record.text,
        data=record.data,
    )


def event_of(row: sqlite3.Row) -> ClusterEvent:
    """A row of `events`."""
    return ClusterEvent(
        event_id=row["event_id"],
        at_s=row["at_s"],
        kind=row["kind"],
        job_id=row["job_id"],
        attempt=row["attempt"],
        node=row["node"],
        actor=row["actor"],
        text=row["text"],
        data=loads(dict[str, str], row["data"]),
    )
