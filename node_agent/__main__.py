"""`python -m node_agent`: run a node agent until SIGTERM; its jobs go on without it."""

from __future__ import annotations

import os

# Before gRPC is imported: we spawn processes beside it, and only plain spawns (no fork handlers).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import asyncio
import contextlib
import logging
import signal
import sys
import time
import uuid
from importlib.metadata import version

from node_agent.collector import CollectorClient, CollectorStartError
from node_agent.config import AgentConfig, parse_args
from node_agent.host import boot_id
from node_agent.identity import Membership, StateDirBusy, lock_state_dir, node_id
from node_agent.inventory import Inventory
from node_agent.launcher import Launcher
from node_agent.session import AgentSession, Identity
from node_agent.telemetry import AgentTelemetry

SCAN_EVERY_S = 1.0

log = logging.getLogger("rltune.agent")


async def run(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT.

    Raises:
        OSError: it cannot start.
    """
    this_node = node_id(config.state_dir)
    boot = boot_id()
    collector = CollectorClient(
        mock_gpus=config.mock_gpus, seed=this_node, faults_path=config.mock_faults
    )
    telemetry = AgentTelemetry(
        config,
        collector,
        Inventory(config.state_dir, boot),
        version=version("rltune-testbed"),
        sleep=asyncio.sleep,
    )
    session = AgentSession(
        config.controller,
        Identity(config.node_name, this_node, boot, str(uuid.uuid4()), config.advertise_address),
        Membership(config.state_dir),
        telemetry,
        monotonic=time.monotonic,
        sleep=asyncio.sleep,
    )
    launcher = Launcher(
        config.state_dir,
        node_name=config.node_name,
        boot_id=boot,
        on_report=session.on_report,
        gpu_processes=collector.processes,
        log_limit_bytes=config.log_limit_bytes,
        monotonic=time.monotonic,
        sleep=asyncio.sleep,
    )
    serving = asyncio.create_task(_serve(config, collector, telemetry, session, launcher))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    log.info("stopped; running jobs go on and are found again at the next start")


async def _serve(
    config: AgentConfig,
    collector: CollectorClient,
    telemetry: AgentTelemetry,
    session: AgentSession,
    launcher: Launcher,
) -> None:
    """Runs all parts until it is cancelled."""
    try:
        try:
            await collector.start()
        except CollectorStartError as error:  # running jobs need the agent all the same
            log.error("the telemetry process does not start: %s", error)
        await telemetry.scan_once()
        await launcher.start()
        log.info("node %s offers %s", config.node_name, _offer(telemetry))
        if collector.latest is not None and collector.latest.note:
            log.warning("%s", collector.latest.note)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(telemetry.run(SCAN_EVERY_S))
            tasks.create_task(session.run(launcher))
    finally:
        await launcher.close()
        await collector.close()


def _offer(telemetry: AgentTelemetry) -> str:
    facts = telemetry.facts()
    types = [gpu.gpu_type for gpu in facts.gpus]
    gpus = ", ".join(f"{types.count(name)} x {name}" for name in dict.fromkeys(types))
    mock = " (mock)" if facts.mock else ""
    return f"{gpus or 'no GPU'}{mock}, {facts.cpus} CPUs, {facts.memory_bytes / 2**30:.1f} GiB"


def main() -> int:
    """Entry point; returns the exit code."""
    config = parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        lock = lock_state_dir(config.state_dir)
    except StateDirBusy as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error(
            "cannot use %s (%s): give a --state-dir that can be written", config.state_dir, error
        )
        return 2
    try:
        with lock:
            asyncio.run(run(config))
    except OSError as error:
        log.error("the agent cannot start: %s; its state folder is %s", error, config.state_dir)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
