"""Reads a rank's output from its segment files, also while it is being written."""

from __future__ import annotations

from pathlib import Path

from node_agent.attempts import AttemptDir
from protos.messages import LogChunk, LogStream, RankPhase

READ_ATTEMPTS = 5
"""A segment may be deleted between listing and opening; the next listing lacks it."""


def read_log(
    folder: AttemptDir,
    stream: LogStream,
    offset: int,
    limit_bytes: int,
    *,
    tail_bytes: int | None = None,
) -> LogChunk:
    """Up to `limit_bytes` of a stream from `offset` on.

    A negative `offset` counts from the present end, and so does `tail_bytes`, which wins.
    Bytes that the size limit or a full disk took are skipped: the chunk's `offset` then is
    larger than asked. `end` is set when the rank has ended and everything was read.
    """
    if not folder.path.is_dir():
        error = f"the output of {folder.path.name} is not on this node (any more)"
        return LogChunk(b"", max(offset, 0), max(offset, 0), end=True, error=error)
    if tail_bytes is not None:
        offset = -tail_bytes
    # The phase is read first: what an ended rank wrote is all there.
    status = folder.read_status()
    has_ended = status is not None and status.phase is RankPhase.ENDED
    for _ in range(READ_ATTEMPTS):
        segments = folder.log_segments(stream)
        try:
            return _read(segments, offset, limit_bytes, has_ended=has_ended)
        except FileNotFoundError:
            continue
    return LogChunk(b"", max(offset, 0), max(offset, 0), end=False)


def _read(
    segments: list[tuple[int, Path]], offset: int, limit_bytes: int, *, has_ended: bool
) -> LogChunk:
    spans = [(start, start + path.stat().st_size, path) for start, path in segments]
    stream_end = spans[-1][1] if spans else 0
    position = stream_end + offset if offset < 0 else offset
    wanted = [span for span in spans if span[1] > max(position, 0)]
    if not wanted:
        position = max(position, 0)
        return LogChunk(b"", position, position, end=has_ended)
    position = max(position, wanted[0][0])
    data = bytearray()
    for start, end, path in wanted:
        if start > position + len(data) or len(data) >= limit_bytes:
            break  # a gap: the next chunk begins behind it
        with path.open("rb") as file:
            file.seek(position + len(data) - start)
            data += file.read(min(limit_bytes - len(data), end - position - len(data)))
    next_offset = position + len(data)
    return LogChunk(bytes(data), position, next_offset, end=has_ended and next_offset >= stream_end)
