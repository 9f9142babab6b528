"""`rltune up`: a whole cluster on this machine until somebody asks to stop."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from testbed.cli.json_output import print_json
from testbed.cli.text import plain, say, tell
from testbed.client import Client
from testbed.client_errors import ControllerUnreachable, InvalidRequest, TryAgain
from testbed.interrupts import Interrupts
from testbed.keeper import Keeper
from testbed.local import LocalCluster, StartInterrupted, Stopped
from testbed.settings import DEFAULT_CONTROLLER
from testbed.values import InvalidValue, parse_gpus

CHECK_EVERY_S = 0.2
"""How soon a death is seen."""
STATUS_EVERY_S = 1.0
"""How often the state is asked for that the status line shows."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `rltune up` was asked for."""

    nodes: int
    gpus: str | None
    policy: str
    allocator: str
    solver: str
    port: int
    state_dir: Path | None
    config: Path | None
    json_output: bool


def run_up(options: UpOptions) -> None:
    """Start the cluster, tell where it is, watch it, and stop it cleanly.

    Raises:
        RltuneError: an option is wrong, the cluster could not be started, or a part of it died
            again and again.
    """
    gpus = _node_gpus(options.nodes, options.gpus)
    _check_port(options.port)
    with Interrupts() as interrupts:
        cluster = LocalCluster(
            gpus,
            policy=options.policy,
            allocator=options.allocator,
            port=options.port,
            state_dir=options.state_dir,
            controller_options=_controller_options(options),
            interrupts=interrupts,
        )
        try:
            cluster.start()
        except StartInterrupted:
            return
        try:
            _serve(cluster, interrupts, json_output=options.json_output)
        finally:
            for line in stopped_lines(cluster.stop()):
                tell(line)


def _controller_options(options: UpOptions) -> list[str]:
    config = [] if options.config is None else ["--config", str(options.config.absolute())]
    return ["--solver", options.solver, *config]


def stopped_lines(stopped: Stopped) -> list[str]:
    """What stopping a cluster took, where it was more than nothing."""
    lines = []
    if stopped.cancelled:
        lines.append(f"cancelled jobs: {', '.join(map(str, stopped.cancelled))}")
    if stopped.unfinished:
        lines.append(f"their end was not seen: jobs {', '.join(map(str, stopped.unfinished))}")
    if stopped.orphaned:
        lines.append(
            f"ended without controller or agent: jobs {', '.join(map(str, stopped.orphaned))}"
        )
    lines += [f"{name} had to be killed" for name in stopped.killed]
    lines += [
        f"killed a process that a job left behind: {left.pid} {plain(left.command)}"
        for left in stopped.leftovers
    ]
    return lines


def _node_gpus(nodes: int, gpus: str | None) -> tuple[str | None, ...]:
    if gpus is None:
        if nodes > 1:
            raise InvalidRequest(
                "--nodes: several nodes on one machine would share its real GPUs",
                "give them mock GPUs of their own, e.g. --gpus P100:4",
                field="nodes",
            )
        return (None,)
    for part in gpus.split(","):
        try:
            asked = parse_gpus(part)
        except InvalidValue as error:
            raise InvalidRequest(f"--gpus: {error.problem}", "write e.g. P100:4,V100:2") from None
        if not asked.types or not asked.count:
            raise InvalidRequest(
                f"--gpus: {part!r} names no type and number", "write e.g. P100:4,V100:2"
            )
    return (gpus,) * nodes


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the controller will: ports in TIME_WAIT are free, ports in LISTEN are not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidRequest(
                f"--port: cannot listen on 127.0.0.1:{port}: {error.strerror}",
                "another cluster may be up; say --port 0 for any free port",
            ) from None


def _serve(cluster: LocalCluster, interrupts: Interrupts, *, json_output: bool) -> None:
    """Tell that the cluster is ready, then keep it up until somebody asks to stop."""
    if json_output:
        print_json(_ready_value(cluster))
    for line in _ready_lines(cluster):
        (tell if json_output else say)(line)
    sys.stdout.flush()
    keeper = Keeper(cluster, tell)
    console = Console(stderr=True)
    if console.is_terminal:
        _keep_with_status(cluster, keeper, interrupts, console)
    while not interrupts.stop:
        keeper.check()
        interrupts.pause(CHECK_EVERY_S)
    tell("stopping: jobs are cancelled first; Ctrl-C again hurries")


def _keep_with_status(
    cluster: LocalCluster, keeper: Keeper, interrupts: Interrupts, console: Console
) -> None:
    # Without patience: while the controller is away, deaths and Ctrl-C must be seen.
    with (
        Client(cluster.address, patience_s=0.0) as client,
        Live(console=console, auto_refresh=False, transient=True) as status,
    ):
        next_s = 0.0
        while not interrupts.stop:
            keeper.check()
            if time.monotonic() >= next_s:
                status.update(Text(_status_line(client), "dim"), refresh=True)
                next_s = time.monotonic() + STATUS_EVERY_S
            interrupts.pause(CHECK_EVERY_S)


def _ready_value(cluster: LocalCluster) -> dict[str, Any]:
    pids = cluster.pids
    return {
        "address": cluster.address,
        "state_dir": str(cluster.state_dir),
        "controller": {"pid": pids["controller"]},
        "nodes": [
            {
                "name": node.name,
                "pid": pids[node.name],
                "gpus": [{"uuid": g.facts.uuid, "type": g.facts.gpu_type} for g in node.gpus],
            }
            for node in cluster.client.nodes()
            if node.name in pids
        ],
    }


def _ready_lines(cluster: LocalCluster) -> list[str]:
    nodes = cluster.client.nodes()
    gpus = [gpu.facts.gpu_type for node in nodes for gpu in node.gpus]
    types = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    is_default = cluster.address == DEFAULT_CONTROLLER
    prefix = "" if is_default else f"RLTUNE_CONTROLLER={cluster.address} "
    asked = "--gpus 1 " if gpus else ""
    hint = [] if gpus else ["no GPU was found here; try mock ones: --gpus P100:4"]
    return [
        f"cluster is up at {cluster.address}: {count}, {types or 'no GPU'}",
        f"logs in {cluster.state_dir / 'logs'}",
        "",
        "in another terminal:",
        f"  {prefix}rltune submit {asked}resnet34",
        f"  {prefix}rltune jobs",
        f"  {prefix}rltune nodes",
        "",
        "Ctrl-C stops it and cancels its jobs",
        *hint,
    ]


def _status_line(client: Client) -> str:
    try:
        info = client.info()
    except (ControllerUnreachable, TryAgain) as error:
        return error.message
    counts = " · ".join(
        f"{count} {state}" for state, count in sorted(info.jobs_by_state.items()) if count
    )
    return (
        f"{info.nodes_up}/{info.nodes_total} nodes up · "
        f"{info.gpus_used}/{info.gpus_total} GPUs held · {counts or 'no jobs'}"
    )
