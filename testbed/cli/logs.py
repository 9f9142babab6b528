"""`rltune logs`: what a job wrote, byte for byte."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from protos.messages import JobState, JobView, LaunchFault, LogStream
from testbed.cli import complete
from testbed.cli.exit_codes import ExitCode, job_exit_code
from testbed.cli.jobs import state_word
from testbed.cli.json_output import print_json
from testbed.cli.options import (
    INT32_MAX,
    ControllerFlag,
    JobArgument,
    JsonFlag,
    connect,
    select_job,
    some_text,
)
from testbed.cli.tail import last_lines
from testbed.cli.text import plain, tell
from testbed.client_errors import NotFound
from testbed.values import format_size

if TYPE_CHECKING:
    from testbed.client_streams import LogMessage

LONGEST_HELD_BYTES = 1 << 16
"""An unfinished line is shown once it is this long: progress bars may never end theirs."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("logs")(logs)


def logs(
    job: JobArgument,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on until the job has ended; exit with its code."),
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(min=0, max=INT32_MAX, metavar="LINES", help="Only the last lines so far."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", "--node-rank", min=0, max=INT32_MAX, help="Only this rank."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            callback=some_text, autocompletion=complete.nodes, help="Only the ranks on this node."
        ),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, max=INT32_MAX, help="This attempt (default: the newest).")
    ] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only standard output.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only standard error.")] = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Print a job's output as it was written: stdout to stdout, stderr to stderr."""
    streams = [LogStream.STDOUT] * stdout + [LogStream.STDERR] * stderr
    with connect(controller) as client:
        job_id = select_job(client, job)
        view = client.job(job_id)
        if node is not None:
            rank = _rank_on(view, node, attempt)
        _tell_if_not_started(view, follow=follow)

        def open_logs(go_on: bool, tail_bytes: int | None) -> Iterator[LogMessage]:
            return client.logs(
                job_id,
                follow=go_on,
                streams=streams,
                node_rank=rank,
                attempt=attempt,
                tail_bytes=tail_bytes,
            )

        messages = (
            open_logs(follow, None) if tail is None else last_lines(open_logs, tail, follow=follow)
        )
        by_rank = view.spec.nodes != 1 and rank is None
        if view.attempts:
            by_rank = len(view.attempts[-1].ranks) > 1 and rank is None
        notices = _write_json(messages) if json else _write_bytes(messages, prefixed=by_rank)
        ended = client.job(job_id)
        if view.attempts or not view.state.is_final:  # else it was told at the start
            _tell_end(ended, always=follow)
        if follow:
            raise typer.Exit(job_exit_code(ended) if ended.state.is_final else ExitCode.OK)
    if notices:
        # Without --follow the only thing that the controller has to say is what it cannot reach.
        raise typer.Exit(ExitCode.UNREACHABLE)


def _rank_on(job: JobView, node: str, attempt: int | None) -> int:
    """The rank of an attempt (the newest) on a node."""
    attempts = [a for a in job.attempts if attempt in {None, a.attempt}]
    ranks = attempts[-1].ranks if attempts else ()
    for rank in ranks:
        if rank.node == node:
            return rank.node_rank
    nodes = ", ".join(rank.node for rank in ranks) or "none"
    raise NotFound(f"job {job.job_id} has no rank on node {node!r}", f"its nodes are: {nodes}")


def _tell_if_not_started(job: JobView, *, follow: bool) -> None:
    if job.attempts:
        return
    why = job.reason_text or job.reason
    state = f"job {job.job_id} is {state_word(job)}" + (f" ({plain(why)})" if why else "")
    goes_on = follow and not job.state.is_final
    tell(f"{state}: waiting for its start" if goes_on else f"{state}: it has written nothing")


def _tell_end(job: JobView, *, always: bool) -> None:
    """How it ended, where its own output cannot say it."""
    never_ran = job.exit is not None and job.exit.launch_fault is not LaunchFault.NONE
    is_bad = job.state.is_final and job.state is not JobState.COMPLETED
    if is_bad and (always or never_ran):
        tell(f"rltune: job {job.job_id} is {job.state}: {plain(job.reason_text or job.reason)}")


def _write_json(messages: Iterable[LogMessage]) -> int:
    """JSON Lines; how many notices there were."""
    notices = 0
    for message in messages:
        notices += bool(message.notice)
        print_json(_json_fields(message))
    return notices


def _json_fields(message: LogMessage) -> dict[str, object]:
    try:
        data, encoding = message.data.decode(), "utf-8"
    except UnicodeDecodeError:
        data, encoding = base64.b64encode(message.data).decode(), "base64"
    return {
        "attempt": message.attempt,
        "node_rank": message.node_rank,
        "node": message.node,
        "stream": message.stream,
        "offset": message.offset,
        "data": data,
        "encoding": encoding,
        "dropped_bytes": message.dropped_bytes,
        "notice": message.notice or None,
    }


def _write_bytes(messages: Iterable[LogMessage], *, prefixed: bool) -> int:
    """The bytes as they are, or line by line with the rank in front; how many notices came."""
    notices = 0
    outputs = {LogStream.STDOUT: sys.stdout.buffer, LogStream.STDERR: sys.stderr.buffer}
    lines = RankLines()
    for message in messages:
        if message.notice:
            notices += 1
            tell(f"rltune: {plain(message.node)}: {plain(message.notice)}")
            continue
        if message.dropped_bytes:
            tell(f"rltune: {format_size(message.dropped_bytes)} of output are missing here")
        data = lines.add(message) if prefixed else message.data
        outputs[message.stream].write(data)
        outputs[message.stream].flush()
    for stream, rest in lines.rest():
        outputs[stream].write(rest)
        outputs[stream].flush()
    return notices


class RankLines:
    """Cuts the bytes of several ranks into lines, so that no line mixes two of them."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, LogStream], bytes] = {}

    def add(self, message: LogMessage) -> bytes:
        """The lines that a piece completes, each with `[rank] ` in front."""
        key = (message.node_rank, message.stream)
        data = self._begun.pop(key, b"") + message.data
        complete, newline, begun = data.rpartition(b"\n")
        if len(begun) > LONGEST_HELD_BYTES:
            return self._prefixed(message.node_rank, complete + newline + begun + b"\n")
        if begun:
            self._begun[key] = begun
        return self._prefixed(message.node_rank, complete + newline)

    def rest(self) -> Iterator[tuple[LogStream, bytes]]:
        """What never ended with a newline, completed by us."""
        for (rank, stream), begun in sorted(self._begun.items()):
            yield stream, self._prefixed(rank, begun + b"\n")

    @staticmethod
    def _prefixed(rank: int, lines: bytes) -> bytes:
        mark = b"[%d] " % rank
        return b"".join(mark + line + b"\n" for line in lines.split(b"\n")[:-1])
