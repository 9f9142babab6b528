"""`rltune up` and `rltune demo` as a shell runs them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

RLTUNE = str(Path(sys.executable).with_name("rltune"))


def rltune(*args, timeout_s=110, **options):
    return subprocess.run(
        [RLTUNE, *args], capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )


@pytest.fixture
def up(request):
    """A running `rltune up --json`; ended by the test, or killed with what it started."""
    process = subprocess.Popen(
        [RLTUNE, "up", "--json", "--port", "0", *request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.parametrize("up", [("--nodes", "2", "--gpus", "P100:4")], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_up_tells_where_it_is_and_stops_cleanly(up, signum):
    ready = json.loads(up.stdout.readline())
    assert [node["name"] for node in ready["nodes"]] == ["node-1", "node-2"]
    assert [len(node["gpus"]) for node in ready["nodes"]] == [4, 4]
    pids = [ready["controller"]["pid"], *(node["pid"] for node in ready["nodes"])]
    environ = {"RLTUNE_CONTROLLER": ready["address"], "HOME": "/", "PATH": "/usr/bin:/bin"}
    submitted = rltune("submit", "--json", "--gpus", "2", "--", "sleep", "600", env=environ)
    assert submitted.returncode == 0, submitted.stderr
    up.send_signal(signum)
    rest, said = up.communicate(timeout=60)
    assert up.returncode == 0, said
    assert rest == ""
    assert "cancelled jobs: 1" in said
    assert not any(psutil.pid_exists(pid) for pid in pids)


def wait_until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # noqa: TID251 - between two looks at an observable


def of(state_dir):
    """Command lines of living processes that name the state folder."""
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(state_dir) in word for word in process.info["cmdline"] or [])
    ]


@pytest.fixture
def up_in(tmp_path):
    """`rltune up` with a state folder: the process, and a way to ask its controller."""
    state = tmp_path / "state"
    command = [RLTUNE, "up", "--json", "--port", "0", "--gpus", "P100:4", "--state-dir", str(state)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    ready = json.loads(process.stdout.readline())
    environ = {"RLTUNE_CONTROLLER": ready["address"], "HOME": "/", "PATH": "/usr/bin:/bin"}
    yield process, ready, state, lambda *args: rltune(*args, env=environ)
    if process.poll() is None:
        process.terminate()
    process.wait(60)
    process.stdout.close()


def test_up_starts_a_part_that_died_again_and_jobs_go_on(up_in, tmp_path):
    _, ready, _, ask = up_in
    gate = tmp_path / "gate"
    script = f'until [ -e "{gate}" ]; do sleep 0.05; done; exit 6'
    assert ask("submit", "--gpus", "1", "--", "sh", "-c", script).returncode == 0
    running = lambda: '"RUNNING"' in ask("job", "1", "--json").stdout  # noqa: E731
    wait_until(running)
    psutil.Process(ready["nodes"][0]["pid"]).kill()
    psutil.Process(ready["controller"]["pid"]).kill()
    wait_until(running)
    gate.touch()
    assert ask("wait", "1").returncode == 6


def test_nothing_is_left_of_up_when_it_is_killed(up_in):
    process, _, state, ask = up_in
    assert ask("submit", "--gpus", "1", "--", "sleep", "600").returncode == 0
    wait_until(lambda: '"RUNNING"' in ask("job", "1", "--json").stdout)
    process.kill()
    wait_until(lambda: not of(state))
    assert (state / "controller" / "controller.db").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gpus", "P100"], "P100"),
        (["--gpus", "P100:0"], "P100:0"),
        (["--gpus", "P100:4,"], "--gpus"),
        (["--gpus", "4"], "--gpus"),
        (["--gpus", "NOSUCH:4"], "NOSUCH"),
        (["--nodes", "2"], "--nodes"),
        (["--gpus", "P100:1", "--policy", "nosuch"], "nosuch"),
        (["--gpus", "P100:1", "--state-dir", "/dev/null/state"], "/dev/null/state"),
    ],
)
def test_up_refuses_what_cannot_be(args, said):
    ended = rltune("up", "--json", "--port", "0", *args)
    assert ended.returncode == 2
    assert said in json.loads(ended.stdout)["error"]["message"]


def test_up_refuses_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = rltune("up", "--gpus", "P100:1", "--port", port)
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "--port 0" in ended.stderr


def test_demo_trains_to_the_end_and_leaves_a_report(tmp_path):
    report = tmp_path / "new folder" / "report.html"
    ended = rltune("demo", "--jobs", "2", "--json", "--report", str(report))
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [job["state"] for job in told["jobs"]] == ["COMPLETED"] * 2
    assert all(job["jct_s"] >= job["run_s"] > 0 for job in told["jobs"])
    assert told["summary"]["completed"] == 2
    assert told["failures"] == []
    assert "resnet101-b32-dp" in report.read_text()
    assert "RUNNING on node-" in ended.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_demo_cancels_its_jobs(tmp_path, signum):
    argv = [RLTUNE, "demo", "--json", "--report", str(tmp_path / "report.html")]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as demo:
        while "RUNNING" not in (line := demo.stderr.readline()):
            assert line, "the demo ended before a job ran"
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signum)
        said, _ = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert json.loads(said)["error"]["code"] == "interrupted"
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_demo_refuses_a_report_that_cannot_be_written():
    ended = rltune("demo", "--report", "/dev/null/report.html")
    assert ended.returncode == 2
    assert "/dev/null/report.html" in ended.stderr
