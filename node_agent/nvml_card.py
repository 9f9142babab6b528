"""Reads one card, value by value, so that what it cannot tell costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from node_agent.gpu_profiles import gpu_type_of
from node_agent.health import THROTTLE_WORDS, Symptoms, judge
from node_agent.nvml_api import FaultKind, Handle, NvmlApi, NvmlFault
from protos.messages import GpuFacts, GpuProcess, GpuSample

T = TypeVar("T")

_RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older pynvml has no name for it
_NODE_FAULTS = frozenset({FaultKind.LOST, FaultKind.DRIVER_MISMATCH, FaultKind.UNINITIALIZED})
"""Faults that end the reading of the card at once; the collector decides what they mean."""


@dataclass(slots=True)
class Card:
    """What the collector remembers of a card between scans."""

    uuid: str
    index: int
    handle: Handle | None = None
    """None while NVML does not reach the card."""
    lost: str | None = None
    """Why there is no handle."""
    suspect: bool = False
    """The last reading failed in an unknown way: take a fresh handle."""
    facts: GpuFacts | None = None
    unsupported: set[str] = field(default_factory=set)
    """Fields that the card does not have; asked again after a driver change."""
    watched_key: int | None = None
    """Key of the handle that is registered for events."""
    unwatched: str | None = None
    critical_xids: set[int] = field(default_factory=set)
    """Seen since NVML was opened; the card stays out for them."""

    def attach(self, index: int, handle: Handle) -> None:
        """NVML reaches the card."""
        self.index, self.handle, self.lost, self.suspect = index, handle, None, False

    def detach(self, reason: str) -> None:
        """NVML does not reach the card any more."""
        self.handle, self.lost = None, reason

    def facts_or_placeholder(self) -> GpuFacts:
        """What is known of the card; hardly anything if it was lost from the start."""
        return self.facts or GpuFacts(
            uuid=self.uuid, index=self.index, name="unknown", gpu_type="unknown", pci_bus_id=""
        )


class _Reader:
    """Guards each value of one card in one scan."""

    def __init__(self, api: NvmlApi, card: Card) -> None:
        self.api = api
        self.handle = card.handle
        self.errors: dict[str, str] = {}
        self.values_read = 0
        self.reset_required = False
        self._card = card

    def read(self, name: str, call: Callable[[], T]) -> T | None:
        """The value, or None where the card has none or could not tell this time.

        Raises:
            NvmlFault: the card or the driver is out of reach.
        """
        if name in self._card.unsupported:
            return None
        try:
            value = call()
        except NvmlFault as fault:
            self._note(name, fault)
            return None
        self.values_read += 1
        return value

    def number(self, name: str, function: str, *args: int) -> int | None:
        """Reads what a function of the handle gives as a whole number."""
        return self.read(name, lambda: int(self.api.call(function, self.handle, *args)))

    def constant(self, name: str, default: int) -> int:
        """A constant of the module, or its value by NVML's header where this pynvml lacks it."""
        value = self.api.lookup(name)
        return default if value is None else int(value)

    def _note(self, name: str, fault: NvmlFault) -> None:
        if fault.kind in _NODE_FAULTS:
            raise fault
        if fault.kind is FaultKind.NOT_SUPPORTED:
            self._card.unsupported.add(name)
        elif fault.kind is FaultKind.RESET_REQUIRED:
            self.reset_required = True
        else:
            self.errors[name] = fault.text
            self._card.suspect = True


def read_sample(api: NvmlApi, card: Card, new_xids: frozenset[int], *, mock: bool) -> GpuSample:
    """Takes a reading of a card that has a handle, and judges it; refreshes `card.facts`.

    Raises:
        NvmlFault: the card was lost on the way, or NVML as a whole is out of reach.
    """
    reader = _Reader(api, card)
    mig_enabled = _mig_enabled(reader)
    if card.facts is None or card.facts.mig_enabled != mig_enabled:
        card.facts = _facts(reader, card, mig_enabled, mock=mock)
    memory = reader.read("memory", lambda: api.memory(card.handle))
    utilization = reader.read("utilization", lambda: _utilization(reader))
    ecc_corrected, ecc_uncorrected = (_ecc(reader, corrected=word) for word in (True, False))
    throttle_reasons = reader.read("throttle reasons", lambda: _throttle_reasons(reader))
    power_mw = reader.number("power", "nvmlDeviceGetPowerUsage")
    sample = GpuSample(
        uuid=card.uuid,
        memory_used_bytes=memory[0] if memory else None,
        memory_total_bytes=memory[1] if memory else None,
        gpu_utilization_pct=utilization[0] if utilization else None,
        memory_utilization_pct=utilization[1] if utilization else None,
        temperature_c=_temperature_c(reader),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=_power_limit_w(reader),
        sm_clock_mhz=reader.number(
            "SM clock", "nvmlDeviceGetClockInfo", reader.constant("NVML_CLOCK_SM", 1)
        ),
        memory_clock_mhz=reader.number(
            "memory clock", "nvmlDeviceGetClockInfo", reader.constant("NVML_CLOCK_MEM", 2)
        ),
        ecc_corrected=ecc_corrected,
        ecc_uncorrected=ecc_uncorrected,
        throttle_reasons=throttle_reasons,
        processes=reader.read("processes", lambda: api.processes(card.handle)),
    )
    return _judged(sample, _symptoms(reader, card, sample, mig_enabled, new_xids))


def lost_sample(card: Card, new_xids: frozenset[int]) -> GpuSample:
    """The row of a card that NVML does not reach."""
    symptoms = Symptoms(lost=card.lost or "GPU is lost", xids=card.critical_xids | new_xids)
    return _judged(GpuSample(uuid=card.uuid, lost=True), symptoms)


def read_processes(api: NvmlApi, card: Card) -> tuple[GpuProcess, ...] | None:
    """The processes on a card that has a handle, or None where NVML could not tell.

    Raises:
        NvmlFault: the card was lost on the way, or NVML as a whole is out of reach.
    """
    return _Reader(api, card).read("processes", lambda: api.processes(card.handle))


def _judged(sample: GpuSample, symptoms: Symptoms) -> GpuSample:
    verdict = judge(symptoms)
    return replace(sample, health=verdict.reasons, warnings=verdict.warnings)


def _symptoms(
    reader: _Reader,
    card: Card,
    sample: GpuSample,
    mig_enabled: bool | None,
    new_xids: frozenset[int],
) -> Symptoms:
    api, handle = reader.api, card.handle
    rows = reader.read("remapped rows", lambda: api.call("nvmlDeviceGetRemappedRows", handle))
    pages = reader.number("retired pages", "nvmlDeviceGetRetiredPagesPendingStatus")
    recovery = reader.read("recovery action", lambda: api.field(handle, _RECOVERY_ACTION_FIELD))
    first_error = next(iter(reader.errors.values()), None)
    return Symptoms(
        unreadable=first_error if reader.values_read == 0 else None,
        reset_required=reader.reset_required,
        unwatched=card.unwatched,
        mig_enabled=mig_enabled,
        ecc_uncorrected=sample.ecc_uncorrected,
        throttle_reasons=sample.throttle_reasons,
        recovery_action=recovery,
        row_remap_pending=bool(rows[2]) if rows else None,
        row_remap_failed=bool(rows[3]) if rows else None,
        page_retirement_pending=None if pages is None else bool(pages),
        read_errors=reader.errors,
        xids=card.critical_xids | new_xids,
    )


def _facts(reader: _Reader, card: Card, mig_enabled: bool | None, *, mock: bool) -> GpuFacts | None:
    """What does not change; None (so asked again) as long as the card does not tell its name."""
    api, handle = reader.api, card.handle
    name = reader.read("name", lambda: api.text("nvmlDeviceGetName", handle))
    if name is None:
        return None
    memory = reader.read("memory", lambda: api.memory(handle))
    memory_bytes = memory[1] if memory else None
    return GpuFacts(
        uuid=card.uuid,
        index=card.index,
        name=name,
        gpu_type=gpu_type_of(name, memory_bytes),
        pci_bus_id=reader.read("PCI bus id", lambda: api.pci_bus_id(handle)) or "",
        memory_bytes=memory_bytes,
        power_limit_w=_power_limit_w(reader),
        mig_enabled=mig_enabled,
        mock=mock,
    )


def _mig_enabled(reader: _Reader) -> bool | None:
    mode = reader.read("MIG mode", lambda: reader.api.call("nvmlDeviceGetMigMode", reader.handle))
    return None if mode is None else bool(mode[0])


def _utilization(reader: _Reader) -> tuple[float, float]:
    rates = reader.api.call("nvmlDeviceGetUtilizationRates", reader.handle)
    return float(rates.gpu), float(rates.memory)


def _ecc(reader: _Reader, *, corrected: bool) -> int | None:
    kind = "CORRECTED" if corrected else "UNCORRECTED"
    return reader.number(
        f"{kind.lower()} ECC errors",
        "nvmlDeviceGetTotalEccErrors",
        reader.constant(f"NVML_MEMORY_ERROR_TYPE_{kind}", 0 if corrected else 1),
        reader.constant("NVML_VOLATILE_ECC", 0),
    )


def _temperature_c(reader: _Reader) -> float | None:
    names = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")  # the first goes in CUDA 14
    sensor = reader.constant("NVML_TEMPERATURE_GPU", 0)
    return reader.read(
        "temperature", lambda: float(reader.api.call_first(names, reader.handle, sensor))
    )


def _power_limit_w(reader: _Reader) -> float | None:
    names = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
    return reader.read(
        "power limit", lambda: float(reader.api.call_first(names, reader.handle)) / 1000
    )


def _throttle_reasons(reader: _Reader) -> tuple[str, ...]:
    bits = int(
        reader.api.call_first(
            (
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetCurrentClocksThrottleReasons",
            ),
            reader.handle,
        )
    )
    words = [word for bit, word in enumerate(THROTTLE_WORDS) if bits & (1 << bit)]
    unknown = bits >> len(THROTTLE_WORDS) << len(THROTTLE_WORDS)
    return (*words, f"unknown_{unknown:#x}") if unknown else tuple(words)
