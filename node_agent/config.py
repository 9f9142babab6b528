"""What the agent is told on its command line, checked once."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from node_agent.gpu_profiles import parse_mock_gpus
from protos.codec import InvalidMessage, check_node_name

DEFAULT_CONTROLLER = "127.0.0.1:7817"
MIN_LOG_LIMIT_BYTES = 64 * 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?B)?", re.IGNORECASE)
MIN_MEMORY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent's settings."""

    controller: str
    node_name: str
    state_dir: Path
    mock_gpus: str | None
    mock_faults: Path | None
    cpus: int | None
    """CPU cores to offer; None offers all that the process may use."""
    memory_bytes: int | None
    """Host memory to offer; None offers all."""
    log_limit_bytes: int
    """Kept of each output stream of an attempt: the head and the tail."""
    advertise_address: str


def parse_args(argv: list[str] | None = None) -> AgentConfig:
    """The settings from the command line; ends the process with code 2 and a clear word on
    a bad one.
    """
    parser = argparse.ArgumentParser(
        prog="rltune agent",
        description="Offers this machine's GPUs to a controller and runs jobs on them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("rltune-testbed"))
    parser.add_argument(
        "--controller",
        default=os.environ.get("RLTUNE_CONTROLLER", DEFAULT_CONTROLLER),
        metavar="HOST:PORT",
        help="where the controller listens (default: $RLTUNE_CONTROLLER or %(default)s)",
    )
    parser.add_argument(
        "--name",
        default=socket.gethostname().split(".")[0],
        help="this node's name in the cluster (default: the host name)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="attempts, logs and the node's identity (default: ~/.local/state/rltune/agent/NAME)",
    )
    parser.add_argument(
        "--mock-gpus",
        metavar="TYPE:N[,TYPE:N]",
        help="offer mock GPUs instead of real ones, e.g. P100:4",
    )
    parser.add_argument(
        "--mock-faults", type=Path, metavar="FILE", help="JSON file of faults to inject (tests)"
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="CPU cores to offer (default: all)")
    parser.add_argument(
        "--mem", type=_size, metavar="SIZE", help="host memory to offer, e.g. 64G (default: all)"
    )
    parser.add_argument(
        "--log-limit",
        type=_size,
        default=256 * 2**20,
        metavar="SIZE",
        help="kept of each output stream of an attempt, head and tail (default: 256M)",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="ADDRESS",
        help="address of this node for its peers (default: the one the controller sees)",
    )
    args = parser.parse_args(argv)
    try:
        check_node_name(args.name, "--name")
    except InvalidMessage as error:
        parser.error(str(error))
    if not re.fullmatch(r"\S+:\d{1,5}", args.controller):
        parser.error(f"--controller {args.controller!r} is not HOST:PORT")
    if args.cpus is not None and args.cpus < 1:
        parser.error("--cpus must be at least 1")
    if args.mem is not None and args.mem < MIN_MEMORY_BYTES:
        parser.error("--mem must be at least 1M")
    if args.log_limit < MIN_LOG_LIMIT_BYTES:
        parser.error(f"--log-limit must be at least {MIN_LOG_LIMIT_BYTES} bytes")
    if args.mock_gpus is not None:
        try:
            parse_mock_gpus(args.mock_gpus)
        except ValueError as error:
            parser.error(f"--mock-gpus: {error}")
    if args.mock_faults and not args.mock_gpus:
        parser.error("--mock-faults needs --mock-gpus")
    if args.advertise:
        try:
            ipaddress.ip_address(args.advertise)
        except ValueError:
            parser.error(f"--advertise {args.advertise!r} is not an IP address")
    try:
        state_dir = (args.state_dir or default_state_dir(args.name)).expanduser().absolute()
        mock_faults = args.mock_faults.absolute() if args.mock_faults else None
    except (OSError, RuntimeError) as error:  # the current folder or the home is gone
        parser.error(f"--state-dir: give an absolute path ({error})")
    return AgentConfig(
        controller=args.controller,
        node_name=args.name,
        state_dir=state_dir,
        mock_gpus=args.mock_gpus,
        mock_faults=mock_faults,
        cpus=args.cpus,
        memory_bytes=args.mem,
        log_limit_bytes=args.log_limit,
        advertise_address=args.advertise,
    )


def default_state_dir(node_name: str) -> Path:
    """Where an agent keeps its state unless told otherwise (XDG state folder)."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "rltune" / "agent" / node_name


def _size(text: str) -> int:
    """Bytes from `64G` (GiB), `64GiB` or `64GB` (1000^3)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size with a unit; write e.g. 64G or 512M"
        )
    number, prefix, unit = match.groups()
    base = 1000 if unit and unit.lower() == "b" else 1024
    return int(float(number) * base ** ("KMGT".index(prefix.upper()) + 1))
