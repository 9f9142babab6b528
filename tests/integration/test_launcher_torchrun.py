"""The real torchrun under the launcher, without flags: SIGTERM reaches its ranks, none is left."""

from __future__ import annotations

import os
import signal

import pytest

from protos.messages import RankPhase, StopReason

SCRIPT = """
import os, signal, sys, time

def save(*_):
    time.sleep(0.3)
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
os.write(1, b"ready ")
while True:
    time.sleep(0.1)
"""
UUIDS = ["GPU-a", "GPU-b"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


async def _until_both_ranks_run(node, order):
    await node.launch(order)
    await node.until_output(order.rank, b"ready ready ", timeout_s=90)


async def test_cancel_lets_both_ranks_save(node, script):
    order = node.order("torchrun", script, gpus=UUIDS, grace_s=30.0)
    await _until_both_ranks_run(node, order)
    await node.stop(order.rank, StopReason.CANCEL, 30.0)
    report = await node.until(order.rank, RankPhase.RELEASED, timeout_s=60)

    output = await node.output(order.rank)
    assert b"rank 0 of 2 saved" in output
    assert b"rank 1 of 2 saved" in output
    assert report.exit.stop_reason is StopReason.CANCEL
    assert node.left(order.rank) == []


async def test_killed_torchrun_leaves_no_rank(node, script):
    order = node.order("torchrun", script, gpus=UUIDS)
    await _until_both_ranks_run(node, order)
    os.kill((await node.until(order.rank, RankPhase.RUNNING)).pid, signal.SIGKILL)
    report = await node.until(order.rank, RankPhase.RELEASED, timeout_s=60)

    assert report.exit.signal == 9
    assert node.left(order.rank) == []
