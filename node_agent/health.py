"""From what NVML says about a card to whether it may get work. Pure.

A *reason* takes the card out of service, a *warning* is only shown. An Xid of the critical kind
is a reason as long as its event is remembered; who remembers it, and until when, is not decided
here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class XidSeverity(StrEnum):
    """What an Xid says about the card."""

    APPLICATION = "APPLICATION"
    """The program's own fault (or only the program dies): the card stays in service."""
    CRITICAL = "CRITICAL"
    """The card or its link is broken until someone mends it."""


@dataclass(frozen=True, slots=True)
class XidMeaning:
    """An entry of NVIDIA's Xid table."""

    severity: XidSeverity
    text: str


def _application(text: str) -> XidMeaning:
    return XidMeaning(XidSeverity.APPLICATION, text)


def _critical(text: str) -> XidMeaning:
    return XidMeaning(XidSeverity.CRITICAL, text)


XID_TABLE: Mapping[int, XidMeaning] = MappingProxyType(
    {
        13: _application("graphics engine exception, usually an error of the program"),
        31: _application("GPU memory page fault, usually an illegal address in the program"),
        43: _application("GPU stopped processing, the program was ended"),
        45: _application("preemptive cleanup after an earlier error or a killed program"),
        48: _critical("double bit ECC error"),
        63: _critical("row remap or page retirement pending: reset the GPU when its job has ended"),
        64: _critical("row remap or page retirement failed"),
        68: _application("video processor exception"),
        69: _application("graphics engine class error"),
        74: _critical("NVLink error"),
        79: _critical("GPU has fallen off the bus"),
        94: _application("contained ECC error: only the program that hit it dies"),
        95: _critical("uncontained ECC error"),
        109: _application("context switch timeout"),
        119: _critical("GSP firmware does not answer (RPC timeout)"),
        120: _critical("GSP firmware error"),
        154: _critical("GPU asks for a recovery action"),
    }
)
"""After NVIDIA's `Xid Errors` manual: which errors are the program's, which are the card's."""

THROTTLE_WORDS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""Bits 0, 1, ... of NVML's clocks event reasons, in nvidia-smi's words."""

THERMAL_THROTTLE_WORDS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
)
"""Throttle reasons that a person should look at; a power cap or an idle clock is everyday."""

RECOVERY_ACTIONS: Mapping[int, str] = MappingProxyType(
    {
        1: "reset the GPU (nvidia-smi -r)",
        2: "reboot the node",
        3: "drain peer-to-peer traffic",
        4: "drain and reset the GPU",
        5: "recover the IMEX domain",
        6: "reset the bus",
        7: "reboot the system",
    }
)
"""Values of NVML field 230 (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`); 0 means none."""

MIG_REASON = "MIG is enabled; not supported yet"


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What a scan found out about one card. None means that the card has no opinion."""

    lost: str | None = None
    """Why NVML does not reach the card; then nothing else is known."""
    unreadable: str | None = None
    """The error, when not a single value of the card could be read."""
    reset_required: bool = False
    unwatched: str | None = None
    """The error, when Xid events exist for the card but could not be subscribed."""
    mig_enabled: bool | None = None
    ecc_uncorrected: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    recovery_action: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    page_retirement_pending: bool | None = None
    read_errors: Mapping[str, str] = field(default_factory=dict)
    """Field -> error, for values that should be there but could not be read this time."""
    xids: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the symptoms."""

    reasons: tuple[str, ...]
    """Why the card must not get work; empty means healthy."""
    warnings: tuple[str, ...]


def xid_text(xid: int, table: Mapping[int, XidMeaning] = XID_TABLE) -> str:
    """An Xid in words, e.g. `Xid 79: GPU has fallen off the bus`."""
    meaning = table.get(xid)
    return f"Xid {xid}: {meaning.text}" if meaning else f"Xid {xid}"


def is_critical_xid(xid: int, table: Mapping[int, XidMeaning] = XID_TABLE) -> bool:
    """Whether an Xid takes the card out. One that the table does not know is only shown."""
    meaning = table.get(xid)
    return meaning is not None and meaning.severity is XidSeverity.CRITICAL


def judge(symptoms: Symptoms, table: Mapping[int, XidMeaning] = XID_TABLE) -> Verdict:
    """Decides what takes the card out of service and what is only shown.

    Args:
        symptoms: what the scan found.
        table: meaning of Xids; a site may bring its own.
    """
    xids = sorted(symptoms.xids)
    xid_reasons = [xid_text(xid, table) for xid in xids if is_critical_xid(xid, table)]
    xid_warnings = [xid_text(xid, table) for xid in xids if not is_critical_xid(xid, table)]
    if symptoms.lost is not None:
        return Verdict((symptoms.lost, *xid_reasons), tuple(xid_warnings))
    return Verdict(
        (*_state_reasons(symptoms), *_memory_reasons(symptoms), *xid_reasons),
        (*_throttle_warnings(symptoms), *_read_warnings(symptoms), *xid_warnings),
    )


def _state_reasons(symptoms: Symptoms) -> list[str]:
    reasons = []
    if symptoms.unreadable is not None:
        reasons.append(f"NVML cannot read this GPU: {symptoms.unreadable}")
    if symptoms.reset_required:
        reasons.append("GPU needs a reset (nvidia-smi -r)")
    if symptoms.unwatched is not None:
        reasons.append(f"Xid events cannot be watched: {symptoms.unwatched}")
    if symptoms.mig_enabled:
        reasons.append(MIG_REASON)
    if symptoms.recovery_action:
        # A number that a newer driver brings is worse than none, never better.
        action = RECOVERY_ACTIONS.get(
            symptoms.recovery_action, f"unknown action {symptoms.recovery_action}"
        )
        reasons.append(f"GPU asks for recovery: {action}")
    return reasons


def _memory_reasons(symptoms: Symptoms) -> list[str]:
    reasons = []
    if symptoms.ecc_uncorrected:
        reasons.append(f"{symptoms.ecc_uncorrected} uncorrected ECC errors since the driver loaded")
    if symptoms.row_remap_failed:
        reasons.append("row remap failed: the GPU's memory is worn out, replace the GPU")
    if symptoms.row_remap_pending:
        reasons.append("row remap pending: reset the GPU (nvidia-smi -r)")
    if symptoms.page_retirement_pending:
        reasons.append("page retirement pending: reset the GPU (nvidia-smi -r)")
    return reasons


def _throttle_warnings(symptoms: Symptoms) -> list[str]:
    words = [word for word in symptoms.throttle_reasons or () if word in THERMAL_THROTTLE_WORDS]
    return [f"clocks are throttled: {', '.join(words)}"] if words else []


def _read_warnings(symptoms: Symptoms) -> list[str]:
    return [f"cannot read {name}: {error}" for name, error in symptoms.read_errors.items()]
