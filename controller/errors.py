"""What the controller says no with."""

from __future__ import annotations


class Refused(Exception):
    """An agent's session is not accepted."""

    def __init__(self, code: str, message: str) -> None:
        """`code` is a fixed word, `message` says what to do."""
        super().__init__(message)
        self.code = code


class Rejected(Exception):
    """A submission is not accepted; nothing was queued."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        """`code` is a fixed word, `hint` says how to mend it."""
        super().__init__(message)
        self.code = code
        self.hint = hint


class NoSuchNode(LookupError):
    """No node of that name ever joined."""


class NodeUnreachable(RuntimeError):
    """No agent of that name is connected, or it did not answer in time."""
