"""A local cluster of real processes: ready when it says so, and nothing left when it stops."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import psutil
import pytest

from protos.messages import JobState
from testbed.children import ProcessDied
from testbed.client import Client
from testbed.interrupts import Interrupts
from testbed.job_request import JobRequest
from testbed.leftovers import leftovers
from testbed.local import CONTROLLER, LocalCluster, StartInterrupted, StartRefused

DEAF_TO_SIGTERM = ("sh", "-c", "trap '' TERM; while :; do sleep 1; done")


@pytest.fixture(autouse=True)
def nothing_left_in_tmp(tmp_path_factory, monkeypatch):
    """The cluster's temporary folders are made in a folder of the test, which must end empty."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def job(*argv, **changes):
    return JobRequest(**({"argv": argv, "gpus": 1, "cwd": "/"} | changes))


def are_gone(pids):
    return not any(psutil.pid_exists(pid) for pid in pids)


def run_until_running(cluster, wait_until, *argv, **changes):
    job_id = cluster.client.submit(job(*argv, **changes))
    wait_until(
        lambda: cluster.client.job(job_id).state is JobState.RUNNING,
        describe=lambda: cluster.client.job(job_id),
    )
    return job_id


def test_inside_the_block_all_is_up_and_afterwards_all_is_gone():
    with LocalCluster(["P100:2", "T4:1,P100:1"], policy="fcfs", allocator="greedy") as cluster:
        pids = list(cluster.pids.values())
        assert list(cluster.pids) == [CONTROLLER, "node-1", "node-2"]
        nodes = cluster.client.nodes()
        assert [(node.name, node.state) for node in nodes] == [("node-1", "UP"), ("node-2", "UP")]
        assert [gpu.facts.gpu_type for gpu in nodes[1].gpus] == ["T4", "P100"]
        assert nodes[0].facts.cpus >= 8
        assert cluster.client.info().policy == "fcfs"
        cluster.check()
        folder = cluster.state_dir
        assert (folder / "logs" / "node-2.log").exists()
    assert are_gone(pids)
    assert not folder.exists()


def test_stopping_cancels_what_runs_and_what_waits(wait_until):
    cluster = LocalCluster(["P100:1"])
    cluster.start()
    running = run_until_running(cluster, wait_until, "sleep", "600")
    waiting = cluster.client.submit(job("sleep", "600"))
    stopped = cluster.stop()
    assert stopped.cancelled == (running, waiting)
    assert stopped.unfinished == stopped.killed == stopped.leftovers == ()


def test_state_in_a_given_folder_outlives_the_cluster(tmp_path):
    with LocalCluster(["P100:1"], state_dir=tmp_path / "a b") as cluster:
        [ended] = cluster.client.wait([cluster.client.submit(job("true"))], timeout_s=30)
        assert ended.state is JobState.COMPLETED
    with LocalCluster(["P100:1"], state_dir=tmp_path / "a b") as cluster:
        assert cluster.client.job(ended.job_id).state is JobState.COMPLETED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": ["NOSUCH:4"]}, "NOSUCH"),
        ({"gpus": ["P100:1"], "policy": "nosuch"}, "nosuch"),
        ({"gpus": ["P100:1"], "allocator": "nosuch"}, "nosuch"),
        ({"gpus": ["P100:1"], "name": "no such"}, "no such"),
    ],
)
def test_what_controller_or_agent_refuse_is_told_in_their_words(options, said, tmp_path):
    cluster = LocalCluster(**options, state_dir=tmp_path)
    with pytest.raises(StartRefused, match=said):
        cluster.start()
    assert are_gone(cluster.pids.values())


def test_a_state_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartRefused, match="Not a directory"):
        LocalCluster(["P100:1"], state_dir=tmp_path / "file" / "state").start()


def test_a_state_folder_in_use_is_refused_and_its_user_goes_on(tmp_path):
    with LocalCluster(["P100:1"], state_dir=tmp_path) as first:
        with pytest.raises(StartRefused):
            LocalCluster(["P100:1"], state_dir=tmp_path).start()
        first.check()
        with Client(first.address) as client:
            assert client.nodes()[0].state == "UP"


@pytest.mark.parametrize("name", [CONTROLLER, "node-1"])
def test_a_crash_is_told_and_what_crashed_can_be_started_again(name):
    with LocalCluster(["P100:1"]) as cluster:
        address = cluster.address
        cluster.kill(name)
        with pytest.raises(ProcessDied, match=f"{name} ended by signal SIGKILL"):
            cluster.check()
        cluster.restart(name)
        cluster.check()
        assert cluster.address == address
        [ended] = cluster.client.wait([cluster.client.submit(job("true"))], timeout_s=30)
        assert ended.state is JobState.COMPLETED


def test_jobs_of_a_dead_controller_are_ended_through_their_supervisors(wait_until):
    cluster = LocalCluster(["P100:1"])
    cluster.start()
    run_until_running(cluster, wait_until, "sleep", "600")
    folder = cluster.state_dir
    cluster.kill(CONTROLLER)
    stopped = cluster.stop()
    assert stopped.orphaned == (1,)
    assert stopped.leftovers == ()
    assert leftovers(folder) == ()


def test_a_second_interrupt_hurries_and_leaves_nothing(wait_until):
    with Interrupts() as interrupts:
        cluster = LocalCluster(["P100:1"], interrupts=interrupts)
        cluster.start()
        run_until_running(cluster, wait_until, *DEAF_TO_SIGTERM, grace_s=600.0)
        folder = cluster.state_dir
        for signum in (signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), signum)
        wait_until(lambda: interrupts.hurry)
        started = time.monotonic()
        stopped = cluster.stop()
    assert time.monotonic() - started < 30
    assert stopped.unfinished
    assert stopped.leftovers
    assert leftovers(folder) == ()


def test_an_interrupt_while_it_starts_ends_the_start():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        cluster = LocalCluster(["P100:1"], interrupts=interrupts)
        with pytest.raises(StartInterrupted):
            cluster.start()
    assert are_gone(cluster.pids.values())
