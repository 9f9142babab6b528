"""`rltune jobs`, `rltune job`, `rltune explain`: what there is and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from protos.messages import AttemptView, ExitFacts, JobState, JobView, OomKind
from testbed.cli import complete
from testbed.cli.json_output import iso_utc, print_json
from testbed.cli.options import (
    INT32_MAX,
    UNFINISHED,
    ControllerFlag,
    JobArgument,
    JsonFlag,
    connect,
    read_states,
    select_job,
    select_jobs,
    some_text,
)
from testbed.cli.secrets_hidden import hide_secret_values
from testbed.cli.text import ABSENT, Column, plain, say, say_lines, show_table, tell
from testbed.values import format_duration, format_size

DEFAULT_LIMIT = 1000

COLUMNS = (
    Column("JOBID", right=True),
    Column("NAME", cut=True),
    Column("USER"),
    Column("STATE"),
    Column("TIME", right=True),
    Column("LIMIT", right=True),
    Column("GPUS", right=True),
    Column("NODES", right=True),
    Column("REASON/NODELIST", cut=True),
)
_STATE_COLORS = {
    JobState.RUNNING: "green",
    JobState.STARTING: "green",
    JobState.PENDING: "yellow",
    JobState.HELD: "yellow",
    JobState.COMPLETED: None,
    JobState.CANCELLED: "dim",
}


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("jobs")(jobs)
    for alias in ("ls", "list", "ps"):
        app.command(alias, hidden=True)(jobs)
    app.command("job")(job)
    app.command("show", hidden=True)(job)
    app.command("explain")(explain)


def jobs(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOBS...]", autocompletion=complete.jobs, help="Only these."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            autocompletion=complete.states,
            help="Only these states, e.g. RUNNING or R,PD.",
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", callback=some_text, help="Only this user's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-J", callback=some_text, help="Only this name.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=INT32_MAX, help="Only the newest so many.")
    ] = DEFAULT_LIMIT,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """List jobs, by default those that have not ended."""
    with connect(controller) as client:
        states = () if every or selectors else UNFINISHED
        if state:
            states = read_states(state)
        job_ids = select_jobs(
            client, selectors or (), user=user, states=states, numbers_are_anybodys=True
        )
        if selectors and not job_ids:
            found = []
        else:
            found = client.jobs(
                states=states, user=user, name=name, job_ids=job_ids, limit=limit + 1
            )
    more = len(found) > limit
    shown = sorted(found[:limit], key=lambda job: job.job_id)
    if json:
        print_json({"jobs": shown, "more": more})
        return
    show_table(COLUMNS, [job_row(job) for job in shown], [job_color(job) for job in shown])
    if more:
        tell(f"only the newest {limit} are shown; say --limit to see more")


def job_color(job: JobView) -> str | None:
    """Colour of a job's line."""
    return _STATE_COLORS.get(job.state, "red")


def job_row(job: JobView) -> tuple[str, ...]:
    """A job as squeue would show it."""
    started = job.started_at_s is not None
    return (
        str(job.job_id),
        job.spec.name,
        job.spec.user,
        state_word(job),
        format_duration(job.run_s) if started else format_duration(0),
        format_duration(job.spec.time_limit_s),
        gpus_word(job),
        node_count_word(job),
        nodes_word(job) if job.state.is_active else f"({reason_word(job)})",
    )


def state_word(job: JobView) -> str:
    """The state; COMPLETING while processes are being stopped."""
    return "COMPLETING" if job.completing else str(job.state)


def gpus_word(job: JobView) -> str:
    """How many GPUs, and of which types if that was asked."""
    types = "|".join(job.spec.gpu_types)
    return f"{types}:{job.spec.gpus}" if types and job.spec.gpus else str(job.spec.gpus)


def node_count_word(job: JobView) -> str:
    """How many nodes: as many as asked for, or as it got where it left that open."""
    if job.spec.nodes:
        return str(job.spec.nodes)
    return str(len(job.attempts[-1].ranks)) if job.attempts else "auto"


def nodes_word(job: JobView) -> str:
    """Where the newest attempt is or was."""
    if not job.attempts:
        return ABSENT
    return ",".join(dict.fromkeys(rank.node for rank in job.attempts[-1].ranks)) or ABSENT


def reason_word(job: JobView) -> str:
    """Why it waits or how it ended, short."""
    if job.state.is_final and job.exit is not None and job.state is not JobState.CANCELLED:
        return exit_word(job.exit)
    return job.reason or "None"


def exit_word(facts: ExitFacts) -> str:
    """`exit 1`, `signal 9`, with the memory that ran out."""
    if facts.signal is not None:
        word = f"signal {facts.signal}"
    elif facts.exit_code is not None:
        word = f"exit {facts.exit_code}"
    else:
        word = "not started"
    return word if facts.oom is OomKind.NONE else f"{word}, {facts.oom} memory"


def job(
    job: JobArgument,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Show all about one job: what was asked, its attempts, its GPUs, how it ended."""
    with connect(controller) as client:
        view = client.job(select_job(client, job))
    if json:
        print_json({"job": view})
        return
    say_lines(_job_lines(view))


def _job_lines(job: JobView) -> Iterator[str]:
    for name, value in _job_facts(job):
        yield f"{name:<12}  {plain(value)}"
    for attempt in job.attempts:
        yield ""
        yield from _attempt_lines(attempt)


def _job_facts(job: JobView) -> Iterator[tuple[str, str]]:
    spec = job.spec
    yield "job", str(job.job_id)
    yield "name", spec.name
    yield "user", spec.user
    yield "state", state_word(job)
    if job.reason or job.reason_text:
        yield "reason", f"{job.reason}: {job.reason_text}" if job.reason_text else job.reason
    if job.exit is not None:
        rank = f" (rank {job.exit_node_rank})" if job.exit_node_rank else ""
        yield "exit", exit_word(job.exit) + rank
        if job.exit.message:
            yield "message", job.exit.message
    yield "command", " ".join(_quoted(word) for word in spec.argv)
    yield "folder", spec.cwd
    for name, value in hide_secret_values(spec.env).items():
        yield "environment", f"{name}={value}"
    yield "gpus", gpus_word(job)
    if spec.min_gpu_memory_bytes:
        yield "GPU memory", f"{format_size(spec.min_gpu_memory_bytes)} or more"
    if spec.mix_gpu_types:
        yield "GPU types", "may differ from node to node"
    yield "nodes", str(spec.nodes) if spec.nodes else f"auto ({node_count_word(job)})"
    if spec.partition:
        yield "partition", spec.partition
    yield "cpus", f"{spec.cpus} on each node"
    if spec.memory_bytes:
        yield "memory", f"{format_size(spec.memory_bytes)} on each node"
    yield "time limit", format_duration(spec.time_limit_s)
    if spec.time_estimate_s is not None:
        yield "estimate", format_duration(spec.time_estimate_s)
    yield "priority", f"{spec.priority} (QOS {spec.qos})"
    yield "node fails", spec.on_node_fail.lower()
    yield "submitted", iso_utc(job.submitted_at_s)
    if job.started_at_s is not None:
        yield "started", iso_utc(job.started_at_s)
    if job.ended_at_s is not None:
        yield "ended", iso_utc(job.ended_at_s)
    yield "wait", f"{job.wait_s:.1f} s"
    yield "run", f"{job.run_s:.1f} s"
    yield "gpu time", f"{job.gpu_s:.1f} GPU s"


def _quoted(word: str) -> str:
    safe = word and all(c.isalnum() or c in "-_./=:,@%+" for c in word)
    return word if safe else "'" + word.replace("'", "'\\''") + "'"


def _attempt_lines(attempt: AttemptView) -> Iterator[str]:
    stop = f", stopped: {attempt.stop_reason}" if attempt.stop_reason else ""
    yield f"attempt {attempt.attempt}: {attempt.state}{stop}"
    if attempt.gpu_utilization_mean_pct is not None:
        peak = format_size(attempt.gpu_memory_peak_bytes)
        yield f"  GPU utilization {attempt.gpu_utilization_mean_pct:.0f}%, peak memory {peak}"
    for rank in attempt.ranks:
        gpus = ",".join(str(i) for i in rank.gpu_indices) or "none"
        end = "" if rank.exit is None else f", {exit_word(rank.exit)}"
        pid = "" if rank.pid is None else f", pid {rank.pid}"
        yield f"  rank {rank.node_rank} on {plain(rank.node)}: GPUs {gpus}, {rank.phase}{pid}{end}"
        yield from (f"    {plain(uuid)}" for uuid in rank.gpu_uuids)
        if rank.usage is not None:
            memory = format_size(rank.usage.peak_memory_bytes)
            cpu = ABSENT if rank.usage.cpu_s is None else f"{rank.usage.cpu_s:.1f} s"
            yield f"    elapsed {rank.usage.elapsed_s:.1f} s, CPU {cpu}, peak memory {memory}"
            if rank.usage.log_bytes_dropped:
                yield f"    {format_size(rank.usage.log_bytes_dropped)} of output were dropped"


def explain(
    job: JobArgument,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Say why a job waits, or why it went where it went."""
    with connect(controller) as client:
        told = client.explain(select_job(client, job))
    if json:
        print_json({"explanation": told})
        return
    reason = f" ({told.reason})" if told.reason else ""
    say(f"job {told.job_id} is {told.state}{plain(reason)}: {plain(told.text)}")
    say_lines(f"  {plain(line)}" for line in told.lines)
    if told.terms:
        terms = {_term_words(name): value for name, value in told.terms.items()}
        width = max(len(name) for name in terms)
        say_lines(f"  {plain(name):<{width}}  {value:g}" for name, value in terms.items())


def _term_words(name: str) -> str:
    """`run_time_s` as people say it."""
    words = name.removesuffix("_s").replace("_", " ")
    return f"{words} (s)" if name.endswith("_s") else words
