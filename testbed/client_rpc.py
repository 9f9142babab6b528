"""Calls to one controller: deadlines, trying again, and errors that people understand."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from testbed.client_errors import ControllerUnreachable, RltuneError, ServerFailed
from testbed.client_status import from_rpc

CALL_TIMEOUT_S = 10.0
"""For one unary call."""
CONNECT_TIMEOUT_S = 2.0
"""How long the first contact may take before the controller counts as unreachable."""
UNARY_PATIENCE_S = 30.0
"""How long a unary call is tried again after the controller was reached once."""
STREAM_PATIENCE_S = 600.0
"""How long a stream waits for the controller's return: a restart or an upgrade."""
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
MAX_MESSAGE_BYTES = 256 * 2**20
"""A page of 1,000 jobs, each with a large environment."""

_CHANNEL_OPTIONS = (
    # A proxy of the environment is for the web; a controller behind it is never what was meant.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In grpc's C core this is also the longest time one connection attempt may take.
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(LONGEST_BACKOFF_S * 1000)),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

M = TypeVar("M", bound=Message)

_random = secrets.SystemRandom().random


class Patience:
    """Decides whether a lost connection is waited out, and waits: full jitter, a deadline."""

    def __init__(
        self,
        budget_s: float,
        monotonic: Callable[[], float],
        pause: Callable[[float], object],
        jitter: Callable[[], float],
    ) -> None:
        """`budget_s` counts from now; `jitter` is in [0, 1)."""
        self._gives_up_at = monotonic() + budget_s
        self._monotonic = monotonic
        self._pause = pause
        self._jitter = jitter
        self._failures = 0

    def spend(self, error: RltuneError) -> None:
        """Wait before the next try.

        Raises:
            RltuneError: `error` itself, if trying again cannot help or the budget is used up.
        """
        if not isinstance(error, ControllerUnreachable):
            raise error
        longest_s = min(FIRST_BACKOFF_S * 2**self._failures, LONGEST_BACKOFF_S)
        delay_s = longest_s * self._jitter()
        if self._monotonic() + delay_s >= self._gives_up_at:
            raise error
        self._failures = min(self._failures + 1, 16)
        self._pause(delay_s)


class Rpc:
    """A channel to one controller. Not to be used by several threads at once."""

    def __init__(
        self,
        address: str,
        *,
        patience_s: float | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = _random,
    ) -> None:
        """`patience_s` is how long one question is tried again after the connection was lost.

        `pause` waits so many seconds; the default one ends early when the channel closes.
        """
        self.address = address
        self._patience_s = UNARY_PATIENCE_S if patience_s is None else patience_s
        self._call_timeout_s = call_timeout_s
        self._closing = threading.Event()
        self._start_or_close = threading.Lock()
        self._pause = self._closing.wait if pause is None else pause
        self._monotonic = monotonic
        self._jitter = jitter
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._reached = False

    def close(self) -> None:
        """End all calls and give the connection back. Safe to call from another thread."""
        with self._start_or_close:
            self._closing.set()
            self._channel.close()

    def patience(self, budget_s: float) -> Patience:
        """A budget from now on; a short one while the controller was never reached."""
        budget_s = budget_s if self._reached else min(budget_s, CONNECT_TIMEOUT_S)
        return Patience(budget_s, self._monotonic, self._pause, self._jitter)

    def unary(
        self, method: str, request: Message, answer: type[M], *, idempotent: bool = True
    ) -> M:
        """One question, one answer; tried again while that may help, if it is `idempotent`.

        Raises:
            RltuneError: the controller refused, or could not be reached in time.
        """
        call = self._channel.unary_unary(
            f"/rltune.v1.Controller/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        patience = self.patience(self._patience_s)
        while True:
            try:
                response: M = call(request, timeout=self._call_timeout_s)
            except grpc.RpcError as failure:
                error = self._told(failure)
            else:
                self._reached = True
                return response
            # Out here it has no context: people see our one line, not gRPC's forty before it.
            if not idempotent:
                raise error
            patience.spend(error)

    def stream(self, method: str, request: Message, answer: type[M]) -> Iterator[M]:
        """One question, many answers, as long as this one connection lives.

        Raises:
            RltuneError: the controller refused, or the connection is lost.
        """
        start = self._channel.unary_stream(
            f"/rltune.v1.Controller/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        with self._start_or_close:
            if self._closing.is_set():
                raise ServerFailed("the client is closed", code="closed")
            call = start(request)
        try:
            for response in call:
                self._reached = True
                yield response
        except grpc.RpcError as failure:
            raise self._told(failure) from None
        finally:
            call.cancel()
        self._reached = True

    def _told(self, failure: grpc.RpcError) -> RltuneError:
        # What grpc raises is both, which its stubs cannot say.
        return from_rpc(cast("grpc.Call", failure), self.address)
