"""Stopping ranks: whom the signals reach, which reason counts, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from protos.messages import (
    LaunchFault,
    RankId,
    RankPhase,
    StopReason,
)

PYTHON = sys.executable
SLEEP_FOREVER = "while :; do sleep 0.05; done"


async def _stop_and_release(node, rank, reason=StopReason.CANCEL, grace_s=5.0):
    await node.stop(rank, reason, grace_s)
    report = await node.until(rank, RankPhase.RELEASED)
    assert node.left(rank) == []
    return report


async def test_cancel_of_a_running_job(node):
    order = node.order("sleep", "60")
    await node.launch(order)
    report = await _stop_and_release(node, order.rank)

    assert report.exit.stop_reason is StopReason.CANCEL
    assert report.exit.signal == 15


async def test_cancel_right_after_launch(node):
    order = node.order("sleep", "60")
    await node.launcher.launch(order)
    report = await _stop_and_release(node, order.rank)

    assert report.exit.stop_reason is StopReason.CANCEL


async def test_cancel_at_every_moment_of_a_launch(node):
    """Between the order and the running job lie folder, spawn, handler, claim and exec."""
    for step in range(20):
        order = node.order("sleep", "60")
        await node.launcher.launch(order)
        await asyncio.sleep(step * 0.001)
        report = await _stop_and_release(node, order.rank)
        assert report.exit.stop_reason is StopReason.CANCEL
        assert report.exit.launch_fault is LaunchFault.NONE


async def test_cancel_while_it_ends_keeps_the_exit(node):
    order = node.order("true")
    await node.launch(order, RankPhase.ENDED)
    report = await _stop_and_release(node, order.rank)

    assert report.exit.exit_code == 0
    assert report.exit.stop_reason is None


async def test_stop_of_a_released_rank_repeats_its_report(node):
    order = node.order("true")
    report = await node.run(order)
    node.reports.clear()
    await node.stop(order.rank, StopReason.CANCEL, 1.0)

    assert node.reports == [report]


async def test_stop_of_an_unknown_rank_ends_it_for_ever(node):
    order = node.order("touch", str(node.state_dir / "ran"))
    report = await _stop_and_release(node, order.rank)
    assert report.exit.stop_reason is StopReason.CANCEL
    assert "never ran here" in report.exit.message

    await node.launcher.launch(order)

    assert node.reports[-1] == report
    assert not (node.state_dir / "ran").exists()


async def test_launching_twice_starts_once(node):
    order = node.order("sh", "-c", "echo once; sleep 60")
    await node.launcher.launch(order)
    await node.launcher.launch(order)
    await node.until_output(order.rank, b"once")
    await node.launcher.launch(order)

    assert node.reports[-1].phase is RankPhase.RUNNING
    await _stop_and_release(node, order.rank)
    assert await node.output(order.rank) == b"once\n"


async def test_launching_a_forgotten_rank_repeats_its_end(node):
    order = node.order("sh", "-c", "echo once; exit 3")
    await node.run(order)
    node.launcher.forget(order.rank)
    assert node.launcher.reports() == ()
    await node.launcher.launch(order)

    assert node.reports[-1].phase is RankPhase.RELEASED
    assert node.reports[-1].exit.exit_code == 3
    assert await node.output(order.rank) == b"once\n"


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (StopReason.PREEMPT, StopReason.CANCEL, StopReason.CANCEL),
        (StopReason.PREEMPT, StopReason.DRAIN, StopReason.PREEMPT),
        (StopReason.CANCEL, StopReason.PREEMPT, StopReason.CANCEL),
    ],
)
async def test_the_first_reason_counts_unless_cancelled(node, first, second, counts):
    order = node.order("sh", "-c", f"trap 'echo term' TERM; echo ready; {SLEEP_FOREVER}")
    await node.launch(order)
    await node.until_output(order.rank, b"ready")
    await node.stop(order.rank, first, 60.0)
    await node.until_output(order.rank, b"term")
    report = await _stop_and_release(node, order.rank, second, 0.2)

    assert report.exit.stop_reason is counts
    assert report.usage.elapsed_s < 30, "the second, shorter grace ended it"


async def test_cancel_overrides_the_time_limit(node):
    order = node.order(
        "sh", "-c", f"trap 'echo term' TERM; {SLEEP_FOREVER}", time_limit_s=0.2, grace_s=60.0
    )
    await node.launch(order)
    await node.until_output(order.rank, b"term")
    report = await _stop_and_release(node, order.rank, StopReason.CANCEL, 0.0)

    assert report.exit.stop_reason is StopReason.CANCEL


async def test_a_repeated_stop_does_not_lengthen_the_grace(node):
    order = node.order("sh", "-c", f"trap 'echo term' TERM; echo ready; {SLEEP_FOREVER}")
    await node.launch(order)
    await node.until_output(order.rank, b"ready")
    for _ in range(3):
        await node.stop(order.rank, StopReason.DRAIN, 0.5)
    report = await _stop_and_release(node, order.rank, StopReason.DRAIN, 0.5)

    assert report.exit.stop_reason is StopReason.DRAIN
    assert (await node.output(order.rank)).count(b"term") == 1


async def test_sigterm_reaches_the_program_below_a_shell(node):
    """`sh -c` dies of SIGTERM at once; its orphan comes to the supervisor and gets one too."""
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    order = node.order("sh", "-c", f'{PYTHON} -c "{program}"; echo never')
    await node.launch(order)
    await node.until_output(order.rank, b"ready\n")
    await _stop_and_release(node, order.rank)

    assert await node.output(order.rank) == b"ready\nsaved\n"


async def test_sigterm_spares_the_workers_of_the_program(node):
    """DataLoader workers must live while the program writes its checkpoint."""
    program = """
import os, signal, sys, time
def told(*_):
    print('worker got SIGTERM', flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, told)
worker = os.fork()
if worker == 0:
    while True:
        time.sleep(0.05)
def save(*_):
    time.sleep(0.5)
    os.kill(worker, 0)
    print('saved with worker alive', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
while True:
    time.sleep(60)
"""
    order = node.order(PYTHON, "-c", program)
    await node.launch(order)
    await node.until_output(order.rank, b"ready\n")
    await _stop_and_release(node, order.rank, grace_s=20.0)

    saved = b"ready\nsaved with worker alive\n"
    assert (await node.output(order.rank)).startswith(saved), "and later, as an orphan, it may end"


TORCHRUN_LIKE = f"""
import subprocess, sys, time
code = ("import signal, os, time;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os.write(1, b'rank up '); time.sleep(600)")
ranks = [subprocess.Popen(['{PYTHON}', '-c', code], start_new_session=True) for _ in range(3)]
time.sleep(600)
"""


async def test_ranks_in_their_own_sessions_end_with_a_killed_leader(node):
    order = node.order(PYTHON, "-c", TORCHRUN_LIKE)
    running = await node.launch(order)
    await node.until_output(order.rank, b"rank up rank up rank up")
    assert len(node.left(order.rank)) == 4
    os.kill(running.pid, signal.SIGKILL)
    report = await node.until(order.rank, RankPhase.RELEASED)

    assert node.left(order.rank) == []
    assert report.exit.signal == 9
    assert report.exit.stop_reason is None


async def test_daemon_that_leaves_its_session_and_ignores_sigterm(node):
    daemon = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        os.write(1, b'daemon up')
        while True:
            time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(60)
"""
    order = node.order(PYTHON, "-c", daemon)
    await node.launch(order)
    await node.until_output(order.rank, b"daemon up")
    report = await _stop_and_release(node, order.rank, grace_s=0.3)

    assert report.exit.signal == 9


async def test_what_a_job_leaves_in_the_background_ends_with_it(node):
    order = node.order("sh", "-c", "setsid sleep 600 & sleep 600 & exit 5")
    report = await node.run(order)

    assert report.exit.exit_code == 5
    assert report.exit.message == ""


async def test_a_job_that_stopped_itself_ends(node):
    order = node.order("sh", "-c", "echo ready; kill -STOP $$; echo continued")
    await node.launch(order)
    await node.until_output(order.rank, b"ready")
    report = await _stop_and_release(node, order.rank)

    assert report.exit.signal == 15, "SIGCONT let it take the SIGTERM"


async def test_processes_that_fork_without_end_are_caught(node):
    """Each child forks and exits, in ever new process groups; no pid lives for long."""
    program = """
import os
def run():
    while True:
        if os.fork():
            os._exit(0)
        os.setpgid(0, 0)
for _ in range(4):
    if os.fork() == 0:
        run()
os.write(1, b'forking')
import time
time.sleep(60)
"""
    order = node.order(PYTHON, "-c", program)
    await node.launch(order)
    await node.until_output(order.rank, b"forking")
    report = await _stop_and_release(node, order.rank, grace_s=0.0)

    assert report.exit.stop_reason is StopReason.CANCEL
    assert "survive" not in report.exit.message


async def test_sigterm_to_the_supervisor_from_outside(node):
    order = node.order("sleep", "60")
    await node.launch(order)
    os.kill(node.folder(order.rank).read_status().supervisor.pid, signal.SIGTERM)
    report = await node.until(order.rank, RankPhase.RELEASED)

    assert report.exit.stop_reason is StopReason.DRAIN
    assert "from outside" in report.exit.message


async def test_killed_supervisor_leaves_nothing_behind(node):
    script = f"setsid sleep 600 & {PYTHON} -c 'import time; print(1, flush=True); time.sleep(600)'"
    order = node.order("sh", "-c", script)
    await node.launch(order)
    await node.until_output(order.rank, b"1")
    assert len(node.left(order.rank)) == 3
    os.kill(node.folder(order.rank).read_status().supervisor.pid, signal.SIGKILL)
    report = await node.until(order.rank, RankPhase.RELEASED)

    assert node.left(order.rank) == []
    assert "its supervisor died (signal 9)" in report.exit.message
    assert report.exit.exit_code is None


async def test_fenced_ranks_have_ended_when_kill_unknown_returns(node):
    order = node.order("sh", "-c", f"trap '' TERM; echo ready; {SLEEP_FOREVER}", grace_s=60.0)
    await node.launch(order)
    await node.until_output(order.rank, b"ready")
    never_here = RankId(999, 7, 1)
    await node.launcher.kill_unknown((order.rank, never_here))

    for rank in (order.rank, never_here):
        report = await node.until(rank, RankPhase.ENDED)
        assert report.exit.stop_reason is StopReason.FENCED
    assert node.left(order.rank) == []


async def test_tmpdir_is_removed_and_checkpoints_stay(node):
    script = 'touch "$TMPDIR/x" "$RLTUNE_CHECKPOINT_DIR/model.pt"; echo "$TMPDIR"'
    order = node.order("sh", "-c", script)
    await node.run(order)

    tmp_dir = Path((await node.output(order.rank)).decode().strip())
    assert not tmp_dir.exists()  # noqa: ASYNC240
    assert (node.state_dir / "checkpoints" / str(order.rank.job_id) / "model.pt").exists()


async def test_sixty_jobs_at_once_all_end_once_and_leave_no_zombie(node):
    before = set(psutil.Process().children())
    orders = [node.order("sh", "-c", f"exit {i % 7}") for i in range(60)]
    for order in orders:
        await node.launcher.launch(order)
    for i, order in enumerate(orders):
        report = await node.until(order.rank, RankPhase.RELEASED, timeout_s=60.0)
        assert report.exit.exit_code == i % 7
    ends = [r.rank for r in node.reports if r.phase is RankPhase.ENDED]
    assert sorted(ends) == sorted(order.rank for order in orders)
    await _until_children_are(before)


async def _until_children_are(before: set[psutil.Process]):
    async with asyncio.timeout(10):
        while set(psutil.Process().children()) - before:  # noqa: ASYNC110 - zombies too
            await asyncio.sleep(0.01)
