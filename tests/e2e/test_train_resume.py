"""Stopping and going on: nothing is lost, nothing is different."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from workloads import train

Event = dict[str, Any]

# AlexNet draws for its dropout at each step: only a restored generator gives the same weights.
MODEL = ("alexnet", "--batch-size", "8", "--steps", "120", "--checkpoint-every", "24",
         "--progress-every", "0")  # fmt: skip


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[Event], str]]:
    """Run the program inside the test's process, where torch is loaded already."""

    def run(*argv: str) -> tuple[int, list[Event], str]:
        code = train.main(argv)
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


@contextmanager
def _running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own; whatever is left of it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "workloads.train", *argv],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # So small that a reader who stops soon stops the writer: it cannot finish meanwhile.
        pipesize=4096,
    )
    guard = threading.Timer(100, process.kill)
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _read_to(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "progress" and event["step"] >= step:
            return
    pytest.fail(f"it ended before step {step}")


def _rest(process: subprocess.Popen[str]) -> list[Event]:
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout]


def _weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    state = torch.load(folder / f"step-{step:010d}.pt", weights_only=True)
    weights: dict[str, torch.Tensor] = state["model"]
    return weights


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train.main([*MODEL, "--checkpoint-dir", str(folder)]) == 0
    return folder


def test_stopped_and_resumed_is_the_same_as_never_stopped(
    here, uninterrupted: Path, tmp_path: Path
) -> None:
    with _running(*MODEL, "--checkpoint-dir", str(tmp_path)) as process:
        _read_to(process, 9)
        process.terminate()
        told = _rest(process)[-1]
        assert process.wait() == 143
    assert (told["event"], told["reason"]) == ("checkpoint", "sigterm")
    assert 9 <= told["step"] < 120

    code, events, _ = here(*MODEL, "--checkpoint-dir", str(tmp_path))
    assert code == 0
    assert events[0]["resumed_from"] == told["step"]
    assert _same(_weights(tmp_path, 120), _weights(uninterrupted, 120))


def test_killed_it_goes_on_from_the_last_interval(
    here, uninterrupted: Path, tmp_path: Path
) -> None:
    with _running(*MODEL, "--checkpoint-dir", str(tmp_path)) as process:
        _read_to(process, 25)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    code, events, _ = here(*MODEL, "--checkpoint-dir", str(tmp_path))
    assert (code, events[0]["resumed_from"] in {24, 48, 72, 96}) == (0, True)
    assert _same(_weights(tmp_path, 120), _weights(uninterrupted, 120))


def test_a_torn_checkpoint_is_told_and_the_one_before_is_used(
    here, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted, folder)
    newest = folder / "step-0000000120.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    code, events, err = here(*MODEL, "--checkpoint-dir", str(folder))
    assert code == 0
    assert (events[0]["event"], events[0]["path"]) == ("checkpoint_damaged", str(newest))
    assert "trying the one before" in err
    assert events[1]["resumed_from"] == 96
    assert _same(_weights(folder, 120), _weights(uninterrupted, 120))


def test_a_finished_run_does_no_step_again(here, uninterrupted: Path) -> None:
    code, events, _ = here(*MODEL, "--checkpoint-dir", str(uninterrupted))
    assert code == 0
    assert [event["event"] for event in events] == ["start", "summary"]
    assert (events[0]["resumed_from"], events[-1]["steps"]) == (120, 120)


def test_another_batch_size_goes_on_at_the_same_sample(here, tmp_path: Path) -> None:
    common = ["resnet18", "--checkpoint-dir", str(tmp_path), "--epochs", "1"]
    stopped = ["--batch-size", "32", "--checkpoint-every", "20"]
    with _running(*common, *stopped, "--progress-every", "0") as process:
        _read_to(process, 22)
        process.kill()
        process.wait()
    saved = max(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("step-*.json"))
    code, events, _ = here(*common, "--batch-size", "64")
    assert code == 0
    assert (events[0]["resumed_from"], events[0]["steps"]) == (saved // 2, 22)


def test_sigterm_to_the_whole_group_still_saves_though_loaders_get_it_too(tmp_path: Path) -> None:
    argv = ["resnet18", "--epochs", "99", "--dataset", "synthetic", "--workers", "2"]
    with _running(*argv, "--checkpoint-dir", str(tmp_path), "--progress-every", "0") as process:
        _read_to(process, 3)
        os.killpg(process.pid, signal.SIGTERM)
        assert _rest(process)[-1]["reason"] == "sigterm"
        assert process.wait() == 143


def test_inference_goes_on_too(here, tmp_path: Path) -> None:
    argv = ["gpt2", "--task", "inference", "--batch-size", "2", "--checkpoint-dir", str(tmp_path)]
    assert here(*argv, "--steps", "3")[0] == 0
    code, events, _ = here(*argv, "--steps", "5")
    assert (code, events[0]["resumed_from"], events[-1]["tokens"]) == (0, 3, 2 * 2 * 50)
