"""The SQLite store: load everything that matters, commit changes with their events, read history.

One thread uses a `Store` at a time (see `thread.py`). Every method either does all it says or
raises and leaves the database as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from controller.lifecycle.effects import Record
from controller.lifecycle.state import Changes, ClusterState
from controller.store import queries, rows
from controller.store.errors import (
    StoreDamaged,
    StoreInUse,
    StoreRefused,
    StoreTooNew,
    StoreUnavailable,
)
from controller.store.jsonrows import loads
from controller.store.rows import JobRows
from protos.messages import ClusterEvent, JobSpec, JobState

__all__ = ["EndedUsage", "JobFilter", "Loaded", "Store", "StoreUnavailable", "as_changes"]

MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
DATABASE_NAME = "controller.db"
BUSY_TIMEOUT_MS = 5_000
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_RESTORE_OR_BEGIN_ANEW = (
    "Stop the controller, then restore the file from a backup, or move it away together with its "
    "-wal and -shm files to begin a new cluster (agents of the old one then need another "
    "--state-dir)"
)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list, newest first; an empty or absent field lets all pass."""

    states: frozenset[JobState] = frozenset()
    user: str | None = None
    name: str | None = None
    job_ids: tuple[int, ...] = ()
    before_job_id: int | None = None
    """Only older jobs than this one: the next page."""
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a controller starts from."""

    state: ClusterState
    last_job_id: int
    last_event_id: int
    cluster_id: str
    """Random, made with the database: which cluster this is, whatever its name."""


@dataclass(frozen=True, slots=True)
class EndedUsage:
    """GPU-seconds of one ended attempt."""

    user: str
    ended_at_s: float
    gpu_s: float


class Store:
    """An open database."""

    def __init__(self, path: Path, migrations: Path = MIGRATIONS_FOLDER) -> None:
        """Locks and opens the database file, and brings its schema up to date.

        Raises:
            StoreInUse: another controller has it open.
            StoreTooNew: a newer version wrote it.
            StoreUnavailable: it cannot be opened.
        """
        self._path = path
        self._lock_fd = _lock(path)
        try:
            _refuse_emptied(path)
            with self._errors():
                self._connection = _connect(path)
            try:
                with self._errors():
                    self._migrate(migrations)
                    self._next_event_id = self._scalar(queries.LAST_EVENT_ID) + 1
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            os.close(self._lock_fd)
            raise

    @classmethod
    def open(cls, state_dir: Path) -> Self:
        """Opens the database of a controller's state folder, which is made if it is not there.

        Raises:
            StoreUnavailable: see the constructor.
        """
        return cls(state_dir / DATABASE_NAME)

    def close(self) -> None:
        """Closes the database and gives the lock back."""
        self._connection.close()
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def load(self) -> Loaded:
        """Everything that the controller keeps in memory."""
        with self._errors():
            found = self._with_attempts(self._connection.execute(queries.LIVE_JOBS).fetchall())
            gpu_rows: dict[str, list[sqlite3.Row]] = {}
            for row in self._connection.execute(queries.ALL_GPUS):
                gpu_rows.setdefault(row["node"], []).append(row)
            nodes = [
                rows.node_of(row, gpu_rows.get(row["name"], []))
                for row in self._connection.execute(queries.ALL_NODES)
            ]
            last_job_id = self._scalar(queries.LAST_JOB_ID)
            cluster_id = str(self._connection.execute(queries.CLUSTER_ID).fetchone()[0])
        state = ClusterState()
        state.absorb(as_changes(found))
        state.absorb(Changes(nodes={node.name: node for node in nodes}))
        return Loaded(state, last_job_id, self._next_event_id - 1, cluster_id)

    def commit(self, changes: Changes, records: Sequence[Record]) -> list[ClusterEvent]:
        """Writes changes and their events in one transaction.

        Returns:
            The events with their ids.

        Raises:
            StoreUnavailable: nothing was written (disk full, locked, I/O error).
            StoreRefused: a guard of the schema said no; nothing was written.
        """
        first = self._next_event_id
        with self._errors(), self._transaction() as connection:
            connection.executemany(queries.UPSERT_JOB, map(rows.job_values, changes.jobs.values()))
            for attempt in changes.attempts.values():
                connection.execute(queries.UPSERT_ATTEMPT, rows.attempt_values(attempt))
                connection.executemany(queries.UPSERT_RANK, rows.rank_values(attempt))
            # Leases last, those given back first: a GPU may change hands within one transaction.
            leases = [
                lease
                for attempt in changes.attempts.values()
                for lease in rows.lease_values(attempt)
            ]
            leases.sort(key=lambda lease: lease[-1] is None)
            connection.executemany(queries.UPSERT_LEASE, leases)
            for node in changes.nodes.values():
                connection.execute(queries.UPSERT_NODE, rows.node_values(node))
                connection.execute(queries.DELETE_GPUS, (node.name,))
                connection.executemany(queries.INSERT_GPU, rows.gpu_values(node))
            connection.executemany(
                queries.INSERT_EVENT,
                [rows.event_values(first + i, record) for i, record in enumerate(records)],
            )
        self._next_event_id = first + len(records)
        return [rows.event_of_record(first + i, record) for i, record in enumerate(records)]

    def find_requests(self, requests: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Job ids of those (user, request id) pairs that were submitted before."""
        found = {}
        with self._errors():
            for request in requests:
                row = self._connection.execute(queries.JOB_BY_REQUEST, request).fetchone()
                if row is not None:
                    found[request] = row[0]
        return found

    def jobs_by_id(self, job_ids: Collection[int]) -> JobRows:
        """Those of the jobs that exist, with their attempts."""
        with self._errors():
            ids = json.dumps(sorted(job_ids))
            return self._with_attempts(
                self._connection.execute(queries.JOBS_BY_ID, (ids,)).fetchall()
            )

    def jobs(self, wanted: JobFilter) -> JobRows:
        """The newest jobs that pass the filter, newest first."""
        values = {
            "states": json.dumps(sorted(wanted.states)) if wanted.states else None,
            "ids": json.dumps(wanted.job_ids) if wanted.job_ids else None,
            "user": wanted.user,
            "name": wanted.name,
            "before_id": wanted.before_job_id,
            "limit": wanted.limit,
        }
        with self._errors():
            return self._with_attempts(
                self._connection.execute(queries.FILTERED_JOBS, values).fetchall()
            )

    def jobs_by_state(self) -> dict[str, int]:
        """How many jobs are in each state, finished ones included."""
        with self._errors():
            return dict(self._connection.execute(queries.JOBS_BY_STATE).fetchall())

    def events(
        self,
        after: int,
        up_to: int,
        job_ids: frozenset[int],
        node: str | None,
        limit: int,
    ) -> list[ClusterEvent]:
        """Events with `after < event_id <= up_to`, oldest first.

        Only those that concern the jobs (if there are any named) and the node (if it is).
        """
        values = {
            "after": after,
            "up_to": up_to,
            "job_ids": json.dumps(sorted(job_ids)) if job_ids else None,
            "node": node,
            "limit": limit,
        }
        with self._errors():
            return [
                rows.event_of(row) for row in self._connection.execute(queries.EVENTS_AFTER, values)
            ]

    def last_events(self, job_ids: frozenset[int], count: int) -> list[ClusterEvent]:
        """The last events of some jobs, oldest first."""
        with self._errors():
            values = (json.dumps(sorted(job_ids)), count)
            found = self._connection.execute(queries.LAST_EVENTS, values).fetchall()
            return [rows.event_of(row) for row in reversed(found)]

    def ended_usage(self, since_s: float) -> list[EndedUsage]:
        """GPU-seconds of all attempts that ended after a time."""
        with self._errors():
            found = self._connection.execute(queries.ENDED_USAGE, (since_s,))
            return [EndedUsage(user, ended_at_s, gpu_s) for user, ended_at_s, gpu_s in found]

    def ended_runs(self, limit: int) -> list[tuple[JobSpec, float]]:
        """The newest jobs that ended by themselves, oldest first, with their run times."""
        with self._errors():
            found = self._connection.execute(queries.ENDED_RUNS, (limit,)).fetchall()
        return [(loads(JobSpec, spec), run_s) for spec, run_s in reversed(found)]

    def _with_attempts(self, job_rows: Sequence[sqlite3.Row]) -> JobRows:
        ids = json.dumps([row["job_id"] for row in job_rows])
        attempts = rows.attempts_of(
            self._connection.execute(queries.ATTEMPTS_BY_JOB, (ids,)).fetchall(),
            self._connection.execute(queries.RANKS_BY_JOB, (ids,)).fetchall(),
        )
        return JobRows(tuple(map(rows.job_of, job_rows)), attempts)

    def _scalar(self, query: str) -> int:
        value = self._connection.execute(query).fetchone()[0]
        assert isinstance(value, int)
        return value

    def _migrate(self, folder: Path) -> None:
        """Applies the migrations that the database lacks, each in a transaction of its own."""
        scripts = sorted(folder.glob("[0-9][0-9][0-9][0-9]_*.sql"))
        newest = int(scripts[-1].name[:4])
        version = self._scalar("PRAGMA user_version")
        if version > newest:
            raise StoreTooNew(
                f"{self._path} has schema version {version}; this program knows {newest}. "
                "Use the newer program that wrote it, or another database."
            )
        for script in scripts:
            number = int(script.name[:4])
            if number > version:
                text = script.read_text(encoding="utf-8")
                # The version changes with the schema or not at all.
                self._connection.executescript(
                    f"BEGIN IMMEDIATE;\n{text}\nPRAGMA user_version = {number};\nCOMMIT;"
                )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise StoreRefused(f"{self._path} refused a change: {error}") from error
        except sqlite3.Error as error:
            # The primary code is the low byte; errors of the module itself have none.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                raise StoreDamaged(
                    f"{self._path} is damaged ({error}). {_RESTORE_OR_BEGIN_ANEW}"
                ) from error
            raise StoreUnavailable(f"{self._path} cannot be used now: {error}") from error


def as_changes(found: JobRows) -> Changes:
    """Jobs with their attempts in the form that `ClusterState` takes over."""
    return Changes(
        jobs={job.job_id: job for job in found.jobs},
        attempts={a.key: a for group in found.attempts.values() for a in group},
    )


def _lock(database: Path) -> int:
    """Takes the lock beside the database; the kernel gives it back when the process ends."""
    path = database.with_name(f"{database.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be opened: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreInUse(
            f"{database} is in use by another controller: stop it first, or use another folder"
        ) from error
    return descriptor


def _refuse_emptied(path: Path) -> None:
    """A file of no bytes is a database that was lost, not a new one."""
    if path.exists() and path.stat().st_size == 0:
        raise StoreUnavailable(f"{path} is empty: its jobs are lost. {_RESTORE_OR_BEGIN_ANEW}")


def _connect(path: Path) -> sqlite3.Connection:
    # The thread that opens it hands it over to the store's own (see thread.py).
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection
