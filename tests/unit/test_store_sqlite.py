"""The SQLite store on a real file: what is committed is there, what is refused changes nothing."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controller.lifecycle import events, rules
from controller.lifecycle.effects import Record
from controller.lifecycle.node import GpuFault, GpuFaultKind
from controller.lifecycle.state import Changes, ClusterState, Outcome
from controller.store.errors import StoreInUse, StoreRefused, StoreTooNew, StoreUnavailable
from controller.store.store import MIGRATIONS_FOLDER, JobFilter, Store
from protos.messages import (
    AdminState,
    ExitFacts,
    GpuFacts,
    Hello,
    JobSpec,
    JobState,
    NodeFacts,
    OnNodeFail,
    OomKind,
    RankId,
    RankPhase,
    RankReport,
    RankUsage,
    XidEvent,
)

ODD = 'it\'s "odd"; DROP TABLE jobs;-- \n\t$(rm) ünï 🎈 \\ %s ?'
SPEC = JobSpec(
    ODD, "o'brien", ("sh", "-c", ODD, ""), "/tmp/" + ODD, {"A=B": ODD}, 2, ("P100", ODD),
    cpus=3, memory_bytes=1 << 40, time_limit_s=1.5, on_node_fail=OnNodeFail.WAIT,
)  # fmt: skip


class Driver:
    """Applies events to a state and commits them, as the service does."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state = store.load().state
        self.records = 0

    def apply(self, *happened: events.Event) -> Outcome:
        outcome = Outcome()
        for event in happened:
            outcome = rules.apply(self.state, event)
            self.store.commit(outcome.changes, outcome.records)
            self.state.absorb(outcome.changes)
            self.records += len(outcome.records)
        return outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "controller.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened


@pytest.fixture
def driver(store: Store) -> Driver:
    return Driver(store)


def joined(name: str = "n1") -> events.AgentConnected:
    gpus = tuple(GpuFacts(f"{name}-{i}", i, "Tesla P100", "P100", f"{i}") for i in range(4))
    facts = NodeFacts(name, "linux", 64, 1 << 40, gpus, driver_version=ODD)
    return events.AgentConnected(Hello(name, "id", "boot", "inst", facts, ()), "10.0.0.1", 1.0)


def submitted(job_id: int, spec: JobSpec = SPEC) -> events.JobSubmitted:
    return events.JobSubmitted(job_id, f"r{job_id}", spec, float(job_id), spec.user)


def placed(job_id: int, *gpus: int, node: str = "n1") -> events.JobPlaced:
    place = events.Place(node, tuple(f"{node}-{i}" for i in gpus), gpus)
    return events.JobPlaced(job_id, (place,), 5.0, 0, {"packing": 0.5}, (ODD,))


def told(job_id: int, phase: RankPhase, exit_facts: ExitFacts | None = None) -> events.RankReported:
    usage = RankUsage(2.0, 1.0, 1 << 33, 7) if exit_facts else None
    report = RankReport(RankId(job_id, 1), phase, 42, exit_facts, usage)
    return events.RankReported("n1", report, 9.0)


def same(left: ClusterState, right: ClusterState) -> bool:
    return (left.jobs, left.attempts, left.nodes) == (right.jobs, right.attempts, right.nodes)


def test_all_that_matters_comes_back_after_a_restart(path: Path) -> None:
    oom = ExitFacts(None, 9, core_dumped=True, oom=OomKind.HOST, message=ODD)
    xid = XidEvent("n1-3", 79, ODD)
    with Store(path) as store:
        driver = Driver(store)
        driver.apply(joined(), submitted(1), submitted(2), submitted(3), submitted(4))
        driver.apply(placed(1, 0, 1), told(1, RankPhase.RUNNING))
        driver.apply(placed(2, 2), told(2, RankPhase.ENDED, oom))
        driver.apply(events.CancelRequested(1, ODD, ODD, 10.0))
        driver.apply(events.HoldRequested(3, "x", 10.0))
        driver.apply(events.NodeDrained("n1", ODD, ODD, 11.0))
        driver.apply(
            events.NodeHealthReported(
                "n1", (ODD,), {"n1-2": (ODD,)}, frozenset({"n1-2"}), (xid,), 12.0
            )
        )
        before = driver.state
    with Store(path) as store:
        loaded = store.load()
    assert same(loaded.state, before)
    assert loaded.last_job_id == 4
    assert loaded.last_event_id == driver.records
    node = loaded.state.nodes["n1"]
    assert node.admin is AdminState.DRAIN
    assert node.gpu_faults["n1-3"] == (GpuFault(GpuFaultKind.XID, f"Xid 79: {ODD}", 12.0),)


def test_settled_jobs_are_not_loaded_but_can_be_read(driver: Driver, store: Store) -> None:
    driver.apply(joined(), submitted(1), submitted(2), placed(1, 0))
    driver.apply(told(1, RankPhase.ENDED, ExitFacts(exit_code=0)))
    assert set(store.load().state.jobs) == {1, 2}, "its GPU is not given back yet"
    driver.apply(told(1, RankPhase.RELEASED, ExitFacts(exit_code=0)))
    assert set(store.load().state.jobs) == {2}
    found = store.jobs_by_id([1, 77])
    assert found.jobs == (driver.state.jobs[1],)
    assert found.attempts[1] == (driver.state.attempts[1, 1],)


def test_events_get_rising_ids_and_keep_what_they_say(driver: Driver, store: Store) -> None:
    record = Record(3.5, "JobSubmitted", ODD, "o'brien", 7, 2, "n'1", {"k": ODD})
    first = store.commit(Changes(), [record, record])
    second = store.commit(Changes(), [record])
    assert [event.event_id for event in first + second] == [1, 2, 3]
    assert store.events(0, 99, frozenset(), None, 10) == first + second
    assert store.events(1, 2, frozenset({7}), "n'1", 10) == first[1:]
    assert store.events(0, 99, frozenset({8}), None, 10) == []
    assert store.last_events(frozenset({7}), 2) == [first[1], second[0]]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (JobFilter(), [4, 3, 2, 1]),
        (JobFilter(limit=2), [4, 3]),
        (JobFilter(limit=2, before_job_id=3), [2, 1]),
        (JobFilter(states=frozenset({JobState.CANCELLED})), [2]),
        (JobFilter(states=frozenset({JobState.CANCELLED, JobState.PENDING})), [4, 3, 2, 1]),
        (JobFilter(user="o'brien"), [4, 2, 1]),
        (JobFilter(user="nobody"), []),
        (JobFilter(name="plain"), [3]),
        (JobFilter(job_ids=(1, 4, 9)), [4, 1]),
        (JobFilter(user="o'brien", job_ids=(3, 4)), [4]),
    ],
)
def test_filters(driver: Driver, store: Store, wanted: JobFilter, ids: list[int]) -> None:
    plain = JobSpec("plain", "ann", ("true",), "/")
    driver.apply(submitted(1), submitted(2), submitted(3, plain), submitted(4))
    driver.apply(events.CancelRequested(2, "x", "", 9.0))
    assert [job.job_id for job in store.jobs(wanted).jobs] == ids


def test_counts_and_requests(driver: Driver, store: Store) -> None:
    driver.apply(submitted(1), submitted(2), events.CancelRequested(2, "x", "", 9.0))
    assert store.jobs_by_state() == {"PENDING": 1, "CANCELLED": 1}
    asked = [("o'brien", "r2"), ("ann", "r2"), ("o'brien", "r9")]
    assert store.find_requests(asked) == {("o'brien", "r2"): 2}


def test_usage_of_ended_attempts(driver: Driver, store: Store) -> None:
    driver.apply(joined(), submitted(1), placed(1, 0, 1), told(1, RankPhase.RUNNING))
    assert store.ended_usage(0.0) == []
    driver.apply(told(1, RankPhase.RELEASED, ExitFacts(exit_code=0)))
    (usage,) = store.ended_usage(0.0)
    assert usage.user == "o'brien"
    attempt = driver.state.attempts[1, 1]
    assert usage.gpu_s == 2 * attempt.run_s(99.0)
    assert store.ended_usage(1e9) == []
    ((spec, run_s),) = store.ended_runs(5)
    assert spec == submitted(1).spec
    assert run_s == attempt.run_s(99.0)
    assert store.ended_runs(0) == []


# Guards of the schema


def test_a_gpu_cannot_be_leased_twice_whatever_the_code_does(driver: Driver, store: Store) -> None:
    driver.apply(joined(), submitted(1), submitted(2), placed(1, 0))
    outcome = rules.apply(driver.state, placed(2, 0))
    before = store.last_events(frozenset({1, 2}), 99)
    with pytest.raises(StoreRefused, match=r"gpu_leases\.gpu_uuid"):
        store.commit(outcome.changes, outcome.records)
    assert store.load().state.jobs[2].state is JobState.PENDING
    assert store.last_events(frozenset({1, 2}), 99) == before


def test_a_gpu_may_change_hands_within_one_transaction(driver: Driver, store: Store) -> None:
    driver.apply(joined(), submitted(1), submitted(2), placed(2, 0))
    released = rules.apply(driver.state, told(2, RankPhase.RELEASED, ExitFacts(exit_code=0)))
    driver.state.absorb(released.changes)
    taken = rules.apply(driver.state, placed(1, 0))
    both = Changes(
        {**taken.changes.jobs, **released.changes.jobs},
        {**taken.changes.attempts, **released.changes.attempts},
    )
    store.commit(both, [])
    assert store.load().state.attempts[1, 1].ranks[0].gpu_uuids == ("n1-0",)


def test_a_final_state_cannot_be_overwritten(driver: Driver, store: Store) -> None:
    driver.apply(submitted(1), events.CancelRequested(1, "x", "", 9.0))
    job = replace(driver.state.jobs[1], state=JobState.COMPLETED)
    with pytest.raises(StoreRefused, match="a final job state is overwritten"):
        store.commit(Changes(jobs={1: job}), [])


def test_a_request_id_makes_one_job(driver: Driver, store: Store) -> None:
    driver.apply(submitted(1))
    twin = replace(driver.state.jobs[1], job_id=2)
    with pytest.raises(StoreRefused, match=r"jobs\.request_id"):
        store.commit(Changes(jobs={2: twin}), [])


def test_two_live_attempts_of_a_job_are_refused(driver: Driver, store: Store) -> None:
    driver.apply(joined(), submitted(1), placed(1, 0))
    second = replace(driver.state.attempts[1, 1], number=2, ranks=())
    with pytest.raises(StoreRefused, match="UNIQUE"):
        store.commit(Changes(attempts={second.key: second}), [])


@pytest.mark.parametrize(
    "statement", ["UPDATE events SET text = 'x'", "DELETE FROM events WHERE event_id = 1"]
)
def test_the_event_log_is_append_only(path: Path, statement: str) -> None:
    with Store(path) as store:
        Driver(store).apply(submitted(1))
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(statement)
    connection.close()


# Opening


def test_a_second_controller_is_refused(path: Path, store: Store) -> None:
    with pytest.raises(StoreInUse, match="in use by another controller"):
        Store(path)
    assert store.jobs_by_state() == {}


def test_the_lock_is_given_back(path: Path) -> None:
    Store(path).close()
    Store(path).close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(StoreTooNew, match="schema version 999"):
        Store(path)
    with pytest.raises(StoreTooNew):
        Store(path)  # the first refusal has not kept the lock


def test_migrations_are_applied_once_and_in_order(path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        Driver(store).apply(submitted(1))
    folder = tmp_path / "migrations"
    folder.mkdir()
    for script in MIGRATIONS_FOLDER.glob("*.sql"):
        (folder / script.name).write_text(script.read_text())
    (folder / "0003_more.sql").write_text("CREATE TABLE more (x INTEGER) STRICT;")
    (folder / "0004_fill.sql").write_text("INSERT INTO more VALUES (7);")
    for _ in range(2):
        with Store(path, folder) as store:
            assert set(store.load().state.jobs) == {1}
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT x FROM more").fetchall() == [(7,)]
    assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    connection.close()


def test_a_migration_that_fails_leaves_the_database_as_it_was(path: Path, tmp_path: Path) -> None:
    Store(path).close()
    folder = tmp_path / "migrations"
    folder.mkdir()
    for script in MIGRATIONS_FOLDER.glob("*.sql"):
        (folder / script.name).write_text(script.read_text())
    (folder / "0003_bad.sql").write_text("CREATE TABLE half (x INTEGER); INSERT INTO nowhere;")
    with pytest.raises(StoreUnavailable):
        Store(path, folder)
    with Store(path) as store:
        assert store.jobs_by_state() == {}
    connection = sqlite3.connect(path)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "half" not in tables


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        Store.open(in_the_way / "state")


def test_a_file_that_is_no_database_is_told(path: Path) -> None:
    path.write_bytes(b"this is not SQLite" * 1000)
    with pytest.raises(StoreUnavailable, match="not a database"):
        Store(path)


# Trouble while running


def test_a_full_disk_fails_one_commit_and_no_more(driver: Driver, store: Store, path: Path) -> None:
    driver.apply(submitted(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    big = replace(SPEC, env={"X": "x" * 2_000_000})
    outcome = rules.apply(driver.state, submitted(2, big))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 65_536, hard))
        with pytest.raises(StoreUnavailable, match="cannot be used now"):
            store.commit(outcome.changes, outcome.records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert set(store.load().state.jobs) == {1}
    driver.apply(submitted(2, big))
    assert set(store.load().state.jobs) == {1, 2}
    events_now = store.events(0, 99, frozenset(), None, 99)
    assert [event.event_id for event in events_now] == [1, 2]


WRITER = """
import sys
from pathlib import Path
from controller.lifecycle import events, rules
from controller.store.store import Store
from protos.messages import JobSpec

with Store(Path(sys.argv[1])) as store:
    loaded = store.load()
    state, job_id = loaded.state, loaded.last_job_id
    while True:
        job_id += 1
        spec = JobSpec("j", "u", ("true",), "/", env={"X": "x" * 5000})
        outcome = rules.apply(state, events.JobSubmitted(job_id, f"r{job_id}", spec, 1.0, "u"))
        store.commit(outcome.changes, outcome.records)
        state.absorb(outcome.changes)
        print(job_id, flush=True)
"""


def test_what_was_committed_survives_kill_9(path: Path) -> None:
    told_last = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONSAFEPATH": "0"},
        ) as process:
            assert process.stdout is not None
            for _ in range(15):
                told_last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        told_last = int(rest[-1]) if rest else told_last
        with Store(path) as store:
            loaded = store.load()
            # What was told is there; at most the commit that was under way is there as well.
            assert told_last <= loaded.last_job_id <= told_last + 1
            assert set(loaded.state.jobs) == set(range(1, loaded.last_job_id + 1))
            assert loaded.last_event_id == loaded.last_job_id
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
