"""Event and log streams that survive a lost connection without a gap or a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from protos import rltune_pb2 as pb
from protos.codec import from_pb
from protos.messages import ClusterEvent, LogStream
from testbed.client_errors import RltuneError
from testbed.client_rpc import STREAM_PATIENCE_S, Patience, Rpc
from testbed.client_status import unreachable


@dataclass(frozen=True, slots=True)
class LogMessage:
    """A piece of a job's output, or a notice about it."""

    attempt: int
    node_rank: int
    node: str
    stream: LogStream
    offset: int
    """Position of `data` in the stream as the job wrote it."""
    data: bytes
    dropped_bytes: int
    """Bytes before this piece that the node's size limit removed."""
    notice: str
    """Said by the testbed, not by the job; `data` is empty then."""


def stream_events(rpc: Rpc, request: pb.WatchEventsRequest) -> Iterator[ClusterEvent]:
    """The events asked for; with follow, without end. `request` is changed as they come.

    Raises:
        RltuneError: the controller refused, or did not come back in time.
    """
    patience: Patience | None = None
    while True:
        try:
            for message in rpc.stream("WatchEvents", request, pb.ClusterEvent):
                patience = None
                event = from_pb(message, ClusterEvent)
                request.after_event_id = event.event_id
                yield event
        except RltuneError as lost:
            error = lost
        else:
            if not request.follow:
                return
            error = unreachable(rpc.address, "it ended the stream")
        patience = patience or rpc.patience(STREAM_PATIENCE_S)
        patience.spend(error)


def stream_logs(rpc: Rpc, request: pb.StreamLogsRequest) -> Iterator[LogMessage]:
    """The output asked for. After a lost connection the bytes already seen are left out.

    If another attempt started meanwhile, it goes on with that one.

    Raises:
        RltuneError: the controller refused, or did not come back in time.
    """
    patience: Patience | None = None
    seen = Seen()
    while True:
        try:
            for message in rpc.stream("StreamLogs", request, pb.LogMessage):
                patience = None
                fresh = seen.only_new(from_pb(message, LogMessage))
                if fresh is not None:
                    yield fresh
        except RltuneError as lost:
            patience = patience or rpc.patience(STREAM_PATIENCE_S)
            patience.spend(lost)
            # From the start, since what came meanwhile may be longer than the tail.
            request.ClearField("tail_bytes")
        else:
            return


class Seen:
    """How far each stream of each rank of each attempt has been handed out."""

    def __init__(self) -> None:
        self._next_offset: dict[tuple[int, int, LogStream], int] = {}
        self._notices: set[tuple[int, int, str]] = set()

    def only_new(self, piece: LogMessage) -> LogMessage | None:
        """The part of a piece that was not handed out yet; None if there is none."""
        if piece.notice:
            key = (piece.attempt, piece.node_rank, piece.notice)
            known = key in self._notices
            self._notices.add(key)
            return None if known else piece
        stream = (piece.attempt, piece.node_rank, piece.stream)
        end = piece.offset + len(piece.data)
        start = self._next_offset.get(stream, 0)
        if end <= start:
            return None
        self._next_offset[stream] = end
        if start <= piece.offset:
            return piece
        return replace(
            piece, offset=start, data=piece.data[start - piece.offset :], dropped_bytes=0
        )
