"""Several ranks: the same training, one voice, one checkpoint, the true exit code."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from workloads import train

Event = dict[str, Any]


def _finish(process: subprocess.Popen[str]) -> tuple[int, list[Event]]:
    out, _ = process.communicate(timeout=100)
    return process.returncode, [json.loads(line) for line in out.splitlines()]


def _start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "workloads.train", *argv], stdout=subprocess.PIPE, text=True
    )


def test_two_ranks_learn_what_one_process_learns(capsys: pytest.CaptureFixture[str]) -> None:
    # Without batch normalisation and dropout two halves of a batch give the whole one's gradient.
    argv = ["vit_b_16", "--steps", "6", "--progress-every", "0"]
    assert train.main([*argv, "--batch-size", "32"]) == 0
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    code, shared = _finish(_start(*argv, "--batch-size", "16", "--mode", "ddp", "--nproc", "2"))
    assert code == 0
    assert [event["event"] for event in shared] == [event["event"] for event in alone]
    assert shared[0]["world_size"] == 2
    for one, two in zip(alone[1:], shared[1:], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert shared[-1]["test_loss"] == pytest.approx(alone[-1]["test_loss"], rel=1e-3)


def test_ranks_stop_together_on_one_checkpoint_that_one_process_takes_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["resnet18", "--checkpoint-dir", str(tmp_path), "--batch-size", "8"]
    process = _start(*common, "--steps", "5000", "--mode", "ddp", "--nproc", "2",
                     "--progress-every", "0")  # fmt: skip
    guard = threading.Timer(100, process.kill)
    guard.start()
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("step", 0) >= 3:
            process.send_signal(signal.SIGTERM)
            break
    code, events = _finish(process)
    guard.cancel()
    assert code == 143
    saved = events[-1]
    assert (saved["event"], saved["reason"]) == ("checkpoint", "sigterm")
    assert len(list(tmp_path.glob("*.pt"))) == 1

    more = str(saved["step"] + 2)
    assert train.main([*common, "--steps", more]) == 0
    resumed = json.loads(capsys.readouterr().out.splitlines()[0])
    assert resumed["resumed_from"] == saved["step"]


def test_the_ranks_own_exit_code_comes_through() -> None:
    code, events = _finish(
        _start("resnet18", "--steps", "9", "--lr", "1e30", "--mode", "ddp", "--nproc", "2")
    )
    assert code == 4
    assert not [event for event in events if event["event"] == "summary"]


def test_ranks_of_a_mode_for_one_process_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert train.main(["resnet18"]) == 2
    assert "2 ranks were started: that is --mode ddp" in capsys.readouterr().err
