"""`rltune submit`: a workload by name, any command after `--`, or a job file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from protos.messages import JobSpec, OnNodeFail
from testbed.cli import complete
from testbed.cli.actions import wait_and_tell
from testbed.cli.exit_codes import jobs_exit_code
from testbed.cli.field_names import in_words_of_options
from testbed.cli.json_output import print_json
from testbed.cli.options import (
    ControllerFlag,
    JsonFlag,
    connect,
    read,
    settings_of,
    some_text,
)
from testbed.cli.secrets_hidden import secret_looking_argument
from testbed.cli.text import plain, say, say_lines, tell
from testbed.client_errors import InvalidRequest
from testbed.job_request import MAX_COUNT, JobRequest, os_user
from testbed.settings import is_local
from testbed.values import (
    format_duration,
    parse_duration,
    parse_finite_duration,
    parse_gpu_types,
    parse_gpus,
    parse_nodes,
    parse_size,
)

T = TypeVar("T")

AFTER_DASHES = "rltune.after_dashes"
ONLY_ASK = "rltune.only_ask"


class SubmitCommand(TyperCommand):
    """Tells `submit WORKLOAD` from `submit -- COMMAND`: the parser itself drops the dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and note whether the words came after `--`."""
        given = list(args)
        rest: list[str] = super().parse_args(ctx, args)
        words = ctx.params.get("words") or ()
        before = given[len(given) - len(words) - 1 :][:1]
        ctx.meta[AFTER_DASHES] = bool(words) and before == ["--"]
        return rest


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    settings: Any = {"allow_interspersed_args": False}
    app.command("submit", cls=SubmitCommand, context_settings=settings)(submit)
    what_if = typer.Typer(no_args_is_help=True, help="Ask what would happen; nothing is done.")
    what_if.command("submit", cls=SubmitCommand, context_settings=settings)(what_if_submit)
    app.add_typer(what_if, name="whatif")


def submit(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD [ITS OPTIONS] | -- COMMAND [ARGS]",
            help="A workload by name, e.g. resnet50, or any command after --.",
            autocompletion=complete.workloads,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="Job file (.yaml, .toml, - for stdin); flags win."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", "-G", metavar="N|TYPE:N", help="GPUs in all.")
    ] = None,
    gpu_type: Annotated[
        list[str] | None,
        typer.Option("--gpu-type", metavar="TYPE[,TYPE]", help="Types that will do, best first."),
    ] = None,
    gpu_mem: Annotated[
        str | None,
        typer.Option("--gpu-mem", metavar="SIZE", help="Least memory of each GPU, e.g. 16G."),
    ] = None,
    mix_gpu_types: Annotated[
        bool,
        typer.Option("--mix-gpu-types", help="Different nodes may have different GPU types."),
    ] = False,
    partition: Annotated[
        str | None,
        typer.Option("--partition", "-p", callback=some_text, help="Part of the cluster."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            "-N",
            metavar="N|auto",
            help="Nodes, in equal shares (default 1); auto: as few as possible, in any shares.",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option("--cpus", "-c", help="CPU cores on each node (default: as many as GPUs)."),
    ] = None,
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Memory on each node, e.g. 32G.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", "-t", metavar="DURATION", help="Time limit, e.g. 90m or 2h30m."),
    ] = None,
    estimate: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Your guess of the run time; helps the scheduler."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-J", callback=some_text, help="Name of the job.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="K=V|K", help="A variable; K alone: as it is here."),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option("--cwd", help="Folder on the node (default: this one).")
    ] = None,
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Run again elsewhere if the node is lost."),
    ] = None,
    on_node_fail: Annotated[
        str | None,
        typer.Option(
            metavar="requeue|wait|fail",
            autocompletion=complete.on_node_fail,
            help="If the node is lost (default requeue).",
        ),
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher starts earlier.")] = None,
    qos: Annotated[
        str | None,
        typer.Option(
            metavar="low|normal|high",
            autocompletion=complete.qos,
            help="Quality of service (default normal).",
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Submit as HELD.")] = False,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="From SIGTERM to SIGKILL (default 30s)."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; exit with the job's own code.")
    ] = False,
    count: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="So many equal jobs, all or none.")
    ] = None,
    allow_infeasible: Annotated[
        bool, typer.Option("--allow-infeasible", help="Queue it even if no node could hold it.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--parsable", "-q", help="Print only the job's number.")
    ] = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Queue a job: a workload by name, any command after `--`, or a job file.

    Options of submit stand before the workload's name, its own options behind it.
    """
    flags = JobRequest(
        **_program(words or [], after_dashes=ctx.meta[AFTER_DASHES]),
        **_gpus(gpus, gpu_type),
        name=name,
        cwd=None if cwd is None else str(Path(_given("--cwd", cwd)).absolute()),
        env=_env(env or [], os.environ),
        nodes=_optional("--nodes", parse_nodes, nodes),
        cpus=cpus,
        memory_bytes=_optional("--mem", parse_size, mem),
        time_limit_s=_optional("--time", parse_duration, time),
        time_estimate_s=_optional("--estimate", parse_finite_duration, estimate),
        grace_s=_optional("--grace", parse_finite_duration, grace),
        priority=priority,
        qos=qos,
        hold=True if hold else None,
        on_node_fail=_on_node_fail(requeue, on_node_fail),
        partition=partition,
        min_gpu_memory_bytes=_optional("--gpu-mem", parse_size, gpu_mem),
        mix_gpu_types=True if mix_gpu_types else None,
    )
    request, file_count = _with_file(flags, None if file is None else _given("--file", file))
    settings = settings_of(controller)
    spec = _spec(request, own_options={word for p in ctx.command.params for word in p.opts})
    if ctx.meta.get(ONLY_ASK):
        _tell_forecast(spec, controller, json=json)
        return
    _check_here(spec, is_local(settings.controller))
    talk = _Talk(json=json, quiet=quiet)
    with connect(controller) as client:
        specs = [spec] * (count or file_count)
        with in_words_of_options():
            job_ids = client.submit_many(specs, allow_infeasible=allow_infeasible)
        _tell_queued(talk, job_ids, wait=wait)
        if not wait:
            return
        ended = wait_and_tell(client, job_ids, timeout_s=None, tell_end=talk.ended)
    if json:
        print_json({"job_ids": job_ids, "jobs": ended})
    raise typer.Exit(jobs_exit_code(ended))


@wraps(submit)
def what_if_submit(ctx: typer.Context, **options: Any) -> None:
    """Say when and where a job would start if it were submitted now.

    Takes what `rltune submit` takes. Expected ends are time limits, so it may start earlier.
    """
    ctx.meta[ONLY_ASK] = True
    submit(ctx, **options)


def _tell_forecast(spec: JobSpec, controller: str | None, *, json: bool) -> None:
    with connect(controller) as client, in_words_of_options():
        told = client.forecast(spec)
    if json:
        print_json({"forecast": told})
        return
    nodes = plain(", ".join(told.nodes))
    if told.starts_in_s == 0.0:
        say(f"would start now on {nodes}")
        return
    waits = plain(told.text)
    ahead = f"{told.ahead} {'job' if told.ahead == 1 else 'jobs'} before it"
    if told.starts_in_s is None:
        say(f"would wait, for how long cannot be said ({ahead}): {waits}")
        return
    after = f" when job {told.after_job_id} ends" if told.after_job_id is not None else ""
    when = format_duration(told.starts_in_s)
    say(f"would start in {when} at the latest{after}, on {nodes} ({ahead}): {waits}")


def _spec(request: JobRequest, *, own_options: set[str]) -> JobSpec:
    """The complete job; one of our options behind a workload's name is told as just that."""
    try:
        return request.to_spec(user=os_user())
    except InvalidRequest:
        given = (word.partition("=")[0] for word in request.workload_options)
        misplaced = next((word for word in given if word in own_options), None)
        if misplaced is None:
            raise
        raise InvalidRequest(
            f"{misplaced} is an option of `rltune submit`, not of {request.workload}",
            f"put it before the name: rltune submit {misplaced} ... {request.workload}",
        ) from None


def _tell_queued(talk: _Talk, job_ids: Sequence[int], *, wait: bool) -> None:
    """Say the numbers; if nobody can read them, on stderr: the jobs are queued all the same."""
    try:
        talk.queued(job_ids, wait=wait)
    except OSError:
        tell(_submitted(job_ids))
        raise


@dataclass(frozen=True, slots=True)
class _Talk:
    """What is said on the way, and where."""

    json: bool
    quiet: bool

    def queued(self, job_ids: Sequence[int], *, wait: bool) -> None:
        """The jobs have their numbers."""
        if self.json:
            if not wait:
                print_json({"job_ids": job_ids})
                return
            tell(_submitted(job_ids))
        elif self.quiet:
            say_lines(str(job_id) for job_id in job_ids)
        else:
            say(_submitted(job_ids))
        sys.stdout.flush()

    def ended(self, line: str) -> None:
        """A job has ended."""
        if not self.json and not self.quiet:
            say(line)
            sys.stdout.flush()


def _submitted(job_ids: Sequence[int]) -> str:
    if len(job_ids) == 1:
        return f"submitted job {job_ids[0]}"
    if job_ids[-1] - job_ids[0] == len(job_ids) - 1:
        return f"submitted {len(job_ids)} jobs {job_ids[0]}-{job_ids[-1]}"
    return f"submitted {len(job_ids)} jobs {','.join(str(job_id) for job_id in job_ids)}"


def _with_file(flags: JobRequest, file: str | None) -> tuple[JobRequest, int]:
    """Flags over what the job file says, and how many jobs it asks for."""
    if file is None:
        return flags, 1
    from testbed.jobfile import load_job_file  # noqa: PLC0415 - loads pydantic

    said = load_job_file(Path(file))
    return said.request.overridden_by(flags), said.count


def _program(words: Sequence[str], *, after_dashes: bool) -> dict[str, Any]:
    if not words:
        return {}
    if after_dashes:
        return {"argv": tuple(words)}
    options = words[2:] if words[1:2] == ["--"] else words[1:]
    return {"workload": words[0], "workload_options": tuple(options)}


def _gpus(gpus: str | None, gpu_type: Sequence[str] | None) -> dict[str, Any]:
    request = _optional("--gpus", parse_gpus, gpus)
    types = _optional("--gpu-type", parse_gpu_types, ",".join(gpu_type) if gpu_type else None)
    if request is not None and request.types:
        if types not in {None, request.types}:
            raise InvalidRequest(
                f"--gpus {gpus} and --gpu-type say different types", "give the types once"
            )
        types = request.types
    return {"gpus": None if request is None else request.count, "gpu_types": types}


def _env(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    env = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise InvalidRequest(f"--env {text!r} names no variable", "write --env NAME=VALUE")
        if not equals:
            if name not in environ:
                raise InvalidRequest(
                    f"--env {name}: it is not set here", f"write --env {name}=VALUE"
                )
            value = environ[name]
        env[name] = value
    return env


def _on_node_fail(requeue: bool | None, text: str | None) -> OnNodeFail | None:
    said = None
    if text is not None:
        said = OnNodeFail.__members__.get(text.upper())
        if said is None:
            raise InvalidRequest(f"--on-node-fail: {text!r} is not known", "requeue, wait or fail")
    if requeue is None:
        return said
    meant = OnNodeFail.REQUEUE if requeue else OnNodeFail.FAIL
    if said not in {None, meant}:
        raise InvalidRequest("--requeue and --on-node-fail contradict each other", "give one")
    return meant


def _given(option: str, text: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{option} is empty", "leave it out for the default", field=option)
    return text


def _optional(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    return None if text is None else read(option, parse, text)


def _check_here(spec: JobSpec, local: bool) -> None:
    """What only this side can know: the folder here, and a secret that others could read."""
    if local and not os.path.isdir(spec.cwd):  # noqa: PTH112 - false, too, for a name too long
        raise InvalidRequest(
            f"--cwd: there is no folder {spec.cwd!r}", "make it, or name another", field="--cwd"
        )
    secret = secret_looking_argument(spec.argv)
    if secret is not None:
        tell(
            f"warning: {plain(secret)} looks like a secret; everybody on the node can read a "
            "command's arguments: hand it over in a file or by --env"
        )
