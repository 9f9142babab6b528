"""What the node is and how it does: the GPU collector's scans joined with the host's readings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from node_agent.collector import CollectorClient
from node_agent.config import AgentConfig
from node_agent.host import HostSampler, host_facts
from protos.messages import GpuFacts, NodeFacts, Telemetry, XidEvent


class AgentTelemetry:
    """Scans in the background; facts and samples are always there at once, with their age."""

    def __init__(
        self,
        config: AgentConfig,
        collector: CollectorClient,
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
        self._gpus: tuple[GpuFacts, ...] = ()
        self._driver: tuple[str | None, str | None] = (None, None)

    async def scan_once(self) -> None:
        """Take one reading; a missed deadline leaves the last one in place."""
        scan = await self._collector.scan()
        if scan is None:
            return
        self._xids.extend(scan.xids)
        self._driver = (scan.driver_version, scan.cuda_version)
        if scan.facts:
            self._gpus = scan.facts

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
        return Telemetry(
            gpus=latest.samples if latest else (),
            host=self._host.sample(),
            telemetry_age_s=self._collector.age_s,
            node_health=self._collector.node_health,
        )

    def take_xids(self) -> tuple[XidEvent, ...]:
        """Xid events that no heartbeat has carried yet."""
        taken, self._xids = tuple(self._xids), []
        return taken
