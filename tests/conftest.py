"""Shared fixtures: bounded waits, hostile names, and a guard against leaked processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

LEAK_GRACE_S = 5.0


class WaitUntil(Protocol):
    """Waits for an observable instead of sleeping."""

    def __call__(
        self,
        condition: Callable[[], object],
        timeout_s: float = 20.0,
        describe: Callable[[], object] | None = None,
    ) -> None: ...


@pytest.fixture
def wait_until() -> WaitUntil:
    """`wait_until(condition, timeout_s, describe)`: fails with the last state when time is up."""

    def wait(
        condition: Callable[[], object],
        timeout_s: float = 20.0,
        describe: Callable[[], object] | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                state = f"; last state: {describe()}" if describe else ""
                pytest.fail(f"not true within {timeout_s:g} s{state}")
            time.sleep(0.02)  # noqa: TID251 - between two looks at an observable

    return wait


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def no_leaked_process() -> Iterator[None]:
    """A test that leaves a child process behind fails, and the child is ended."""
    before = _children()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while leaked := {p for p in _children() - before if _is_alive(p)}:
        if time.monotonic() > deadline:
            named = [_describe(p) for p in leaked]
            for process in leaked:
                process.kill()
            pytest.fail(f"the test left processes behind: {named}")
        time.sleep(0.05)  # noqa: TID251 - between two looks at an observable


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not _is_tracker(process)
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker lives as long as the interpreter."""
    return any("resource_tracker" in word for word in process.cmdline())


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


@pytest.fixture(params=["plain", "with space", "quote'and\"", "new\nline", "ünïcödé", "x" * 200])
def hostile_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder whose name would break a program that builds shell lines."""
    folder = tmp_path / request.param
    folder.mkdir()
    return folder
