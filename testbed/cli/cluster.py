"""`rltune info`, `config`, `version`, `controller`, `agent`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from protos.messages import JobState
from testbed.cli.json_output import iso_utc, print_json
from testbed.cli.options import ControllerFlag, JsonFlag, connect, settings_of
from testbed.cli.text import plain, say, say_lines

DISTRIBUTION = "rltune-testbed"
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("info")(info)
    config = typer.Typer(no_args_is_help=True, help="Settings of the client.")
    config.command("show")(show_config)
    app.add_typer(config, name="config")
    app.command("version")(version)
    app.command("controller", context_settings=_PASS_ON)(run_controller)
    app.command("agent", context_settings=_PASS_ON)(run_agent)


def info(json: JsonFlag = False, controller: ControllerFlag = None) -> None:
    """Show what the controller is and how it does."""
    with connect(controller) as client:
        told = client.info()
        address = client.address
    if json:
        print_json({"controller": address, "cluster": told})
        return
    states = ", ".join(f"{n} {s}" for s in JobState if (n := told.jobs_by_state.get(s, 0)))
    last_fallback = f", the last: {told.last_fallback}" if told.last_fallback else ""
    last = "-" if told.last_cycle_s is None else f"{told.last_cycle_s * 1000:.1f} ms"
    facts = {
        "controller": address,
        "cluster": told.cluster,
        "version": told.version,
        "policy": told.policy,
        "allocator": told.allocator,
        "started": iso_utc(told.started_at_s),
        "nodes": f"{told.nodes_up} of {told.nodes_total} take work",
        "gpus": f"{told.gpus_used} of {told.gpus_total} in use",
        "jobs": states or "none",
        "cycles": f"{told.cycles}, the last took {last}",
        "fallbacks": f"{told.fallbacks}{last_fallback}",
    }
    if told.last_error:
        facts["last error"] = told.last_error
    say_lines(f"{name:<10}  {plain(value)}" for name, value in facts.items())


def show_config(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value is from.")] = False,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Show the settings that a command would use."""
    settings = settings_of(controller)
    if json:
        print_json({"path": str(settings.path), "settings": settings.items})
        return
    for item in settings.items:
        say(plain(f"{item.key} = {item.value}" + (f"  ({item.origin})" if origin else "")))


def version(json: JsonFlag = False) -> None:
    """Show the version of this software."""
    from importlib.metadata import version as installed  # noqa: PLC0415 - loads email, zipfile

    number = installed(DISTRIBUTION)
    python = ".".join(str(part) for part in sys.version_info[:3])
    if json:
        print_json({"version": number, "python": python})
    else:
        say(f"rltune {number} (Python {python})")


def run_controller(ctx: typer.Context) -> None:
    """Run the controller here; `rltune controller --help` lists its options."""
    _become("controller", ctx.args)


def run_agent(ctx: typer.Context) -> None:
    """Run a node agent here; `rltune agent --help` lists its options."""
    _become("node_agent", ctx.args)


def _become(module: str, args: list[str]) -> None:
    """Replace this process, so that signals and the exit code need no passing on.

    -P: a folder called `controller` where we stand must not be taken for ours.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])  # noqa: S606
