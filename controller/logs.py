"""Follow a job's output over its ranks, streams and attempts, fetching bytes from the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from typing import Protocol

from controller.errors import NodeUnreachable
from controller.service import Service
from protos import rltune_pb2
from protos.codec import enum_to_pb
from protos.messages import (
    AttemptView,
    JobView,
    LogChunk,
    LogStream,
    RankId,
    RankPhase,
    RankView,
)

FETCH_BYTES = 1 << 20
POLL_S = 0.2
"""How often a follower asks a quiet rank for more."""
RECONNECT_WAIT_S = 30.0
"""How long a follower waits for a silent node before it tells and gives up."""


class NoSuchJob(LookupError):
    """There is no job of that number."""


class NoSuchRank(LookupError):
    """The job has no such attempt or rank."""


class FetchLog(Protocol):
    """How bytes come from a node."""

    def __call__(
        self,
        node: str,
        rank: RankId,
        stream: LogStream,
        offset: int,
        limit: int,
        tail_bytes: int | None = None,
    ) -> Awaitable[LogChunk]:
        """Raises NodeUnreachable."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of output, or a notice of ours."""

    attempt: int
    node_rank: int
    node: str
    stream: LogStream
    offset: int = 0
    data: bytes = b""
    dropped_bytes: int = 0
    notice: str = ""

    def to_pb(self) -> rltune_pb2.LogMessage:
        """For the wire."""
        return rltune_pb2.LogMessage(
            attempt=self.attempt,
            node_rank=self.node_rank,
            node=self.node,
            stream=rltune_pb2.LogStream.ValueType(enum_to_pb(self.stream)),
            offset=self.offset,
            data=self.data,
            dropped_bytes=self.dropped_bytes,
            notice=self.notice,
        )


@dataclass(slots=True)
class _Cursor:
    """Where we are in one stream of one rank."""

    rank: RankId
    node: str
    stream: LogStream
    offset: int = 0
    tail_bytes: int | None = None
    done: bool = False
    silent_polls: int = 0


class LogFollower:
    """Streams the output of jobs to clients."""

    def __init__(self, service: Service, fetch: FetchLog) -> None:
        """`fetch` asks a node for bytes."""
        self._service = service
        self._fetch = fetch

    async def stream(
        self,
        job_id: int,
        *,
        attempt: int | None,
        node_rank: int | None,
        streams: tuple[LogStream, ...],
        follow: bool,
        tail_bytes: int | None,
    ) -> AsyncIterator[LogPiece]:
        """Pieces of output in the order in which they are seen.

        Without `follow` it ends with what is there; with it, when the job has ended. Raises
        NoSuchJob, NoSuchRank.
        """
        number = attempt
        while True:
            job = await self._attempt_of(job_id, number, follow)
            if job is None:
                return
            view = _choose(job, number)
            cursors = _cursors(job, view, node_rank, streams, tail_bytes)
            async for piece in self._follow_attempt(cursors, follow):
                yield piece
            if not follow or attempt is not None:
                return
            job = await self._wait_for_next(job_id, view.attempt)
            if job is None:
                return
            number, tail_bytes = view.attempt + 1, None
            first = _choose(job, number).ranks[0]
            yield LogPiece(
                number, 0, first.node, LogStream.STDERR, notice=f"attempt {number} starts"
            )

    async def _job(self, job_id: int) -> JobView:
        job = await self._service.job(job_id)
        if job is None:
            raise NoSuchJob(job_id)
        return job

    async def _attempt_of(self, job_id: int, number: int | None, follow: bool) -> JobView | None:
        """The job once it has the attempt asked for; None if it ended or need not be awaited."""
        while True:
            job = await self._job(job_id)
            if _has_attempt(job, number) and not (follow and _is_launching(job, number)):
                return job
            if number is not None and (job.state.is_final or not follow):
                known = [a.attempt for a in job.attempts]
                raise NoSuchRank(f"job {job_id} has no attempt {number}; it has {known or 'none'}")
            if job.state.is_final or not follow:
                return None
            await asyncio.sleep(POLL_S)

    async def _wait_for_next(self, job_id: int, attempt: int) -> JobView | None:
        """The job once it has a later attempt; None if it ended instead."""
        while True:
            job = await self._job(job_id)
            if job.attempts[-1].attempt > attempt:
                return job
            if job.state.is_final:
                return None
            await asyncio.sleep(POLL_S)

    async def _follow_attempt(
        self, cursors: Iterable[_Cursor], follow: bool
    ) -> AsyncIterator[LogPiece]:
        live = list(cursors)
        while live:
            quiet = True
            for cursor in live:
                async for piece in self._read_on(cursor, follow):
                    quiet = quiet and not piece.data
                    yield piece
            live = [cursor for cursor in live if not cursor.done]
            if live and quiet:
                await asyncio.sleep(POLL_S)

    async def _read_on(self, cursor: _Cursor, follow: bool) -> AsyncIterator[LogPiece]:
        """One fetch's worth of a stream; marks the cursor as done at its end."""
        try:
            chunk = await self._fetch(
                cursor.node,
                cursor.rank,
                cursor.stream,
                cursor.offset,
                FETCH_BYTES,
                cursor.tail_bytes,
            )
        except NodeUnreachable as error:
            cursor.silent_polls += 1
            if not follow or cursor.silent_polls * POLL_S > RECONNECT_WAIT_S:
                cursor.done = True
                yield _piece(cursor, notice=str(error))
            return
        cursor.silent_polls = 0
        if chunk.error:
            cursor.done = True
            yield _piece(cursor, notice=chunk.error)
            return
        skipped = 0 if cursor.tail_bytes is not None else max(0, chunk.offset - cursor.offset)
        cursor.tail_bytes = None
        cursor.offset = chunk.next_offset
        if chunk.data or skipped:
            yield _piece(cursor, offset=chunk.offset, data=chunk.data, dropped_bytes=skipped)
        cursor.done = chunk.end or (not follow and not chunk.data)


def _piece(
    cursor: _Cursor, *, offset: int = 0, data: bytes = b"", dropped_bytes: int = 0, notice: str = ""
) -> LogPiece:
    return LogPiece(
        cursor.rank.attempt,
        cursor.rank.node_rank,
        cursor.node,
        cursor.stream,
        offset,
        data,
        dropped_bytes,
        notice,
    )


def _has_attempt(job: JobView, number: int | None) -> bool:
    return bool(job.attempts) and (number is None or any(a.attempt == number for a in job.attempts))


def _is_launching(job: JobView, number: int | None) -> bool:
    return any(r.phase is RankPhase.LAUNCHING for r in _choose(job, number).ranks)


def _choose(job: JobView, number: int | None) -> AttemptView:
    if number is None:
        return job.attempts[-1]
    return next(a for a in job.attempts if a.attempt == number)


def _cursors(
    job: JobView,
    attempt: AttemptView,
    node_rank: int | None,
    streams: tuple[LogStream, ...],
    tail_bytes: int | None,
) -> list[_Cursor]:
    ranks: list[RankView] = [r for r in attempt.ranks if node_rank in {None, r.node_rank}]
    if not ranks:
        raise NoSuchRank(f"job {job.job_id} has no rank {node_rank}; it has {len(attempt.ranks)}")
    return [
        _Cursor(RankId(job.job_id, attempt.attempt, r.node_rank), r.node, stream, 0, tail_bytes)
        for r in ranks
        for stream in streams
    ]
