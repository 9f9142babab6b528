"""From a failed gRPC call to an error that a person understands.

The controller puts `{"code", "message", "hint", "field"}` as JSON into the trailing metadata
`rltune-error-bin`; without it the gRPC status alone decides.
"""

from __future__ import annotations

import json

import grpc

from testbed.client_errors import (
    ControllerUnreachable,
    Infeasible,
    InvalidRequest,
    NodeUnreachable,
    NotAllowed,
    NotFound,
    RltuneError,
    ServerFailed,
    TryAgain,
)

ERROR_METADATA_KEY = "rltune-error-bin"

_BY_STATUS: dict[grpc.StatusCode, type[RltuneError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: Infeasible,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TryAgain,
    grpc.StatusCode.ABORTED: TryAgain,
}


_SILENT = ("before receiving settings frame", "keepalive", "ping timeout")
"""In gRPC's words for a connection that stands and on which nothing comes."""


def unreachable(address: str, why: str) -> ControllerUnreachable:
    """The error for an address where nobody listens."""
    return ControllerUnreachable(
        f"cannot reach the controller at {address}: {why}",
        "start one with `rltune up` or set RLTUNE_CONTROLLER",
    )


def silent(address: str) -> ControllerUnreachable:
    """The error for an address where somebody listens but does not answer."""
    return ControllerUnreachable(
        f"the controller at {address} accepts connections but does not answer",
        "it is stopped, overloaded or hung: look at its process and its log, restart it if need "
        "be; running jobs go on meanwhile",
    )


def from_rpc(error: grpc.Call, address: str) -> RltuneError:
    """The error of our own for a failed call."""
    status = error.code()
    told = _told_by_server(error)
    details = error.details() or status.name
    if not told and status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return silent(address)
    if not told and status is grpc.StatusCode.UNAVAILABLE:
        is_silent = any(words in details.lower() for words in _SILENT)
        return silent(address) if is_silent else unreachable(address, _short(details))
    if told.get("code") == NodeUnreachable.default_code:
        kind: type[RltuneError] = NodeUnreachable
    elif not told and "larger than max" in details:
        kind = InvalidRequest
    elif status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        kind = TryAgain
    else:
        kind = _BY_STATUS.get(status, ServerFailed)
    hint = told.get("hint", "")
    return kind(
        told.get("message", details).removesuffix(f" ({hint})"),
        hint,
        code=told.get("code", ""),
        field=told.get("field", ""),
    )


def _told_by_server(error: grpc.Call) -> dict[str, str]:
    """The error that the controller described in the trailing metadata; empty if it did not."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return {name: str(text) for name, text in json.loads(value).items() if text}
    return {}


def _short(details: str) -> str:
    """The end of gRPC's long story: `failed to connect ...: connect: Connection refused (111)`."""
    for known in ("Connection refused", "Name or service not known", "Network is unreachable"):
        if known.lower() in details.lower():
            return known.lower()
    if "DNS" in details or "resolution" in details:
        return "its name is not known"
    if "timed out" in details.lower() or "timeout" in details.lower():
        return "no answer in time"
    return details
