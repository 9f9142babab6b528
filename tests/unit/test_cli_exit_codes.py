"""The exit codes that scripts depend on."""

from __future__ import annotations

import pytest

from node_agent import supervisor
from protos.messages import ExitFacts, JobSpec, JobState, JobView, LaunchFault, OomKind
from testbed import client_errors
from testbed.cli.exit_codes import error_exit_code, job_exit_code, jobs_exit_code


def ended(state: JobState, exit: ExitFacts | None = None) -> JobView:  # noqa: A002
    return JobView(
        job_id=1,
        spec=JobSpec(name="j", user="ann", argv=("true",), cwd="/"),
        state=state,
        completing=False,
        reason="",
        reason_text="",
        submitted_at_s=0.0,
        eligible_at_s=0.0,
        started_at_s=0.0,
        ended_at_s=1.0,
        wait_s=0.0,
        run_s=1.0,
        gpu_s=0.0,
        exit=exit,
        exit_node_rank=0,
        attempts=(),
    )


@pytest.mark.parametrize(
    ("state", "facts", "code"),
    [
        (JobState.COMPLETED, ExitFacts(exit_code=0), 0),
        (JobState.FAILED, ExitFacts(exit_code=3), 3),
        (JobState.FAILED, ExitFacts(exit_code=255), 255),
        (JobState.FAILED, ExitFacts(signal=9), 137),
        (JobState.FAILED, ExitFacts(signal=11, core_dumped=True), 139),
        (JobState.FAILED, ExitFacts(message="no such program"), 1),
        (JobState.TIMEOUT, ExitFacts(signal=15), 124),
        (JobState.TIMEOUT, ExitFacts(exit_code=0), 124),
        (JobState.OUT_OF_MEMORY, ExitFacts(signal=9, oom=OomKind.HOST), 137),
        (JobState.OUT_OF_MEMORY, ExitFacts(exit_code=1, oom=OomKind.CUDA), 1),
        (JobState.CANCELLED, None, 143),
        (JobState.CANCELLED, ExitFacts(signal=15), 143),
        (JobState.CANCELLED, ExitFacts(signal=9), 137),
        (JobState.CANCELLED, ExitFacts(exit_code=0), 143),
        (JobState.NODE_FAIL, None, 1),
    ],
)
def test_a_jobs_end_as_an_exit_code(state, facts, code):
    assert job_exit_code(ended(state, facts)) == code


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["no-such-program-here"], 127),
        (["./none"], 127),
        (["line\nbreak"], 127),
        (["./data"], 126),
        (["data"], 126),
        (["./folder"], 126),
        (["./interpreter"], 126),
        (["./garbage"], 126),
        (["./" + "x" * 5_000], 1),
    ],
    ids=lambda value: value[0][:20] if isinstance(value, list) else None,
)
def test_what_the_supervisor_says_becomes_the_shells_code(tmp_path, argv, code):
    (tmp_path / "data").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, text in (("interpreter", "#!/no/such/interpreter\n"), ("garbage", "\x01\x02")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    order = {"argv": argv, "env": {"PATH": str(tmp_path)}, "cwd": str(tmp_path)}
    with pytest.raises(supervisor.LaunchError) as refused:
        supervisor.spawn(order, 1, 2)
    facts = ExitFacts(launch_fault=LaunchFault(refused.value.fault), message=str(refused.value))
    assert job_exit_code(ended(JobState.FAILED, facts)) == code


def test_a_fault_of_the_node_is_not_the_commands():
    message = "'/x' is not executable: run `chmod +x` on it"
    for fault in (LaunchFault.NODE, LaunchFault.NONE):
        facts = ExitFacts(launch_fault=fault, message=message)
        assert job_exit_code(ended(JobState.FAILED, facts)) == 1


def test_of_several_jobs_the_highest_counts():
    jobs = [
        ended(JobState.FAILED, ExitFacts(exit_code=3)),
        ended(JobState.COMPLETED, ExitFacts(exit_code=0)),
        ended(JobState.FAILED, ExitFacts(signal=9)),
    ]
    assert jobs_exit_code(jobs) == 137
    assert jobs_exit_code([]) == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (client_errors.InvalidRequest, 2),
        (client_errors.Infeasible, 2),
        (client_errors.NotFound, 3),
        (client_errors.ControllerUnreachable, 4),
        (client_errors.NodeUnreachable, 4),
        (client_errors.NotAllowed, 5),
        (client_errors.TryAgain, 75),
        (client_errors.WaitTimedOut, 124),
        (client_errors.ServerFailed, 1),
    ],
)
def test_an_error_as_an_exit_code(kind, code):
    assert error_exit_code(kind("x")) == code
