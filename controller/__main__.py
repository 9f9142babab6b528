"""`python -m controller`: run the controller until SIGTERM."""

from __future__ import annotations

import os

# Before gRPC is imported: the solver is spawned beside it, by plain spawns only.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from importlib.metadata import version

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controller.api import ControllerApi
from controller.config import ControllerConfig, parse_args
from controller.dispatch import Dispatch
from controller.gateway import Gateway
from controller.loop import SchedulingLoop
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import NEED_SOLVER, make_allocator, make_prioritizer
from controller.service import Service
from controller.solvers import SolverMissing, make_solver
from controller.solvers.glpsol import load_pyomo
from controller.store.errors import StoreUnavailable
from controller.store.store import Store
from protos import rltune_pb2, rltune_pb2_grpc

TICK_S = 0.25
STOP_GRACE_S = 2.0
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second controller on the port must fail, not share it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
)
SERVICES = (
    rltune_pb2.DESCRIPTOR.services_by_name["Controller"].full_name,
    rltune_pb2.DESCRIPTOR.services_by_name["AgentGateway"].full_name,
)

log = logging.getLogger("rltune.controller")


class CannotListen(RuntimeError):
    """The address cannot be listened on."""


async def run(config: ControllerConfig, store: Store, scheduler: Scheduler) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    dispatch = Dispatch(config.cluster)
    service = Service(
        store,
        dispatch,
        cluster=config.cluster,
        scheduler=scheduler,
        config=config.cluster_config,
        version=version("rltune-testbed"),
        lease_s=config.lease_s,
        heartbeat_s=config.heartbeat_s,
        now=time.time,
        monotonic=time.monotonic,
    )
    scheduling = SchedulingLoop(service, scheduler, monotonic=time.monotonic, sleep=asyncio.sleep)
    healthy = health.aio.HealthServicer()
    gateway = Gateway(service, dispatch)
    server, address = _bind(config, service, gateway, healthy)
    await service.load()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(service.run()),
            tasks.create_task(scheduling.run()),
            tasks.create_task(_tick(service)),
        ]
        await server.start()
        for name in ("", *SERVICES):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        _tell_ready(config, address)
        log.info(
            "cluster %s listens on %s; policy %s, allocator %s",
            config.cluster,
            address,
            config.policy,
            config.allocator,
        )
        await stop.wait()
        log.info("stopping; running jobs go on and are found again at the next start")
        gateway.close()
        await server.stop(STOP_GRACE_S)
        for task in running:
            task.cancel()


async def _tick(service: Service) -> None:
    while True:
        await service.tick()
        await asyncio.sleep(TICK_S)


def _bind(
    config: ControllerConfig,
    service: Service,
    gateway: Gateway,
    healthy: health.aio.HealthServicer,
) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    rltune_pb2_grpc.add_ControllerServicer_to_server(ControllerApi(service, gateway), server)
    rltune_pb2_grpc.add_AgentGatewayServicer_to_server(gateway, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise CannotListen(
            f"cannot listen on {host}:{config.port}: is another controller running? "
            "say --listen ADDRESS:PORT"
        ) from error
    return server, f"{host}:{port}"


def _tell_ready(config: ControllerConfig, address: str) -> None:
    """Write where we listen, for whoever started us with port 0."""
    path = config.state_dir / "controller.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n")
    fresh.rename(path)


def _allocator(config: ControllerConfig) -> Allocator:
    """The allocator with its solver.

    Raises:
        SolverMissing: a solver was asked for by name that cannot be loaded.
    """
    if config.allocator not in NEED_SOLVER:
        return make_allocator(config.allocator, aim=config.aim)
    load_pyomo()  # now, so that no decision has to wait for it
    gc.freeze()  # what is loaded stays: a collection during a decision need not walk it
    solver, missing = None, ""
    try:
        solver = make_solver(config.solver)
        log.info("placements are solved by %s", solver.name)
    except SolverMissing as error:
        if config.solver != "auto":
            raise
        missing = str(error)
        log.warning("%s; until then jobs are placed as greedy does", missing)
    return make_allocator(
        config.allocator,
        solver=solver,
        no_solver=missing,
        aim=config.aim,
        monotonic=time.monotonic,
    )


def main() -> int:
    """Entry point; returns the exit code."""
    config = parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        scheduler = Scheduler(make_prioritizer(config.policy), _allocator(config), config.backfill)
        with Store.open(config.state_dir) as store:
            uvloop.run(run(config, store, scheduler))
    except (CannotListen, SolverMissing, StoreUnavailable, OSError) as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
