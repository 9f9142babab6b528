"""Waiting for the end of jobs: the event log says when to look, the jobs say what is true.

Looking again at each event, rather than reading states out of events, keeps the meaning of an
event in one place, and a repeated or missed one does no harm.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from protos import rltune_pb2 as pb
from protos.messages import JobView
from testbed.client_errors import NotFound, RltuneError, WaitTimedOut
from testbed.client_rpc import Rpc
from testbed.client_streams import stream_events

News = int | RltuneError
"""A job about which there is something new, or why there will be no more news."""


def wait_for_end(
    job_ids: Sequence[int],
    *,
    fetch: Callable[[Sequence[int]], list[JobView]],
    address: str,
    monotonic: Callable[[], float],
    timeout_s: float | None,
    on_end: Callable[[JobView], None],
) -> list[JobView]:
    """The jobs once all have ended, in the order asked; see `Client.wait`."""
    gives_up_at = None if timeout_s is None else monotonic() + timeout_s
    waiting = set(job_ids)
    ended: dict[int, JobView] = {}

    def look(ids: set[int]) -> None:
        jobs = sorted(fetch(sorted(ids)), key=lambda job: job.job_id)
        unknown = ids.difference(job.job_id for job in jobs)
        if unknown:
            raise NotFound(
                f"there is no job {min(unknown)}", "`rltune jobs --all` lists those there are"
            )
        for job in jobs:
            if job.state.is_final and job.job_id in waiting:
                waiting.remove(job.job_id)
                ended[job.job_id] = job
                on_end(job)

    look(set(waiting))
    if waiting:
        with _listening(address, sorted(waiting)) as news:
            while waiting:
                left_s = None if gives_up_at is None else max(0.0, gives_up_at - monotonic())
                if left_s is not None:
                    left_s = min(left_s, threading.TIMEOUT_MAX)
                if fresh := _next_news(news, left_s, waiting) & waiting:
                    look(fresh)
    return [ended[job_id] for job_id in job_ids]


def _next_news(
    news: queue.SimpleQueue[News], timeout_s: float | None, waiting: set[int]
) -> set[int]:
    """The jobs to look at, as soon as there are some."""
    try:
        items = [news.get(timeout=timeout_s)]
    except queue.Empty:
        raise WaitTimedOut(
            f"{len(waiting)} of the jobs had not ended in time, the first is {min(waiting)}",
            "they go on; wait again or look with `rltune jobs`",
        ) from None
    while not news.empty():
        items.append(news.get())
    for item in items:
        if isinstance(item, RltuneError):
            raise item
    return {item for item in items if isinstance(item, int)}


@contextmanager
def _listening(address: str, job_ids: Sequence[int]) -> Iterator[queue.SimpleQueue[News]]:
    """A queue of the numbers of jobs that something happens to, history included.

    The history comes first, so that nothing is missed between looking and listening. It has a
    connection of its own: closing that is how the thread is ended.
    """
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    rpc = Rpc(address)

    def listen() -> None:
        request = pb.WatchEventsRequest(job_ids=job_ids, follow=True)
        try:
            for event in stream_events(rpc, request):
                if event.job_id is not None:
                    news.put(event.job_id)
        except RltuneError as error:
            news.put(error)

    thread = threading.Thread(target=listen, name="rltune-wait", daemon=True)
    thread.start()
    try:
        yield news
    finally:
        rpc.close()
        thread.join()
