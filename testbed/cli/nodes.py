"""`rltune nodes`, `gpus`, `drain`, `resume`: the machines."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from protos.messages import GpuView, NodeView, PartitionView
from testbed.cli import complete
from testbed.cli.json_output import print_json
from testbed.cli.options import ControllerFlag, JsonFlag, connect, some_text
from testbed.cli.text import ABSENT, Column, plain, say, show_table
from testbed.values import format_duration, format_size

SILENT_AFTER_S = 10.0
"""Slurm marks a node that does not answer with `*`."""

NODE_COLUMNS = (
    Column("NODE"),
    Column("STATE"),
    Column("GPUS", right=True),
    Column("TYPE"),
    Column("UTIL", right=True),
    Column("GPU MEM", right=True),
    Column("TEMP", right=True),
    Column("CPUS", right=True),
    Column("MEM", right=True),
    Column("LAST SEEN", right=True),
    Column("REASON", cut=True),
)
GPU_COLUMNS = (
    Column("NODE"),
    Column("GPU", right=True),
    Column("TYPE"),
    Column("UTIL", right=True),
    Column("MEM", right=True),
    Column("TEMP", right=True),
    Column("POWER", right=True),
    Column("JOB", right=True),
    Column("HEALTH", cut=True),
    Column("UUID"),
)
PARTITION_COLUMNS = (
    Column("PARTITION"),
    Column("NODES UP", right=True),
    Column("GPUS", right=True),
    Column("MAX GPUS", right=True),
    Column("PER USER", right=True),
    Column("MAX TIME", right=True),
    Column("USERS", cut=True),
    Column("NODES", cut=True),
)
NodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        callback=some_text,
        autocompletion=complete.nodes,
        help="Name of the node.",
    ),
]
OptionalNode = Annotated[
    str | None,
    typer.Argument(
        metavar="[NODE]",
        callback=some_text,
        autocompletion=complete.nodes,
        help="Only this node.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("nodes")(nodes)
    app.command("gpus")(gpus)
    app.command("partitions")(partitions)
    app.command("drain")(drain)
    app.command("resume")(resume)


def nodes(
    node: OptionalNode = None,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """List nodes: state, GPUs in use, load, health."""
    with connect(controller) as client:
        views = client.nodes(node or "")
    if json:
        print_json({"nodes": views})
        return
    colors = [None if view.state == "UP" else "red" for view in views]
    show_table(NODE_COLUMNS, [node_row(view) for view in views], colors)


def node_row(view: NodeView) -> tuple[str, ...]:
    """A node as sinfo would show it."""
    samples = [gpu.sample for gpu in view.gpus if gpu.sample is not None]
    utilizations = [s.gpu_utilization_pct for s in samples if s.gpu_utilization_pct is not None]
    temperatures = [s.temperature_c for s in samples if s.temperature_c is not None]
    used = [s.memory_used_bytes for s in samples if s.memory_used_bytes is not None]
    total = [s.memory_total_bytes for s in samples if s.memory_total_bytes is not None]
    silent = view.last_seen_s_ago is None or view.last_seen_s_ago > SILENT_AFTER_S
    busy = sum(gpu.job_id is not None for gpu in view.gpus)
    types = Counter(gpu.facts.gpu_type for gpu in view.gpus)
    return (
        view.name,
        view.state + ("*" if silent else ""),
        f"{busy}/{len(view.gpus)}",
        ",".join(f"{name}:{count}" for name, count in types.items()) or ABSENT,
        f"{sum(utilizations) / len(utilizations):.0f}%" if utilizations else ABSENT,
        f"{format_size(sum(used))}/{format_size(sum(total))}" if used and total else ABSENT,
        f"{max(temperatures):.0f}C" if temperatures else ABSENT,
        f"{view.cpus_used}/{view.facts.cpus}",
        f"{format_size(view.memory_used_bytes)}/{format_size(view.facts.memory_bytes)}",
        ABSENT if view.last_seen_s_ago is None else f"{view.last_seen_s_ago:.0f}s",
        "; ".join(view.reasons) or ABSENT,
    )


def gpus(
    node: OptionalNode = None,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """List GPUs: load, memory, temperature, power, who holds them, health."""
    with connect(controller) as client:
        views = client.gpus(node or "")
    if json:
        print_json({"gpus": views})
        return
    colors = [None if view.healthy else "red" for view in views]
    show_table(GPU_COLUMNS, [gpu_row(view) for view in views], colors)


def gpu_row(view: GpuView) -> tuple[str, ...]:
    """A GPU on one line."""
    sample = view.sample
    utilization = None if sample is None else sample.gpu_utilization_pct
    used = None if sample is None else sample.memory_used_bytes
    total = view.facts.memory_bytes if sample is None else sample.memory_total_bytes
    temperature = None if sample is None else sample.temperature_c
    power = None if sample is None else sample.power_w
    limit = None if sample is None else sample.power_limit_w
    warnings = () if sample is None else sample.warnings
    return (
        view.node,
        str(view.facts.index),
        view.facts.gpu_type,
        ABSENT if utilization is None else f"{utilization:.0f}%",
        f"{format_size(used)}/{format_size(total)}",
        ABSENT if temperature is None else f"{temperature:.0f}C",
        (ABSENT if power is None else f"{power:.0f}W")
        + ("" if limit is None else f"/{limit:.0f}W"),
        ABSENT if view.job_id is None else str(view.job_id),
        "; ".join((*view.reasons, *warnings)) or ("ok" if view.healthy else "unhealthy"),
        view.facts.uuid,
    )


def partitions(json: JsonFlag = False, controller: ControllerFlag = None) -> None:
    """List partitions: nodes, GPUs in use, limits, who may use them."""
    with connect(controller) as client:
        views = client.info().partitions
    if json:
        print_json({"partitions": views})
        return
    if not views:
        say("no partition is configured: every job may go anywhere")
        return
    show_table(PARTITION_COLUMNS, [partition_row(view) for view in views])


def partition_row(view: PartitionView) -> tuple[str, ...]:
    """A partition as sinfo would show it; `*` marks the default one."""
    return (
        view.name + ("*" if view.is_default else ""),
        f"{view.nodes_up}/{len(view.nodes)}",
        f"{view.gpus_used}/{view.gpus_total}",
        ABSENT if view.max_gpus is None else str(view.max_gpus),
        ABSENT if view.max_gpus_per_user is None else str(view.max_gpus_per_user),
        ABSENT if view.max_time_s is None else format_duration(view.max_time_s),
        "everybody" if view.everybody else ",".join(view.allow_users) or "nobody",
        ",".join(view.nodes) or ABSENT,
    )


def drain(
    node: NodeArgument,
    reason: Annotated[
        str, typer.Option("--reason", callback=some_text, help="Why; others see it.")
    ],
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Give a node no new work; what runs there goes on."""
    with connect(controller) as client:
        view = client.drain(node, reason)
    _show_node(view, json=json)


def resume(
    node: NodeArgument,
    json: JsonFlag = False,
    controller: ControllerFlag = None,
) -> None:
    """Give a drained node work again."""
    with connect(controller) as client:
        view = client.resume(node)
    _show_node(view, json=json)


def _show_node(view: NodeView, *, json: bool) -> None:
    if json:
        print_json({"node": view})
    else:
        reasons = f" ({'; '.join(view.reasons)})" if view.reasons else ""
        say(plain(f"{view.name} {view.state}{reasons}"))
