"""Partitions, uneven and mixed jobs, backfill and forecasts on a real local cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.messages import JobState, JobView
from testbed.client import Client
from testbed.client_errors import Infeasible, InvalidRequest, NotAllowed
from testbed.job_request import JobRequest
from testbed.local import LocalCluster

CONFIG = """
partitions:
  - {name: all, nodes: ["node-*"], default: true}
  - {name: small, nodes: [node-3], max_gpus_per_user: 1, max_time: 1h}
  - {name: staff, nodes: [node-1], allow_users: [nobody-here]}
gpu_types:
  P100: {speed: 0.5}
  V100-16GB: {speed: 0.9}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = tmp_path_factory.mktemp("config") / "cluster.yaml"
    config.write_text(CONFIG)
    gpus = ["P100:4", "P100:2", "V100-16GB:2"]
    options = ("--config", str(config), "--backfill", "easy")
    with LocalCluster(gpus, policy="fcfs", controller_options=options) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    yield cluster.client
    unfinished = [s for s in JobState if not s.is_final]
    left = [job.job_id for job in cluster.client.jobs(states=unfinished)]
    if left:
        cluster.client.cancel(left)
        cluster.client.wait(left, timeout_s=30.0)


def request(*argv: str, **options: object) -> JobRequest:
    return JobRequest(argv=argv, cwd="/", **options)  # type: ignore[arg-type]


def ended(client: Client, job_id: int) -> JobView:
    client.wait([job_id], timeout_s=60.0)
    return client.job(job_id)


def said(client: Client, job_id: int) -> list[str]:
    pieces: dict[int, bytes] = {}
    for piece in client.logs(job_id):
        pieces[piece.node_rank] = pieces.get(piece.node_rank, b"") + piece.data
    return [pieces[rank].decode().strip() for rank in sorted(pieces)]


def test_a_job_over_as_few_nodes_as_possible_has_uneven_shares(client: Client) -> None:
    say = 'echo "$RLTUNE_GPUS_BY_NODE $PET_NPROC_PER_NODE $WORLD_SIZE $RLTUNE_NNODES"'
    job_id = client.submit(request("sh", "-c", say, gpus=5, gpu_types=("P100",), nodes=0))
    job = ended(client, job_id)
    assert job.state is JobState.COMPLETED
    shares = sorted(len(rank.gpu_uuids) for rank in job.attempts[-1].ranks)
    assert sum(shares) == 5
    assert len(shares) == 2
    by_node = [len(rank.gpu_uuids) for rank in job.attempts[-1].ranks]
    text = ",".join(map(str, by_node))
    assert said(client, job_id) == [f"{text} {share} 5 2" for share in by_node]


def test_a_job_mixes_types_only_if_it_says_so(client: Client) -> None:
    with pytest.raises(Infeasible, match="the largest so many have 6"):
        client.submit(request("true", gpus=8, nodes=0))
    job = ended(client, client.submit(request("true", gpus=4, nodes=2, mix_gpu_types=True)))
    assert job.state is JobState.COMPLETED
    with pytest.raises(Infeasible, match="needs 3 nodes with 2 P100"):
        client.submit(request("true", gpus=6, nodes=3))
    job = ended(client, client.submit(request("true", gpus=6, nodes=3, mix_gpu_types=True)))
    assert {rank.node for rank in job.attempts[-1].ranks} == {"node-1", "node-2", "node-3"}


def test_the_type_that_does_most_for_its_price_is_taken(client: Client) -> None:
    job = ended(client, client.submit(request("true", gpus=1)))
    assert job.attempts[-1].ranks[0].node == "node-3"


def test_least_gpu_memory(client: Client) -> None:
    with pytest.raises(Infeasible, match="--gpu-mem"):
        client.submit(request("true", gpus=1, min_gpu_memory_bytes=80 << 30))
    job = ended(client, client.submit(request("true", gpus=1, min_gpu_memory_bytes=15 << 30)))
    assert job.state is JobState.COMPLETED


def test_partitions_admit_limit_and_queue(client: Client, wait_until: Callable[..., None]) -> None:
    with pytest.raises(InvalidRequest, match="no partition 'nowhere'"):
        client.submit(request("true", gpus=1, partition="nowhere"))
    with pytest.raises(NotAllowed, match="may not use partition staff"):
        client.submit(request("true", gpus=1, partition="staff"))
    with pytest.raises(Infeasible, match="at most"):
        client.submit(request("true", gpus=1, partition="small", time_limit_s=7200.0))
    with pytest.raises(Infeasible, match="allows 1 for the jobs of one user"):
        client.submit(request("true", gpus=2, partition="small"))
    first = client.submit(request("sleep", "60", gpus=1, partition="small"))
    second = client.submit(request("true", gpus=1, partition="small"))
    elsewhere = client.submit(request("true", gpus=1))
    assert ended(client, elsewhere).spec.partition == "all"
    assert client.job(first).spec.time_limit_s == 3600.0
    wait_until(lambda: client.job(second).reason == "Quota", describe=lambda: client.job(second))
    assert "allows 1 GPUs for each user" in client.explain(second).text
    views = {view.name: view for view in client.info().partitions}
    assert (views["small"].nodes, views["small"].gpus_used) == (("node-3",), 1)
    assert views["all"].is_default
    client.cancel([first])
    assert ended(client, second).state is JobState.COMPLETED


def test_backfill_reserves_explains_and_forecasts(
    client: Client, wait_until: Callable[..., None]
) -> None:
    p100: dict[str, object] = {"gpu_types": ("P100",)}
    holder = client.submit(request("sleep", "60", gpus=3, time_limit_s=300.0, **p100))
    wait_until(
        lambda: client.job(holder).state is JobState.RUNNING, describe=lambda: client.job(holder)
    )
    large = client.submit(request("true", gpus=4, time_limit_s=60.0, **p100))
    wait_until(lambda: client.job(large).reason != "", describe=lambda: client.job(large))
    text = client.explain(large).text
    assert "needs 4 P100 on one node" in text
    assert "reserved node-1" in text
    assert f"job {holder} ends" in text
    told = client.forecast(request("true", gpus=4, time_limit_s=60.0, **p100))
    assert told.starts_in_s is not None
    assert 200.0 < told.starts_in_s <= 361.0
    assert told.nodes == ("node-1",)
    assert told.ahead == 1
    now = client.forecast(request("true", gpus=2, **p100))
    assert (now.starts_in_s, now.nodes) == (0.0, ("node-2",))
    with pytest.raises(Infeasible):
        client.forecast(request("true", gpus=99))
    blocks = client.submit(request("sleep", "600", gpus=1, **p100))
    fits = client.submit(request("true", gpus=1, time_limit_s=30.0, **p100))
    assert ended(client, fits).state is JobState.COMPLETED
    assert client.job(blocks).attempts[-1].ranks[0].node == "node-2"
    client.cancel([holder])
    assert ended(client, large).state is JobState.COMPLETED


def test_the_command_line_shows_it(cluster: LocalCluster) -> None:
    def rltune(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "testbed.cli.main", *argv],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "RLTUNE_CONTROLLER": cluster.address},
        )

    shown = rltune("partitions")
    assert "all*" in shown.stdout
    assert json.loads(rltune("partitions", "--json").stdout)["partitions"][1]["name"] == "small"
    asked = rltune("whatif", "submit", "--gpus", "2", "--", "true")
    assert asked.stdout.startswith("would start now on node-")
    answer = json.loads(rltune("whatif", "submit", "--json", "--gpus", "2", "--", "true").stdout)
    assert answer["forecast"]["starts_in_s"] == 0.0
    auto = rltune("submit", "-q", "--wait", "--gpus", "5", "--gpu-type", "P100", "--nodes", "auto",
                  "--", "sh", "-c", "echo here")  # fmt: skip
    assert auto.returncode == 0, auto.stderr
    job_id = auto.stdout.split()[0]
    listed = rltune("jobs", "--all").stdout.splitlines()
    (line,) = (line for line in listed if line.split()[:1] == [job_id])
    assert line.split()[7] == "2"
    assert "auto (2)" in rltune("job", job_id).stdout
    assert sorted(rltune("logs", job_id).stdout.split()) == ["[0]", "[1]", "here", "here"]
    refused = rltune("submit", "--gpus", "1", "--nodes", "many", "--", "true")
    assert refused.returncode == 2
    assert "--nodes" in refused.stderr
    bad = rltune("controller", "--config", str(Path(__file__)))
    assert bad.returncode == 2
    assert "--config" in bad.stderr
