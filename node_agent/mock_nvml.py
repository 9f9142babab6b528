# The names and meanings of the methods are those of NVML, so they are not described again:
# ruff: noqa: N802, D102
"""Mock GPUs behind the API of the module `pynvml`: no hardware, but real processes on it.

Constants and error classes are pynvml's own; its functions are never passed through, so a mock
node cannot touch a real GPU. Memory and utilization of a card follow the real processes that
were given its UUID (`node_agent.mock_processes`); power, temperature and clocks follow the
utilization.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml

from node_agent.gpu_profiles import MIB, GpuProfile, parse_mock_gpus
from node_agent.health import THROTTLE_WORDS
from node_agent.mock_faults import FaultFile, MockFault, MockFaultKind, write_faults
from node_agent.mock_processes import MockProcessTable

__all__ = ["MockFault", "MockFaultKind", "MockNvml", "parse_mock_gpus", "write_faults"]

CONTEXT_BYTES = 256 * MIB
"""What each process takes on each of its GPUs beside its own memory, about as a CUDA context."""
RESERVED_BYTES = 256 * MIB
"""What the driver keeps for itself: `reserved` of memory v2, part of `used` in v1."""
MOCK_DRIVER_VERSION = "550.54.15"
MOCK_CUDA_VERSION = 12040

_AMBIENT_C = 30.0
_RISE_AT_LIMIT_C = 45.0
_THERMAL_TIME_CONSTANT_S = 20.0
_MEMORY_SHARE_OF_UTILIZATION = 0.5
_HANG_POLL_S = 0.05

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Device:
    """A mock card; also its handle."""

    index: int
    uuid: str
    profile: GpuProfile
    temperature_c: float = _AMBIENT_C
    temperature_at_s: float | None = None


def _device_call(
    field: str,
) -> Callable[
    [Callable[Concatenate[MockNvml, _Device, P], T]],
    Callable[Concatenate[MockNvml, _Device, P], T],
]:
    """Marks a function of a card: the card's faults strike before it answers."""

    def decorate(
        function: Callable[Concatenate[MockNvml, _Device, P], T],
    ) -> Callable[Concatenate[MockNvml, _Device, P], T]:
        def guarded(self: MockNvml, device: _Device, /, *args: P.args, **kwargs: P.kwargs) -> T:
            self.strike(device, field)
            return function(self, device, *args, **kwargs)

        return guarded

    return decorate


def mock_uuids(profiles: Sequence[GpuProfile], seed: str) -> tuple[str, ...]:
    """The UUIDs of an agent's mock cards: the same at each start, and its own.

    Args:
        profiles: the cards in index order.
        seed: the agent's node id.
    """
    return tuple(
        f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'rltune-mock/{seed}/{index}/{profile.gpu_type}')}"
        for index, profile in enumerate(profiles)
    )


class MockNvml:
    """An object to use in place of the module `pynvml`."""

    def __init__(
        self,
        profiles: Sequence[GpuProfile],
        seed: str,
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
        faults_path: Path | None = None,
    ) -> None:
        """Makes the cards.

        Args:
            profiles: the cards in index order.
            seed: the agent's node id.
            monotonic: seconds of a clock that never jumps.
            sleep: stands in for a driver call that takes its time.
            faults_path: faults to simulate; the file may come, change and go.
        """
        uuids = mock_uuids(profiles, seed)
        self._devices = [
            _Device(index, gpu_uuid, profile)
            for index, (gpu_uuid, profile) in enumerate(zip(uuids, profiles, strict=True))
        ]
        self._monotonic = monotonic
        self._sleep = sleep
        self._processes = MockProcessTable(frozenset(uuids), monotonic=monotonic)
        self._faults = FaultFile(faults_path, len(self._devices))
        self._is_open = False
        self._watched: list[_Device] = []

    def __getattr__(self, name: str) -> Any:
        """Constants, structures and error classes of pynvml, but none of its functions."""
        value = getattr(pynvml, name)
        if isinstance(value, (int, type)):
            return value
        raise AttributeError(f"the mock NVML has no {name}")

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the faults file, as reasons of the node."""
        return self._faults.problems()

    def strike(self, device: _Device, field: str) -> None:
        """Lets the faults of a card act on a call.

        Raises:
            NVMLError: as the fault says.
        """
        self._check_open()
        faults, gpu = self._faults, device.index
        if not faults.count_call(gpu):
            return
        for fault in faults.of_gpu(gpu, MockFaultKind.SLOW):
            self._sleep(float(fault.value or 0))
        while faults.of_gpu(gpu, MockFaultKind.HANG):
            self._sleep(_HANG_POLL_S)
        if faults.of_gpu(gpu, MockFaultKind.LOST) or faults.of_gpu(
            gpu, MockFaultKind.FALLEN_OFF_BUS
        ):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if any(f.value == field for f in faults.of_gpu(gpu, MockFaultKind.NOT_SUPPORTED)):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _check_open(self) -> None:
        if self._faults.of_node(MockFaultKind.DRIVER_MISMATCH):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        if not self._is_open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _visible(self) -> list[_Device]:
        self._check_open()
        return [
            device
            for device in self._devices
            if not self._faults.of_gpu(device.index, MockFaultKind.FALLEN_OFF_BUS)
        ]

    # The functions of the API, in the order of NVML's manual.

    def nvmlInit(self) -> None:
        self._is_open = True
        try:
            self._check_open()
        except pynvml.NVMLError:
            self._is_open = False
            raise

    def nvmlShutdown(self) -> None:
        self._check_open()
        self._is_open = False
        self._watched.clear()

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check_open()
        return MOCK_DRIVER_VERSION

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._check_open()
        return MOCK_CUDA_VERSION

    def nvmlDeviceGetCount(self) -> int:
        return len(self._visible())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Device:
        visible = self._visible()
        if index >= len(visible):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.strike(visible[index], "handle")
        return visible[index]

    @_device_call("uuid")
    def nvmlDeviceGetUUID(self, device: _Device) -> str:
        return device.uuid

    @_device_call("name")
    def nvmlDeviceGetName(self, device: _Device) -> str:
        return device.profile.nvml_name

    @_device_call("pci")
    def nvmlDeviceGetPciInfo(self, device: _Device) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{device.index + 1:02X}:00.0")

    @_device_call("topology")
    def nvmlDeviceGetTopologyCommonAncestor(self, device: _Device, other: _Device) -> int:
        """Pairs behind one switch, two pairs on each socket."""
        self.strike(other, "topology")
        if device.index // 2 == other.index // 2:
            return int(pynvml.NVML_TOPOLOGY_SINGLE)
        if device.index // 4 == other.index // 4:
            return int(pynvml.NVML_TOPOLOGY_NODE)
        return int(pynvml.NVML_TOPOLOGY_SYSTEM)

    @_device_call("nvlink")
    def nvmlDeviceGetP2PStatus(self, device: _Device, other: _Device, _index: int) -> int:
        has_links = "SXM" in device.profile.nvml_name and "SXM" in other.profile.nvml_name
        if has_links and device.index // 2 == other.index // 2:
            return int(pynvml.NVML_P2P_STATUS_OK)
        return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)

    @_device_call("name")
    def nvmlDeviceGetCudaComputeCapability(self, device: _Device) -> tuple[int, int]:
        return device.profile.compute_capability

    @_device_call("memory")
    def nvmlDeviceGetMemoryInfo(
        self, device: _Device, version: int | None = None
    ) -> SimpleNamespace:
        total = device.profile.memory_bytes
        holders = self._processes.holders(device.uuid)
        used = sum(holder.memory_bytes + CONTEXT_BYTES for holder in holders)
        used = min(used, total - RESERVED_BYTES)
        free = total - RESERVED_BYTES - used
        if version is None:
            return SimpleNamespace(total=total, used=used + RESERVED_BYTES, free=free)
        return SimpleNamespace(total=total, used=used, free=free, reserved=RESERVED_BYTES)

    @_device_call("utilization")
    def nvmlDeviceGetUtilizationRates(self, device: _Device) -> SimpleNamespace:
        utilization = round(self._processes.utilization_pct(device.uuid))
        return SimpleNamespace(
            gpu=utilization, memory=round(utilization * _MEMORY_SHARE_OF_UTILIZATION)
        )

    @_device_call("temperature")
    def nvmlDeviceGetTemperature(self, device: _Device, _sensor: int) -> int:
        profile, now_s = device.profile, self._monotonic()
        load = self._power_w(device) / profile.power_limit_w
        target_c = _AMBIENT_C + _RISE_AT_LIMIT_C * load
        if device.temperature_at_s is None:
            device.temperature_c = target_c
        else:
            elapsed_s = now_s - device.temperature_at_s
            way = 1.0 - math.exp(-elapsed_s / _THERMAL_TIME_CONSTANT_S)
            device.temperature_c += (target_c - device.temperature_c) * way
        device.temperature_at_s = now_s
        return round(device.temperature_c)

    @_device_call("power")
    def nvmlDeviceGetPowerUsage(self, device: _Device) -> int:
        return round(self._power_w(device) * 1000)

    @_device_call("power")
    def nvmlDeviceGetEnforcedPowerLimit(self, device: _Device) -> int:
        return round(device.profile.power_limit_w * 1000)

    @_device_call("clocks")
    def nvmlDeviceGetClockInfo(self, device: _Device, clock: int) -> int:
        profile, is_idle = device.profile, self._is_idle(device)
        if clock == pynvml.NVML_CLOCK_MEM:
            return profile.idle_memory_clock_mhz if is_idle else profile.memory_clock_mhz
        return profile.idle_sm_clock_mhz if is_idle else profile.sm_clock_mhz

    @_device_call("ecc")
    def nvmlDeviceGetTotalEccErrors(self, device: _Device, kind: int, _counter: int) -> int:
        self._require(device.profile.has_ecc)
        if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
            return 0
        faults = self._faults.of_gpu(device.index, MockFaultKind.ECC_UNCORRECTED)
        return sum(int(fault.value or 0) for fault in faults)

    @_device_call("throttle")
    def nvmlDeviceGetCurrentClocksEventReasons(self, device: _Device) -> int:
        bits = int(pynvml.nvmlClocksEventReasonGpuIdle) if self._is_idle(device) else 0
        for fault in self._faults.of_gpu(device.index, MockFaultKind.THROTTLE):
            bits |= 1 << THROTTLE_WORDS.index(str(fault.value))
        return bits

    @_device_call("mig")
    def nvmlDeviceGetMigMode(self, device: _Device) -> list[int]:
        self._require(device.profile.has_mig)
        return [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_DISABLE]

    @_device_call("ecc")
    def nvmlDeviceGetRemappedRows(self, device: _Device) -> tuple[int, ...]:
        self._require(device.profile.has_row_remapping)
        return (0, 0, 0, 0)

    @_device_call("ecc")
    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: _Device) -> int:
        self._require(device.profile.has_ecc and not device.profile.has_row_remapping)
        return 0

    @_device_call("recovery")
    def nvmlDeviceGetFieldValues(
        self, _device: _Device, field_ids: Sequence[int]
    ) -> list[SimpleNamespace]:
        # None of the numbered fields is simulated.
        return [
            SimpleNamespace(
                fieldId=field_id,
                nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED,
                value=SimpleNamespace(uiVal=0),
            )
            for field_id in field_ids
        ]

    @_device_call("processes")
    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: _Device) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=holder.pid, usedGpuMemory=holder.memory_bytes + CONTEXT_BYTES)
            for holder in self._processes.live_holders(device.uuid)
        ]

    @_device_call("processes")
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, _device: _Device) -> list[SimpleNamespace]:
        return []

    def nvmlEventSetCreate(self) -> list[_Device]:
        self._check_open()
        return self._watched

    def nvmlEventSetFree(self, event_set: list[_Device]) -> None:
        event_set.clear()

    @_device_call("events")
    def nvmlDeviceRegisterEvents(
        self, device: _Device, _types: int, event_set: list[_Device]
    ) -> None:
        if device not in event_set:
            event_set.append(device)

    def nvmlEventSetWait(self, event_set: list[_Device], _timeout_ms: int) -> SimpleNamespace:
        self._check_open()
        for device in event_set:
            xid = self._faults.take_xid(device.index)
            if xid is not None:
                return SimpleNamespace(
                    device=device,
                    eventType=pynvml.nvmlEventTypeXidCriticalError,
                    eventData=xid,
                )
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    @staticmethod
    def _require(is_supported: bool) -> None:
        if not is_supported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _is_idle(self, device: _Device) -> bool:
        return not self._processes.holders(device.uuid)

    def _power_w(self, device: _Device) -> float:
        profile = device.profile
        share = self._processes.utilization_pct(device.uuid) / 100.0
        return profile.idle_power_w + share * (profile.power_limit_w - profile.idle_power_w)
