"""Group commit: all commands that wait are applied to a draft and stored in one transaction.

Only the writer changes the state. Callers hear back after the transaction is on disk; if it
fails, they hear that, and nothing has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from controller.lifecycle import rules
from controller.lifecycle.errors import IllegalTransition
from controller.lifecycle.events import Event
from controller.lifecycle.state import ClusterState, Draft, StateView
from controller.store.errors import StoreRefused, StoreUnavailable
from controller.store.store import Store, as_changes
from controller.store.thread import StoreThread
from protos.messages import ClusterEvent

MAX_BATCH = 512
STORY_LENGTH = 8
"""How many last events of a job go with an illegal transition."""

log = logging.getLogger("rltune.writer")

_T = TypeVar("_T")
Request = tuple[str, str]
"""(user, request id)."""


class Transaction:
    """What a command works on."""

    def __init__(self, state: StateView, last_job_id: int, requests: Mapping[Request, int]) -> None:
        """`requests` are the submissions that are known already, of those asked for."""
        self.draft = Draft(state)
        self.last_job_id = last_job_id
        self.requests: ChainMap[Request, int] = ChainMap({}, dict(requests))

    def apply(self, event: Event) -> None:
        """Applies one event.

        Raises:
            IllegalTransition, NotAllowed: see `rules.apply`; the transaction is as before.
        """
        self.draft.absorb(rules.apply(self.draft, event))

    def nested(self) -> Transaction:
        """A transaction over this one, to be taken over whole or not at all."""
        inner = Transaction(self.draft, self.last_job_id, {})
        inner.requests = self.requests.new_child()
        return inner

    def take_over(self, inner: Transaction) -> None:
        """Makes what a nested transaction did a part of this one."""
        self.draft.absorb(inner.draft.outcome())
        self.last_job_id = inner.last_job_id
        self.requests.update(inner.requests.maps[0])


@dataclass(slots=True)
class _Command(Generic[_T]):
    run: Callable[[Transaction], _T]
    answer: asyncio.Future[_T]
    job_ids: Collection[int]
    requests: Collection[Request]


@dataclass(slots=True)
class Committed:
    """What a transaction changed, for those who hear of it."""

    draft: Draft
    before: ClusterState
    """The state without the changes: valid only during the call."""
    events: list[ClusterEvent] = field(default_factory=list)


class Listener(Protocol):
    """Who hears of transactions."""

    def will_commit(self, transaction: Transaction) -> None:
        """Adds what belongs into the same transaction."""

    def will_swap(self, committed: Committed) -> None:
        """The changes are on disk, memory is still as before."""

    def has_committed(self, committed: Committed) -> None:
        """Memory is as on disk."""

    def store_failed(self, error: StoreUnavailable) -> None:
        """The store could not be used: nothing has changed."""

    def store_works(self) -> None:
        """A transaction has just been stored."""


class Writer:
    """The one task that changes the state."""

    def __init__(
        self, store: StoreThread, state: ClusterState, last_job_id: int, listener: Listener
    ) -> None:
        """Takes over the loaded state."""
        self._store = store
        self._state = state
        self._last_job_id = last_job_id
        self._listener = listener
        self._queue: asyncio.Queue[_Command[Any]] = asyncio.Queue()
        self._is_closed = False

    async def do(
        self,
        run: Callable[[Transaction], _T],
        *,
        job_ids: Collection[int] = (),
        requests: Collection[Request] = (),
    ) -> _T:
        """Runs a function on a transaction and returns its result once that is stored.

        The function may run more than once and must have no effect but on the transaction. What
        it raises reaches the caller. `job_ids` are fetched if they are no longer in memory,
        `requests` are looked up before.

        Raises:
            StoreUnavailable: nothing was changed.
        """
        if self._is_closed:
            raise StoreUnavailable("the controller is stopping")
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Command(run, answer, job_ids, requests))
        return await answer

    async def run(self) -> None:
        """Serves commands until cancelled; then callers that still wait are told."""
        try:
            while True:
                batch = [await self._queue.get()]
                while not self._queue.empty() and len(batch) < MAX_BATCH:
                    batch.append(self._queue.get_nowait())
                await self._serve(batch)
        finally:
            self._is_closed = True
            while not self._queue.empty():
                _refuse([self._queue.get_nowait()], StoreUnavailable("the controller is stopping"))

    async def _serve(self, batch: list[_Command[Any]]) -> None:
        settled = {job_id for command in batch for job_id in command.job_ids}
        try:
            requests = await self._fetch(batch)
            transaction = Transaction(self._state, self._last_job_id, requests)
            done = await self._run(batch, transaction)
            await self._commit(transaction, done)
            changed = transaction.draft.changes
            settled |= {*changed.jobs, *(job_id for job_id, _ in changed.attempts)}
        except StoreUnavailable as error:
            log.error("nothing was stored: %s", error)
            self._listener.store_failed(error)
            _refuse(batch, error)
        finally:
            # Nobody waits for ever, not even when we are cancelled here.
            _refuse(batch, StoreUnavailable("the controller stopped before it could answer"))
        self._state.forget_settled(sorted(settled))

    async def _run(
        self, batch: list[_Command[Any]], transaction: Transaction
    ) -> list[tuple[_Command[Any], Any]]:
        """Runs commands one after the other; one that raises leaves nothing behind."""
        done = []
        for command in batch:
            nested = transaction.nested()
            try:
                result = command.run(nested)
            except IllegalTransition as error:
                await self._tell_story(error, command)
                _refuse([command], error)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is its caller's
                _refuse([command], error)
            else:
                transaction.take_over(nested)
                done.append((command, result))
        return done

    async def _fetch(self, batch: list[_Command[Any]]) -> dict[Request, int]:
        """Brings settled jobs back into memory, and looks up submissions."""
        job_ids = {job_id for command in batch for job_id in command.job_ids}
        missing = [job_id for job_id in job_ids if self._state.job(job_id) is None]
        if missing:
            found = await self._store.call(Store.jobs_by_id, missing)
            self._state.absorb(as_changes(found))
        asked = {request for command in batch for request in command.requests}
        return await self._store.call(Store.find_requests, asked) if asked else {}

    async def _commit(
        self, transaction: Transaction, done: list[tuple[_Command[Any], Any]]
    ) -> None:
        draft = transaction.draft
        self._listener.will_commit(transaction)
        committed = Committed(draft, self._state)
        if draft.changes or draft.records:
            try:
                committed.events = await asyncio.shield(
                    self._store.call(Store.commit, draft.changes, draft.records)
                )
            except StoreRefused as error:
                await self._retry_singly([command for command, _ in done], error)
                return
            self._listener.store_works()
        self._listener.will_swap(committed)
        self._state.absorb(draft.changes)
        self._last_job_id = transaction.last_job_id
        self._listener.has_committed(committed)
        for command, result in done:
            if not command.answer.done():
                command.answer.set_result(result)

    async def _retry_singly(self, commands: list[_Command[Any]], error: StoreRefused) -> None:
        """One command of a batch broke an invariant: the others must not fail with it."""
        log.error("a guard of the database refused %d commands: %s", len(commands), error)
        if len(commands) <= 1:
            _refuse(commands, error)
            return
        for command in commands:
            await self._serve([command])

    async def _tell_story(self, error: IllegalTransition, command: _Command[Any]) -> None:
        """Adds the last events of the command's jobs to the error: how it came to this."""
        ids = frozenset(command.job_ids)
        if not ids:
            return
        events = await self._store.call(Store.last_events, ids, STORY_LENGTH)
        for event in events:
            error.add_note(f"  {event.event_id} {event.kind}: {event.text}")


def _refuse(commands: list[_Command[Any]], error: Exception) -> None:
    for command in commands:
        if not command.answer.done():
            command.answer.set_exception(error)
