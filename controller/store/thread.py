"""The thread that uses the store: the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from controller.store.store import Store

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StoreThread:
    """Runs the store's methods, one at a time and in order, in a thread of its own."""

    def __init__(self, store: Store) -> None:
        """From now on only this thread may use the store, until `shut_down`."""
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def call(
        self, method: Callable[Concatenate[Store, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Runs a method of the store, e.g. `await thread.call(Store.load)`.

        Once begun it goes on to its end, even if the caller is cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: method(self._store, *args, **kwargs)
        )

    def shut_down(self) -> None:
        """Waits for what was begun and ends the thread; the store stays open."""
        self._executor.shutdown(wait=True, cancel_futures=True)
