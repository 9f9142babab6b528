"""How ranks end, each with a real process: exit facts, limits, launch faults."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import pytest

from protos.messages import LaunchFault, LogStream, OomKind, RankPhase, StopReason

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("script", "exit_code", "signal"),
    [
        ("exit 0", 0, None),
        ("exit 1", 1, None),
        ("exit 3", 3, None),
        ("no-such-command-at-all", 127, None),
        ("kill -9 $$", None, 9),
        ("kill -SEGV $$", None, 11),
        ("kill -TERM $$", None, 15),
    ],
)
async def test_exit_code_and_signal_are_told_apart(node, script, exit_code, signal):
    report = await node.run(node.order("sh", "-c", script))

    assert (report.exit.exit_code, report.exit.signal) == (exit_code, signal)
    assert report.exit.stop_reason is None
    assert report.exit.oom is OomKind.NONE
    assert report.exit.launch_fault is LaunchFault.NONE


async def test_each_phase_is_reported_in_order_with_the_leaders_pid(node):
    order = node.order("sh", "-c", "echo $$; sleep 0.2")
    await node.run(order)

    phases = [report.phase for report in node.reports]
    assert phases == list(RankPhase)
    assert str(node.reports[1].pid).encode() == (await node.output(order.rank)).strip()


async def test_time_limit_ends_a_sleeper(node):
    report = await node.run(node.order("sleep", "60", time_limit_s=0.2))

    assert report.exit.stop_reason is StopReason.TIME_LIMIT
    assert report.exit.signal == 15
    assert 0.2 <= report.usage.elapsed_s < 3


async def test_time_limit_counts_even_if_the_job_ends_well_after_the_signal(node):
    script = "trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done"
    order = node.order("sh", "-c", script, time_limit_s=0.3)
    report = await node.run(order)

    assert report.exit.stop_reason is StopReason.TIME_LIMIT
    assert report.exit.exit_code == 0
    assert await node.output(order.rank) == b"saved\n"


async def test_a_job_that_ignores_sigterm_is_killed_after_its_grace(node):
    script = "trap '' TERM; while :; do sleep 0.05; done"
    report = await node.run(node.order("sh", "-c", script, time_limit_s=0.2, grace_s=0.5))

    assert report.exit.stop_reason is StopReason.TIME_LIMIT
    assert report.exit.signal == 9
    assert 0.7 <= report.usage.elapsed_s < 5


async def test_memory_above_the_limit_ends_the_tree(node):
    program = "x = bytearray(400 << 20); import time; time.sleep(60)"
    order = node.order("sh", "-c", f"{PYTHON} -c '{program}'; true", memory_bytes=200 << 20)
    report = await node.run(order)

    assert report.exit.oom is OomKind.HOST
    assert report.exit.stop_reason is StopReason.MEMORY_LIMIT
    assert "200 MiB were asked for" in report.exit.message
    assert report.usage.peak_memory_bytes > 200 << 20


async def test_memory_that_forked_workers_share_is_counted_once(node):
    program = """
import os, time
x = bytearray(os.urandom(1 << 20)) * 100
for _ in range(6):
    if os.fork() == 0:
        time.sleep(1.0)
        os._exit(0)
for _ in range(6):
    os.wait()
"""
    report = await node.run(node.order(PYTHON, "-c", program, memory_bytes=300 << 20))

    assert report.exit.exit_code == 0
    assert 100 << 20 < report.usage.peak_memory_bytes < 300 << 20


async def test_cuda_out_of_memory_is_read_from_stderr(node):
    program = "raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')"
    report = await node.run(node.order(PYTHON, "-c", program))

    assert report.exit.oom is OomKind.CUDA
    assert report.exit.exit_code == 1


async def test_a_job_that_only_mentions_cuda_memory_and_succeeds_is_fine(node):
    report = await node.run(node.order("echo", "CUDA out of memory, retried with batch size 8"))

    assert report.exit.oom is OomKind.NONE


async def test_cpu_time_of_the_whole_tree_is_accounted(node):
    burn = f"{PYTHON} -c 'sum(range(10_000_000))'"
    report = await node.run(node.order("sh", "-c", f"{burn} & {burn}; wait"))

    assert report.usage.cpu_s > 0.2
    assert report.usage.elapsed_s > 0.1


def _script(path: Path, text: str, mode: int) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


async def test_missing_working_directory(node):
    report = await node.run(node.order("true", cwd="/no/such/folder"))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "'/no/such/folder' does not exist" in report.exit.message
    assert report.exit.exit_code is None
    assert report.pid is None


async def test_working_directory_that_is_a_file(node, tmp_path):
    path = tmp_path / "file"
    path.touch()
    report = await node.run(node.order("true", cwd=str(path)))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "is not a directory" in report.exit.message


async def test_missing_command(node):
    report = await node.run(node.order("no-such-command", env={"PATH": "/bin:/nowhere"}))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "'no-such-command' was not found in PATH=/bin:/nowhere" in report.exit.message


async def test_missing_program_by_path(node):
    report = await node.run(node.order("./train.sh"))

    assert "'./train.sh' does not exist" in report.exit.message


async def test_script_without_execute_permission(node, tmp_path):
    path = _script(tmp_path / "run.sh", "#!/bin/sh\n", 0o644)
    report = await node.run(node.order(path))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "is not executable: run `chmod +x`" in report.exit.message


async def test_script_with_a_missing_interpreter(node, tmp_path):
    path = _script(tmp_path / "run.sh", "#!/no/such/python -u\n", 0o755)
    report = await node.run(node.order(path))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "interpreter '/no/such/python -u'" in report.exit.message


async def test_script_with_windows_line_ends(node, tmp_path):
    path = _script(tmp_path / "run.sh", "#!/bin/sh\r\necho hi\r\n", 0o755)
    report = await node.run(node.order(path))

    assert "dos2unix" in report.exit.message


async def test_file_that_is_no_program(node, tmp_path):
    path = _script(tmp_path / "data", "just text\n", 0o755)
    report = await node.run(node.order(path))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "no `#!` line" in report.exit.message


async def test_directory_as_program(node, tmp_path):
    report = await node.run(node.order(str(tmp_path)))

    assert "is a directory" in report.exit.message


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"BIG": "x" * 200_000, "SMALL": "y"}, "variable BIG with 200004"),
        ({f"V{i}": "x" * 100_000 for i in range(40)}, "variable V"),
    ],
)
async def test_too_large_an_environment_names_the_largest_variable(node, env, named):
    report = await node.run(node.order("true", env=env))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert named in report.exit.message


async def test_too_long_an_argument_is_named(node):
    report = await node.run(node.order("echo", "x" * 200_000))

    assert "the largest is argument 1 with 200000" in report.exit.message


async def test_environment_of_one_megabyte_arrives(node):
    env = {f"V{i}": "x" * 100_000 for i in range(10)}
    order = node.order("sh", "-c", "env | grep -c ^V[0-9]=", env=env)
    await node.run(order)

    assert await node.output(order.rank) == b"10\n"


async def test_a_null_byte_is_the_jobs_fault(node):
    report = await node.run(node.order("echo", "a\0b"))

    assert report.exit.launch_fault is LaunchFault.JOB
    assert "null" in report.exit.message


async def test_what_the_node_cannot_prepare_is_its_own_fault(node):
    node.base_env = {**node.base_env, "TMPDIR": "/no/such/folder"}
    await node.launcher.close()
    await node.start()
    report = await node.run(node.order("true"))

    assert report.exit.launch_fault is LaunchFault.NODE
    assert "this node cannot start its supervisor" in report.exit.message


async def test_relative_program_and_output_streams(node, tmp_path):
    _script(
        tmp_path / "run.sh", '#!/bin/sh\npwd\necho oops >&2\nread line || echo "no stdin"\n', 0o755
    )
    order = node.order("./run.sh", cwd=str(tmp_path))
    await node.run(order)

    assert await node.output(order.rank) == f"{tmp_path}\nno stdin\n".encode()
    assert await node.output(order.rank, LogStream.STDERR) == b"oops\n"


async def test_signals_have_their_default_meaning_in_the_job(node):
    """Python ignores SIGPIPE and the supervisor SIGHUP; a job must not inherit that."""
    order = node.order("grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
    await node.run(order)

    masks = [int(line.split()[1], 16) for line in (await node.output(order.rank)).splitlines()]
    threading_signals = 3 << 31  # 32 and 33 belong to the C library, which lets nobody change them
    assert [mask & ~threading_signals for mask in masks] == [0, 0]


async def test_no_file_of_the_agent_is_open_in_the_job(node):
    order = node.order("sh", "-c", "ls -l /proc/self/fd")
    await node.run(order)

    listing = (await node.output(order.rank)).decode()
    assert str(node.state_dir) not in listing
    assert listing.count("pipe:") == 2


async def test_arguments_arrive_as_they_are(node):
    argv = ["", " ", "a\nb", "'\"$HOME`", "🦊", "\udcff raw byte", "-", "--", "*"]
    script = 'for a; do printf "%s\\0" "$a"; done'
    order = node.order("sh", "-c", script, "sh", *argv)
    await node.run(order)

    sent = [argument.encode("utf-8", "surrogateescape") for argument in argv]
    assert (await node.output(order.rank)).split(b"\0")[:-1] == sent


async def test_a_job_with_a_hostile_name_and_folder(node, hostile_dir):
    order = node.order(
        "sh", "-c", 'pwd; echo "$RLTUNE_JOB_NAME"', cwd=str(hostile_dir), name="a'b\n$c"
    )
    await node.run(order)

    assert await node.output(order.rank) == f"{hostile_dir}\na'b\n$c\n".encode()


class TestHostileStateFolder:
    @pytest.fixture
    def tmp_path(self, hostile_dir: Path) -> Path:
        """Puts the node's whole state below the folder."""
        return hostile_dir

    async def test_launch_notify_and_release(self, node):
        order = node.order("sh", "-c", 'cd "$RLTUNE_CHECKPOINT_DIR" && cd "$TMPDIR" && echo ok')
        await node.run(order)

        assert await node.output(order.rank) == b"ok\n"


async def test_fifty_launches_one_after_the_other_are_quick(node):
    """The bound is for a busy machine; an idle one needs about 15 ms (docs/launcher.md)."""
    started_s, released_s = [], []
    for _ in range(50):
        order = node.order("true", gpus=["GPU-a"])
        begun_s = time.monotonic()
        await node.launch(order, RankPhase.RUNNING)
        started_s.append(time.monotonic() - begun_s)
        await node.until(order.rank, RankPhase.ENDED)
        ended_s = time.monotonic()
        await node.until(order.rank, RankPhase.RELEASED)
        released_s.append(time.monotonic() - ended_s)

    print(
        f"launch to started: median {statistics.median(started_s) * 1e3:.1f} ms; "
        f"end to released: median {statistics.median(released_s) * 1e3:.1f} ms"
    )
    assert statistics.median(started_s) < 0.25
    assert statistics.median(released_s) < 0.05
