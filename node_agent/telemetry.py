"""What the node is and how it does: the GPU collector's scans joined with the host's readings."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from node_agent.collector import CollectorClient
from node_agent.config import AgentConfig
from node_agent.host import HostSampler, host_facts
from node_agent.inventory import Inventory
from protos.messages import HostSample, NodeFacts, Telemetry, XidEvent

MIN_FREE_BYTES = 64 * 2**20
MIN_FREE_FRACTION = 0.05
MIN_FREE_FILES = 1000


def state_folder_health(
    host: HostSample, *, is_writable: bool, free_files: int | None
) -> tuple[str, ...]:
    """Why the node must not get work because of the disk with the agent's state folder.

    Asked for is room for a few orders, statuses and the first output: 64 MiB, or on a smaller disk
    a twentieth of it, and 1000 more files. The reason goes by itself when there is room again.
    `free_files` is None where the file system has no limit.
    """
    used, total = host.disk_used_bytes, host.disk_total_bytes
    if used is None or total is None:
        return ("the agent's state folder is gone",)
    if not is_writable:
        return ("the agent's state folder cannot be written",)
    free, needed = total - used, min(MIN_FREE_BYTES, int(total * MIN_FREE_FRACTION))
    if free >= needed:
        if free_files is None or free_files >= MIN_FREE_FILES:
            return ()
        has, need = f"{free_files} more files (inodes)", str(MIN_FREE_FILES)
        return (f"the disk with the agent's state folder has room for {has}, new jobs need {need}",)
    has, need = f"{free / 2**20:.1f} MiB", f"{needed / 2**20:.1f} MiB"
    return (f"the disk with the agent's state folder has {has} free, new jobs need {need}",)


class AgentTelemetry:
    """Scans in the background; facts and samples are always there at once, with their age."""

    def __init__(
        self,
        config: AgentConfig,
        collector: CollectorClient,
        inventory: Inventory,
        *,
        version: str,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """`version` is the agent's own."""
        self._config = config
        self._collector = collector
        self._version = version
        self._sleep = sleep
        self._host = HostSampler(config.state_dir)
        self._machine = host_facts()
        self._xids: list[XidEvent] = []
        self._inventory = inventory
        self._gpus = inventory.read()
        self._has_seen_gpus = False
        self._driver: tuple[str | None, str | None] = (None, None)

    async def scan_once(self) -> None:
        """Take one reading; a missed deadline leaves the last one in place."""
        scan = await self._collector.scan()
        if scan is None:
            return
        self._xids.extend(scan.xids)
        self._driver = (scan.driver_version, scan.cuda_version)
        if scan.facts:
            self._has_seen_gpus = True
            if scan.facts != self._gpus:
                self._gpus = scan.facts
                self._inventory.write(scan.facts)
        elif not self._has_seen_gpus and not scan.node_health:
            self._gpus = ()  # an earlier agent's, but NVML works and shows none

    async def run(self, every_s: float) -> None:
        """Scan for ever."""
        while True:
            await self.scan_once()
            await self._sleep(every_s)

    def facts(self) -> NodeFacts:
        """What the node is now."""
        machine = self._machine
        return NodeFacts(
            hostname=machine.hostname,
            os=machine.os,
            cpus=self._config.cpus or machine.cpus,
            memory_bytes=self._config.memory_bytes or machine.memory_bytes,
            gpus=self._gpus,
            driver_version=self._driver[0],
            cuda_version=self._driver[1],
            agent_version=self._version,
            mock=self._config.mock_gpus is not None,
        )

    def sample(self) -> Telemetry:
        """The latest readings and how old they are."""
        latest = self._collector.latest
        host = self._host.sample()
        return Telemetry(
            gpus=latest.samples if latest else (),
            host=host,
            telemetry_age_s=self._collector.age_s,
            node_health=(*self._collector.node_health, *self._folder_health(host)),
        )

    def _folder_health(self, host: HostSample) -> tuple[str, ...]:
        folder = self._config.state_dir
        try:
            disk = os.statvfs(folder)
        except OSError:
            return state_folder_health(host, is_writable=False, free_files=None)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
        free_files = disk.f_favail if disk.f_files else None  # btrfs and others make them as needed
        return state_folder_health(host, is_writable=is_writable, free_files=free_files)

    def take_xids(self) -> tuple[XidEvent, ...]:
        """Xid events that no heartbeat has carried yet."""
        taken, self._xids = tuple(self._xids), []
        return taken
