"""The event log as streams: history from the store, then live, without a gap or a double."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from controller.store.store import Store
from controller.store.thread import StoreThread
from protos.messages import ClusterEvent

RING_SIZE = 8_192
PAGE_SIZE = 1_000


class EventFeed:
    """The last events in memory, and who waits for the next."""

    def __init__(self, store: StoreThread, last_event_id: int) -> None:
        """Everything up to `last_event_id` is in the store only."""
        self._store = store
        self._last_id = last_event_id
        self._ring: deque[ClusterEvent] = deque(maxlen=RING_SIZE)
        self._more = asyncio.Event()

    def publish(self, events: Iterable[ClusterEvent]) -> None:
        """These events are stored."""
        before = self._last_id
        for event in events:
            self._ring.append(event)
            self._last_id = event.event_id
        if self._last_id != before:
            self._more.set()
            self._more = asyncio.Event()

    async def watch(
        self, after_event_id: int, job_ids: frozenset[int], node: str | None, *, follow: bool
    ) -> AsyncIterator[ClusterEvent]:
        """Events after the given one that concern the jobs and the node, in order.

        A watcher who is too slow for the ring reads the store again from where it is.
        """
        seen = after_event_id
        while True:
            more, up_to = self._more, self._last_id
            if seen < up_to and not self._is_in_ring(seen + 1):
                page = await self._store.call(Store.events, seen, up_to, job_ids, node, PAGE_SIZE)
                seen = page[-1].event_id if len(page) == PAGE_SIZE else up_to
                for event in page:
                    yield event
                continue
            if seen < up_to:
                first = self._ring[0].event_id
                news = [self._ring[i] for i in range(seen + 1 - first, up_to + 1 - first)]
                seen = up_to
                for event in news:
                    if (not job_ids or event.job_id in job_ids) and node in {None, event.node}:
                        yield event
                continue
            if not follow:
                return
            await more.wait()

    def _is_in_ring(self, event_id: int) -> bool:
        return bool(self._ring) and self._ring[0].event_id <= event_id
