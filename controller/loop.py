"""When to decide: on events, paced, in a thread of its own, and never for the last time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from controller.scheduler.cycle import Scheduler
from controller.scheduler.types import Decision
from controller.service import Service
from controller.snapshot import Snapshot

RETRY_FIRST_S = 0.1
RETRY_CAP_S = 10.0

log = logging.getLogger("rltune.loop")


class SchedulingLoop:
    """Runs scheduling cycles: the first event after idleness at once, then paced."""

    def __init__(
        self,
        service: Service,
        scheduler: Scheduler,
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        min_interval_s: float = 0.005,
    ) -> None:
        """`min_interval_s` is the least time from the start of a cycle to the next one's."""
        self._service = service
        self._scheduler = scheduler
        self._monotonic = monotonic
        self._sleep = sleep
        self._min_interval_s = min_interval_s
        self._wake_after_s: float | None = None

    async def run(self) -> None:
        """Decides until cancelled. A cycle that fails is told, counted and tried again."""
        failures = 0
        # One decision at a time; a thread, so that heartbeats are served meanwhile.
        with ThreadPoolExecutor(1, thread_name_prefix="decide") as executor:
            while True:
                await self._wait_for_news()
                began_s = self._monotonic()
                self._service.changed.clear()
                try:
                    await self._cycle(executor, began_s)
                except Exception as error:
                    failures += 1
                    self._service.stats.last_error = f"{type(error).__name__}: {error}"
                    pause_s = min(RETRY_CAP_S, RETRY_FIRST_S * 2 ** (failures - 1))
                    log.exception("a scheduling cycle failed; again in %.1f s", pause_s)
                    self._service.changed.set()
                    await self._sleep(pause_s)
                else:
                    failures = 0
                    self._service.stats.last_error = ""
                    rest_s = self._min_interval_s - (self._monotonic() - began_s)
                    if rest_s > 0:
                        await self._sleep(rest_s)

    async def _wait_for_news(self) -> None:
        """Until something happened, or the time that the last decision named has come."""
        try:
            async with asyncio.timeout(self._wake_after_s):
                await self._service.changed.wait()
        except TimeoutError:
            pass  # the time has come: that is news as well
        self._wake_after_s = None

    async def _cycle(self, executor: ThreadPoolExecutor, began_s: float) -> None:
        snapshot = self._service.snapshot()
        stats = self._service.stats
        if snapshot.queue:
            loop = asyncio.get_running_loop()
            decision = await loop.run_in_executor(executor, self._decide, snapshot)
            stats.cycles += 1
            stats.last_cycle_s = self._monotonic() - began_s
            if decision.fallback:
                stats.fallbacks += 1
                stats.last_fallback = decision.fallback
                log.warning("the allocator fell back: %s", decision.fallback)
            await self._service.commit_decision(decision, snapshot.version)
            if decision.wake_at_s is not None:
                passed_s = self._monotonic() - began_s
                self._wake_after_s = max(0.0, decision.wake_at_s - snapshot.now_s - passed_s)

    def _decide(self, snapshot: Snapshot) -> Decision:
        return self._scheduler.decide(snapshot.queue, snapshot.cluster, snapshot.now_s)
