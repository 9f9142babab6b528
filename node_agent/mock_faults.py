"""Faults of mock GPUs, given by a JSON file that may change while the agent runs.

{"faults": [{"kind": "xid", "gpu": 0, "value": 79, "after_calls": 100},
            {"kind": "lost", "gpu": 2}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard

from node_agent.health import THROTTLE_WORDS

FAULT_FIELDS = (
    "clocks",
    "ecc",
    "events",
    "memory",
    "mig",
    "name",
    "pci",
    "power",
    "processes",
    "recovery",
    "topology",
    "nvlink",
    "temperature",
    "throttle",
    "utilization",
)
"""What `not_supported` can take away."""


class MockFaultKind(StrEnum):
    """What can be wrong with a mock GPU."""

    LOST = "lost"
    """Every call answers GPU_IS_LOST."""
    FALLEN_OFF_BUS = "fallen_off_bus"
    """The card is no longer counted, as after a reboot without it."""
    XID = "xid"
    """The driver reports an Xid, once; `value` is its number."""
    ECC_UNCORRECTED = "ecc_uncorrected"
    """`value` uncorrected errors."""
    DRIVER_MISMATCH = "driver_mismatch"
    """Driver and library differ: concerns the whole node, whatever `gpu` says."""
    THROTTLE = "throttle"
    """`value` is a throttle reason in nvidia-smi's words."""
    SLOW = "slow"
    """Each call of the card takes `value` seconds."""
    HANG = "hang"
    """A call of the card does not return as long as the fault is in the file."""
    NOT_SUPPORTED = "not_supported"
    """`value` is a field that the card does not support."""


@dataclass(frozen=True, slots=True)
class MockFault:
    """One fault."""

    kind: MockFaultKind
    gpu: int | None = None
    """Index of the card; None means all."""
    value: int | float | str | None = None
    after_calls: int = 0
    """Calls to the card that still go well after the fault was read."""


def write_faults(path: Path, faults: Sequence[MockFault]) -> None:
    """Replaces the faults file in one step, so that a reader never sees half of it."""
    text = json.dumps({"faults": [asdict(fault) for fault in faults]}, indent=2)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text + "\n", encoding="utf-8")
    aside.replace(path)


def parse_faults(text: str, gpu_count: int) -> tuple[MockFault, ...]:
    """Reads the text of a faults file.

    Raises:
        ValueError: it cannot be read; the message says where.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("faults"), list):
        raise ValueError('expected {"faults": [...]}')  # noqa: TRY004
    return tuple(
        _parse_fault(f"faults[{number}]", entry, gpu_count)
        for number, entry in enumerate(document["faults"])
    )


def _parse_fault(where: str, entry: object, gpu_count: int) -> MockFault:
    if not isinstance(entry, dict):
        raise ValueError(  # noqa: TRY004
            f'{where}: expected an object such as {{"kind": "lost", "gpu": 0}}'
        )
    unknown = entry.keys() - {"kind", "gpu", "value", "after_calls"}
    if unknown:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
    try:
        kind = MockFaultKind(str(entry.get("kind")))
    except ValueError:
        known = ", ".join(MockFaultKind)
        raise ValueError(f"{where}.kind: {entry.get('kind')!r} is none of {known}") from None
    gpu = entry.get("gpu")
    if gpu is not None and not (_is_whole(gpu) and gpu < gpu_count):
        raise ValueError(f"{where}.gpu: {gpu!r} is no index below {gpu_count}")
    after_calls = entry.get("after_calls", 0)
    if not _is_whole(after_calls):
        raise ValueError(f"{where}.after_calls: {after_calls!r} is no number of calls")
    return MockFault(kind, gpu, _parse_value(f"{where}.value", kind, entry), after_calls)


def _parse_value(where: str, kind: MockFaultKind, entry: Mapping[str, Any]) -> Any:
    value: Any = entry.get("value")
    is_right: bool
    match kind:
        case MockFaultKind.XID | MockFaultKind.ECC_UNCORRECTED:
            is_right, expected = _is_whole(value) and value > 0, "a whole number above 0"
        case MockFaultKind.SLOW:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_right, expected = is_number and value >= 0, "seconds"
        case MockFaultKind.THROTTLE:
            is_right, expected = value in THROTTLE_WORDS, f"one of {', '.join(THROTTLE_WORDS)}"
        case MockFaultKind.NOT_SUPPORTED:
            is_right, expected = value in FAULT_FIELDS, f"one of {', '.join(FAULT_FIELDS)}"
        case _:
            is_right, expected = value is None, "no value"
    if not is_right:
        raise ValueError(f"{where}: {kind} takes {expected}, not {value!r}")
    return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class FaultFile:
    """The faults in force; the file is read again whenever it changes."""

    def __init__(self, path: Path | None, gpu_count: int) -> None:
        """Reads nothing yet.

        Args:
            path: the file, which may come and go; None means no faults ever.
            gpu_count: cards of the node, to check indices.
        """
        self._path = path
        self._gpu_count = gpu_count
        self._stamp: tuple[int, int, int] | None = None
        self._calls = [0] * gpu_count
        self._calls_before: dict[MockFault, list[int]] = {}
        """Each fault in the file -> calls per card when it was first read."""
        self._delivered: set[tuple[MockFault, int]] = set()
        self._problem: str | None = None

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the file, as reasons of the node."""
        self._refresh()
        return () if self._problem is None else (self._problem,)

    def count_call(self, gpu: int) -> bool:
        """Notes that a call to a card is made, and tells whether there is any fault at all."""
        self._refresh()
        self._calls[gpu] += 1
        return bool(self._calls_before)

    def of_gpu(self, gpu: int, kind: MockFaultKind) -> list[MockFault]:
        """The faults of a kind that are in force for a card."""
        self._refresh()
        return [
            fault
            for fault, before in self._calls_before.items()
            if fault.kind is kind
            and fault.gpu in (None, gpu)
            and self._calls[gpu] - before[gpu] >= fault.after_calls
        ]

    def of_node(self, kind: MockFaultKind) -> bool:
        """Whether a fault of a kind that concerns the whole node is in force."""
        self._refresh()
        return bool(self._calls_before) and any(
            self.of_gpu(gpu, kind) for gpu in range(self._gpu_count)
        )

    def take_xid(self, gpu: int) -> int | None:
        """The next Xid of a card that was not reported yet."""
        for fault in self.of_gpu(gpu, MockFaultKind.XID):
            if (fault, gpu) not in self._delivered:
                self._delivered.add((fault, gpu))
                return int(fault.value or 0)
        return None

    def _refresh(self) -> None:
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._problem = None
        faults = self._read()
        self._calls_before = {
            fault: self._calls_before.get(fault, list(self._calls)) for fault in faults
        }
        self._delivered = {key for key in self._delivered if key[0] in self._calls_before}

    def _current_stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> tuple[MockFault, ...]:
        if self._path is None or self._stamp is None:
            return ()
        try:
            return parse_faults(self._path.read_text(encoding="utf-8"), self._gpu_count)
        except (OSError, ValueError) as error:
            self._problem = f"mock faults file {self._path}: {error}"
            return ()
