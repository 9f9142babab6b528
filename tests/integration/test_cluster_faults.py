"""kill -9 of agent and controller: running jobs go on, ends are recorded, nothing runs twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.messages import JobState
from testbed.client import Client
from testbed.job_request import JobRequest
from testbed.local import CONTROLLER, LocalCluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(["P100:4", "P100:4"]) as running:
        yield running


def request(*argv: str, **options: object) -> JobRequest:
    return JobRequest(argv=argv, cwd="/", **options)  # type: ignore[arg-type]


def waiter(gate: Path, log: Path, code: int) -> JobRequest:
    """A job that notes its start, waits for `gate` to appear, and exits with `code`."""
    script = f'echo "$RLTUNE_ATTEMPT" >> "{log}"; until [ -e "{gate}" ]; do sleep 0.05; done; '
    return request("sh", "-c", f"{script}exit {code}", gpus=2)


def test_agent_killed_and_started_again_adopts_the_running_job(
    cluster: LocalCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    client, gate, log = cluster.client, tmp_path / "gate", tmp_path / "log"
    job_id = client.submit(waiter(gate, log, 42))
    wait_until(lambda: client.job(job_id).state is JobState.RUNNING)
    rank = client.job(job_id).attempts[-1].ranks[0]
    assert rank.pid is not None
    cluster.kill(rank.node)
    assert Path(f"/proc/{rank.pid}").exists()
    cluster.restart(rank.node)
    assert Path(f"/proc/{rank.pid}").exists()
    assert client.job(job_id).state is JobState.RUNNING
    gate.touch()
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.FAILED
    assert job.exit is not None
    assert job.exit.exit_code == 42
    assert len(job.attempts) == 1
    assert log.read_text() == "1\n"
    wait_until(lambda: all(g.job_id is None for g in client.gpus()))


def test_a_job_that_ends_while_its_agent_is_away_is_recorded_and_not_run_again(
    cluster: LocalCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    client, gate, log = cluster.client, tmp_path / "gate", tmp_path / "log"
    job_id = client.submit(waiter(gate, log, 3))
    wait_until(lambda: client.job(job_id).state is JobState.RUNNING)
    rank = client.job(job_id).attempts[-1].ranks[0]
    cluster.kill(rank.node)
    gate.touch()
    wait_until(lambda: not Path(f"/proc/{rank.pid}").exists())
    cluster.restart(rank.node)
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.exit is not None
    assert (job.state, job.exit.exit_code, len(job.attempts)) == (JobState.FAILED, 3, 1)
    assert log.read_text() == "1\n"


def test_controller_killed_while_a_job_runs(
    cluster: LocalCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    client, gate, log = cluster.client, tmp_path / "gate", tmp_path / "log"
    running = client.submit(waiter(gate, log, 9))
    waiting = client.submit_many([request("true", gpus=4) for _ in range(3)])
    wait_until(lambda: client.job(running).state is JobState.RUNNING)
    cluster.kill(CONTROLLER)
    gate.touch()  # it ends while nobody listens
    cluster.restart(CONTROLLER)
    with Client(cluster.address) as fresh:
        jobs = fresh.wait([running, *waiting], timeout_s=30)
    assert jobs[0].exit is not None
    assert (jobs[0].state, jobs[0].exit.exit_code) == (JobState.FAILED, 9)
    assert {j.state for j in jobs[1:]} == {JobState.COMPLETED}
    assert log.read_text() == "1\n"


@pytest.mark.parametrize("after_jobs", [0, 10, 25])
def test_controller_killed_amid_a_burst_runs_every_job_once(
    cluster: LocalCluster, tmp_path: Path, wait_until: Callable[..., None], after_jobs: int
) -> None:
    once = tmp_path / "once"
    once.mkdir()
    jobs = [
        request("sh", "-c", f'echo >> "{once}/{n}"; exit {n % 3}', gpus=1 + n % 4)
        for n in range(40)
    ]
    job_ids = cluster.client.submit_many(jobs)
    wait_until(lambda: len(list(once.iterdir())) >= after_jobs)
    cluster.kill(CONTROLLER)
    cluster.restart(CONTROLLER)
    with Client(cluster.address) as fresh:
        ended = fresh.wait(job_ids, timeout_s=60)
        for n, job in enumerate(ended):
            assert job.exit is not None
            assert job.exit.exit_code == n % 3, (n, job)
        runs = {p.name: p.read_text().count("\n") for p in once.iterdir()}
        assert runs == {str(n): 1 for n in range(40)}
        assert all(len(j.attempts) == 1 for j in ended)
        wait_until(lambda: all(g.job_id is None for g in fresh.gpus()))


def test_supervisor_killed_ends_the_job_and_leaves_nothing(
    cluster: LocalCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    client = cluster.client
    job_id = client.submit(request("sh", "-c", "sleep 300 & sleep 301", gpus=1))
    wait_until(lambda: client.job(job_id).state is JobState.RUNNING)
    pid = client.job(job_id).attempts[-1].ranks[0].pid
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(supervisor, 9)
    (job,) = client.wait([job_id], timeout_s=20)
    assert job.state is JobState.FAILED
    assert job.exit is not None
    assert "supervisor" in job.exit.message
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    wait_until(lambda: all(g.job_id is None for g in client.gpus()))


def test_a_lost_gpu_leaves_service_and_the_others_go_on(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"faults": []}')
    with LocalCluster(["P100:4"], mock_faults={"node-1": faults}) as cluster:
        client = cluster.client
        faults.write_text('{"faults": [{"gpu": 1, "kind": "lost"}]}')
        wait_until(lambda: [g.healthy for g in client.gpus()] == [True, False, True, True])
        jobs = client.wait(client.submit_many([request("true", gpus=3)]), timeout_s=20)
        assert jobs[0].state is JobState.COMPLETED
        assert sorted(jobs[0].attempts[-1].ranks[0].gpu_indices) == [0, 2, 3]
