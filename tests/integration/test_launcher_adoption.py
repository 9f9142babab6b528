"""An agent that comes back: adoption, ends while it was away, reboots, and GPUs that stay held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.attempts import AttemptDir, read_start_ticks
from node_agent.processes import find_marked
from protos.messages import (
    GpuProcess,
    LaunchFault,
    LogStream,
    RankPhase,
    StopReason,
)

AGENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import LauncherNode

async def main():
    node = LauncherNode(Path(sys.argv[2]))
    await node.start()
    order = node.order("sh", "-c", sys.argv[3], gpus=["GPU-a"])
    await node.launch(order)
    print("running", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def first_agent(node):
    """Runs another launcher in a process of its own until it is killed with SIGKILL."""
    with contextlib.ExitStack() as stack:

        def start(script: str) -> subprocess.Popen[bytes]:
            agent = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", AGENT, Path(__file__).parent, node.state_dir, script],
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(agent.kill)
            assert agent.stdout is not None
            assert agent.stdout.readline() == b"running\n"
            return agent

        yield start


@pytest.fixture
async def away(node):
    """The node's own launcher is not there; `start` brings it back."""
    await node.launcher.close()
    return node


def _kill(agent: subprocess.Popen[bytes]) -> None:
    agent.kill()
    agent.wait()


def _only_folder(node) -> AttemptDir:
    (path,) = (node.state_dir / "attempts").iterdir()
    return AttemptDir(path)


async def test_running_job_is_adopted_and_its_end_recorded(away, first_agent, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo begun; while [ ! -e {gate} ]; do sleep 0.02; done; echo done; exit 7"
    _kill(first_agent(script))
    await away.start()
    rank = _only_folder(away).rank
    await away.until(rank, RankPhase.RUNNING)
    gate.touch()
    report = await away.until(rank, RankPhase.RELEASED)

    assert report.exit.exit_code == 7
    assert await away.output(rank) == b"begun\ndone\n"


async def test_adopted_job_can_be_stopped(away, first_agent):
    _kill(first_agent("sleep 600"))
    await away.start()
    rank = _only_folder(away).rank
    await away.stop(rank, StopReason.CANCEL, 5.0)
    report = await away.until(rank, RankPhase.RELEASED)

    assert report.exit.stop_reason is StopReason.CANCEL
    assert away.left(rank) == []


async def test_end_while_the_agent_was_away_is_reported(away, first_agent, tmp_path, wait_until):
    gate = tmp_path / "gate"
    _kill(first_agent(f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 9"))
    folder = _only_folder(away)
    gate.touch()
    wait_until(lambda: folder.read_status().phase is RankPhase.ENDED)
    await away.start()
    report = await away.until(folder.rank, RankPhase.RELEASED)

    assert report.exit.exit_code == 9
    assert [r.phase for r in away.reports] == [RankPhase.ENDED, RankPhase.RELEASED]


async def test_tmpdir_goes_although_the_agent_is_away(away, first_agent, tmp_path, wait_until):
    gate, kept = tmp_path / "gate", tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    _kill(
        first_agent(
            f'mkdir -p "$TMPDIR/a/b"; touch "$TMPDIR/a/b/c"; ln -s {kept} "$TMPDIR/a/link"; '
            f"while [ ! -e {gate} ]; do sleep 0.02; done"
        )
    )
    tmp_dir = Path(_only_folder(away).read_order()["tmp_dir"])
    wait_until((tmp_dir / "a" / "link").is_symlink)
    gate.touch()
    wait_until(lambda: not tmp_dir.exists())
    assert (kept / "file").exists()


async def test_time_limit_holds_while_the_agent_is_away(away, wait_until):
    await away.start()
    order = away.order("sleep", "600", time_limit_s=0.5)
    await away.launch(order)
    await away.launcher.close()
    wait_until(lambda: away.folder(order.rank).read_status().phase is RankPhase.ENDED)
    away.reports.clear()
    await away.start()
    report = await away.until(order.rank, RankPhase.RELEASED)

    assert report.exit.stop_reason is StopReason.TIME_LIMIT


async def test_supervisor_and_agent_both_killed(away, first_agent):
    agent = first_agent("setsid sleep 600 & sleep 600")
    folder = _only_folder(away)
    _kill(agent)
    os.kill(folder.read_status().supervisor.pid, signal.SIGKILL)
    assert find_marked(folder.path)
    await away.start()
    report = await away.until(folder.rank, RankPhase.RELEASED)

    assert "its supervisor died" in report.exit.message
    assert away.left(folder.rank) == []


async def test_other_boot_ends_a_running_rank(away, first_agent):
    _kill(first_agent("sleep 600"))
    away.boot_id = "another boot"
    await away.start()
    rank = _only_folder(away).rank
    report = await away.until(rank, RankPhase.RELEASED)

    assert "rebooted" in report.exit.message
    for pid in away.left(rank):  # they are only there because the boot was not real
        os.kill(pid, signal.SIGKILL)


async def test_launch_that_no_supervisor_has_begun_is_given_up(away):
    order = away.order("true", gpus=["GPU-a"])
    folder = away.folder(order.rank)
    folder.write_order(order, {"argv": order.argv, "boot_id": "b", "notify_path": "/no/fifo"})
    await away.start()
    report = await away.until(order.rank, RankPhase.RELEASED)

    assert report.exit.launch_fault is LaunchFault.NODE
    supervisor = Path(__file__).parents[2] / "node_agent" / "supervisor.py"
    late = [sys.executable, "-I", "-S", supervisor, folder.path]
    begun = await asyncio.to_thread(subprocess.run, late, check=False, timeout=20)
    assert begun.returncode == 0
    assert folder.read_status().exit == report.exit


async def test_status_lost_to_a_power_failure(away):
    order = away.order("true")
    folder = away.folder(order.rank)
    folder.write_order(order, {})
    (folder.path / "status.json").write_bytes(b"\0" * 4096)
    await away.start()
    report = await away.until(order.rank, RankPhase.RELEASED)

    assert report.exit.launch_fault is LaunchFault.NODE


async def test_a_job_can_be_cancelled_on_a_full_disk(away, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    mounted = await asyncio.to_thread(subprocess.run, mount, check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
    away.state_dir = disk / "state"
    try:
        await away.start()
        order = away.order("sh", "-c", "echo ready; while :; do echo; sleep 0.05; done")
        await away.launch(order)
        await away.until_output(order.rank, b"ready")
        _fill(disk / "ballast")
        await away.stop(order.rank, StopReason.CANCEL, 5.0)
        report = await away.until(order.rank, RankPhase.RELEASED)
        refused = await away.launch(away.order("true"), RankPhase.RELEASED)
        await away.launcher.close()
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", disk], check=True)

    assert report.exit.stop_reason is StopReason.CANCEL
    assert refused.exit.launch_fault is LaunchFault.NODE
    assert "No space left on device" in refused.exit.message


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


async def test_acknowledged_ranks_are_not_reported_again(node):
    order = node.order("echo", "kept")
    await node.run(order)
    node.launcher.forget(order.rank)
    await node.launcher.close()
    node.reports.clear()
    await node.start()

    assert node.launcher.reports() == ()
    assert await node.output(order.rank) == b"kept\n"


async def test_unacknowledged_end_survives_the_restart(node):
    order = node.order("sh", "-c", "exit 4")
    await node.run(order)
    await node.launcher.close()
    await node.start()

    (report,) = node.launcher.reports()
    assert (await node.until(report.rank, RankPhase.RELEASED)).exit.exit_code == 4


async def test_reused_pid_is_not_taken_for_the_supervisor(away, first_agent):
    """The status names a living process, but one that started at another time."""
    _kill(first_agent("sleep 600"))
    folder = _only_folder(away)
    supervisor = folder.read_status().supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    status_path = folder.path / "status.json"
    own_pid = os.getpid()
    text = status_path.read_text().replace(
        f'"supervisor_pid": {supervisor.pid}', f'"supervisor_pid": {own_pid}'
    )
    assert read_start_ticks(own_pid) != supervisor.start_ticks
    status_path.write_text(text)
    await away.start()
    report = await away.until(folder.rank, RankPhase.RELEASED)

    assert "its supervisor died" in report.exit.message


class TestGpuRelease:
    """ENDED comes at once; RELEASED when NVML shows that nothing of the rank is on its GPUs."""

    async def test_process_that_stays_on_the_gpu_is_killed(self, node):
        order = node.order("sleep", "600", gpus=["GPU-a", "GPU-b"])
        environment = {**os.environ, "RLTUNE_ATTEMPT_DIR": str(node.folder(order.rank).path)}
        with subprocess.Popen(["sleep", "600"], env=environment) as stray:  # noqa: ASYNC220
            node.gpu_answer = lambda: {
                "GPU-b": () if stray.poll() is not None else (GpuProcess(stray.pid),)
            }
            await node.launch(order)
            await node.stop(order.rank, StopReason.CANCEL, 5.0)
            report = await node.until(order.rank, RankPhase.RELEASED)
            assert stray.returncode == -signal.SIGKILL

        assert report.dirty_gpus == {}

    async def test_foreign_process_is_left_alone_and_no_reason_to_wait(self, node):
        with subprocess.Popen(["sleep", "600"]) as foreign:  # noqa: ASYNC220
            node.gpu_answer = lambda: {"GPU-a": (GpuProcess(foreign.pid, 5 << 20),)}
            report = await node.launch(node.order("true", gpus=["GPU-a"]), RankPhase.RELEASED)
            assert foreign.poll() is None
            foreign.kill()

        assert report.dirty_gpus == {}

    async def test_card_that_cannot_list_processes_counts_as_clean(self, node):
        node.gpu_answer = lambda: {"GPU-a": None}
        report = await node.run(node.order("true", gpus=["GPU-a"]))

        assert report.dirty_gpus == {}

    async def test_silent_nvml_makes_the_gpus_dirty_after_a_minute(self, away):
        clock = [0.0]

        async def sleep(seconds: float) -> None:
            clock[0] += seconds
            await asyncio.sleep(0.001)

        away.monotonic, away.sleep, away.gpu_answer = lambda: clock[0], sleep, lambda: None
        await away.start()
        report = await away.run(away.order("true", gpus=["GPU-a"]))

        assert report.exit.exit_code == 0
        assert "NVML did not say" in report.dirty_gpus["GPU-a"]

    async def test_rank_without_gpus_needs_no_nvml(self, node):
        node.gpu_answer = lambda: pytest.fail("nobody asked for a GPU")
        await node.run(node.order("true"))


class TestReadLog:
    async def test_offsets_tail_and_end(self, node):
        order = node.order("sh", "-c", "printf 0123456789; printf err >&2")
        await node.run(order)
        read = node.launcher.read_log

        whole = await read(order.rank, LogStream.STDOUT, 0, 100)
        assert (whole.data, whole.offset, whole.next_offset, whole.end) == (
            b"0123456789",
            0,
            10,
            True,
        )
        part = await read(order.rank, LogStream.STDOUT, 3, 4)
        assert (part.data, part.next_offset, part.end) == (b"3456", 7, False)
        assert (await read(order.rank, LogStream.STDOUT, -3, 100)).data == b"789"
        tail = await read(order.rank, LogStream.STDOUT, 0, 100, tail_bytes=4)
        assert (tail.data, tail.offset) == (b"6789", 6)
        beyond = await read(order.rank, LogStream.STDOUT, 50, 100)
        assert (beyond.data, beyond.end) == (b"", True)
        assert (await read(order.rank, LogStream.STDERR, 0, 100)).data == b"err"

    async def test_running_rank_has_no_end_yet(self, node):
        order = node.order("sh", "-c", "echo one; sleep 600")
        await node.launch(order)
        await node.until_output(order.rank, b"one")
        chunk = await node.launcher.read_log(order.rank, LogStream.STDOUT, 4, 100)

        assert (chunk.data, chunk.offset, chunk.end) == (b"", 4, False)

    async def test_rank_that_was_never_here(self, node):
        order = node.order("true")
        chunk = await node.launcher.read_log(order.rank, LogStream.STDOUT, 0, 100)

        assert "not on this node" in chunk.error
        assert chunk.end
