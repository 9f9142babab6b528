"""`rltune cancel`, `hold`, `release`, `requeue`, `wait`: what is done to jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from protos.messages import JobState, JobView, LaunchFault
from testbed.cli.exit_codes import ExitCode, jobs_exit_code
from testbed.cli.jobs import reason_word
from testbed.cli.json_output import print_json
from testbed.cli.options import (
    UNFINISHED,
    ControllerFlag,
    JobsArgument,
    JsonFlag,
    UserFlag,
    connect,
    read,
    select_jobs,
    some_text,
)
from testbed.cli.text import plain, say, tell
from testbed.client_errors import InvalidRequest
from testbed.values import format_duration, parse_finite_duration

if TYPE_CHECKING:
    from testbed.client import ActionResult, Client

YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before acting on `all`.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("cancel")(cancel)
    app.command("stop", hidden=True)(cancel)
    app.command("hold")(hold)
    app.command("release")(release)
    app.command("requeue")(requeue)
    app.command("wait")(wait)


def cancel(
    jobs: JobsArgument,
    reason: Annotated[
        str | None, typer.Option("--reason", callback=some_text, help="Why, for the record.")
    ] = None,
    user: UserFlag = None,
    yes: YesFlag = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """End jobs. A job that has ended already is no error."""
    with connect(controller) as client:
        job_ids = _selected(client, jobs, user, UNFINISHED, "cancel", yes=yes)
        results = client.cancel(job_ids, reason=reason or "") if job_ids else []
    _finish(results, json=json)


def hold(
    jobs: JobsArgument,
    user: UserFlag = None,
    yes: YesFlag = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Keep waiting jobs from starting."""
    with connect(controller) as client:
        job_ids = _selected(client, jobs, user, (JobState.PENDING,), "hold", yes=yes)
        results = client.hold(job_ids) if job_ids else []
    _finish(results, json=json)


def release(
    jobs: JobsArgument,
    user: UserFlag = None,
    yes: YesFlag = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Let held jobs start again."""
    with connect(controller) as client:
        job_ids = _selected(client, jobs, user, (JobState.HELD,), "release", yes=yes)
        results = client.release(job_ids) if job_ids else []
    _finish(results, json=json)


def requeue(
    jobs: JobsArgument,
    user: UserFlag = None,
    yes: YesFlag = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Put jobs back into the queue: running ones are stopped first, ended ones run again.

    `all` means those that run now.
    """
    with connect(controller) as client:
        running = (JobState.STARTING, JobState.RUNNING)
        job_ids = _selected(client, jobs, user, running, "requeue", yes=yes)
        results = client.requeue(job_ids) if job_ids else []
    _finish(results, json=json)


def _selected(
    client: Client,
    texts: Sequence[str],
    user: str | None,
    states: Sequence[JobState],
    verb: str,
    *,
    yes: bool,
) -> list[int]:
    """The jobs to act on; asks first when they were named by `all`."""
    job_ids = select_jobs(client, texts, user=user, states=states)
    if any(text.strip() == "all" for text in texts) and not yes and job_ids:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                f"{verb} all would act on {len(job_ids)} jobs and nobody can be asked",
                "say -y if that is meant",
            )
        typer.confirm(f"{verb} {len(job_ids)} jobs?", abort=True, err=True)
    return job_ids


def _finish(results: Sequence[ActionResult], *, json: bool) -> None:
    if json:
        print_json({"results": results})
    elif not results:
        tell("no such jobs: nothing to do")
    for result in results:
        if json:
            break
        state = "" if result.state is None else f" {result.state}"
        text = f": {plain(result.message)}" if result.message else ""
        (say if result.ok else tell)(f"{result.job_id}{state}{text}")
    if any(result.state is None for result in results):
        raise typer.Exit(ExitCode.NOT_FOUND)
    if not all(result.ok for result in results):
        raise typer.Exit(ExitCode.FAILED)


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="Give up (124) after it.")
    ] = None,
    user: UserFlag = None,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Wait until jobs have ended; the exit code is the job's own (of several: the highest)."""
    timeout_s = None if timeout is None else read("--timeout", parse_finite_duration, timeout)
    with connect(controller) as client:
        job_ids = select_jobs(client, jobs, user=user, or_newest=True)
        ended = wait_and_tell(client, job_ids, timeout_s=timeout_s, tell_end=None if json else say)
    if json:
        print_json({"jobs": ended})
    raise typer.Exit(jobs_exit_code(ended))


def wait_and_tell(
    client: Client,
    job_ids: Sequence[int],
    *,
    timeout_s: float | None,
    tell_end: Callable[[str], None] | None,
) -> list[JobView]:
    """The jobs once they have ended; `tell_end` gets a line for each as it ends."""

    def on_end(job: JobView) -> None:
        if tell_end is not None:
            run = format_duration(job.run_s)
            never_ran = job.exit is not None and job.exit.launch_fault is not LaunchFault.NONE
            why = f": {plain(job.reason_text)}" if never_ran else ""
            tell_end(f"{job.job_id} {job.state} ({plain(reason_word(job))}) after {run}{why}")

    try:
        return client.wait(job_ids, timeout_s=timeout_s, on_end=on_end)
    except KeyboardInterrupt:
        names = ",".join(str(job_id) for job_id in job_ids)
        tell(f"\nno longer waiting; the jobs go on (rltune cancel {names} ends them)")
        raise
