"""Fixtures of the launcher's tests: a launcher with real processes, and what it reported."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from node_agent.attempts import AttemptDir, read_boot_id
from node_agent.launcher import Launcher
from node_agent.processes import find_marked
from protos.messages import (
    GpuProcess,
    LaunchOrder,
    LogStream,
    RankId,
    RankPhase,
    RankReport,
    StopOrder,
    StopReason,
)

GpuAnswer = Mapping[str, tuple[GpuProcess, ...] | None] | None
PHASES = list(RankPhase)


class LauncherNode:
    """A node without a controller: orders in, reports out."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.boot_id = read_boot_id()
        self.log_limit_bytes = 1 << 20
        self.reports: list[RankReport] = []
        self.gpu_answer: Callable[[], GpuAnswer] = dict
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self.monotonic: Callable[[], float] = time.monotonic
        self.base_env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        self._news = asyncio.Event()
        self._job_ids = itertools.count(1)

    async def start(self) -> None:
        """Starts (or starts again) a launcher on the state folder."""
        self.launcher = Launcher(
            self.state_dir,
            node_name="node-1",
            boot_id=self.boot_id,
            on_report=self._reported,
            gpu_processes=self._gpu_processes,
            log_limit_bytes=self.log_limit_bytes,
            monotonic=self.monotonic,
            sleep=self.sleep,
            base_env=self.base_env,
        )
        await self.launcher.start()

    async def _gpu_processes(self, uuids: tuple[str, ...]) -> GpuAnswer:
        answer = self.gpu_answer()
        return None if answer is None else {uuid: answer.get(uuid, ()) for uuid in uuids}

    def _reported(self, report: RankReport) -> None:
        self.reports.append(report)
        self._news.set()

    def order(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        gpus: Sequence[str] = (),
        memory_bytes: int = 0,
        time_limit_s: float | None = None,
        grace_s: float = 5.0,
        name: str = "job",
    ) -> LaunchOrder:
        """An order for the next job id."""
        return LaunchOrder(
            rank=RankId(next(self._job_ids), 1),
            name=name,
            user="ann",
            argv=argv,
            env=env or {},
            cwd=cwd,
            gpu_uuids=tuple(gpus),
            gpu_type="P100" if gpus else "",
            cpus=1,
            memory_bytes=memory_bytes,
            time_limit_s=time_limit_s,
            grace_s=grace_s,
            node_names=("node-1",),
            node_addresses=("127.0.0.1",),
            master_port=0,
        )

    async def launch(self, order: LaunchOrder, phase: RankPhase = RankPhase.RUNNING) -> RankReport:
        """Launches, and waits until the rank is at least in `phase`."""
        await self.launcher.launch(order)
        return await self.until(order.rank, phase)

    async def run(self, order: LaunchOrder) -> RankReport:
        """Launches, waits for the release, and checks that nothing is left."""
        report = await self.launch(order, RankPhase.RELEASED)
        assert self.left(order.rank) == []
        return report

    async def stop(self, rank: RankId, reason: StopReason, grace_s: float) -> None:
        await self.launcher.stop(StopOrder(rank, reason, grace_s))

    async def until(self, rank: RankId, phase: RankPhase, timeout_s: float = 30.0) -> RankReport:
        """The first report of the rank that is at least in `phase`."""
        async with asyncio.timeout(timeout_s):
            while True:
                for report in self.reports:
                    if report.rank == rank and PHASES.index(report.phase) >= PHASES.index(phase):
                        return report
                self._news.clear()
                await self._news.wait()

    async def output(self, rank: RankId, stream: LogStream = LogStream.STDOUT) -> bytes:
        """All that is kept of a stream."""
        data, offset = b"", 0
        while True:
            chunk = await self.launcher.read_log(rank, stream, offset, 1 << 20)
            assert not chunk.error
            data, offset = data + chunk.data, chunk.next_offset
            if chunk.end or not chunk.data:
                return data

    async def until_output(self, rank: RankId, text: bytes, timeout_s: float = 20.0) -> None:
        """Waits until the job has written `text` to its stdout."""
        async with asyncio.timeout(timeout_s):
            while text not in await self.output(rank):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)

    def folder(self, rank: RankId) -> AttemptDir:
        return AttemptDir(self.state_dir / "attempts" / str(rank))

    def left(self, rank: RankId) -> list[int]:
        """Pids of the rank that still live."""
        return find_marked(self.folder(rank).path)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[LauncherNode]:
    """A started launcher; its jobs are ended afterwards."""
    node = LauncherNode(tmp_path / "state")
    await node.start()
    yield node
    unfinished = [r.rank for r in node.launcher.reports() if r.phase is not RankPhase.RELEASED]
    await node.launcher.kill_unknown(unfinished)
    for rank in unfinished:
        await node.until(rank, RankPhase.RELEASED)
    await node.launcher.close()
