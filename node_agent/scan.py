"""What one look at all GPUs of a node yields, and how it crosses the collector's pipe as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from protos.messages import GpuFacts, GpuProcess, GpuSample, XidEvent

ProcessesByGpu: TypeAlias = Mapping[str, tuple[GpuProcess, ...] | None]
"""GPU uuid -> its processes; None where NVML could not tell (lost, unsupported, unknown GPU)."""


@dataclass(frozen=True, slots=True)
class Scan:
    """One reading of every GPU of the node."""

    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA that the driver serves, e.g. `12.4`."""
    facts: tuple[GpuFacts, ...] = ()
    """Every GPU seen since the collector started, lost ones included."""
    samples: tuple[GpuSample, ...] = ()
    """One per entry of `facts`, in the same order; empty while NVML itself is out of reach."""
    xids: tuple[XidEvent, ...] = ()
    """Xid errors since the previous scan."""
    node_health: tuple[str, ...] = ()
    """Reasons why the whole node must not get work."""
    note: str = ""
    """Why there is no GPU although nothing is broken (no NVIDIA driver on this machine)."""


def scan_to_json(scan: Scan) -> dict[str, Any]:
    """Turns a scan into plain JSON values."""
    return asdict(scan)


def scan_from_json(value: Mapping[str, Any]) -> Scan:
    """Rebuilds what `scan_to_json` made."""
    return Scan(
        driver_version=value["driver_version"],
        cuda_version=value["cuda_version"],
        facts=tuple(gpu_facts_from_json(facts) for facts in value["facts"]),
        samples=tuple(_sample_from_json(sample) for sample in value["samples"]),
        xids=tuple(XidEvent(**event) for event in value["xids"]),
        node_health=tuple(value["node_health"]),
        note=value["note"],
    )


def gpu_facts_from_json(value: Mapping[str, Any]) -> GpuFacts:
    """Rebuilds the facts of a card from plain JSON values."""
    return GpuFacts(**{**value, "near": tuple(value.get("near", ()))})


def processes_to_json(processes: ProcessesByGpu) -> dict[str, Any]:
    """Turns processes by GPU into plain JSON values."""
    return {
        uuid: None if holders is None else [asdict(holder) for holder in holders]
        for uuid, holders in processes.items()
    }


def processes_from_json(value: Mapping[str, Any]) -> dict[str, tuple[GpuProcess, ...] | None]:
    """Rebuilds what `processes_to_json` made."""
    return {uuid: _holders_from_json(holders) for uuid, holders in value.items()}


def _holders_from_json(holders: list[dict[str, Any]] | None) -> tuple[GpuProcess, ...] | None:
    return None if holders is None else tuple(GpuProcess(**holder) for holder in holders)


def _sample_from_json(value: dict[str, Any]) -> GpuSample:
    reasons = value["throttle_reasons"]
    return GpuSample(
        **{
            **value,
            "throttle_reasons": None if reasons is None else tuple(reasons),
            "processes": _holders_from_json(value["processes"]),
            "health": tuple(value["health"]),
            "warnings": tuple(value["warnings"]),
        }
    )
