"""The JSON contract: one value on standard output for every command, also on error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import grpc
import pytest

from protos.messages import ExitFacts, JobState

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
HOSTILE = "q\"uo'te\\ [red]x[/red] 名前 \x9c".replace("\x9c", "…")


@pytest.fixture
def jobs(controller):
    """Job 1 runs on 1 GPU, 2 failed, 3 waits."""
    running = controller.add(
        JobState.RUNNING, name=HOSTILE, gpus=1, env={"HF_TOKEN": "t", "A": "1"}
    )
    failed = controller.add(JobState.RUNNING, gpus=2, time_limit_s=60.0)
    controller.end(failed, JobState.FAILED, ExitFacts(exit_code=3))
    controller.add(gpus=2, gpu_types=("P100",))
    controller.write(b"hello\n")
    assert running == 1
    return controller


ONE_VALUE = {
    "jobs": (["jobs"], 0, "jobs"),
    "jobs of a selector": (["jobs", "1-3"], 0, "jobs"),
    "job": (["job", "1"], 0, "job"),
    "explain": (["explain", "3"], 0, "explanation"),
    "submit": (["submit", "--", "true"], 0, "job_ids"),
    "submit several": (["submit", "--count", "3", "--", "true"], 0, "job_ids"),
    "submit a workload": (["submit", "resnet50", "--steps", "2"], 0, "job_ids"),
    "cancel": (["cancel", "1"], 0, "results"),
    "cancel some that are not there": (["cancel", "1,99"], 3, "results"),
    "cancel none": (["cancel", "all", "--user", "nobody"], 0, "results"),
    "hold": (["hold", "3"], 0, "results"),
    "hold a running one": (["hold", "1"], 1, "results"),
    "release": (["release", "3"], 1, "results"),
    "requeue": (["requeue", "2"], 0, "results"),
    "wait": (["wait", "2"], 3, "jobs"),
    "nodes": (["nodes"], 0, "nodes"),
    "gpus": (["gpus"], 0, "gpus"),
    "drain": (["drain", "gpu-node-1", "--reason", "new disk"], 0, "node"),
    "resume": (["resume", "gpu-node-1"], 0, "node"),
    "history": (["history"], 0, "totals"),
    "info": (["info"], 0, "cluster"),
    "config show": (["config", "show"], 0, "settings"),
    "version": (["version"], 0, "version"),
}


def with_json(args: list[str]) -> list[str]:
    """`--json` where the command takes it: before a workload's name or `--`."""
    at = 1 if args[0] == "submit" else len(args)
    return [*args[:at], "--json", *args[at:]]


@pytest.mark.parametrize(("args", "code", "key"), ONE_VALUE.values(), ids=ONE_VALUE)
def test_each_command_prints_one_value(jobs, rltune, args, code, key):
    ran = rltune(*with_json(args))
    assert ran.code == code
    assert ran.json["schema_version"] == 1
    assert key in ran.json
    check_conventions(ran.json)


def check_conventions(value, path=""):
    """Times are ISO 8601 with Z, no point in time is a number, nothing is in the wrong type."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key.endswith("_at") or key in {"at", "now"}:
                assert item is None or TIME.fullmatch(item), (path, key, item)
            assert not key.endswith(("_at_s", "now_s")), (path, key)
            assert key != "at_s", path
            if key.endswith("_bytes") and item is not None:
                assert type(item) is int, (path, key)
            if key.endswith(("_s", "_pct", "_w")) and item is not None:
                assert type(item) is float, (path, key)
            check_conventions(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_conventions(item, f"{path}[{i}]")


STREAMS = {
    "logs": (["logs", "1"], 0, "data"),
    "logs of a tail": (["logs", "1", "--tail", "1"], 0, "data"),
    "logs followed": (["logs", "2", "-f"], 3, "data"),
    "events": (["events"], 0, "event"),
    "events of a job": (["events", "--job", "1"], 0, "event"),
}


@pytest.mark.parametrize(("args", "code", "key"), STREAMS.values(), ids=STREAMS)
def test_streams_are_json_lines(jobs, rltune, args, code, key):
    ran = rltune(*args, "--json")
    assert ran.code == code
    assert ran.lines
    for line in ran.lines:
        assert line["schema_version"] == 1
        assert key in line
        check_conventions(line)


ERRORS = {
    "no such job": (["job", "99"], 3, "not_found"),
    "no such name": (["cancel", "@none"], 3, "not_found"),
    "no such job to wait for": (["wait", "99"], 3, "not_found"),
    "no such node": (["nodes", "none"], 3, "not_found"),
    "no such node to drain": (["drain", "none", "--reason", "x"], 3, "not_found"),
    "no job of that number has logs": (["logs", "99"], 3, "not_found"),
    "bad selector": (["cancel", "x"], 2, "invalid_argument"),
    "several where one is meant": (["job", "1-3"], 2, "invalid_argument"),
    "bad state": (["jobs", "--state", "SLEEPING"], 2, "invalid_argument"),
    "history of the living": (["history", "--state", "RUNNING"], 2, "invalid_argument"),
    "wait too long": (["wait", "1", "--timeout", "0s"], 124, "wait_timed_out"),
    "all without being asked": (["cancel", "all"], 2, "invalid_argument"),
    "unknown option": (["jobs", "--bogus"], 2, "usage"),
    "unknown command": (["jobz"], 2, "usage"),
    "missing argument": (["job"], 2, "usage"),
    "missing reason": (["drain", "gpu-node-1"], 2, "usage"),
    "value of the wrong kind": (["jobs", "--limit", "x"], 2, "usage"),
    "watch without a terminal": (["watch", "--interval", "x"], 2, "invalid_argument"),
    "bad address": (["jobs", "--controller", "nowhere"], 2, "invalid_settings"),
    "unreachable": (["jobs", "--controller", "127.0.0.1:1"], 4, "controller_unreachable"),
    "nothing to run": (["submit"], 2, "invalid_argument"),
    "unknown workload": (["submit", "resnet51"], 2, "invalid_argument"),
    "unknown option of a workload": (["submit", "resnet50", "--bogus"], 2, "invalid_argument"),
    "negative GPUs": (["submit", "--gpus", "-1", "--", "true"], 2, "invalid_argument"),
    "999999 GPUs": (["submit", "--gpus", "999999", "--", "true"], 2, "invalid_argument"),
    "bare time": (["submit", "--time", "90", "--", "true"], 2, "invalid_argument"),
    "negative time": (["submit", "--time", "-5m", "--", "true"], 2, "invalid_argument"),
    "missing folder": (["submit", "--cwd", "/none", "--", "true"], 2, "invalid_argument"),
    "name with a newline": (["submit", "-J", "a\nb", "--", "true"], 2, "invalid_argument"),
    "unset variable": (["submit", "--env", "RLTUNE_NONE", "--", "true"], 2, "invalid_argument"),
    "large environment": (["submit", "-e", "A=" + "x" * 10**6, "--", "x"], 2, "invalid_argument"),
    "missing job file": (["submit", "-f", "/none.yaml"], 2, "invalid_job_file"),
    "unknown qos": (["submit", "--qos", "urgent", "--", "true"], 2, "invalid_argument"),
    "contradiction": (
        ["submit", "--no-requeue", "--on-node-fail", "wait", "--", "x"], 2, "invalid_argument"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "code", "error"), ERRORS.values(), ids=ERRORS)
def test_errors_are_the_one_value(jobs, rltune, args, code, error):
    before = len(jobs.jobs)
    ran = rltune(*with_json(args))
    assert ran.code == code
    told = ran.json["error"]
    assert told["code"] == error
    assert told["message"]
    assert set(told) <= {"code", "message", "hint", "field"}
    assert len(jobs.jobs) == before


@pytest.mark.parametrize(("args", "code", "error"), ERRORS.values(), ids=ERRORS)
def test_the_same_errors_for_people_go_to_standard_error(jobs, rltune, args, code, error):
    ran = rltune(*args)
    assert ran.code == code
    assert ran.stdout == b""
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, 5),
        (grpc.StatusCode.UNAUTHENTICATED, 5),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 75),
        (grpc.StatusCode.UNAVAILABLE, 75),
        (grpc.StatusCode.FAILED_PRECONDITION, 2),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_what_the_controller_refuses_has_its_code(controller, rltune, refusal, status, code):
    detail = {"code": "never_fits", "message": "no node has 16 GPUs", "hint": "ask for 8"}
    controller.refusals = [refusal(status, detail)]
    ran = rltune("submit", "--json", "--", "true")
    assert ran.code == code
    assert ran.json["error"] == detail


def test_filters_act_on_json_as_well(jobs, rltune):
    states = rltune("jobs", "--all", "--state", "F,PD", "--json").json["jobs"]
    assert [job["state"] for job in states] == ["FAILED", "PENDING"]
    assert rltune("jobs", "--name", "none", "--json").json["jobs"] == []
    newest = rltune("jobs", "--all", "--limit", "1", "--json").json
    assert (len(newest["jobs"]), newest["more"]) == (1, True)


def test_a_job_in_json_has_what_was_asked_and_no_secret(jobs, rltune):
    job = rltune("job", "1", "--json").json["job"]
    assert job["spec"]["name"] == HOSTILE
    assert job["spec"]["env"] == {"HF_TOKEN": "***", "A": "1"}
    assert job["spec"]["time_limit_s"] is None
    assert job["submitted_at"] == "2026-09-21T14:13:20.250Z"
    assert job["attempts"][0]["ranks"][0]["gpu_uuids"] == ["GPU-gpu-node-1-0"]


def test_bytes_that_are_no_text_survive_json(jobs, rltune):
    jobs.logs.clear()
    jobs.write(b"\xff\x00\r")
    (line,) = rltune("logs", "1", "--json").lines
    assert (line["encoding"], line["data"]) == ("base64", "/wAN")


ODD_ENVIRONMENTS = {
    "no locale": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "colours forced": {"FORCE_COLOR": "1", "TERM": "xterm-256color"},
    "narrow": {"COLUMNS": "20"},
    "dumb": {"TERM": "dumb", "NO_COLOR": "1"},
    "squeue's": {"SQUEUE_FORMAT": "%i", "RLTUNE_FORMAT": "x", "RLTUNE_JSON": "0"},
    "almost empty": {},
    "debug": {"RLTUNE_DEBUG": "1"},
}


@pytest.mark.parametrize("environ", ODD_ENVIRONMENTS.values(), ids=ODD_ENVIRONMENTS)
def test_an_odd_environment_changes_no_json(jobs, environ, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "testbed.cli.main", "jobs", "--all", "--json"],
        env={"RLTUNE_CONTROLLER": jobs.address, "HOME": str(tmp_path), **environ},
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=30,
    )
    assert ran.stderr == b""
    document = json.loads(ran.stdout)
    assert ran.stdout.count(b"\n") == 1
    assert [job["job_id"] for job in document["jobs"]] == [1, 2, 3]
    assert document["jobs"][0]["spec"]["name"] == HOSTILE


def test_a_fault_of_ours_is_one_line_and_one_value(controller, rltune, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1 // 0)
    ran = rltune("jobs", "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "internal"
    assert "ZeroDivisionError" in ran.json["error"]["message"]
    assert "Traceback" not in ran.stderr
    monkeypatch.setenv("RLTUNE_DEBUG", "1")
    assert "Traceback" in rltune("jobs", "--json").stderr
