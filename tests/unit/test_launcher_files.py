"""The attempt folder, retention, and the pure parts of the supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent import supervisor
from node_agent.attempts import (
    AttemptDir,
    AttemptStatus,
    ProcessIdentity,
    StopRequest,
    open_process,
    read_boot_id,
    read_start_ticks,
)
from node_agent.logs import read_log
from node_agent.retention import Retention, remove_expired
from node_agent.supervisor import Process, Stopper
from protos.messages import (
    ExitFacts,
    LaunchFault,
    LogStream,
    OomKind,
    RankId,
    RankPhase,
    RankUsage,
    StopReason,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[])),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(JSON_VALUES)
def test_supervisors_json_is_json(value):
    text = supervisor.to_json(value)

    assert json.loads(text) == value
    assert supervisor.parse_json(json.dumps(value)) == value
    assert supervisor.parse_json(text + "   ") == value


def test_supervisor_imports_nothing_slow():
    folder = str(Path(supervisor.__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import supervisor; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True, text=True
    ).stdout.split()

    slow = {
        "re",
        "enum",
        "json",
        "signal",
        "typing",
        "collections",
        "pathlib",
        "socket",
        "subprocess",
    }
    assert not slow & set(modules)


@given(
    st.builds(
        AttemptStatus,
        phase=st.sampled_from([RankPhase.RUNNING, RankPhase.ENDED]),
        boot_id=st.just("b"),
        supervisor=st.none(),
        leader_pid=st.none() | st.integers(2, 1 << 22),
        exit=st.none()
        | st.builds(
            ExitFacts,
            exit_code=st.none() | st.integers(0, 255),
            signal=st.none() | st.integers(1, 64),
            core_dumped=st.booleans(),
            oom=st.sampled_from(OomKind),
            stop_reason=st.none() | st.sampled_from(StopReason),
            launch_fault=st.sampled_from(LaunchFault),
            message=st.text(),
        ),
        usage=st.none() | st.builds(RankUsage, elapsed_s=st.floats(0, 1e9)),
        survivors=st.lists(
            st.builds(ProcessIdentity, st.just("b"), st.integers(2), st.integers(0))
        ).map(tuple),
    )
)
def test_status_survives_its_file(status):
    document = json.loads(json.dumps(status.to_document()))

    assert AttemptStatus.from_document(document) == status


def test_claim_and_status_exclude_each_other(tmp_path):
    folder = AttemptDir(tmp_path / "3.2.1")
    ended = AttemptStatus(RankPhase.ENDED, "b", None, exit=ExitFacts(message="first"))

    assert folder.claim(ended)
    assert not folder.claim(AttemptStatus(RankPhase.ENDED, "b", None, exit=ExitFacts()))
    assert folder.read_status() == ended
    assert folder.rank == RankId(3, 2, 1)
    assert [path.name for path in folder.path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"phase": "END', b"\0" * 100, "é".encode()])
def test_torn_status_is_none(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)

    assert AttemptDir(tmp_path).read_status() is None


def test_stop_requests_are_kept_in_order(tmp_path):
    folder = AttemptDir(tmp_path)
    requests = (StopRequest(StopReason.DRAIN, 5.0), StopRequest(StopReason.CANCEL, 0.5))
    folder.write_stop_requests(requests)

    assert folder.read_stop_requests() == requests
    assert AttemptDir(tmp_path / "none").read_stop_requests() == ()


def test_process_identity():
    boot_id, pid = read_boot_id(), os.getpid()
    ticks = read_start_ticks(pid)
    pidfd = open_process(ProcessIdentity(boot_id, pid, ticks), boot_id)

    assert pidfd is not None
    os.close(pidfd)
    assert open_process(ProcessIdentity(boot_id, pid, ticks + 1), boot_id) is None
    assert open_process(ProcessIdentity("other", pid, ticks), boot_id) is None
    assert read_start_ticks(2**22 + 1) is None


def test_process_line_with_a_hostile_name():
    stat = (
        b"42 (a) R 1 (b\n) S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 999 1000 25 1844674407"
    )
    process = Process(stat)

    assert (process.pid, process.ppid, process.pgid, process.state) == (42, 7, 42, "S")
    assert process.start_ticks == 999
    assert process.rss_bytes == 25 * supervisor.PAGE_BYTES


class TestStopper:
    def test_first_reason_stays_unless_cancelled(self):
        stopper = Stopper()
        for reason, counts in [
            ("DRAIN", "DRAIN"),
            ("PREEMPT", "DRAIN"),
            ("CANCEL", "CANCEL"),
            ("DRAIN", "CANCEL"),
        ]:
            stopper.request(reason, 10.0, 0.0)
            assert stopper.reason == counts

    def test_grace_can_only_become_shorter(self):
        stopper = Stopper()
        stopper.request("DRAIN", 10.0, now_s=0.0)
        stopper.request("DRAIN", 30.0, now_s=1.0)
        assert stopper.kill_at_s == 10.0
        stopper.request("DRAIN", 2.0, now_s=3.0)
        assert stopper.kill_at_s == 5.0


class TestRetention:
    @pytest.fixture
    def state(self, tmp_path):
        for folder in ("attempts", "checkpoints"):
            (tmp_path / folder).mkdir()
        return tmp_path

    def _rank(self, state, name, *, age_s, size=1000, acknowledged=True):
        folder = AttemptDir(state / "attempts" / name)
        folder.path.mkdir()
        (folder.path / "stdout.00000000000000000000").write_bytes(b"x" * size)
        if acknowledged:
            folder.acknowledge()
            os.utime(folder.path / "acknowledged", (10_000 - age_s, 10_000 - age_s))

    def _remove(self, state, **retention):
        return remove_expired(
            state / "attempts", state / "checkpoints", Retention(**retention), now_s=10_000.0
        )

    def test_old_folders_go(self, state):
        self._rank(state, "1.1.0", age_s=101)
        self._rank(state, "2.1.0", age_s=99)
        self._rank(state, "3.1.0", age_s=999, acknowledged=False)

        assert self._remove(state, max_age_s=100) == ["1.1.0"]
        assert sorted(p.name for p in (state / "attempts").iterdir()) == ["2.1.0", "3.1.0"]

    def test_oldest_folders_go_beyond_the_size(self, state):
        for i in range(1, 5):
            self._rank(state, f"{i}.1.0", age_s=100 - i)

        assert self._remove(state, max_bytes=2500) == ["1.1.0", "2.1.0"]

    def test_checkpoints_outlive_the_attempts_by_the_same_age(self, state):
        self._rank(state, "1.1.0", age_s=0)
        for name in ("1", "2", "3"):
            path = state / "checkpoints" / name / "model.pt"
            path.parent.mkdir()
            path.touch()
            touched_s = 10_000 if name == "3" else 1
            os.utime(path, (touched_s, touched_s))
            os.utime(path.parent, (1, 1))
        self._remove(state, max_age_s=100)

        assert sorted(p.name for p in (state / "checkpoints").iterdir()) == ["1", "3"]


class TestReadLog:
    @pytest.fixture
    def folder(self, tmp_path):
        """0-9 kept, 10-19 dropped, 20-29 kept."""
        for offset, data in ((0, b"01234"), (5, b"56789"), (20, b"abcdefghij")):
            (tmp_path / f"stdout.{offset:020d}").write_bytes(data)
        return AttemptDir(tmp_path)

    @pytest.mark.parametrize(
        ("offset", "limit", "data", "starts", "next_offset"),
        [
            (0, 100, b"0123456789", 0, 10),
            (3, 4, b"3456", 3, 7),
            (10, 3, b"abc", 20, 23),
            (15, 100, b"abcdefghij", 20, 30),
            (-4, 100, b"ghij", 26, 30),
            (-15, 100, b"abcdefghij", 20, 30),
            (-1000, 100, b"0123456789", 0, 10),
            (30, 100, b"", 30, 30),
        ],
    )
    def test_table(self, folder, offset, limit, data, starts, next_offset):
        chunk = read_log(folder, LogStream.STDOUT, offset, limit)

        assert (chunk.data, chunk.offset, chunk.next_offset) == (data, starts, next_offset)
        assert not chunk.end

    def test_end_only_after_the_last_byte_of_an_ended_rank(self, folder):
        folder.claim(AttemptStatus(RankPhase.ENDED, "b", None, exit=ExitFacts()))

        assert not read_log(folder, LogStream.STDOUT, 0, 100).end
        assert not read_log(folder, LogStream.STDOUT, 20, 9).end
        assert read_log(folder, LogStream.STDOUT, 20, 10).end
        assert read_log(folder, LogStream.STDERR, 0, 10).end
