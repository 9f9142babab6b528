"""Telemetry of all GPUs of a node, written once against the API of the module `pynvml`.

Nothing here knows whether the module is NVIDIA's or `node_agent.mock_nvml`. A card that fails
becomes a row with a reason and the others go on; NVML that fails as a whole becomes a reason of
the node. A call may hang for ever in the driver: that is why this runs in a process of its own
(`node_agent.collector`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from node_agent.gpu_profiles import gpu_type_of
from node_agent.health import is_critical_xid, xid_text
from node_agent.nvml_api import FaultKind, Handle, NvmlApi, NvmlFault, handle_key
from node_agent.nvml_card import Card, lost_sample, read_processes, read_sample
from node_agent.nvml_topology import read_topology
from node_agent.scan import ProcessesByGpu, Scan
from protos.messages import GpuFacts, GpuProcess, GpuSample, XidEvent

__all__ = ["DRIVER_VERSION_PATH", "NvmlCollector", "Scan", "gpu_type_of"]

DRIVER_VERSION_PATH = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's kernel module is loaded; another text means another driver."""

_MISSING = "gpu missing"
_MISMATCH = (
    "NVIDIA driver and library versions differ (the driver packages were upgraded while the old "
    "module is loaded): reboot the node, or unload and load the nvidia kernel module"
)
_NO_DRIVER = "the NVIDIA kernel module is not loaded: run `modprobe nvidia` or mend the driver"
_NO_LIBRARY = "libnvidia-ml.so.1 is not found although the NVIDIA driver is loaded: install it"
_NO_NVIDIA = "no NVIDIA driver on this machine"
_CONTAINER_HINT = (
    "; inside a container this happens when the devices were taken away "
    "(systemctl daemon-reload): restart it with the device nodes given explicitly or by CDI"
)
_MAX_EVENTS_PER_SCAN = 100
_UNREADABLE = "unreadable-gpu-"
"""Stands for the UUID of a card that was lost before it could tell its own."""


class NvmlCollector:
    """Reads all cards; remembers which exist, what they do not support, and their Xids."""

    def __init__(
        self,
        nvml: object,
        *,
        mock: bool = False,
        problems: Callable[[], tuple[str, ...]] = tuple,
        driver_version_path: Path = DRIVER_VERSION_PATH,
    ) -> None:
        """Touches nothing yet: NVML is opened by the first scan.

        Args:
            nvml: the module `pynvml`, or an object with its API.
            mock: whether the cards exist only in software.
            problems: further reasons why the node must not get work, asked in each scan.
            driver_version_path: tells a machine without a driver from one with a broken one.
        """
        self._api = NvmlApi(nvml)
        self._mock = mock
        self._problems = problems
        self._driver_version_path = driver_version_path
        self._is_open = False
        self._cards: dict[str, Card] = {}
        self._count: int | None = None
        self._topology: Mapping[str, tuple[int, ...]] = {}
        self._placed: set[str] = set()
        """Cards that were there when the topology was read."""
        self._event_set: Any = None
        self._untold_xids: list[XidEvent] = []
        """Taken from NVML, where they are gone then, but in no scan yet."""
        self._driver_version: str | None = None
        self._cuda_version: str | None = None

    def scan(self) -> Scan:
        """Reads every card once. Never raises for anything that NVML answers."""
        try:
            self._open()
            self._find_cards()
            self._collect_xids()
            samples = tuple(self._sample(card) for card in self._in_order())
        except NvmlFault as fault:
            out_of_reach = self._out_of_reach(fault)
            return replace(out_of_reach, xids=self._take_untold_xids())
        return Scan(
            driver_version=self._driver_version,
            cuda_version=self._cuda_version,
            facts=self._facts(),
            samples=samples,
            xids=self._take_untold_xids(),
            node_health=self._problems(),
            note="" if self._cards else "NVML reports no GPU",
        )

    def processes(self, uuids: Iterable[str]) -> ProcessesByGpu:
        """Reads only who is on the given cards, as fresh as NVML has it."""
        wanted = tuple(uuids)
        try:
            self._open()
            self._find_cards()
            return {uuid: self._processes_of(uuid) for uuid in wanted}
        except NvmlFault as fault:
            self._out_of_reach(fault)
            return dict.fromkeys(wanted)

    def close(self) -> None:
        """Lets go of NVML, so that cards can be reset and the driver unloaded."""
        if not self._is_open:
            return
        with contextlib.suppress(NvmlFault):  # closing what is broken anyway
            if self._event_set is not None:
                self._api.call("nvmlEventSetFree", self._event_set)
            self._api.call("nvmlShutdown")
        self._is_open = False
        self._event_set = None
        self._count = None
        for card in self._cards.values():
            card.handle = card.watched_key = None
            card.unsupported.clear()

    def _open(self) -> None:
        if self._is_open:
            return
        self._api.call("nvmlInit")
        self._is_open = True
        self._driver_version = self._text_or_none("nvmlSystemGetDriverVersion")
        self._cuda_version = self._read_cuda_version()
        try:
            self._event_set = self._api.call("nvmlEventSetCreate")
        except NvmlFault as fault:
            if fault.kind is not FaultKind.NOT_SUPPORTED:
                raise

    def _text_or_none(self, function: str) -> str | None:
        try:
            return self._api.text(function)
        except NvmlFault as fault:
            if fault.kind is FaultKind.NOT_SUPPORTED:
                return None
            raise

    def _read_cuda_version(self) -> str | None:
        names = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
        try:
            number = int(self._api.call_first(names))
        except NvmlFault as fault:
            if fault.kind is FaultKind.NOT_SUPPORTED:
                return None
            raise
        return f"{number // 1000}.{number % 1000 // 10}"  # cuda.h: 1000 * major + 10 * minor

    def _facts(self) -> tuple[GpuFacts, ...]:
        return tuple(
            replace(card.facts_or_placeholder(), near=self._topology.get(card.uuid, ()))
            for card in self._in_order()
        )

    def _in_order(self) -> list[Card]:
        return sorted(self._cards.values(), key=lambda card: (card.index, card.uuid))

    def _find_cards(self) -> None:
        """Compares the cards that NVML shows with those that are known, when there is cause."""
        count = int(self._api.call("nvmlDeviceGetCount"))
        if count == self._count and all(
            card.handle is not None and not card.suspect for card in self._cards.values()
        ):
            return
        failed: dict[int, str] = {}
        seen: set[str] = set()
        for index in range(count):
            try:
                seen.add(self._attach(index))
            except NvmlFault as fault:
                if fault.kind in (FaultKind.DRIVER_MISMATCH, FaultKind.UNINITIALIZED):
                    raise
                failed[index] = fault.text
        for index, reason in failed.items():
            seen.add(self._detach(index, reason, seen))
        for uuid in self._cards.keys() - seen:
            if uuid.startswith(_UNREADABLE):
                del self._cards[uuid]  # the card told its real UUID meanwhile
            else:
                self._cards[uuid].detach(_MISSING)
        self._count = count
        for card in self._cards.values():
            self._watch(card)
        # Only when a card is new: one that is lost must not rename the groups of the others.
        if any(
            card.uuid not in self._placed
            for card in self._cards.values()
            if card.handle is not None
        ):
            self._topology = read_topology(self._api, self._in_order())
            self._placed = {card.uuid for card in self._cards.values() if card.handle is not None}

    def _attach(self, index: int) -> str:
        handle = self._api.call("nvmlDeviceGetHandleByIndex", index)
        uuid = self._api.text("nvmlDeviceGetUUID", handle)
        if not uuid:
            raise NvmlFault(FaultKind.OTHER, "GPU has no readable UUID")
        card = self._cards.setdefault(uuid, Card(uuid=uuid, index=index))
        if card.index != index:
            card.facts = None
        card.attach(index, handle)
        return uuid

    def _detach(self, index: int, reason: str, seen: set[str]) -> str:
        known = (card for card in self._cards.values() if card.index == index)
        card = next((card for card in known if card.uuid not in seen), None)
        if card is None:
            card = Card(uuid=f"{_UNREADABLE}{index}", index=index)
            self._cards[card.uuid] = card
        card.detach(reason)
        return card.uuid

    def _watch(self, card: Card) -> None:
        """Subscribes to the card's Xids. Cards that have no events are only polled."""
        if self._event_set is None or card.handle is None:
            return
        key = handle_key(card.handle)
        if card.watched_key == key or "events" in card.unsupported:
            return
        wanted = int(self._api.lookup("nvmlEventTypeXidCriticalError") or 8)
        card.unwatched = None
        try:
            self._api.call("nvmlDeviceRegisterEvents", card.handle, wanted, self._event_set)
        except NvmlFault as fault:
            if fault.kind is FaultKind.NOT_SUPPORTED:
                card.unsupported.add("events")
            elif fault.kind is FaultKind.LOST:
                card.detach(fault.text)
            else:
                card.unwatched = fault.text
                card.suspect = True
        else:
            card.watched_key = key

    def _collect_xids(self) -> None:
        if self._event_set is None:
            return
        wanted = int(self._api.lookup("nvmlEventTypeXidCriticalError") or 8)
        for _ in range(_MAX_EVENTS_PER_SCAN):
            try:
                event = self._api.call("nvmlEventSetWait", self._event_set, 0)
            except NvmlFault as fault:
                if fault.kind in (FaultKind.DRIVER_MISMATCH, FaultKind.UNINITIALIZED):
                    raise
                break  # nothing is waiting, or the set tells nothing now: the cards are polled
            if int(event.eventType) & wanted:
                self._untold_xids.append(self._xid_event(event.device, int(event.eventData)))

    def _take_untold_xids(self) -> tuple[XidEvent, ...]:
        taken = tuple(self._untold_xids)
        self._untold_xids.clear()
        return taken

    def _xid_event(self, device: Handle, xid: int) -> XidEvent:
        # By handle, not by asking NVML for the UUID: a card with Xid 79 does not answer any more.
        card = next(
            (card for card in self._cards.values() if card.watched_key == handle_key(device)), None
        )
        if card is not None and is_critical_xid(xid):
            card.critical_xids.add(xid)
        return XidEvent(uuid=card.uuid if card else "", xid=xid, message=xid_text(xid))

    def _sample(self, card: Card) -> GpuSample:
        new_xids = frozenset(x.xid for x in self._untold_xids if x.uuid == card.uuid)
        if card.handle is None:
            return lost_sample(card, new_xids)
        try:
            return read_sample(self._api, card, new_xids, mock=self._mock)
        except NvmlFault as fault:
            if fault.kind is not FaultKind.LOST:
                raise
            card.detach(fault.text)
            return lost_sample(card, new_xids)

    def _processes_of(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        card = self._cards.get(uuid)
        if card is None or card.handle is None:
            return None
        try:
            return read_processes(self._api, card)
        except NvmlFault as fault:
            if fault.kind is not FaultKind.LOST:
                raise
            card.detach(fault.text)
            return None

    def _out_of_reach(self, fault: NvmlFault) -> Scan:
        """NVML as a whole does not work: no samples, and the reason in words."""
        with contextlib.suppress(NvmlFault):  # what it still tells: closing it loses the rest
            self._collect_xids()
        self.close()
        reason, note = self._reason_of(fault), ""
        if fault.kind is FaultKind.LIBRARY_MISSING and not self._has_nvidia():
            reason, note = "", _NO_NVIDIA
        return Scan(
            driver_version=self._driver_version,
            cuda_version=self._cuda_version,
            facts=self._facts(),
            node_health=(*((reason,) if reason else ()), *self._problems()),
            note=note,
        )

    def _has_nvidia(self) -> bool:
        return bool(self._cards) or self._driver_version_path.exists()

    @staticmethod
    def _reason_of(fault: NvmlFault) -> str:
        match fault.kind:
            case FaultKind.DRIVER_MISMATCH:
                return _MISMATCH
            case FaultKind.DRIVER_MISSING:
                return _NO_DRIVER
            case FaultKind.LIBRARY_MISSING:
                return _NO_LIBRARY
            case _:
                return f"NVML does not work: {fault.text}{_CONTAINER_HINT}"
