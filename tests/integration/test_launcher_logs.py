"""The supervisor by itself: log floods, exact bytes, full disks. No agent is needed for these."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent import supervisor
from node_agent.attempts import AttemptDir
from node_agent.logs import read_log
from node_agent.supervisor import ERRNO_EXIT_BASE
from protos.messages import LogStream, OomKind, RankPhase, StopReason

PYTHON = sys.executable
LIMIT = 1 << 20
SEGMENT = LIMIT // 8


class Rank:
    """One attempt folder with an order, and a supervisor on demand."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = AttemptDir(state_dir / "1.1.0")

    def start(self, *argv: str, **order: object) -> subprocess.Popen[bytes]:
        self.folder.path.mkdir(parents=True)
        document = {
            "argv": argv,
            "env": {"PATH": "/usr/bin:/bin", "RLTUNE_ATTEMPT_DIR": str(self.folder.path)},
            "cwd": "/",
            "time_limit_s": None,
            "grace_s": 2.0,
            "memory_bytes": 0,
            "log_limit_bytes": LIMIT,
            "boot_id": "this boot",
            "notify_path": "/no/fifo",
            **order,
        }
        (self.folder.path / "order.json").write_text(json.dumps(document))
        return subprocess.Popen(
            [PYTHON, "-I", "-S", supervisor.__file__, self.folder.path], start_new_session=True
        )

    def run(self, *argv: str, **order: object):
        with self.start(*argv, **order) as process:
            assert process.wait(timeout=60) == 0
        status = self.folder.read_status()
        assert status.phase is RankPhase.ENDED
        return status

    def pieces(self, stream: LogStream = LogStream.STDOUT) -> list[tuple[int, bytes]]:
        """All kept bytes, as (offset, bytes) without the gaps."""
        found: list[tuple[int, bytes]] = []
        offset = 0
        while True:
            chunk = read_log(self.folder, stream, offset, 1 << 16)
            if chunk.data:
                found.append((chunk.offset, chunk.data))
            if chunk.end:
                return found
            assert chunk.next_offset > offset
            offset = chunk.next_offset

    def kept_bytes(self, stream: LogStream = LogStream.STDOUT) -> int:
        return sum(path.stat().st_size for _, path in self.folder.log_segments(stream))


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def numbered_lines(count: int) -> bytes:
    return b"".join(b"%09d\n" % i for i in range(count))


def test_flood_keeps_head_and_tail(rank):
    lines = 1_000_000
    status = rank.run("sh", "-c", f"seq -f %09.0f 0 {lines - 1}")

    whole = numbered_lines(lines)
    pieces = rank.pieces()
    for offset, data in pieces:
        assert data == whole[offset : offset + len(data)]
    assert pieces[0][0] == 0
    assert pieces[-1][0] + len(pieces[-1][1]) == len(whole)
    kept = rank.kept_bytes()
    assert LIMIT - 2 * SEGMENT <= kept <= LIMIT
    assert kept == sum(len(data) for _, data in pieces)
    assert status.usage.log_bytes_dropped == len(whole) - kept
    assert (
        pieces[0][0],
        rank.folder.log_segments(LogStream.STDOUT)[0][1].stat().st_size,
    ) == (0, SEGMENT)


def test_reader_that_asks_in_the_gap_goes_on_behind_it(rank):
    rank.run("sh", "-c", "seq -f %09.0f 0 999999")
    chunk = read_log(rank.folder, LogStream.STDOUT, SEGMENT, 100)

    assert chunk.offset > SEGMENT
    assert chunk.data == numbered_lines(1_000_000)[chunk.offset : chunk.offset + 100]
    last_of_head = read_log(rank.folder, LogStream.STDOUT, SEGMENT - 10, 100)
    assert (last_of_head.offset, last_of_head.next_offset) == (SEGMENT - 10, SEGMENT)


def test_binary_bytes_are_kept_exactly(rank, tmp_path):
    data = os.urandom(300_000) + bytes(range(256)) + b"\r50%\r100%\r\n" + b"\xff\xfe no end of line"
    source = tmp_path / "data"
    source.write_bytes(data)
    rank.run("cat", str(source))

    assert b"".join(piece for _, piece in rank.pieces()) == data


def test_streams_are_kept_apart(rank):
    rank.run("sh", "-c", "echo out; echo err >&2; echo out2")

    assert rank.pieces() == [(0, b"out\nout2\n")]
    assert rank.pieces(LogStream.STDERR) == [(0, b"err\n")]


def test_endless_flood_obeys_the_time_limit_and_eats_no_memory(rank):
    started = time.monotonic()
    peak_kib = 0
    with rank.start("yes", time_limit_s=1.5) as process:
        while process.poll() is None:
            peak_kib = max(peak_kib, _peak_rss_kib(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
    elapsed_s = time.monotonic() - started

    status = rank.folder.read_status()
    assert status.exit.stop_reason is StopReason.TIME_LIMIT
    assert status.exit.signal == 15
    assert elapsed_s < 4
    assert rank.kept_bytes() <= LIMIT
    assert status.usage.log_bytes_dropped > 8 * LIMIT, "it was a flood, and the pump took it"
    assert 0 < peak_kib < 64 << 10


def _peak_rss_kib(pid: int) -> int:
    """VmHWM of a process, 0 for a zombie."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_any_argument_arrives(argv):
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(Path(folder))
        rank.run("sh", "-c", 'for a; do printf "%s\\0" "$a"; done', "sh", *argv)
        output = b"".join(piece for _, piece in rank.pieces())

    assert output == b"".join(argument.encode() + b"\0" for argument in argv)


def test_closed_outputs_do_not_end_the_job(rank):
    status = rank.run("sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 6")

    assert status.exit.exit_code == 6
    assert status.usage.cpu_s < 0.2, "the supervisor does not spin on closed pipes"
    assert status.usage.elapsed_s >= 0.3


def test_cuda_oom_far_above_the_end_is_not_taken_for_the_cause(rank):
    script = "echo 'CUDA out of memory' >&2; seq 1 100000 >&2; exit 1"
    status = rank.run("sh", "-c", script)

    assert status.exit.oom is OomKind.NONE


def test_second_supervisor_on_one_folder_gives_up(rank):
    rank.run("true")
    again = subprocess.run(
        [PYTHON, "-I", "-S", supervisor.__file__, rank.folder.path], check=False, timeout=20
    )

    assert again.returncode == 0
    assert rank.folder.read_status().exit.exit_code == 0


class TestFullDisk:
    @pytest.fixture
    def rank(self, tmp_path: Path):
        """A rank on a disk of 256 KiB."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk],
            check=False,
            capture_output=True,
        )
        if mounted.returncode != 0:
            pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
        yield Rank(disk)
        subprocess.run(["umount", "-l", disk], check=True)

    def test_job_goes_on_and_its_exit_is_stored(self, rank):
        lines = 200_000
        status = rank.run(
            "sh", "-c", f"seq -f %09.0f 0 {lines - 1}; exit 3", log_limit_bytes=8 << 20
        )

        assert status.exit.exit_code == 3
        kept = rank.kept_bytes()
        assert 0 < kept < 256 << 10
        assert status.usage.log_bytes_dropped == 10 * lines - kept
        whole = numbered_lines(lines)
        for offset, data in rank.pieces():
            assert data == whole[offset : offset + len(data)]

    def test_output_goes_on_at_its_place_when_there_is_room_again(self, rank, wait_until):
        gate = rank.folder.path.parent.parent / "gate"
        ballast = rank.folder.path.parent / "ballast"
        ballast.write_bytes(b"x" * (128 << 10))  # more than a pipe holds
        flooded = rank.folder.path.parent.parent / "flooded"
        until_gate = f"while [ ! -e {gate} ]; do sleep 0.05; done"
        script = f"seq -f %09.0f 0 99999; touch {flooded}; {until_gate}; echo after"
        with rank.start("sh", "-c", script, log_limit_bytes=8 << 20) as process:
            wait_until(flooded.exists)
            assert os.statvfs(rank.folder.path).f_bavail == 0
            ballast.unlink()
            gate.touch()
            assert process.wait(timeout=30) == 0

        whole = numbered_lines(100_000) + b"after\n"
        pieces = rank.pieces()
        for offset, data in pieces:
            assert data == whole[offset : offset + len(data)]
        assert pieces[-1][1].endswith(b"after\n")
        assert pieces[-1][0] + len(pieces[-1][1]) == len(whole)

    def test_no_room_for_the_status_is_told_by_the_exit_status(self, rank):
        rank.folder.path.parent.joinpath("ballast").write_bytes(b"x" * (247 << 10))
        with rank.start("true") as process:
            code = process.wait(timeout=30)

        assert os.strerror(code - ERRNO_EXIT_BASE) == "No space left on device"
        assert rank.folder.read_status() is None
