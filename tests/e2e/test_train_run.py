"""Training as a program: it learns, says so, and ends with the right code."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workloads import train

Event = dict[str, Any]


def _run(*argv: str, expect: int = 0, **environ: str) -> list[Event]:
    """Run the program in a process of its own; returns its events."""
    done = subprocess.run(
        [sys.executable, "-m", "workloads.train", *argv],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == expect, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[Event], str]]:
    """Run the program inside the test's process, where torch is loaded already."""

    def run(*argv: str) -> tuple[int, list[Event], str]:
        code = train.main(argv)
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


def test_a_deep_net_is_tested_with_the_statistics_of_its_weights(
    here: Callable[..., tuple[int, list[Event], str]],
) -> None:
    code, events, _ = here("resnet50", "--dataset", "digits", "--steps", "20")
    assert code == 0
    summary = events[-1]
    # With the running averages of 20 steps it is in the hundred thousands.
    assert summary["test_loss"] < 2 * summary["loss"]
    assert summary["accuracy"] > 0.15  # guessing gives 0.1


def test_a_resnet_learns_to_read_digits(tmp_path: Path) -> None:
    told = tmp_path / "progress"
    events = _run("resnet18", "--epochs", "3", "--progress-every", "0.2",
                  RLTUNE_PROGRESS_FILE=str(told))  # fmt: skip
    start, summary = _of(events, "start")[0], events[-1]
    losses = [event["loss"] for event in _of(events, "progress")]
    assert (start["dataset"], start["steps"], start["device"]) == ("digits", 132, "cpu")
    assert summary["event"] == "summary"
    assert summary["steps"] == 132
    assert summary["accuracy"] > 0.85  # guessing gives 0.1
    assert losses[0] > 2 > 1 > losses[-1]
    assert 0 < summary["startup_s"] < summary["wall_s"]
    assert summary["peak_host_memory_bytes"] > 50e6
    assert [json.loads(line) for line in told.read_text().splitlines()] == events


def test_a_language_model_learns_from_the_librarys_text(here) -> None:
    code, events, _ = here("opt-125m", "--steps", "60", "--progress-every", "0.2")
    losses = [event["loss"] for event in _of(events, "progress")]
    assert code == 0
    assert losses[0] > 5.3  # no better than a guess among 264 tokens: ln 264 = 5.58
    assert events[-1]["test_loss"] < 3.6
    assert events[-1]["accuracy"] > 0.1


def test_bert_learns_to_fill_masks_in(here) -> None:
    code, events, _ = here("bert-tiny", "--steps", "60", "--dataset", "synthetic")
    assert code == 0
    assert events[-1]["test_loss"] < 4.3 < 5 < _of(events, "progress")[0]["loss"]


def test_the_same_seed_gives_the_same_numbers(here) -> None:
    def losses(seed: str) -> list[float]:
        _, events, _ = here("opt-125m", "--steps", "5", "--seed", seed, "--progress-every", "0")
        return [event["loss"] for event in _of(events, "progress")]

    assert losses("1") == losses("1") != losses("2")


def test_mixed_precision_and_loading_processes(here) -> None:
    code, events, _ = here("shufflenet_v2_x0_5", "--steps", "3", "--amp", "--workers", "1",
                           "--dataset", "synthetic")  # fmt: skip
    assert (code, events[-1]["steps"]) == (0, 3)


def test_dp_on_a_cpu_says_what_it_is(here) -> None:
    code, events, err = here("resnet18", "--steps", "2", "--mode", "dp")
    assert (code, _of(events, "start")[0]["world_size"]) == (0, 1)
    assert "DataParallel needs GPUs" in err
    assert "DataParallel needs GPUs" in _of(events, "start")[0]["note"]


def test_inference_generates_fifty_tokens_a_prompt(here) -> None:
    code, events, _ = here("bigscience/bloom-560m", "--task", "inference", "--steps", "2",
                           "--batch-size", "4")  # fmt: skip
    assert (code, events[-1]["tokens"]) == (0, 2 * 4 * 50)
    assert events[-1]["tokens_per_s"] > 0


def test_a_loss_that_is_not_finite_ends_with_code_4_and_no_checkpoint(here, tmp_path: Path) -> None:
    code, events, err = here(
        "resnet18",
        "--steps",
        "50",
        "--lr",
        "1e30",
        "--checkpoint-every",
        "2",
        "--checkpoint-dir",
        str(tmp_path),
    )
    assert code == 4
    assert not _of(events, "summary")
    assert "learning rate 1e+30" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (["resnet5"], 2, "did you mean 'resnet50'"),
        ([], 2, "which model?"),
        (["resnet18", "--dataset", "cifar10", "--data-dir", "/nowhere"], 3, "looked in /nowhere"),
        (["resnet18", "--checkpoint-dir", "/dev/null/x"], 5, "cannot be kept"),
    ],
)
def test_what_cannot_be_done_is_told_with_its_code(
    here, argv: list[str], code: int, word: str
) -> None:
    ended, events, err = here(*argv)
    assert (ended, events) == (code, [])
    assert word in err
    assert "Traceback" not in err


def test_another_models_checkpoint_is_refused(here, tmp_path: Path) -> None:
    assert here("resnet18", "--steps", "1", "--checkpoint-dir", str(tmp_path))[0] == 0
    code, _, err = here("vgg11", "--steps", "1", "--checkpoint-dir", str(tmp_path))
    assert (code, "resnet18" in err, "vgg11" in err) == (5, True, True)


def test_list_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--list"]) == 0
    words = capsys.readouterr().out.split()
    assert {"resnet152", "opt-2.7b", "bloom-3b", "vit_h_14"} <= set(words)


def test_sigterm_without_a_checkpoint_folder_ends_it_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "workloads.train", "resnet18", "--epochs", "999"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    guard = threading.Timer(100, process.kill)
    guard.start()
    try:
        for line in process.stdout:
            if json.loads(line)["event"] == "progress":
                process.terminate()
                break
        assert process.wait(30) == -signal.SIGTERM
    finally:
        guard.cancel()
        process.stdout.close()
