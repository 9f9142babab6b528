"""The `rltune` executable against a real cluster: training, its exit codes, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.client import Client
from testbed.local import LocalCluster

RLTUNE = str(Path(sys.prefix) / "bin" / "rltune")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(["P100:4"]) as running:
        yield running


class Cli:
    """Runs the executable in a folder of its own."""

    def __init__(self, address: str, cwd: Path) -> None:
        self.env = {**os.environ, "RLTUNE_CONTROLLER": address, "XDG_CONFIG_HOME": str(cwd)}
        self.cwd = cwd

    def __call__(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [RLTUNE, *args],
            env={**self.env, **env},
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def json(self, *args: str) -> Any:
        done = self(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def rltune(cluster: LocalCluster, tmp_path: Path) -> Cli:
    return Cli(cluster.address, tmp_path)


def test_a_model_is_trained_to_its_end_and_accounted_for(rltune: Cli) -> None:
    args = ("resnet18", "--dataset", "digits", "--steps", "6", "--batch-size", "16")
    done = rltune("submit", "--wait", "--gpus", "1", "--gpu-type", "p100", *args)
    assert done.returncode == 0, done.stderr + done.stdout
    job_id = "1"
    lines = [json.loads(line) for line in rltune("logs", job_id).stdout.splitlines() if line]
    summary = lines[-1]
    assert summary["event"] == "summary"
    assert summary["steps"] == 6
    history = rltune("history", "--json")
    (row,) = json.loads(history.stdout)["jobs"]
    assert row["state"] == "COMPLETED"
    assert row["gpu_s"] > 0


def test_a_stopped_training_saves_and_goes_on_when_requeued(
    rltune: Cli, cluster: LocalCluster
) -> None:
    args = ("resnet18", "--dataset", "digits", "--steps", "400", "--batch-size", "4")
    submitted = rltune(
        "submit", "-q", "--gpus", "1", *args, "--progress-every", "1", "--checkpoint-every", "5"
    )
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    _wait_for_step(rltune, job_id, 10)
    assert rltune("requeue", job_id).returncode == 0
    deadline_s = time.monotonic() + 60
    while True:
        job = cluster.client.job(int(job_id))
        out = rltune("logs", job_id, "--attempt", "2").stdout if len(job.attempts) > 1 else ""
        steps = [json.loads(x)["step"] for x in out.splitlines() if '"progress"' in x]
        if steps:
            break
        assert time.monotonic() < deadline_s, job
    assert steps[0] > 5
    assert rltune("cancel", job_id).returncode == 0
    assert rltune("wait", job_id).returncode != 0


def _wait_for_step(rltune: Cli, job_id: str, step: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        lines = rltune("logs", job_id).stdout.splitlines()
        if any(json.loads(x).get("step", 0) >= step for x in lines if '"progress"' in x):
            return
        assert time.monotonic() < deadline_s, lines[-3:]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["submit", "resnet18", "--gpus", "2"], 2, ["--gpus", "before the name"]),
        (["submit", "resnet5000"], 2, ["resnet5000", "resnet50"]),
        (["submit", "--gpus", "999", "--", "true"], 2, ["999", "4"]),
        (["submit", "--gpus", "-1", "--", "true"], 2, ["gpus"]),
        (["submit", "--gpu-type", "Z9000", "--gpus", "1", "--", "true"], 2, ["Z9000", "P100"]),
        (["submit", "--gpu-type", "P100", "--", "true"], 2, ["--gpus"]),
        (["submit", "--cwd", "", "--", "true"], 2, ["--cwd"]),
        (["submit", "--name", " ", "--", "true"], 2, ["--name"]),
        (["submit", "--cwd", "/" + "é" * 5000, "--", "true"], 2, ["--cwd"]),
        (["jobs", "--user", ""], 2, ["--user"]),
        (["events", "--node", ""], 2, ["--node"]),
        (["events", "--after", "9" * 23], 2, ["--after"]),
        (["logs", "1", "--tail", "9" * 23], 2, ["--tail"]),
        (["logs", "1", "--attempt", "9" * 23], 2, ["--attempt"]),
        (["resume", "é" * 5000], 2, ["NODE", "longer"]),
        (["resume", "\N{GRINNING FACE}" * 900], 3, ["no node"]),
        (["submit", "--time", "-5m", "--", "true"], 2, ["-5m"]),
        (["submit", "--time", "90", "--", "true"], 2, ["90s", "90m"]),
        (["submit", "--mem", "lots", "--", "true"], 2, ["lots"]),
        (["submit", "--cwd", "/no/such/folder", "--", "true"], 2, ["/no/such/folder"]),
        (["submit", "--env", f"BIG={'x' * 120_000}", "--name", "two\nlines", "--", "true"], 2, []),
        (["submit", "--name", "two\nlines", "--", "true"], 2, ["name"]),
        (["submit", "--frobnicate", "--", "true"], 2, ["frobnicate"]),
        (["submit"], 2, []),
        (["submit", "-f", "missing.yaml"], 2, ["missing.yaml"]),
        (["submit", "-f", "typo.yaml"], 2, ["gpuz", "gpus"]),
        (["submit", "-f", "broken.yaml"], 2, ["broken.yaml"]),
        (["job", "123456"], 3, ["123456"]),
        (["logs", "123456"], 3, ["123456"]),
        (["wait", "123456"], 3, ["123456"]),
        (["cancel", "123456"], 3, ["123456"]),
        (["explain", "123456"], 3, ["123456"]),
        (["job", "abc"], 2, ["abc"]),
        (["drain", "node-77", "--reason", "x"], 3, ["node-77"]),
        (["drain", "node-1"], 2, ["reason"]),
        (["up", "--gpus", "Q9:4"], 2, ["Q9", "P100"]),
        (["agent", "--mock-gpus", "P100:x"], 2, ["P100:x"]),
        (["controller", "--listen", "0.0.0.0:0"], 2, ["--insecure"]),
        (["controller", "--listen", "nonsense"], 2, ["nonsense"]),
        (["controller", "--policy", "best"], 2, ["multifactor"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_says_what_and_exits_with_the_right_code(
    rltune: Cli, args: list[str], code: int, words: list[str]
) -> None:
    (rltune.cwd / "typo.yaml").write_text("command: [true]\ngpuz: 2\n")
    (rltune.cwd / "broken.yaml").write_text("command: [true\ngpus: {")
    began_s = time.monotonic()
    done = rltune(*args)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert time.monotonic() - began_s < 10
    missing = [word for word in words if word.lower() not in done.stderr.lower()]
    assert not missing, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_megabyte_of_environment_is_refused(rltune: Cli) -> None:
    many = [f"--env=V{i}={'x' * 100_000}" for i in range(11)]
    done = rltune("submit", *many, "--", "true")
    assert done.returncode == 2, done.stderr
    assert "bytes" in done.stderr


def test_no_controller_is_told_within_seconds(rltune: Cli) -> None:
    began_s = time.monotonic()
    done = rltune("jobs", RLTUNE_CONTROLLER="127.0.0.1:1")
    assert done.returncode == 4
    assert "127.0.0.1:1" in done.stderr
    assert "rltune up" in done.stderr
    assert time.monotonic() - began_s < 8


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_submit_wait_and_wait_return_the_jobs_own_code(rltune: Cli, script: str, code: int) -> None:
    done = rltune("submit", "--wait", "--", "sh", "-c", script)
    assert done.returncode == code
    last = rltune.json("jobs", "--all")["jobs"][-1]["job_id"]
    assert rltune("wait", str(last)).returncode == code


def test_a_time_limit_gives_124(rltune: Cli) -> None:
    done = rltune("submit", "--wait", "--time", "1s", "--grace", "1s", "--", "sleep", "60")
    assert done.returncode == 124


def test_a_job_that_cannot_start_says_why_where_one_looks(rltune: Cli) -> None:
    done = rltune("submit", "--wait", "--", "no-such-program-here")
    assert done.returncode == 127
    assert "no-such-program-here" in done.stdout
    job_id = str(rltune.json("jobs", "--all")["jobs"][-1]["job_id"])
    for args in (["logs", job_id], ["logs", "-f", job_id]):
        assert "no-such-program-here" in rltune(*args).stderr


@pytest.mark.parametrize("redirection", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("command", ["nodes --json", "jobs --all", "submit -q --hold -- true"])
def test_output_that_cannot_be_written_is_told_and_loses_no_job_number(
    rltune: Cli, command: str, redirection: str
) -> None:
    before = len(rltune.json("jobs", "--all")["jobs"])
    done = subprocess.run(
        ["sh", "-c", f"{RLTUNE} {command} {redirection}"],
        env=rltune.env,
        cwd=rltune.cwd,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 74, done.stderr
    assert "standard output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    after = rltune.json("jobs", "--all")["jobs"]
    if command.startswith("submit"):
        assert len(after) == before + 1
        assert f"submitted job {after[-1]['job_id']}" in done.stderr
        rltune("cancel", str(after[-1]["job_id"]))


def test_the_python_client_finds_the_controller_as_the_command_line_does(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLTUNE_CONTROLLER", cluster.address)
    with Client() as client:
        assert client.info().nodes_total == 1
