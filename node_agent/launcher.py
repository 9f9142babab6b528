"""Starts, watches, stops and accounts for the ranks of this node; one per agent.

Each rank has one task, `_run`, which takes it from LAUNCHING to RELEASED; everything else
(a new status, a supervisor's end, a stop order) only wakes that task. See docs/launcher.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from node_agent.attempts import (
    AttemptDir,
    AttemptStatus,
    StopRequest,
    attempt_dirs,
    open_process,
)
from node_agent.gpu_release import GpuQuery, wait_for_free_gpus
from node_agent.logs import read_log
from node_agent.ports import PortPool
from node_agent.processes import sweep_marked
from node_agent.ranks import TrackedRank, report_from_disk
from node_agent.retention import DEFAULT_RETENTION, Retention, remove_expired
from node_agent.spawning import Spawner, remove_tmp_dir
from protos.messages import (
    ExitFacts,
    LaunchFault,
    LaunchOrder,
    LogChunk,
    LogStream,
    RankId,
    RankPhase,
    RankReport,
    RankUsage,
    StopOrder,
    StopReason,
)

logger = logging.getLogger(__name__)

RESCAN_S = 2.0
"""Safety net below the notifications: each rank looks at its status at least so often."""
RETENTION_S = 600.0
FENCE_PATIENCE_S = 30.0


class Launcher:
    """Launches ranks under supervisors that outlive it, and reports how they fare."""

    def __init__(
        self,
        state_dir: Path,
        *,
        node_name: str,
        boot_id: str,
        on_report: Callable[[RankReport], None],
        gpu_processes: GpuQuery,
        log_limit_bytes: int,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        now: Callable[[], float] = time.time,
        base_env: Mapping[str, str] = os.environ,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        self._state_dir = state_dir
        self._attempts_dir = state_dir / "attempts"
        self._boot_id = boot_id
        self._on_report = on_report
        self._gpu_processes = gpu_processes
        self._spawner = Spawner(
            state_dir,
            boot_id=boot_id,
            log_limit_bytes=log_limit_bytes,
            base_env=base_env,
            ports=PortPool(node_name, monotonic),
            now=now,
        )
        self._retention = retention
        self._now = now
        self._monotonic = monotonic
        self._sleep = sleep
        self._ranks: dict[RankId, TrackedRank] = {}
        self._notify_fd = -1
        self._rescan_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Adopts every rank whose end is not acknowledged; the state folder must be ours alone."""
        self._attempts_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._spawner.prepare()
        self._notify_fd = self._spawner.open_notifications()
        asyncio.get_running_loop().add_reader(self._notify_fd, self._notified)
        for folder in attempt_dirs(self._attempts_dir):
            if not folder.is_acknowledged:
                self._adopt(folder)
        self._rescan_task = asyncio.create_task(self._rescan())
        self._rescan_task.add_done_callback(_log_fault)

    async def launch(self, order: LaunchOrder) -> None:
        """Starts the rank; one that is known or was here before only repeats its report."""
        entry = self._ranks.get(order.rank)
        folder = self._folder(order.rank)
        if entry is not None:
            self._on_report(entry.report)
        elif folder.path.exists():
            self._on_report(report_from_disk(folder))
        else:
            entry = self._ranks[order.rank] = TrackedRank(folder, order.gpu_uuids)
            self._on_report(entry.report)
            self._begin(entry, self._run(entry, order))

    async def stop(self, order: StopOrder) -> None:
        """Asks the rank to end; one that ended repeats its report.

        An unknown one is recorded as ended, so that a launch order that comes late finds it so.
        """
        entry = self._ranks.get(order.rank)
        folder = self._folder(order.rank)
        if entry is None and folder.path.exists():
            self._on_report(report_from_disk(folder))
        elif entry is None:
            entry = self._ranks[order.rank] = TrackedRank(folder, ())
            self._begin(entry, self._refuse(entry, order.reason))
        elif entry.has_ended:
            self._on_report(entry.report)
        else:
            request = StopRequest(order.reason, order.grace_s)
            if request not in entry.stops:
                entry.stops.append(request)
            entry.wake.set()

    async def kill_unknown(self, ranks: Sequence[RankId]) -> None:
        """Ends fenced ranks without grace, and returns when they have ended (or 30 s passed)."""
        for rank in ranks:
            await self.stop(StopOrder(rank, StopReason.FENCED, 0.0))
        entries = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        deadline_s = self._monotonic() + FENCE_PATIENCE_S
        while any(not entry.has_ended for entry in entries) and self._monotonic() < deadline_s:
            await self._sleep(0.02)

    def reports(self) -> tuple[RankReport, ...]:
        """The newest report of each rank whose end is not acknowledged."""
        return tuple(entry.report for entry in self._ranks.values())

    def forget(self, rank: RankId) -> None:
        """The controller has recorded RELEASED: only the logs are of interest from now on."""
        entry = self._ranks.get(rank)
        if entry is None or not entry.has_ended:
            return
        try:
            entry.folder.acknowledge()
        except OSError:  # the worst is that the next agent reports this end once more
            logger.exception("the acknowledgement of %s could not be stored", rank)
        if entry.report.phase is RankPhase.RELEASED:
            del self._ranks[rank]

    async def read_log(
        self,
        rank: RankId,
        stream: LogStream,
        offset: int,
        limit_bytes: int,
        *,
        tail_bytes: int | None = None,
    ) -> LogChunk:
        """Part of a rank's output; see `node_agent.logs.read_log`."""
        folder = self._folder(rank)
        if rank in self._ranks and not folder.path.exists():
            return LogChunk(b"", max(offset, 0), max(offset, 0), end=False)
        return await asyncio.to_thread(
            read_log, folder, stream, offset, limit_bytes, tail_bytes=tail_bytes
        )

    async def close(self) -> None:
        """Lets go of everything; the jobs run on under their supervisors."""
        tasks = [entry.task for entry in self._ranks.values() if entry.task is not None]
        if self._rescan_task is not None:
            tasks.append(self._rescan_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for entry in self._ranks.values():
            if entry.pidfd is not None:
                loop.remove_reader(entry.pidfd)
                os.close(entry.pidfd)
                entry.pidfd = None
        if self._notify_fd >= 0:
            loop.remove_reader(self._notify_fd)
            os.close(self._notify_fd)
            self._notify_fd = -1

    def _folder(self, rank: RankId) -> AttemptDir:
        return AttemptDir(self._attempts_dir / str(rank))

    def _adopt(self, folder: AttemptDir) -> None:
        """Takes over a rank that an earlier agent launched."""
        gpu_uuids = tuple(folder.read_order().get("gpu_uuids", ()))
        entry = self._ranks[folder.rank] = TrackedRank(folder, gpu_uuids)
        entry.stops = list(folder.read_stop_requests())
        entry.stops_delivered = len(entry.stops)
        status = folder.read_status()
        pidfd = None
        if status is not None and status.supervisor is not None:
            pidfd = open_process(status.supervisor, self._boot_id)
        if pidfd is None:
            entry.supervisor_gone = True
        else:
            self._watch(entry, pidfd)
        self._begin(entry, self._run(entry, None))

    def _begin(self, entry: TrackedRank, life: Coroutine[None, None, None]) -> None:
        entry.task = asyncio.create_task(life)
        entry.task.add_done_callback(_log_fault)

    async def _run(self, entry: TrackedRank, order: LaunchOrder | None) -> None:
        if order is not None:
            await self._spawn(entry, order)
        while not entry.has_ended:
            entry.wake.clear()
            await self._deliver_stops(entry)
            await self._advance(entry)
            if not entry.has_ended:
                await entry.wake.wait()
        await self._release(entry)

    async def _spawn(self, entry: TrackedRank, order: LaunchOrder) -> None:
        if entry.stops:
            await self._give_up(entry, entry.never_started())
            return
        try:
            pid = await asyncio.to_thread(self._spawner.spawn, order, entry.folder)
        except OSError as error:
            message = f"this node cannot start its supervisor: {error}"
            await self._give_up(entry, ExitFacts(launch_fault=LaunchFault.NODE, message=message))
        else:
            self._watch(entry, os.pidfd_open(pid))

    def _watch(self, entry: TrackedRank, pidfd: int) -> None:
        entry.pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._supervisor_ended, entry, pidfd)

    def _supervisor_ended(self, entry: TrackedRank, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        try:
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:  # an earlier agent's child
            result = None
        os.close(pidfd)
        entry.pidfd = None
        entry.supervisor_gone = True
        if result is not None:
            has_exited = result.si_code == os.CLD_EXITED
            entry.supervisor_exit = result.si_status if has_exited else -result.si_status
        entry.wake.set()

    def _notified(self) -> None:
        for name in os.read(self._notify_fd, 1 << 16).decode().split():
            entry = self._ranks.get(AttemptDir(self._attempts_dir / name).rank)
            if entry is not None:
                entry.wake.set()

    async def _rescan(self) -> None:
        cleanup_at_s = self._monotonic()
        while True:
            for entry in self._ranks.values():
                entry.wake.set()
            if self._monotonic() >= cleanup_at_s:
                cleanup_at_s = self._monotonic() + RETENTION_S
                await asyncio.to_thread(self._remove_expired)
            await self._sleep(RESCAN_S)

    def _remove_expired(self) -> None:
        checkpoints_dir = self._spawner.checkpoints_dir
        try:
            remove_expired(self._attempts_dir, checkpoints_dir, self._retention, self._now())
        except OSError:  # the next round tries again
            logger.exception("old attempt folders could not be removed")

    async def _deliver_stops(self, entry: TrackedRank) -> None:
        if entry.pidfd is None or entry.stops_delivered == len(entry.stops):
            return
        requests = tuple(entry.stops)
        try:
            await asyncio.to_thread(entry.folder.write_stop_requests, requests)
        except OSError:  # a full disk must not keep a job alive: a bare SIGTERM stops it as well
            logger.exception("the stop of %s could not be stored", entry.folder.rank)
            entry.has_lost_stops = True
        entry.stops_delivered = len(requests)
        if entry.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile: status.json tells
                signal.pidfd_send_signal(entry.pidfd, signal.SIGTERM)

    async def _advance(self, entry: TrackedRank) -> None:
        is_gone = entry.supervisor_gone  # looked at first: its last act is the final status
        status = entry.folder.read_status()
        if status is not None and status.exit is not None:
            entry.survivors = status.survivors
            exit_facts = status.exit
            if entry.has_lost_stops and exit_facts.stop_reason is not None:
                exit_facts = replace(exit_facts, stop_reason=entry.stop_reason)
            self._publish(entry, RankPhase.ENDED, status.leader_pid, exit_facts, usage=status.usage)
        elif is_gone:
            await self._bury(entry, status)
        elif (
            status is not None
            and status.leader_pid is not None
            and entry.report.phase is RankPhase.LAUNCHING
        ):
            self._publish(entry, RankPhase.RUNNING, status.leader_pid)

    async def _bury(self, entry: TrackedRank, status: AttemptStatus | None) -> None:
        """Ends a rank whose supervisor is gone without having told its end."""
        if status is None:
            await self._give_up(entry, entry.never_started())
            return
        if status.boot_id == self._boot_id:
            entry.survivors = await sweep_marked(
                entry.folder.path, monotonic=self._monotonic, sleep=self._sleep
            )
            exit_facts = entry.supervisor_died()
        else:
            exit_facts = entry.node_rebooted()
        final = AttemptStatus(
            RankPhase.ENDED,
            self._boot_id,
            None,
            leader_pid=status.leader_pid,
            exit=exit_facts,
            survivors=entry.survivors,
        )
        await self._store(entry.folder.write_status, final)
        self._publish(entry, RankPhase.ENDED, status.leader_pid, exit_facts)

    async def _give_up(self, entry: TrackedRank, exit_facts: ExitFacts) -> None:
        """Ends a rank that no supervisor has begun, and keeps a late one from beginning it."""
        final = AttemptStatus(RankPhase.ENDED, self._boot_id, None, exit=exit_facts)
        if await self._store(entry.folder.claim, final) is False:
            if entry.folder.read_status() is not None:
                entry.wake.set()  # it has begun after all
                return
            await self._store(entry.folder.write_status, final)  # torn by a loss of power
        self._publish(entry, RankPhase.ENDED, exit_facts=exit_facts)

    async def _refuse(self, entry: TrackedRank, reason: StopReason) -> None:
        message = "it was stopped before it came to this node, and never ran here"
        await self._give_up(entry, ExitFacts(stop_reason=reason, message=message))
        await self._run(entry, None)

    async def _store(
        self, write: Callable[[AttemptStatus], bool | None], status: AttemptStatus
    ) -> bool | None:
        """Writes a final status; the report is sent also when the disk refuses it."""
        try:
            return await asyncio.to_thread(write, status)
        except OSError:
            logger.exception("the end of a rank could not be stored")
            return None

    async def _release(self, entry: TrackedRank) -> None:
        dirty = await wait_for_free_gpus(
            entry.folder.path,
            entry.gpu_uuids,
            entry.survivors,
            query=self._gpu_processes,
            monotonic=self._monotonic,
            sleep=self._sleep,
        )
        await asyncio.to_thread(remove_tmp_dir, entry.folder)
        entry.report = replace(entry.report, phase=RankPhase.RELEASED, dirty_gpus=dirty)
        self._on_report(entry.report)
        if entry.folder.is_acknowledged:
            del self._ranks[entry.folder.rank]

    def _publish(
        self,
        entry: TrackedRank,
        phase: RankPhase,
        pid: int | None = None,
        exit_facts: ExitFacts | None = None,
        *,
        usage: RankUsage | None = None,
    ) -> None:
        entry.report = RankReport(entry.folder.rank, phase, pid, exit_facts, usage)
        self._on_report(entry.report)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a task of the launcher failed", exc_info=task.exception())
