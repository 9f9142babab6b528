"""What the parts of the service share: the state, its one writer, and all that follows a commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from controller.accounting import FairShare, TelemetryAccount
from controller.dispatch import Dispatch
from controller.leases import Deadlines, Heard, Session
from controller.lifecycle.attempt import Attempt, AttemptKey
from controller.lifecycle.job import Job
from controller.lifecycle.node import Node
from controller.lifecycle.state import Changes
from controller.partitions import ClusterConfig
from controller.scheduler.prediction import RunTimeModel
from controller.scheduler.types import Decision, WaitNote
from controller.snapshot import SnapshotBuilder
from controller.store.errors import StoreUnavailable
from controller.store.store import EndedUsage, Loaded, Store
from controller.store.thread import StoreThread
from controller.watch import EventFeed
from controller.writer import Committed, Transaction, Writer
from protos.messages import AttemptState, JobSpec, JobState, RankPhase

LEARNED_RUNS = 20_000
"""Newest ended jobs from which run times are predicted after a start."""
TELLING_STATES = frozenset(
    {JobState.COMPLETED, JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.TIMEOUT}
)
"""Ends that say something about how long such jobs run."""
FORGOTTEN_HALF_LIVES = 10
"""Usage that old counts less than a thousandth."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The service's time constants."""

    lease_s: float = 10.0
    heartbeat_s: float = 1.0
    start_timeout_s: float = 60.0
    """From placement until all ranks run."""
    stop_repeat_s: float = 30.0
    """A rank that was ordered to stop and has not ended is told again."""
    usage_flush_s: float = 30.0
    """Telemetry of running attempts is stored that often."""
    half_life_s: float = 7 * 86_400.0
    """Of usage for fair share; Slurm's default `PriorityDecayHalfLife`."""


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier controllers left beside the state."""

    jobs_by_state: dict[str, int]
    usage: list[EndedUsage]
    runs: list[tuple[JobSpec, float]]
    """Jobs that ended by themselves with their run times, oldest first."""


@dataclass(slots=True)
class CycleStats:
    """How the scheduling loop does."""

    cycles: int = 0
    last_cycle_s: float | None = None
    fallbacks: int = 0
    last_fallback: str = ""
    """Why the last one was; empty when there was none."""
    last_error: str = ""
    """Of the last cycle; empty when it went well."""


class Core:
    """The present state with everything that is derived from it."""

    def __init__(
        self,
        store: StoreThread,
        loaded: Loaded,
        past: Past,
        dispatch: Dispatch,
        terms: Terms,
        config: ClusterConfig,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """Use `load`."""
        self.config = config
        self.store = store
        self.state = loaded.state
        self.cluster_id = loaded.cluster_id
        self.dispatch = dispatch
        self.terms = terms
        self.now = now
        self.monotonic = monotonic
        self.writer = Writer(store, loaded.state, loaded.last_job_id, self)
        self.feed = EventFeed(store, loaded.last_event_id)
        self.account = TelemetryAccount()
        self.jobs_by_state: Counter[str] = Counter(past.jobs_by_state)
        self.sessions: dict[str, Session] = {}
        self.heard: dict[str, Heard] = {}
        self.leases: Deadlines[str] = Deadlines(terms.lease_s)
        self.starts: Deadlines[AttemptKey] = Deadlines(terms.start_timeout_s)
        self.stops: Deadlines[AttemptKey] = Deadlines(terms.stop_repeat_s)
        self.paused_jobs: set[int] = set()
        self.decision: Decision | None = None
        self.stats = CycleStats()
        self.store_error = ""
        """Why the store cannot be used and since when; empty when the last commit went well."""
        self.changed = asyncio.Event()
        """Something happened that a scheduling cycle should see."""
        self._store_fails_since = ""
        self._fair_share = FairShare(terms.half_life_s, past.usage)
        self.run_times = RunTimeModel()
        for spec, run_s in past.runs:
            self.run_times.observe(spec, run_s)
        self.snapshots = SnapshotBuilder(
            self.state, self._fair_share, self.is_connected, config, self.run_times
        )
        self._begin_terms()

    @classmethod
    async def load(
        cls,
        store: StoreThread,
        dispatch: Dispatch,
        terms: Terms,
        config: ClusterConfig,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> Core:
        """The state as the last controller left it.

        Raises:
            StoreUnavailable: the database cannot be read.
        """
        loaded = await store.call(Store.load)
        since_s = now() - FORGOTTEN_HALF_LIVES * terms.half_life_s
        return cls(
            store,
            loaded,
            Past(
                await store.call(Store.jobs_by_state),
                await store.call(Store.ended_usage, since_s),
                await store.call(Store.ended_runs, LEARNED_RUNS),
            ),
            dispatch,
            terms,
            config,
            now,
            monotonic,
        )

    def is_connected(self, node: str) -> bool:
        """Whether the node's agent has an open session."""
        session = self.sessions.get(node)
        return session is not None and session.streams > 0

    def silent_s(self, node: Node) -> float:
        """How long nothing was heard of a node; since its loss if that was before our start."""
        heard = self.heard.get(node.name)
        if heard is not None:
            return self.monotonic() - heard.at_s
        return self.now() - node.lost_at_s[-1] if node.lost_at_s else 0.0

    def note_of(self, job_id: int) -> WaitNote | None:
        """Why the last cycle did not start a job."""
        return None if self.decision is None else self.decision.waits.get(job_id)

    def _begin_terms(self) -> None:
        """Everybody gets a full term: the time while no controller ran is nobody's fault."""
        monotonic_s = self.monotonic()
        for node in self.state.nodes.values():
            if node.is_connected:
                self.leases.begin(node.name, monotonic_s)
        for attempt in self.state.attempts.values():
            self._follow_attempt(attempt, monotonic_s)
        for job in self.state.jobs.values():
            self._follow_job(job)

    def _follow_attempt(self, attempt: Attempt, monotonic_s: float) -> None:
        is_over = attempt.state is AttemptState.ENDED
        is_unwanted = attempt.fenced or attempt.stop_reason is not None
        if attempt.started_at_s is None and not is_over and not is_unwanted:
            self.starts.begin_if_new(attempt.key, monotonic_s)
        else:
            self.starts.end(attempt.key)
        if is_unwanted and not is_over:
            self.stops.begin_if_new(attempt.key, monotonic_s)
        else:
            self.stops.end(attempt.key)

    def _follow_job(self, job: Job) -> None:
        if job.state is JobState.PENDING and job.failed_launches:
            self.paused_jobs.add(job.job_id)
        else:
            self.paused_jobs.discard(job.job_id)

    # What the writer tells:

    def will_commit(self, transaction: Transaction) -> None:
        """Attempts that end take their telemetry with them."""
        attempts = transaction.draft.changes.attempts.values()
        ended = [a.key for a in attempts if a.state is AttemptState.ENDED]
        for event in self.account.news(ended):
            transaction.apply(event)

    def will_swap(self, committed: Committed) -> None:
        """Counts what the changes change."""
        changes = committed.draft.changes
        for job in changes.jobs.values():
            before = committed.before.job(job.job_id)
            if before is not None:
                self.jobs_by_state[before.state] -= 1
            self.jobs_by_state[job.state] += 1
            is_new = before is None or before.state is not job.state
            if is_new and job.state in TELLING_STATES and job.started_at_s is not None:
                assert job.ended_at_s is not None
                self.run_times.observe(job.spec, job.ended_at_s - job.started_at_s)
        for attempt in changes.attempts.values():
            known = committed.before.attempt(attempt.key)
            has_just_ended = known is None or known.state is not AttemptState.ENDED
            if attempt.state is AttemptState.ENDED and has_just_ended:
                job_now = committed.draft.job(attempt.job_id)
                assert job_now is not None
                ended_at_s = attempt.ended_at_s or 0.0
                gpu_s = attempt.gpus * attempt.run_s(ended_at_s)
                self._fair_share.add(EndedUsage(job_now.user, ended_at_s, gpu_s))

    def store_failed(self, error: StoreUnavailable) -> None:
        """Notes since when, and why, the store cannot be used."""
        if not self.store_error:
            since = datetime.fromtimestamp(self.now(), UTC).isoformat(timespec="seconds")
            self._store_fails_since = since.replace("+00:00", "Z")
        self.store_error = f"store: {error}; since {self._store_fails_since}"

    def store_works(self) -> None:
        """The store can be used again."""
        self.store_error = ""

    def has_committed(self, committed: Committed) -> None:
        """Performs effects and tells everybody who waits."""
        changes = committed.draft.changes
        monotonic_s = self.monotonic()
        for attempt in changes.attempts.values():
            self._follow_attempt(attempt, monotonic_s)
        for job in changes.jobs.values():
            self._follow_job(job)
        self.account.stored(changes.attempts.values())
        self.snapshots.note(changes)
        self.dispatch.perform(committed.draft.effects, self.state)
        self.feed.publish(committed.events)
        if _is_news_for_scheduler(changes):
            self.changed.set()


def _is_news_for_scheduler(changes: Changes) -> bool:
    """Whether a scheduling cycle may decide otherwise than before."""
    is_queue = any(
        job.state is JobState.PENDING or job.state.is_final for job in changes.jobs.values()
    )
    is_capacity = any(map(_frees_or_takes, changes.attempts.values()))
    return is_queue or is_capacity or bool(changes.nodes)


def _frees_or_takes(attempt: Attempt) -> bool:
    """Whether a change of the attempt may have changed what is free."""
    return attempt.state is AttemptState.LAUNCHING or any(
        rank.phase is RankPhase.RELEASED for rank in attempt.ranks
    )
