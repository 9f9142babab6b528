"""What the controller is told on its command line, checked once."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from controller.partitions import ClusterConfig, ConfigProblem, load_config
from controller.scheduler.backfill import Backfill
from controller.scheduler.policies import AIMS, ALLOCATORS, DEFAULT_AIM, PRIORITIZERS
from controller.solvers import SOLVERS

DEFAULT_LISTEN = "127.0.0.1:7817"


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The controller's settings."""

    host: str
    port: int
    state_dir: Path
    cluster: str
    policy: str
    allocator: str
    solver: str
    aim: str
    backfill: Backfill
    cluster_config: ClusterConfig
    lease_s: float
    heartbeat_s: float


def parse_args(argv: list[str] | None = None) -> ControllerConfig:
    """The settings from the command line; ends the process with code 2 and a clear word on
    a bad one.
    """
    parser = argparse.ArgumentParser(
        prog="rltune controller",
        description="Keeps the queue, decides where jobs run, and talks to the node agents.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("rltune-testbed"))
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="ADDRESS:PORT",
        help="where to listen (default: %(default)s; port 0: any free one)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address other than loopback: whoever reaches it can run programs on "
        "the nodes",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="the database (default: ~/.local/state/rltune/controller)",
    )
    parser.add_argument("--cluster", default="rltune", help="name of the cluster")
    parser.add_argument(
        "--policy", default="multifactor", choices=PRIORITIZERS, help="order of the queue"
    )
    parser.add_argument("--allocator", default="milp", choices=ALLOCATORS, help="placement")
    parser.add_argument(
        "--solver",
        default="auto",
        choices=SOLVERS,
        help="of the milp allocator (default: GLPK in this process, else the program glpsol)",
    )
    parser.add_argument(
        "--aim",
        default=DEFAULT_AIM,
        choices=AIMS,
        help="which places are best, among those at which the same jobs start "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--backfill",
        default=Backfill.EASY.value,
        choices=[mode.value for mode in Backfill],
        help="what jobs behind one that cannot start may do (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML with partitions and GPU speeds (docs/partitions.md)",
    )
    parser.add_argument(
        "--lease",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="silence after which a node is DOWN (default: %(default)g)",
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how often agents send telemetry (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    host, port = _listen(parser, args.listen)
    if not args.insecure and not _is_loopback(host):
        parser.error(
            f"refusing to listen on {host}: there is no authentication yet, so whoever reaches "
            "this address can run programs on the nodes; listen on 127.0.0.1 (and use an SSH "
            "tunnel), or say --insecure if the network is yours alone"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", args.cluster):
        parser.error(f"--cluster {args.cluster!r}: letters, digits and . _ - only")
    if not 0.1 <= args.heartbeat <= 60:
        parser.error("--heartbeat must be between 0.1 and 60 seconds")
    if not 3 * args.heartbeat <= args.lease <= 3600:
        parser.error("--lease must be at least three heartbeats and at most an hour")
    try:
        state_dir = (args.state_dir or default_state_dir()).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # the current folder or the home is gone
        parser.error(f"--state-dir: give an absolute path ({error})")
    try:
        cluster_config = load_config(args.config) if args.config else ClusterConfig()
    except ConfigProblem as error:
        parser.error(f"--config: {error}")
    return ControllerConfig(
        host=host,
        port=port,
        state_dir=state_dir,
        cluster=args.cluster,
        policy=args.policy,
        allocator=args.allocator,
        solver=args.solver,
        aim=args.aim,
        backfill=Backfill(args.backfill),
        cluster_config=cluster_config,
        lease_s=args.lease,
        heartbeat_s=args.heartbeat,
    )


def default_state_dir() -> Path:
    """Where the controller keeps its state unless told otherwise (XDG state folder)."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "rltune" / "controller"


def _listen(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        parser.error(f"--listen {text!r} is not ADDRESS:PORT")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
