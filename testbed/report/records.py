"""What a report is made from: jobs, their attempts and the GPUs, whoever recorded them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protos.messages import AttemptView, JobState, JobView, NodeView


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """One GPU of the cluster: a row of the Gantt chart."""

    node: str
    index: int
    uuid: str
    gpu_type: str


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """The time for which one attempt held its GPUs."""

    attempt: int
    start_s: float
    """UTC seconds at which the GPUs were given to it."""
    end_s: float | None
    """UTC seconds at which it ended; None while it runs."""
    nodes: tuple[str, ...]
    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job as a report sees it. Points in time are UTC seconds."""

    job_id: int
    name: str
    user: str
    gpus: int
    state: JobState
    submitted_at_s: float
    ended_at_s: float | None
    wait_s: float
    run_s: float
    spans: tuple[AttemptSpan, ...]
    gpu_utilization_pct: float | None
    """Mean of the last attempt's GPUs while it held them; None if it was not measured."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of the last attempt, in rank order."""
        return self.spans[-1].nodes if self.spans else ()

    @property
    def jct_s(self) -> float | None:
        """Job completion time: from submission to the end; None while it has not ended."""
        return None if self.ended_at_s is None else self.ended_at_s - self.submitted_at_s


def job_record(view: JobView) -> JobRecord:
    """The record of a job that the controller describes."""
    return JobRecord(
        job_id=view.job_id,
        name=view.spec.name,
        user=view.spec.user,
        gpus=view.spec.gpus,
        state=view.state,
        submitted_at_s=view.submitted_at_s,
        ended_at_s=view.ended_at_s if view.state.is_final else None,
        wait_s=view.wait_s,
        run_s=view.run_s,
        spans=tuple(_span(attempt) for attempt in view.attempts),
        gpu_utilization_pct=view.attempts[-1].gpu_utilization_mean_pct if view.attempts else None,
    )


def gpu_slots(nodes: Iterable[NodeView]) -> tuple[GpuSlot, ...]:
    """All GPUs of the nodes, ordered by node and index."""
    slots = (
        GpuSlot(node.name, gpu.facts.index, gpu.facts.uuid, gpu.facts.gpu_type)
        for node in nodes
        for gpu in node.gpus
    )
    return tuple(sorted(slots, key=lambda slot: (slot.node, slot.index)))


def _span(attempt: AttemptView) -> AttemptSpan:
    return AttemptSpan(
        attempt=attempt.attempt,
        start_s=attempt.created_at_s,
        end_s=attempt.ended_at_s,
        nodes=tuple(rank.node for rank in attempt.ranks),
        gpu_uuids=tuple(uuid for rank in attempt.ranks for uuid in rank.gpu_uuids),
    )
