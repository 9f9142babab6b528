"""A node belongs to one cluster: a controller with another database does not touch its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.messages import JobState
from testbed.client import Client
from testbed.job_request import JobRequest

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `python -m MODULE ARGS`, with a log; all are ended afterwards."""
    running: list[subprocess.Popen[bytes]] = []

    def spawn(module: str, log: str, *args: str) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("ab") as file:
            process = subprocess.Popen([sys.executable, "-P", "-m", module, *args], stderr=file)
        running.append(process)
        return process

    yield spawn
    for process in running:
        process.terminate()
        process.wait(20)


def test_a_controller_with_another_database_does_not_touch_running_jobs(
    tmp_path: Path, start: Start, wait_until: Callable[..., None]
) -> None:
    gate = tmp_path / "gate"

    def controller(state: str, address: str = "127.0.0.1:0") -> tuple[subprocess.Popen[bytes], str]:
        said = tmp_path / state / "controller.json"
        said.unlink(missing_ok=True)
        process = start(
            "controller", state + ".log", "--listen", address, "--state-dir", str(said.parent)
        )
        wait_until(said.exists, describe=(tmp_path / f"{state}.log").read_text)
        return process, json.loads(said.read_text())["address"]

    def up(client: Client) -> bool:
        return [n.state for n in client.nodes()] == ["UP"]

    ours, address = controller("ours")
    agent = ("--controller", address, "--name", "n1", "--state-dir", str(tmp_path / "n1"))
    start("node_agent", "n1.log", *agent, "--mock-gpus", "P100:4")
    script = f'until [ -e "{gate}" ]; do sleep 0.05; done; exit 4'
    with Client(address) as client:
        wait_until(lambda: up(client))
        job_id = client.submit(JobRequest(argv=("sh", "-c", script), cwd="/", gpus=2))
        wait_until(lambda: client.job(job_id).state is JobState.RUNNING)
        pid = client.job(job_id).attempts[-1].ranks[0].pid
    ours.terminate()
    assert ours.wait(10) == 0

    other, _ = controller("other", address)
    log = tmp_path / "n1.log"
    wait_until(lambda: "belongs to another cluster" in log.read_text(), describe=log.read_text)
    with Client(address) as client:
        assert client.nodes() == []
    other.terminate()
    assert other.wait(10) == 0
    assert Path(f"/proc/{pid}").exists()

    controller("ours", address)
    gate.touch()
    with Client(address) as client:
        (job,) = client.wait([job_id], timeout_s=40)
        wait_until(lambda: up(client))
    assert job.exit is not None
    assert (job.state, job.exit.exit_code, len(job.attempts)) == (JobState.FAILED, 4, 1)


def test_a_database_of_no_bytes_is_refused(tmp_path: Path, start: Start) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "controller.db").touch()
    args = ("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "c"))
    assert start("controller", "c.log", *args).wait(30) == 2
    assert "is empty" in (tmp_path / "c.log").read_text()
