"""The last lines of logs: the controller counts bytes, people count lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protos.messages import LogStream
    from testbed.client_streams import LogMessage

FIRST_TRY_BYTES = 1 << 14
LARGEST_TRY_BYTES = 1 << 28
TYPICAL_LINE_BYTES = 160
MARGIN_BYTES = 1 << 22
"""What a job may write between reading its last lines and following it without a gap."""

OpenLogs = Callable[[bool, int | None], "Iterator[LogMessage]"]
"""Opens a job's logs: whether to follow, and from how many bytes before the end."""


def last_lines(open_logs: OpenLogs, lines: int, *, follow: bool) -> Iterator[LogMessage]:
    """The last so many lines of each stream of each rank, then with `follow` what comes."""
    from testbed.client_streams import Seen  # noqa: PLC0415 - loads gRPC, --help does without

    seen = Seen()
    tail_bytes, pieces = _enough(open_logs, lines)
    for stream in pieces:
        yield from _cut(stream, lines)
        for piece in stream:
            seen.only_new(piece)
    if follow:
        for piece in open_logs(True, tail_bytes + MARGIN_BYTES):
            fresh = seen.only_new(piece)
            if fresh is not None:
                yield fresh


def _enough(open_logs: OpenLogs, lines: int) -> tuple[int, list[list[LogMessage]]]:
    """The end of each stream with at least so many lines, and how many bytes were asked for."""
    tail_bytes = max(FIRST_TRY_BYTES, lines * TYPICAL_LINE_BYTES)
    while True:
        streams: dict[tuple[int, int, LogStream], list[LogMessage]] = {}
        for piece in open_logs(False, tail_bytes):
            streams.setdefault((piece.attempt, piece.node_rank, piece.stream), []).append(piece)
        if tail_bytes >= LARGEST_TRY_BYTES or all(
            _has_lines(pieces, lines) for pieces in streams.values()
        ):
            return tail_bytes, list(streams.values())
        tail_bytes *= 8


def _has_lines(pieces: list[LogMessage], lines: int) -> bool:
    return pieces[0].offset == 0 or sum(p.data.count(b"\n") for p in pieces) > lines


def _cut(pieces: list[LogMessage], lines: int) -> Iterator[LogMessage]:
    """The pieces of one stream that hold its last lines; notices stay."""
    data = b"".join(piece.data for piece in pieces)
    left_out = len(data) - tail_size(data, lines)
    for piece in pieces:
        skipped = min(left_out, len(piece.data))
        left_out -= skipped
        if piece.notice or skipped < len(piece.data):
            yield replace(piece, offset=piece.offset + skipped, data=piece.data[skipped:])


def tail_size(data: bytes, lines: int) -> int:
    """How many bytes the last lines fill; a last one without a newline counts as a line."""
    if lines == 0:
        return 0
    start = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        start = data.rfind(b"\n", 0, start)
        if start < 0:
            return len(data)
    return len(data) - start - 1
