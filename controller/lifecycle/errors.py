"""What the rules raise."""

from __future__ import annotations


class IllegalTransition(Exception):
    """An event asked for a change of state that the table does not allow: a bug of the caller."""

    def __init__(self, entity: str, state: str, event: str) -> None:
        """Names the entity (`job 7`), the state it is in and what was asked."""
        super().__init__(f"{entity} is {state}: {event} is not allowed")
        self.entity = entity
        self.state = state
        self.event = event


class NotAllowed(Exception):
    """A person asked for something that the job's state rules out; the message says why."""
