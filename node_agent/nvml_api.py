"""The one door to NVML: the pynvml module's functions with its many ways to fail put in order.

pynvml raises `NVMLError` subclasses, but also `NVMLLibraryMismatchError` (which is none),
`UnicodeDecodeError` for strings of the driver, and `AttributeError` when an older pynvml lacks a
function. Here each call ends in a value or in one `NvmlFault`, whose kind says what to do.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from protos.messages import GpuProcess

Handle: TypeAlias = Any
"""A device handle of pynvml: opaque."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_INSUFFICIENT_SIZE_TRIES = 3
_MEMORY_NOT_AVAILABLE = 2**64 - 1


class FaultKind(Enum):
    """What a failed call means for its caller."""

    NOT_SUPPORTED = auto()
    """This card, driver or pynvml does not have it: no opinion, do not ask again."""
    LOST = auto()
    """The card is gone; the others go on."""
    DRIVER_MISMATCH = auto()
    """Kernel driver and library differ: nothing works until someone mends it."""
    LIBRARY_MISSING = auto()
    """No libnvidia-ml on this machine."""
    DRIVER_MISSING = auto()
    """The library is there, the kernel module is not loaded."""
    TIMEOUT = auto()
    """No event is waiting."""
    TRY_AGAIN = auto()
    """The answer grew between two calls."""
    RESET_REQUIRED = auto()
    """The card works again only after a reset."""
    UNINITIALIZED = auto()
    """NVML was shut down or never opened."""
    OTHER = auto()


class NvmlFault(Exception):
    """A call to NVML that gave no value."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        """Keeps the kind and NVML's words."""
        super().__init__(text)
        self.kind = kind
        self.text = text


_KIND_OF_ERROR = {
    "NVML_ERROR_NOT_SUPPORTED": FaultKind.NOT_SUPPORTED,
    "NVML_ERROR_FUNCTION_NOT_FOUND": FaultKind.NOT_SUPPORTED,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": FaultKind.NOT_SUPPORTED,
    "NVML_ERROR_DEPRECATED": FaultKind.NOT_SUPPORTED,
    "NVML_ERROR_GPU_IS_LOST": FaultKind.LOST,
    "NVML_ERROR_GPU_NOT_FOUND": FaultKind.LOST,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": FaultKind.DRIVER_MISMATCH,
    "NVML_ERROR_LIBRARY_NOT_FOUND": FaultKind.LIBRARY_MISSING,
    "NVML_ERROR_DRIVER_NOT_LOADED": FaultKind.DRIVER_MISSING,
    "NVML_ERROR_TIMEOUT": FaultKind.TIMEOUT,
    "NVML_ERROR_INSUFFICIENT_SIZE": FaultKind.TRY_AGAIN,
    "NVML_ERROR_RESET_REQUIRED": FaultKind.RESET_REQUIRED,
    "NVML_ERROR_UNINITIALIZED": FaultKind.UNINITIALIZED,
}


class NvmlApi:
    """Calls functions of a pynvml-like module by name."""

    def __init__(self, nvml: object) -> None:
        """Looks at the module, calls nothing.

        Args:
            nvml: the module `pynvml` of nvidia-ml-py of whatever age, or an object with its API.
        """
        self._nvml = nvml
        self._error: type[Exception] = self.lookup("NVMLError") or RuntimeError
        mismatch: type[Exception] | None = self.lookup("NVMLLibraryMismatchError")
        self._caught = (self._error, mismatch) if mismatch else (self._error,)
        self._kinds = {
            code: kind
            for name, kind in _KIND_OF_ERROR.items()
            if (code := self.lookup(name)) is not None
        }
        self._processes_version: dict[str, str] = {}

    def lookup(self, name: str) -> Any:
        """A function or constant of the module, or None where this pynvml does not have it."""
        return getattr(self._nvml, name, None)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function; bytes that are no UTF-8 come back as text with replacements.

        Raises:
            NvmlFault: it gave no value.
        """
        function = self.lookup(name)
        if function is None:
            raise NvmlFault(FaultKind.NOT_SUPPORTED, f"{name} is not in this pynvml")
        try:
            return function(*args, **kwargs)
        except UnicodeDecodeError as error:
            return bytes(error.object).decode("utf-8", errors="replace")
        except self._caught as error:
            raise self._fault_of(error) from error

    def call_first(self, names: Sequence[str], *args: Any) -> Any:
        """Calls the first of several functions that exists and is supported, best one first.

        Raises:
            NvmlFault: the last one is not supported either, or one failed in another way.
        """
        for name in names[:-1]:
            try:
                return self.call(name, *args)
            except NvmlFault as fault:
                if fault.kind is not FaultKind.NOT_SUPPORTED:
                    raise
        return self.call(names[-1], *args)

    def text(self, name: str, *args: Any) -> str:
        """Calls a function that gives a string, and cleans it.

        Raises:
            NvmlFault: it gave no value.
        """
        return clean_text(self.call(name, *args))

    def pci_bus_id(self, handle: Handle) -> str:
        """Where the card sits, e.g. `00000000:3B:00.0`.

        Raises:
            NvmlFault: it gave no value.
        """
        info = self.call("nvmlDeviceGetPciInfo", handle)
        try:
            return clean_text(info.busId)
        except UnicodeDecodeError as error:
            return clean_text(bytes(error.object).decode("utf-8", errors="replace"))

    def memory(self, handle: Handle) -> tuple[int, int]:
        """Used and total bytes; without the driver's reserve where memory v2 is known.

        Raises:
            NvmlFault: neither version gave a value.
        """
        version = self.lookup("nvmlMemory_v2")
        if version is not None:
            try:
                info = self.call("nvmlDeviceGetMemoryInfo", handle, version=version)
            except NvmlFault as fault:
                if fault.kind is not FaultKind.NOT_SUPPORTED:
                    raise
            else:
                return int(info.used), int(info.total)
        info = self.call("nvmlDeviceGetMemoryInfo", handle)
        return int(info.used), int(info.total)

    def field(self, handle: Handle, field_id: int) -> int:
        """The value of a numbered field as a whole number.

        Raises:
            NvmlFault: the driver does not know the field, or the call failed.
        """
        value = self.call("nvmlDeviceGetFieldValues", handle, [field_id])[0]
        if value.nvmlReturn == self.lookup("NVML_ERROR_INVALID_ARGUMENT"):
            raise NvmlFault(FaultKind.NOT_SUPPORTED, f"field {field_id} is unknown to the driver")
        if value.nvmlReturn != 0:
            raise self._fault_of(self._error(value.nvmlReturn))
        return int(value.value.uiVal)

    def processes(self, handle: Handle) -> tuple[GpuProcess, ...]:
        """Compute and graphics processes of a card by pid.

        Raises:
            NvmlFault: the compute processes could not be read.
        """
        by_pid = {process.pid: process for process in self._processes(handle, "Compute")}
        try:
            graphics = self._processes(handle, "Graphics")
        except NvmlFault as fault:
            if fault.kind is not FaultKind.NOT_SUPPORTED:
                raise
            graphics = []
        for process in graphics:
            known = by_pid.get(process.pid)
            # A process of both kinds is listed twice with the same memory.
            if known is None or known.memory_bytes is None:
                by_pid[process.pid] = process
        return tuple(by_pid[pid] for pid in sorted(by_pid))

    def _processes(self, handle: Handle, kind: str) -> list[GpuProcess]:
        """Newest version first; the one that the driver has is remembered.

        pynvml's own unversioned function calls `_v3`, so on old drivers (440, K80's 470) the
        oldest version must be called by hand.
        """
        symbol = f"nvmlDeviceGet{kind}RunningProcesses"
        known = self._processes_version.get(symbol)
        for version in (known,) if known is not None else ("_v3", "_v2", ""):
            try:
                answer = self._processes_of_version(handle, symbol, version)
            except NvmlFault as fault:
                if fault.kind is FaultKind.NOT_SUPPORTED and version and known is None:
                    continue
                raise
            self._processes_version[symbol] = version
            return answer
        raise AssertionError("the unversioned call returns or raises")

    def _processes_of_version(self, handle: Handle, symbol: str, version: str) -> list[GpuProcess]:
        def read() -> list[GpuProcess]:
            if version:
                return [
                    GpuProcess(pid=int(info.pid), memory_bytes=info.usedGpuMemory)
                    for info in self.call(symbol + version, handle)
                ]
            return self._processes_v1(handle, symbol)

        for _ in range(_INSUFFICIENT_SIZE_TRIES - 1):
            try:
                return read()
            except NvmlFault as fault:
                if fault.kind is not FaultKind.TRY_AGAIN:
                    raise
        return read()

    def _processes_v1(self, handle: Handle, symbol: str) -> list[GpuProcess]:
        function: Callable[..., int] = self.call("_nvmlGetFunctionPointer", symbol)
        count = ctypes.c_uint(0)
        code = function(handle, ctypes.byref(count), None)
        if code == 0:
            return []
        if code != self.lookup("NVML_ERROR_INSUFFICIENT_SIZE"):
            raise self._fault_of(self._error(code))
        count.value = count.value * 2 + 5
        infos = (_ProcessInfoV1 * count.value)()
        code = function(handle, ctypes.byref(count), infos)
        if code != 0:
            raise self._fault_of(self._error(code))
        return [
            GpuProcess(
                pid=info.pid,
                memory_bytes=None if info.memory == _MEMORY_NOT_AVAILABLE else info.memory,
            )
            for info in infos[: count.value]
        ]

    def _fault_of(self, error: Exception) -> NvmlFault:
        if not isinstance(error, self._error):
            return NvmlFault(FaultKind.NOT_SUPPORTED, str(error))
        kind = self._kinds.get(getattr(error, "value", None), FaultKind.OTHER)
        try:
            text = clean_text(str(error))
        except UnicodeDecodeError:
            text = f"NVML error {getattr(error, 'value', '?')}"
        return NvmlFault(kind, text)


class _ProcessInfoV1(ctypes.Structure):
    """`nvmlProcessInfo_v1_t` of NVML before release 450."""

    _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong))


def clean_text(text: str) -> str:
    """A string of the driver without control bytes, fit for labels and tables."""
    return _CONTROL_CHARACTERS.sub("", text).strip()


def handle_key(handle: Handle) -> int:
    """A number that is equal for two handles of the same device within one NVML session."""
    if hasattr(handle, "contents"):  # a ctypes pointer: equal by where it points to
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    return id(handle)


def why_not_nvidia_ml_py(pynvml: ModuleType) -> str | None:
    """Checks that the imported `pynvml` is nvidia-ml-py's and not the older package's.

    Both install a module of this name, and the older one shadows or overwrites the other.

    Returns:
        What is wrong and how to mend it, or None.
    """
    mend = "run: pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
    loaded = Path(pynvml.__file__ or "")
    try:
        expected = importlib.metadata.distribution("nvidia-ml-py").locate_file("pynvml.py")
    except importlib.metadata.PackageNotFoundError:
        return f"the module pynvml ({loaded}) does not belong to nvidia-ml-py; {mend}"
    if loaded.resolve() != Path(str(expected)).resolve():
        return f"the module pynvml ({loaded}) is not nvidia-ml-py's ({expected}); {mend}"
    missing = [name for name in ("NVMLError", "nvmlInit") if not hasattr(pynvml, name)]
    if missing:
        return f"the module pynvml ({loaded}) lacks {', '.join(missing)}; {mend}"
    return None
