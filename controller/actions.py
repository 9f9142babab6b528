"""What people ask of jobs, each answered by itself, and submissions, all or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controller.core import Core
from controller.errors import Rejected
from controller.lifecycle.errors import NotAllowed
from controller.lifecycle.events import (
    CancelRequested,
    Event,
    HoldRequested,
    JobSubmitted,
    ReleaseRequested,
    RequeueRequested,
)
from controller.lifecycle.job import Job
from controller.scheduler import feasibility
from controller.scheduler.types import ClusterView
from controller.writer import Transaction
from protos.messages import JobSpec, JobState


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that a client wants queued."""

    request_id: str
    """Made by the client once per submission: the same one never makes a second job."""
    spec: JobSpec
    allow_infeasible: bool = False
    """Queue it even if no known node could ever hold it."""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of a wish about one job."""

    job_id: int
    ok: bool
    state: JobState | None
    """None when there is no such job."""
    message: str


MakeEvent = Callable[[int], Event]


class Actions:
    """Submissions and wishes."""

    def __init__(self, core: Core) -> None:
        """Shares the core with the other parts of the service."""
        self._core = core

    async def submit(self, items: Sequence[Submission], actor: str) -> list[int]:
        """Queues jobs, all or none; see `Service.submit`."""
        core = self._core

        def run(transaction: Transaction) -> list[int]:
            job_ids: list[int] = []
            cluster = core.snapshots.cluster(core.now())
            for item in items:
                request = (item.spec.user, item.request_id)
                known = transaction.requests.get(request)
                if known is None:
                    spec = core.config.admit(item.spec)
                    check_fits(replace(item, spec=spec), cluster, len(job_ids), len(items))
                    transaction.last_job_id += 1
                    known = transaction.last_job_id
                    transaction.requests[request] = known
                    transaction.apply(JobSubmitted(known, item.request_id, spec, core.now(), actor))
                job_ids.append(known)
            return job_ids

        requests = [(item.spec.user, item.request_id) for item in items]
        return await core.writer.do(run, requests=requests)

    async def cancel(self, job_ids: Sequence[int], actor: str, reason: str) -> list[ActionResult]:
        """Wishes jobs to end; see `Service.cancel`."""
        at_s = self._core.now()
        return await self._act(
            job_ids, lambda job_id: CancelRequested(job_id, actor, reason, at_s), _cancel_words
        )

    async def hold(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Keeps waiting jobs from starting."""
        at_s = self._core.now()
        return await self._act(
            job_ids, lambda job_id: HoldRequested(job_id, actor, at_s), _state_words
        )

    async def release(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Lets held jobs start."""
        at_s = self._core.now()
        return await self._act(
            job_ids, lambda job_id: ReleaseRequested(job_id, actor, at_s), _state_words
        )

    async def requeue(self, job_ids: Sequence[int], actor: str) -> list[ActionResult]:
        """Puts running or finished jobs back into the queue."""
        at_s = self._core.now()
        return await self._act(
            job_ids, lambda job_id: RequeueRequested(job_id, actor, at_s), _requeue_words
        )

    async def _act(
        self, job_ids: Sequence[int], make: MakeEvent, words: Callable[[Job, Job], str]
    ) -> list[ActionResult]:
        def one(transaction: Transaction, job_id: int) -> ActionResult:
            before = transaction.draft.job(job_id)
            if before is None:
                return ActionResult(job_id, ok=False, state=None, message=f"no job {job_id}")
            try:
                transaction.apply(make(job_id))
            except NotAllowed as refusal:
                return ActionResult(job_id, ok=False, state=before.state, message=str(refusal))
            after = transaction.draft.job(job_id)
            assert after is not None
            return ActionResult(job_id, ok=True, state=after.state, message=words(before, after))

        return await self._core.writer.do(
            lambda transaction: [one(transaction, job_id) for job_id in job_ids], job_ids=job_ids
        )


def _cancel_words(before: Job, after: Job) -> str:
    if before.state.is_final:
        return f"already {before.state}"
    if after.state is JobState.CANCELLED:
        return "cancelled"
    return "already being cancelled" if before.cancel is not None else "being cancelled"


def _state_words(before: Job, after: Job) -> str:
    return f"already {after.state}" if before.state is after.state else f"now {after.state}"


def _requeue_words(before: Job, after: Job) -> str:
    return f"now {after.state}" if before.state is not after.state else "being stopped to run again"


def check_fits(item: Submission, cluster: ClusterView, position: int = 0, count: int = 1) -> None:
    """Refuses a job that no known node could ever hold.

    Raises:
        Rejected: which of `count` jobs it is, why, and how to mend it.
    """
    if item.allow_infeasible:
        return
    why = feasibility.never_fits(item.spec, cluster)
    if why is not None:
        which = f"job {position + 1} of {count} ({item.spec.name}): " if count > 1 else ""
        raise Rejected(
            "never_fits",
            f"{which}{why}",
            "`rltune nodes` shows what there is; --allow-infeasible queues it all the same",
        )
