"""What can go wrong when a client talks to the controller.

    RltuneError              anything below
    ├── InvalidRequest       the request breaks a rule; `field` names it
    │   └── Infeasible       no known node could ever hold the job
    ├── NotFound             no such job or node
    ├── ControllerUnreachable  nobody listens at the address, or whoever does is silent
    ├── NodeUnreachable      the node that has the answer is gone
    ├── NotAllowed           the caller may not do that
    ├── TryAgain             not now: queue full, store read-only, an answer was lost
    ├── WaitTimedOut         the caller's own patience is at an end
    └── ServerFailed         the controller failed; its log knows more

No gRPC here: settings and job files raise these too.
"""

from __future__ import annotations

from typing import ClassVar


class RltuneError(Exception):
    """Something that a person can understand and mend."""

    default_code: ClassVar[str] = "error"

    def __init__(self, message: str, hint: str = "", *, code: str = "", field: str = "") -> None:
        """Make an error; `code` is a stable word for programs."""
        self.code = code or self.default_code
        self.message = message
        self.hint = hint
        self.field = field
        super().__init__(f"{message} ({hint})" if hint else message)


class InvalidRequest(RltuneError):
    """The request breaks a rule."""

    default_code = "invalid_argument"


class Infeasible(InvalidRequest):
    """No known node could ever hold the job."""

    default_code = "infeasible"


class NotFound(RltuneError):
    """There is no such job or node."""

    default_code = "not_found"


class ControllerUnreachable(RltuneError):
    """Nobody listens at the controller's address, or whoever listens does not answer."""

    default_code = "controller_unreachable"


class NodeUnreachable(RltuneError):
    """The node that would have the answer is gone."""

    default_code = "node_unreachable"


class NotAllowed(RltuneError):
    """The caller may not do that."""

    default_code = "not_allowed"


class TryAgain(RltuneError):
    """It cannot be done now, but perhaps later."""

    default_code = "try_again"


class WaitTimedOut(RltuneError):
    """The time that the caller was ready to wait is over."""

    default_code = "wait_timed_out"


class ServerFailed(RltuneError):
    """The controller failed while it answered."""

    default_code = "server_failed"
