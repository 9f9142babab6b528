"""What a person or a script gets wrong: told in the words of the command line, before it acts."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys

import pytest

from protos.messages import ExitFacts, JobSpec, JobState, LaunchFault
from testbed.cli.field_names import OPTIONS
from testbed.cli.main import MAX_SHOWN_CHARS

RLTUNE = [sys.executable, "-P", "-m", "testbed.cli.main"]
NINES = "9" * 400
NOT_UTF8 = "\udcff"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["submit", "--mem", NINES + "G", "--", "true"], ["--mem", "any memory"]),
        (["submit", "--time", NINES + "d", "--", "true"], ["--time", "ten years"]),
        (["submit", "--nodes", NINES, "--", "true"], ["--nodes: ", "16,384"]),
        (["submit", "--priority", NINES, "--", "true"], ["--priority: "]),
        (["submit", "--count", NINES, "--", "true"], ["--count"]),
        (["submit", "--gpus", "3", "-N", "2", "--", "true"], ["--gpus: ", "2 nodes"]),
        (["submit", "--grace", "3d", "--", "true"], ["--grace: "]),
        (["submit", "--gpu-type", "a b", "-G", "1", "--", "true"], ["--gpu-type: "]),
        (["submit", "--file", ""], ["--file is empty"]),
        (["submit", "--env", "", "--", "true"], ["--env", "no variable"]),
        (["submit", "--name", NOT_UTF8, "--", "true"], ["--name", "not UTF-8"]),
        (["submit", "qqqqqq"], ["qqqqqq", "`rltune workloads`"]),
        (["wait", "1", "--timeout", NINES + "d"], ["--timeout", "ten years"]),
        (["watch", "--interval", "9999999999d"], ["--interval", "ten years"]),
        (["jobs", "--name", ""], ["--name", "empty"]),
        (["history", "--name", " "], ["--name", "empty"]),
        (["nodes", ""], ["NODE", "empty"]),
        (["gpus", ""], ["NODE", "empty"]),
        (["resume", ""], ["NODE", "empty"]),
        (["cancel", "1", "--reason", ""], ["--reason", "empty"]),
        (["drain", "gpu-node-1", "--reason", "x" * 2000], ["--reason", "longer"]),
        (["nodes", NOT_UTF8], ["NODE", "not UTF-8"]),
        (["jobs", "--user", NOT_UTF8], ["--user", "not UTF-8"]),
        (["jobs", "@" + NOT_UTF8], ["JOBS", "not UTF-8"]),
        (["job", "@" + NOT_UTF8], ["JOB", "not UTF-8"]),
        (["cancel", "1", "--user", "bob"], ["--user", "1 names jobs by their numbers"]),
        (["wait", "1-2", "--user", "bob"], ["--user", "1-2 names"]),
        (["cancel", " all"], ["-y"]),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_what_cannot_be_meant_is_told_by_the_option_and_changes_nothing(
    controller, rltune, args, words
):
    controller.add()
    ran = rltune(*args)
    assert (ran.code, ran.out) == (2, "")
    for word in words:
        assert word in ran.stderr
    assert "spec." not in ran.stderr
    assert [job.state for job in controller.jobs.values()] == [JobState.PENDING]


def test_programs_get_the_field_as_the_wire_has_it(controller, rltune):
    error = rltune("submit", "--json", "--gpus", "3", "-N", "2", "--", "true").json["error"]
    assert error["field"] == "spec.gpus"
    assert error["message"].startswith("--gpus: ")


def test_every_field_of_a_job_has_an_option():
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(JobSpec)}


def test_what_the_controller_refuses_is_told_by_the_option_too(controller, rltune, refusal):
    from grpc import StatusCode  # noqa: PLC0415

    detail = {"code": "x", "message": "jobs[0].spec.mem: no", "field": "jobs[0].spec.mem"}
    detail = {name: text.replace("mem", "memory_bytes") for name, text in detail.items()}
    controller.refusals = [refusal(StatusCode.INVALID_ARGUMENT, detail)]
    assert "error: --mem: no\n" in rltune("submit", "--", "true").stderr


def test_numbers_and_a_user_together_filter_a_list(controller, rltune):
    controller.add(name="a", user="ann")
    controller.add(name="b", user="bob")
    ran = rltune("jobs", "1-9", "--user", "bob", "--json")
    assert [job["job_id"] for job in ran.json["jobs"]] == [2]


def test_a_megabyte_in_an_error_is_not_shown(controller, rltune):
    ran = rltune("submit", "--qos", "x" * 100_000, "--", "true")
    assert ran.code == 2
    assert len(ran.stderr) < MAX_SHOWN_CHARS + 200


def test_a_job_file_from_standard_input(controller, rltune, monkeypatch):
    def give(text: str) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)

    give("command: echo hi\ngpus: 1\ncwd: /\n")
    assert rltune("submit", "-q", "-f", "-").out == "1\n"
    assert controller.jobs[1].spec.argv == ("echo", "hi")
    give("command: echo hi\ngpuz: 1\n")
    ran = rltune("submit", "-f", "-")
    assert ran.code == 2
    assert "standard input: line 2: unknown key 'gpuz'" in ran.stderr
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input holds no keys" in rltune("submit", "-f", "-").stderr


# ------------------------------------------------------------------ how a job ended


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("command 'x' was not found in PATH=/bin: give its full path, or set PATH", 127),
        ("'/x' is not executable: run `chmod +x` on it, or call its interpreter", 126),
        ("working directory '/x' does not exist on this node: create it, or give another", 1),
    ],
)
def test_a_program_that_could_not_be_started_is_told(controller, rltune, message, code):
    controller.add(JobState.RUNNING)
    facts = ExitFacts(launch_fault=LaunchFault.JOB, message=message)
    controller.end(1, JobState.FAILED, facts)
    controller.jobs[1] = dataclasses.replace(controller.jobs[1], reason_text=message)
    ran = rltune("wait", "1")
    assert ran.code == code
    assert message in ran.out
    ran = rltune("logs", "-f", "1")
    assert ran.code == code
    assert message in ran.stderr


def test_following_a_job_that_is_cancelled_while_it_waits_says_so(controller, environ, wait_until):
    controller.add()
    process = subprocess.Popen(
        [*RLTUNE, "logs", "-f", "1"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: any(kind == "StreamLogsRequest" for kind, _ in controller.requests))
    controller.jobs[1] = dataclasses.replace(
        controller.jobs[1], state=JobState.CANCELLED, reason_text="Cancelled by ann."
    )
    controller.tell(1, "JobEnded")
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (143, b"")
    assert b"job 1 is CANCELLED: Cancelled by ann." in stderr


def test_what_had_ended_before_is_told_once(controller, rltune):
    controller.add(JobState.CANCELLED)
    assert rltune("logs", "-f", "1").stderr.count("CANCELLED") == 1


# ------------------------------------------------------------------ the world around


@pytest.fixture
def environ(controller, tmp_path):
    return {
        "RLTUNE_CONTROLLER": controller.address,
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }


@pytest.mark.parametrize("redirection", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("words", ["--help", "--version", "jobs --help", "workloads"])
def test_output_that_cannot_be_written_is_told_apart_before_a_command_runs_too(
    environ, words, redirection
):
    ran = subprocess.run(
        ["sh", "-c", f"{' '.join(RLTUNE)} {words} {redirection}"],
        env=environ, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 74
    assert ran.stderr.startswith(b"error: standard output cannot be written")
    assert ran.stderr.count(b"\n") == 1


def test_an_error_that_stdout_cannot_take_is_told_on_stderr(environ):
    ran = subprocess.run(
        ["sh", "-c", f"{' '.join(RLTUNE)} job 99 --json > /dev/full"],
        env=environ, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 3
    assert b"there is no job 99" in ran.stderr


def test_a_name_means_the_same_in_every_locale(controller, environ):
    environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["submit", "--name", "名前é", "--", "true", "ü"]
    ran = subprocess.run([*RLTUNE, *words], env=environ, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert controller.jobs[1].spec.name == "名前é"
    assert controller.jobs[1].spec.argv == ("true", "ü")
    ran = subprocess.run(
        [*RLTUNE, "jobs", "--name", "名前é"], env=environ, capture_output=True, check=False
    )
    head, row = ran.stdout.splitlines()
    assert row.index(b"PENDING") == head.index(b"STATE")


# ------------------------------------------------------------------ completion


def completions(environ, words: str) -> list[str]:
    ran = subprocess.run(
        RLTUNE,
        env=environ | {"_TYPER_COMPLETE_ARGS": words, "_RLTUNE_COMPLETE": "complete_bash",
                       "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rltune submit --qos ", ["low", "normal", "high"]),
        ("rltune submit --on-node-fail w", ["wait"]),
        ("rltune submit resnet1", ["resnet18", "resnet101", "resnet152"]),
        ("rltune jobs --state R,p", ["R,pending"]),
        ("rltune jobs --state R", ["RUNNING"]),
        ("rltune history --state R", []),
        ("rltune history --state TIME", ["TIMEOUT"]),
        ("rltune resume gpu-", ["gpu-node-1", "gpu-node-2"]),
        ("rltune logs --node gpu-node-2", ["gpu-node-2"]),
        ("rltune cancel ", ["1", "last", "all", "@mine"]),
        ("rltune events --job @", ["@mine"]),
    ],
)
def test_tab_offers_what_there_is(controller, environ, words, offered):
    controller.add(name="mine")
    controller.add(name="other", user="bob")
    assert completions(environ, words) == offered


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_tab_is_silent_without_a_controller(environ, address):
    environ["RLTUNE_CONTROLLER"] = address
    assert completions(environ, "rltune resume ") == []
    assert completions(environ, "rltune cancel ") == ["last", "all"]


def test_workloads_are_listed_by_family(rltune):
    out = rltune("workloads").out
    assert any(line.split() == ["googlenet", "vision", "googlenet"] for line in out.splitlines())
    known = rltune("workloads", "--json").json["workloads"]
    assert {"name": "opt-125m", "family": "opt", "kind": "language"} in known
