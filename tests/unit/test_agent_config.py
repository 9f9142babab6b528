"""The agent's and the controller's command lines refuse what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller import config as controller_config
from node_agent import config as agent_config


@pytest.mark.parametrize(
    ("text", "size"), [("32G", 32 << 30), ("32GB", 32 * 10**9), ("1.5MiB", 3 << 19)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert agent_config.parse_args(["--mem", text, "--name", "n"]).memory_bytes == size


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mem", "32"], "unit"),
        (["--mem", "1K"], "at least 1M"),
        (["--log-limit", "1K"], "at least"),
        (["--name", "a/b"], "a/b"),
        (["--controller", "nowhere"], "HOST:PORT"),
        (["--cpus", "0"], "at least 1"),
        (["--mock-faults", "f"], "--mock-gpus"),
        (["--mock-gpus", "P100:99999"], "1 to 64"),
        (["--mock-gpus", "V100"], "V100-16GB"),
        (["--advertise", "not-an-ip"], "IP address"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_the_agent_refuses(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        agent_config.parse_args(args)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--listen", "0.0.0.0:1"], "--insecure"),
        (["--listen", "[::]:1"], "--insecure"),
        (["--listen", "127.0.0.1:99999"], "ADDRESS:PORT"),
        (["--cluster", "a b"], "a b"),
        (["--policy", "best"], "multifactor"),
        (["--lease", "1", "--heartbeat", "1"], "three heartbeats"),
        (["--heartbeat", "0"], "between"),
    ],
)
def test_the_controller_refuses(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        controller_config.parse_args(args)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_relative_state_dir_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for parse in (agent_config.parse_args, controller_config.parse_args):
        with pytest.raises(SystemExit):
            parse(["--state-dir", "relative"])
        assert "absolute path" in capsys.readouterr().err


def test_loopback_needs_no_word_and_other_addresses_do() -> None:
    assert controller_config.parse_args(["--listen", "[::1]:0"]).host == "::1"
    assert controller_config.parse_args(["--listen", "10.0.0.1:1", "--insecure"]).port == 1
