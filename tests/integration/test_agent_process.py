"""The agent as a process: it starts on a disk that takes nothing, and ends quickly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

AGENT = (sys.executable, "-m", "node_agent", "--controller", "127.0.0.1:9", "--name", "n")
# Coverage would fail on the full disk too, and say so on the agent's stderr.
FULL_DISK = (
    *("sh", "-c"),
    'unset COVERAGE_PROCESS_CONFIG COVERAGE_PROCESS_START; ulimit -f 0; exec "$@"',
    "sh",
)
"""Every write into a file fails in this process, as on a full disk, and needs no root."""


@contextlib.contextmanager
def agent(
    state_dir: Path, *options: str, under: tuple[str, ...] = (), python_path: str = ""
) -> Iterator[str]:
    """Runs an agent that has started, and ends it; yields what it logged at its start."""
    argv = [*under, *AGENT, "--mock-gpus", "P100", "--state-dir", str(state_dir), *options]
    env = {**os.environ, "PYTHONPATH": python_path}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            logged = ""
            while " offers " not in logged and (line := process.stderr.readline()):
                logged += line
            assert " offers " in logged, logged
            yield logged
            process.terminate()
            asked_at_s = time.monotonic()
            assert process.wait(timeout=20) == 0
            assert time.monotonic() - asked_at_s < 1.0
        finally:
            process.kill()


def test_an_agent_starts_again_on_a_full_disk(tmp_path: Path) -> None:
    with agent(tmp_path):
        pass
    (compiled,) = tmp_path.glob("supervisor-*.pyc")
    with agent(tmp_path, under=FULL_DISK):
        pass
    compiled.unlink()
    with agent(tmp_path, under=FULL_DISK) as logged:
        assert "the supervisor cannot be compiled" in logged
    assert list(tmp_path.glob("supervisor-*")) == []


def test_a_first_start_on_a_full_disk_fails_in_one_sentence(tmp_path: Path) -> None:
    argv = [*FULL_DISK, *AGENT, "--mock-gpus", "P100", "--state-dir", str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    pattern = rf".* the agent cannot start: .*; its state folder is {tmp_path}\n"
    assert re.fullmatch(pattern, ended.stderr), ended.stderr


def test_an_agent_starts_without_its_telemetry_and_keeps_its_gpus(tmp_path: Path) -> None:
    state_dir, broken = tmp_path / "state", tmp_path / "broken"
    broken.mkdir()
    (broken / "pynvml.py").write_text("raise SystemExit('no pynvml')")
    with agent(state_dir, python_path=str(broken)) as logged:
        assert "the telemetry process does not start" in logged
        assert "no GPU" in logged
    with agent(state_dir):
        pass
    with agent(state_dir, python_path=str(broken)) as logged:
        assert "1 x P100" in logged


def test_nvml_that_hangs_does_not_hold_the_end_up(tmp_path: Path) -> None:
    faults_path = tmp_path / "faults.json"
    faults_path.write_text(json.dumps({"faults": [{"kind": "hang", "gpu": 0}]}))
    with agent(tmp_path / "state", "--mock-faults", str(faults_path)):
        pass
