"""`rltune watch` and `rltune events`: what happens now."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.cli import complete
from testbed.cli.json_output import iso_utc, print_json
from testbed.cli.options import (
    INT64_MAX,
    UNFINISHED,
    ControllerFlag,
    JsonFlag,
    connect,
    read,
    select_jobs,
    some_text,
)
from testbed.cli.text import plain, say
from testbed.client_errors import ControllerUnreachable, InvalidRequest
from testbed.values import parse_duration

if TYPE_CHECKING:
    from protos.messages import ClusterEvent
    from testbed.client import Client

FROM_NOW_ON = -1
SCREEN_PATIENCE_S = 1.0
"""A screen says soon that the controller is away; it looks again by itself."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("watch")(watch)
    app.command("events")(events)


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay for what comes, until Ctrl-C.")
    ] = False,
    after: Annotated[
        int,
        typer.Option(
            min=-1, max=INT64_MAX, help="Only events after this number; -1: only new ones."
        ),
    ] = 0,
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job", metavar="JOBS", autocompletion=complete.jobs, help="Only these jobs."
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(callback=some_text, autocompletion=complete.nodes, help="Only this node."),
    ] = None,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Print the event log, oldest first; with --json one event a line."""
    with connect(controller) as client:
        job_ids = select_jobs(client, job or (), states=())
        stream = client.events(
            after_event_id=after, job_ids=job_ids, node=node or "", follow=follow
        )
        for event in stream:
            if json:
                print_json({"event": event})
            else:
                say(event_line(event))
                sys.stdout.flush()


def event_line(event: ClusterEvent) -> str:
    """An event on one line."""
    about = [f"job {event.job_id}"] if event.job_id is not None else []
    if event.attempt is not None:
        about.append(f"attempt {event.attempt}")
    if event.node is not None:
        about.append(f"node {event.node}")
    whom = f" [{', '.join(about)}]" if about else ""
    return plain(
        f"{event.event_id} {iso_utc(event.at_s)} {event.kind}{whom} {event.text} ({event.actor})"
    )


def watch(
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Time between two looks.")
    ] = "1s",
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Show the queue and the GPUs live, until Ctrl-C; with --json events, one a line."""
    interval_s = read("--interval", parse_duration, interval)
    with connect(controller, patience_s=SCREEN_PATIENCE_S) as client:
        try:
            if json:
                for event in client.events(after_event_id=FROM_NOW_ON, follow=True):
                    print_json({"event": event})
            else:
                _live(client, interval_s)
        except KeyboardInterrupt:
            # Ctrl-C is the way out of a screen that never ends, not an interruption.
            return


def _live(client: Client, interval_s: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - loads rich, needed here only
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from testbed.cli.screen import render  # noqa: PLC0415

    console = Console()
    if not console.is_terminal:
        raise InvalidRequest(
            "watch needs a terminal", "use `rltune watch --json` or `rltune jobs` instead"
        )

    def look() -> Text:
        jobs = client.jobs(states=UNFINISHED)
        return render(client.info(), client.nodes(), jobs, console.width, console.height)

    pause = threading.Event().wait
    with Live(look(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            pause(interval_s)
            try:
                live.update(look())
            except ControllerUnreachable as error:
                live.update(Text(f"{error}\ntrying again; Ctrl-C ends"))
