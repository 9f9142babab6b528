"""Each command as a person sees it."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from protos.messages import ExitFacts, JobState, LogStream, OnNodeFail, OomKind
from testbed.cli.logs import RankLines
from testbed.cli.tail import tail_size
from testbed.client_streams import LogMessage

OK = ExitFacts(exit_code=0)


# ------------------------------------------------------------------ submit


def submitted(controller):
    """The spec of the newest job."""
    return controller.jobs[max(controller.jobs)].spec


def test_a_command_after_dashes_is_passed_on_untouched(controller, rltune, tmp_path):
    script = ["python", "x.py", "--json", "--gpus", "9", "--", "-v", "ünï \udcff"]
    ran = rltune("submit", "--gpus", "p100:2", "--cwd", str(tmp_path), "--", *script)
    assert (ran.code, ran.out) == (0, "submitted job 1\n")
    spec = submitted(controller)
    assert spec.argv == tuple(script)
    assert (spec.name, spec.gpus, spec.gpu_types, spec.cpus) == ("python", 2, ("p100",), 2)
    assert spec.cwd == str(tmp_path)
    assert spec.env == {}


def test_every_option_arrives(controller, rltune, monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_HERE", "yes")
    ran = rltune(
        "submit", "--gpus", "4", "--gpu-type", "v100", "--gpu-type", "p100,k80", "--nodes", "2",
        "--cpus", "3", "--mem", "32G", "--time", "2h", "--estimate", "90m", "--name", "n",
        "--env", "A=1=2", "--env", "FROM_HERE", "--cwd", str(tmp_path), "--no-requeue",
        "--priority", "-5", "--qos", "high", "--hold", "--grace", "10s", "--allow-infeasible",
        "--parsable", "--", "true",
    )  # fmt: skip
    assert (ran.code, ran.out) == (0, "1\n")
    spec = submitted(controller)
    assert spec.gpu_types == ("v100", "p100", "k80")
    assert (spec.gpus, spec.nodes, spec.cpus, spec.memory_bytes) == (4, 2, 3, 32 * 2**30)
    assert (spec.time_limit_s, spec.time_estimate_s, spec.grace_s) == (7200, 5400, 10)
    assert spec.env == {"A": "1=2", "FROM_HERE": "yes"}
    assert (spec.priority, spec.qos, spec.hold) == (-5, "high", True)
    assert spec.on_node_fail is OnNodeFail.FAIL
    assert controller.requests[-1][1].jobs[0].allow_infeasible


@pytest.mark.parametrize(
    "words", [["resnet50", "--steps", "2"], ["resnet50", "--", "--steps", "2"]]
)
def test_options_behind_a_workload_are_its_own(controller, rltune, words):
    assert rltune("submit", "-G", "1", *words).code == 0
    spec = submitted(controller)
    assert spec.argv[-4:] == ("workloads.train", "resnet50", "--steps", "2")
    assert spec.name == "resnet50"
    assert spec.env == {"PYTHONSAFEPATH": "1"}


def test_a_program_without_dashes_is_told_apart_from_a_workload(controller, rltune):
    ran = rltune("submit", "./train.sh")
    assert ran.code == 2
    assert "rltune submit -- " in ran.stderr


def test_a_job_file_with_flags_over_it(controller, rltune, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("workload: resnet50\nargs: --steps 2\ngpus: 2\nname: file\ncount: 2\n")
    ran = rltune("submit", "-f", str(path), "--gpus", "1")
    assert ran.out == "submitted 2 jobs 1-2\n"
    assert (submitted(controller).gpus, submitted(controller).name) == (1, "file")
    path.write_text("workload: resnet50\ngpuz: 2\n")
    ran = rltune("submit", "-f", str(path))
    assert ran.code == 2
    assert "line 2" in ran.stderr
    assert "'gpus'" in ran.stderr


def test_count_submits_equal_jobs_in_one_call(controller, rltune):
    assert rltune("submit", "-q", "--count", "3", "--", "true").out == "1\n2\n3\n"
    assert [kind for kind, _ in controller.requests] == ["SubmitJobsRequest"]


def test_a_folder_is_not_checked_here_for_a_controller_elsewhere(controller, rltune):
    address = f"{'localhost'}:{controller.port}"
    assert rltune("submit", "--controller", address, "--cwd", "/none", "--", "true").code == 2
    # The name of this machine's address is not known to be local, so the node is left to judge.
    ran = rltune("submit", "--controller", "nosuch.invalid:1", "--cwd", "/none", "--", "true")
    assert ran.code == 4


def test_a_secret_on_the_command_line_is_warned_of(controller, rltune):
    ran = rltune("submit", "--", "train", "--api-key", "abc")
    assert ran.code == 0
    assert "--api-key" in ran.stderr
    assert "abc" not in ran.stderr


@pytest.mark.parametrize(
    ("state", "facts", "code"),
    [
        (JobState.COMPLETED, OK, 0),
        (JobState.FAILED, ExitFacts(exit_code=3), 3),
        (JobState.FAILED, ExitFacts(signal=9), 137),
        (JobState.TIMEOUT, ExitFacts(signal=15), 124),
        (JobState.OUT_OF_MEMORY, ExitFacts(signal=9, oom=OomKind.HOST), 137),
    ],
)
def test_submit_and_wait_end_as_the_job_does(controller, rltune, state, facts, code):
    ender = threading.Thread(target=end_the_first, args=(controller, state, facts))
    ender.start()
    ran = rltune("submit", "--wait", "--", "true")
    ender.join()
    assert ran.code == code
    assert ran.out.startswith("submitted job 1\n1 " + state)
    assert rltune("wait", "1").code == code
    assert rltune("logs", "-f", "1").code == code


def end_the_first(controller, state, facts):
    pause = threading.Event().wait
    while 1 not in controller.jobs:
        pause(0.01)
    controller.run(1)
    controller.end(1, state, facts)


def test_submit_wait_json_is_one_value_with_the_end(controller, rltune):
    ender = threading.Thread(
        target=end_the_first, args=(controller, JobState.FAILED, ExitFacts(exit_code=7))
    )
    ender.start()
    ran = rltune("submit", "--json", "--wait", "--", "true")
    ender.join()
    assert ran.code == 7
    assert ran.json["job_ids"] == [1]
    assert ran.json["jobs"][0]["exit"]["exit_code"] == 7


# ------------------------------------------------------------------ jobs


def test_the_list_looks_like_squeue(controller, rltune):
    controller.add(JobState.RUNNING, name="a", user="ann", gpus=1, time_limit_s=7200.0)
    controller.add(name="[red]b\x1b[31m\n", user="ann", gpus=2, gpu_types=("P100",))
    done = controller.add(JobState.RUNNING, user="ann")
    controller.end(done, JobState.FAILED, ExitFacts(exit_code=3))
    out = rltune("jobs").out
    header, first, second = out.splitlines()
    assert " ".join(header.split()) == (
        "JOBID NAME USER STATE TIME LIMIT GPUS NODES REASON/NODELIST"
    )
    assert " ".join(first.split()) == "1 a ann RUNNING 00:00:02 02:00:00 1 1 gpu-node-1"
    assert "[red]b\\x1b[31m\\n" in second
    assert "P100:2" in second
    assert second.endswith("(Resources)")
    assert "\x1b" not in out
    assert rltune("jobs", "-a").out.splitlines()[-1].endswith("(exit 3)")
    for alias in ("ls", "list", "ps"):
        assert rltune(alias).out == out


def test_colour_only_where_it_is_wanted(controller, rltune, monkeypatch):
    controller.add(JobState.RUNNING)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in rltune("jobs").out
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in rltune("jobs").out


def test_all_about_a_job(controller, rltune):
    controller.add(JobState.RUNNING, name="n", gpus=2, nodes=2, argv=("sh", "-c", "a b"),
                   env={"API_KEY": "s3cr3t"}, memory_bytes=2**30)  # fmt: skip
    controller.run(1, "gpu-node-1", "gpu-node-2")
    controller.end(1, JobState.FAILED, ExitFacts(exit_code=3, message="it broke"))
    out = rltune("job", "1").out
    for part in ("sh -c 'a b'", "API_KEY=***", "exit 3", "it broke", "1GiB on each node",
                 "rank 1 on gpu-node-2", "GPU-gpu-node-1-0", "peak memory 3GiB"):  # fmt: skip
        assert part in out
    assert "s3cr3t" not in out
    assert rltune("show", "last").out == out
    assert rltune("job", "@n").out == out


def test_explain_gives_sentences_and_terms(controller, rltune):
    controller.add()
    out = rltune("explain", "1").out
    assert "job 1 is PENDING (Resources): needs 2 GPUs, 1 is free" in out
    assert "gpu-node-1 has 1 free P100" in out
    assert "age" in out


def test_history_accounts_and_adds_up(controller, rltune):
    for gpus, facts in ((1, OK), (3, ExitFacts(signal=9, oom=OomKind.HOST))):
        job_id = controller.add(JobState.RUNNING, gpus=gpus)
        state = JobState.COMPLETED if facts is OK else JobState.OUT_OF_MEMORY
        controller.end(job_id, state, facts)
    controller.add(JobState.RUNNING)
    lines = rltune("history").out.splitlines()
    assert len(lines) == 4
    assert "signal 9, HOST memory" in lines[2]
    assert lines[3].startswith("2 jobs, 12.0 GPU s, mean wait 1.5 s, mean run 3.0 s")
    totals = rltune("history", "--json").json["totals"]
    assert totals == {
        "jobs": 2, "gpu_s": 12.0, "wait_mean_s": 1.5, "run_mean_s": 3.0,
        "gpu_utilization_mean_pct": 75.0,
    }  # fmt: skip


def test_history_without_jobs_invents_no_means(controller, rltune):
    assert rltune("history", "--json").json["totals"]["gpu_utilization_mean_pct"] is None
    assert "mean GPU utilization -" in rltune("history").out


# ------------------------------------------------------------------ actions


def test_selectors_name_ones_own_jobs(controller, rltune):
    mine = [controller.add(name="x"), controller.add(name="y")]
    controller.add(name="x", user="somebody")
    assert rltune("hold", "@x").out == f"{mine[0]} HELD\n"
    assert rltune("hold", "last").out == f"{mine[1]} HELD\n"
    assert rltune("release", "all", "-y").out == "1 PENDING\n2 PENDING\n"
    assert rltune("cancel", "all", "-y", "--user", "somebody").out == "3 CANCELLED\n"
    ran = rltune("cancel", "3")
    assert (ran.code, ran.out) == (0, "3 CANCELLED: already CANCELLED\n")


def test_all_asks_a_person_first(controller, rltune, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    controller.add()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert rltune("cancel", "all").code == 130
    assert controller.jobs[1].state is JobState.PENDING
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert rltune("cancel", "all").code == 0
    assert controller.jobs[1].state is JobState.CANCELLED


def test_wait_of_several_gives_the_highest_code(controller, rltune):
    for code in (0, 3, 1):
        job_id = controller.add(JobState.RUNNING)
        state = JobState.FAILED if code else JobState.COMPLETED
        controller.end(job_id, state, ExitFacts(exit_code=code))
    ran = rltune("wait", "1-3")
    assert ran.code == 3
    assert ran.out.splitlines()[1] == "2 FAILED (exit 3) after 00:00:03"
    ran = rltune("wait", "1,99")
    assert (ran.code, ran.out) == (3, "")


def test_wait_by_name_takes_what_goes_on_else_the_newest(controller, rltune):
    old, new = (controller.add(JobState.RUNNING, name="x") for _ in range(2))
    controller.end(old, JobState.FAILED, ExitFacts(exit_code=9))
    controller.end(new, JobState.FAILED, ExitFacts(exit_code=3))
    assert rltune("wait", "@x").code == 3
    goes_on = controller.add(JobState.RUNNING, name="x")
    assert rltune("wait", "@x", "--timeout", "0s").code == 124
    controller.end(goes_on, JobState.COMPLETED, OK)
    assert rltune("wait", "@x").code == 0


# ------------------------------------------------------------------ nodes


def test_nodes_look_like_sinfo(controller, rltune):
    header, first, _ = rltune("nodes").out.splitlines()
    assert header.startswith("NODE")
    for part in ("gpu-node-1", "UP", "1/2", "P100:2", "88%", "61C", "2/8", "1GiB/64GiB"):
        assert part in first
    ran = rltune("drain", "gpu-node-1", "--reason", "new disk")
    assert ran.out == "gpu-node-1 DRAINING (new disk)\n"
    assert rltune("resume", "gpu-node-1").out == "gpu-node-1 UP\n"


def test_a_gpu_without_readings_shows_nothing_rather_than_zero(controller, rltune):
    _, known, silent, *_ = rltune("gpus", "gpu-node-1").out.splitlines()
    for part in ("88%", "1GiB/16GiB", "61C", "180W/250W", "ok", "GPU-gpu-node-1-0"):
        assert part in known
    assert " ".join(silent.split()) == "gpu-node-1 1 P100 - -/16GiB - - - lost GPU-gpu-node-1-1"


def test_info_and_version_and_config(controller, rltune):
    out = rltune("info").out
    assert "multifactor" in out
    assert controller.address in out
    assert rltune("version").out.startswith("rltune ")
    assert rltune("--version").out == rltune("version").out
    out = rltune("config", "show", "--origin").out
    assert out == f"client.controller = {controller.address}  (environment RLTUNE_CONTROLLER)\n"
    out = rltune("config", "show", "--origin", "--controller", "a:1").out
    assert out == "client.controller = a:1  (flag)\n"


# ------------------------------------------------------------------ logs


def test_bytes_go_where_the_job_sent_them_unchanged(controller, rltune):
    controller.add(JobState.RUNNING)
    data = bytes(range(256)) + b"\r50%\r100%\n"
    controller.write(data)
    controller.write(b"oops", LogStream.STDERR)
    ran = rltune("logs", "1")
    assert ran.stdout == data
    assert ran.stderr == "oops"
    assert rltune("logs", "1", "--stderr").stdout == b""
    assert rltune("logs", "1", "--stdout").stderr == ""


def test_lines_of_several_ranks_are_marked_and_never_mixed(controller, rltune):
    controller.add(nodes=2, gpus=2)
    controller.run(1, "gpu-node-1", "gpu-node-2")
    controller.write(b"a1\na", rank=0)
    controller.write(b"b1\n", rank=1)
    controller.write(b"2\nrest", rank=0)
    assert rltune("logs", "1").stdout == b"[0] a1\n[1] b1\n[0] a2\n[0] rest\n"
    assert rltune("logs", "1", "--rank", "0").stdout == b"a1\na2\nrest"
    assert rltune("logs", "1", "--node", "gpu-node-2").stdout == b"b1\n"
    assert rltune("logs", "1", "--node", "none").code == 3


def test_a_line_without_end_is_not_held_for_ever():
    lines = RankLines()
    piece = LogMessage(1, 2, "n", LogStream.STDOUT, 0, b"x" * 70_000, 0, "")
    assert lines.add(piece) == b"[2] " + b"x" * 70_000 + b"\n"
    assert list(lines.rest()) == []


def test_the_last_lines(controller, rltune):
    controller.add(JobState.RUNNING)
    for begin in range(0, 2000, 100):
        controller.write(b"".join(b"line %d of the log\n" % i for i in range(begin, begin + 100)))
    assert rltune("logs", "1", "--tail", "2").out == "line 1998 of the log\nline 1999 of the log\n"
    assert len(rltune("logs", "1", "--tail", "1500").out.splitlines()) == 1500
    assert len(rltune("logs", "1", "--tail", "9999").out.splitlines()) == 2000
    controller.end(1, JobState.COMPLETED, OK)
    assert rltune("logs", "1", "-f", "--tail", "1").out == "line 1999 of the log\n"
    assert rltune("logs", "1", "-f", "--tail", "0").out == ""


@pytest.mark.parametrize(
    ("data", "lines", "size"),
    [(b"a\nb\nc\n", 2, 4), (b"a\nb\nc", 2, 3), (b"a\nb", 9, 3), (b"", 3, 0), (b"a\n", 0, 0),
     (b"\n\n", 1, 1), (b"a\rb\rc\n", 1, 6)],
)  # fmt: skip
def test_where_the_last_lines_begin(data, lines, size):
    assert tail_size(data, lines) == size


def test_following_a_waiting_job_says_why_and_ends_with_it(controller, rltune):
    controller.add()
    ender = threading.Timer(0.3, controller.end, (1, JobState.FAILED, ExitFacts(exit_code=3)))
    ender.start()
    ran = rltune("logs", "-f", "1")
    ender.join()
    assert ran.code == 3
    assert "PENDING (needs 2 GPUs, 1 is free): waiting" in ran.stderr


def test_what_the_node_can_no_longer_give_is_told(controller, rltune):
    controller.add(JobState.RUNNING)
    controller.write(b"kept\n")
    controller.logs[-1].dropped_bytes = 2048
    controller.write(b"")
    controller.logs[-1].notice = "node gpu-node-1 is silent"
    ran = rltune("logs", "1")
    assert ran.code == 4
    assert ran.stdout == b"kept\n"
    assert "2KiB of output are missing" in ran.stderr
    assert "gpu-node-1 is silent" in ran.stderr


def test_events_for_people_hide_no_tricks(controller, rltune):
    controller.add()
    controller.tell(None, "Node\x1b[2JLost", node="gpu-node-1")
    first, second = rltune("events").out.splitlines()
    assert first.startswith("1 2026-09-21T14:13:21.250Z JobSubmitted [job 1]")
    assert "Node\\x1b[2JLost [node gpu-node-1]" in second
    assert len(rltune("events", "--after", "1").out.splitlines()) == 1
