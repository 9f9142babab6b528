"""The agent's side of the collector: asks the process that talks to NVML, and never waits on it.

A call into NVML may hang in the driver, where not even SIGKILL ends it. So each request has a
deadline; one that was missed is remembered, others return at once, and a process that misses
several is ended and replaced - but never by a second one while the first cannot be ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node_agent.scan import ProcessesByGpu, Scan, processes_from_json, scan_from_json
from protos.messages import XidEvent

log = logging.getLogger("rltune.agent.collector")

DEADLINE_S = 2.0
START_DEADLINE_S = 20.0
MISSES_LIMIT = 3
"""Scans missed in a row that make the node unhealthy; a request that is open for as many deadlines
gets the process ended."""

_LATE_ANSWER_S = 0.05
_QUEUE_S = 0.5
"""How long a request waits for the one before it; a scan takes milliseconds unless NVML hangs."""
_TERMINATE_GRACE_S = 2.0
_CLOSE_GRACES_S = (0.4, 0.2, 0.2)
"""How long `close` waits after asking, after SIGTERM, and after SIGKILL."""
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 60.0
_HEALTHY_AFTER_S = 60.0
"""A process that lived so long starts the back-off anew."""
_LINE_LIMIT_BYTES = 16 * 1024**2

_NO_ANSWER = "NVML does not answer"
_STUCK = "NVML does not answer and its process cannot be ended (it waits in the driver)"
_ENDED = "the telemetry process ends again and again, see the agent's log"


class CollectorStartError(Exception):
    """The collector's process did not come up."""


class CollectorClient:
    """Starts the collector's process, asks it, replaces it. All methods are for one event loop."""

    def __init__(
        self,
        *,
        mock_gpus: str | None = None,
        seed: str = "",
        faults_path: Path | None = None,
        deadline_s: float = DEADLINE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        Args:
            mock_gpus: mock GPUs, e.g. `P100:4,T4:2`; None means the real ones.
            seed: the agent's node id, for the mock UUIDs.
            faults_path: faults of the mock GPUs.
            deadline_s: how long a request may take.
            monotonic: seconds of a clock that never jumps.
        """
        self._argv = _child_argv(mock_gpus, seed, faults_path)
        self._deadline_s = deadline_s
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._started_at_s = monotonic()
        self._ending_since_s: float | None = None
        self._is_killed = False
        self._backoff_s = _FIRST_BACKOFF_S
        self._restart_at_s = 0.0
        self._restarts = 0
        self._is_closed = True
        self._last_id = 0
        self._unanswered_id: int | None = None
        self._open_request = b""
        self._asked_at_s = 0.0
        self._misses = 0
        self._latest: Scan | None = None
        self._latest_at_s = monotonic()
        self._late_xids: deque[XidEvent] = deque(maxlen=1000)
        """Xids of answers that came too late for their caller; the next scan brings them."""

    @property
    def latest(self) -> Scan | None:
        """The newest scan there is."""
        return self._latest

    @property
    def age_s(self) -> float:
        """How old `latest` is; without one, the time since this object was made."""
        return self._monotonic() - self._latest_at_s

    @property
    def pid(self) -> int | None:
        """The collector's process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def node_health(self) -> tuple[str, ...]:
        """Reasons why the node must not get work: NVML's own and those of its silence."""
        reasons = self._latest.node_health if self._latest else ()
        limit = 1 if self._latest is None else MISSES_LIMIT
        if self._misses < limit:
            return reasons
        return (*reasons, self._silence())

    def _silence(self) -> str:
        if self._is_killed and self._process is not None:
            return _STUCK
        return _ENDED if self._process is None and self._restarts > 1 else _NO_ANSWER

    async def start(self) -> None:
        """Starts the process and waits until it reads requests.

        Raises:
            CollectorStartError: it ended at once, or did not come up in time. Scans start another.
        """
        async with self._lock:
            self._is_closed = False
            try:
                await self._spawn()
                is_up = await self._read_answer(START_DEADLINE_S) is not None
            except (_ChildEnded, OSError) as error:
                raise CollectorStartError(str(error)) from error
        if not is_up:
            raise CollectorStartError(f"no sign of life within {START_DEADLINE_S:.0f} s")

    async def scan(self) -> Scan | None:
        """Reads all GPUs; None when NVML missed the deadline.

        An answer that an earlier call gave up on is as good as any, if it has come by now.
        """
        answer = await self._ask({"op": "scan"})
        if answer is None:
            self._misses += 1
            return None
        return self._keep(answer, late=False)

    async def processes(self, uuids: Iterable[str]) -> ProcessesByGpu | None:
        """Reads who is on the given GPUs now; None when NVML missed the deadline."""
        answer = await self._ask({"op": "processes", "uuids": list(uuids)})
        return None if answer is None else processes_from_json(answer["processes"])

    async def close(self) -> None:
        """Ends the process: first by asking, so that it closes NVML, in the end by force.

        A process that hangs in the driver is left behind; it ends by itself when NVML lets it go.
        """
        process, self._process = self._process, None
        self._is_closed = True
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        for force, grace_s in zip(
            (None, process.terminate, process.kill), _CLOSE_GRACES_S, strict=True
        ):
            if force is not None and process.returncode is None:
                force()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
                    return
            except TimeoutError:
                continue
        log.error("collector process %d waits in the driver and cannot be ended", process.pid)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._lock.acquire()
        except TimeoutError:
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._ask_alone(request)
        except TimeoutError:
            return None
        except _ChildEnded as ended:
            self._bury(ended)
            return None
        finally:
            self._lock.release()

    async def _ask_alone(self, request: dict[str, Any]) -> dict[str, Any] | None:
        await self._tend()
        process = self._process
        if process is None or process.stdin is None:
            return None
        if self._unanswered_id is not None:
            late = await self._read_answer(self._patience_s())
            if late is None or (request["op"] == "scan" and "scan" in late):
                return late
            if "scan" in late:
                self._keep(late, late=True)
        self._last_id += 1
        self._unanswered_id = self._last_id
        self._asked_at_s = self._monotonic()
        self._open_request = json.dumps({"id": self._last_id, **request}).encode() + b"\n"
        process.stdin.write(self._open_request)
        return await self._read_answer(self._deadline_s)

    def _patience_s(self) -> float:
        """How long to wait for what was asked earlier: a fresh process needs time to come up."""
        return self._deadline_s if self._unanswered_id == 0 else _LATE_ANSWER_S

    async def _read_answer(self, limit_s: float) -> dict[str, Any] | None:
        """The answer to the request that is open, or None after the limit.

        Raises:
            _ChildEnded: the process has closed its end.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    line = await process.stdout.readline()
                    if not line.endswith(b"\n"):
                        raise _ChildEnded(await self._exit_words(process))
                    answer: dict[str, Any] = json.loads(line)
                    if answer["id"] == self._unanswered_id:
                        self._unanswered_id = None
                        return answer
                    # It greets once more: it began anew after a driver change.
                    process.stdin.write(self._open_request)
        except TimeoutError:
            return None

    @staticmethod
    async def _exit_words(process: asyncio.subprocess.Process) -> str:
        try:
            async with asyncio.timeout(_LATE_ANSWER_S):
                code = await process.wait()
        except TimeoutError:
            return "the collector's process closed its output"
        return f"the collector's process ended with {code}, its messages are above"

    def _keep(self, answer: dict[str, Any], *, late: bool) -> Scan:
        scan = scan_from_json(answer["scan"])
        if late:
            self._late_xids.extend(scan.xids)
        elif self._late_xids:
            scan = replace(scan, xids=(*self._late_xids, *scan.xids))
            self._late_xids.clear()
        self._latest = scan
        self._latest_at_s = self._monotonic()
        self._misses = 0
        return scan

    async def _tend(self) -> None:
        """Moves one step towards a process that answers. Never waits for the old one's end."""
        now_s = self._monotonic()
        process = self._process
        if process is None:
            if not self._is_closed and now_s >= self._restart_at_s:
                try:
                    await self._spawn()
                except OSError as error:
                    self._start_later(f"the collector's process cannot be started: {error}")
        elif process.returncode is not None:
            await self._keep_last_answer(process)
            self._bury(_ChildEnded(f"the collector's process ended with {process.returncode}"))
        elif self._is_overdue(now_s):
            self._end(process, now_s)

    async def _keep_last_answer(self, process: asyncio.subprocess.Process) -> None:
        """What a process has answered before it ended: its Xids are told nowhere else."""
        assert process.stdout is not None
        while (line := await process.stdout.readline()).endswith(b"\n"):
            answer = json.loads(line)
            if "scan" in answer:
                self._keep(answer, late=True)

    def _is_overdue(self, now_s: float) -> bool:
        if self._unanswered_id is None:
            return False
        is_greeting = self._unanswered_id == 0
        limit_s = START_DEADLINE_S if is_greeting else MISSES_LIMIT * self._deadline_s
        return now_s - self._asked_at_s >= limit_s

    def _end(self, process: asyncio.subprocess.Process, now_s: float) -> None:
        if self._ending_since_s is None:
            log.error("NVML does not answer: ending the collector's process %d", process.pid)
            self._ending_since_s = now_s
            process.terminate()
        elif not self._is_killed and now_s - self._ending_since_s >= _TERMINATE_GRACE_S:
            self._is_killed = True
            process.kill()

    def _bury(self, ended: _ChildEnded) -> None:
        """The process closed its output. When it is gone, another follows after a pause."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:  # its exit may hang in the driver: then there is no other
            self._is_killed = True
            process.kill()
            return
        self._process = None
        self._start_later(str(ended))

    def _start_later(self, why: str) -> None:
        now_s = self._monotonic()
        if now_s - self._started_at_s >= _HEALTHY_AFTER_S:
            self._backoff_s, self._restarts = _FIRST_BACKOFF_S, 0
        self._restart_at_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        self._restarts += 1
        log.warning("%s; starting another in %.1f s", why, self._restart_at_s - now_s)

    async def _spawn(self) -> None:
        # Plain on purpose: in a process with gRPC's threads any more than a new session forks.
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )
        self._started_at_s = self._monotonic()
        self._ending_since_s = None
        self._is_killed = False
        self._unanswered_id = 0  # the greeting
        self._asked_at_s = self._started_at_s


class _ChildEnded(Exception):
    """The collector's process is gone."""


def _child_argv(mock_gpus: str | None, seed: str, faults_path: Path | None) -> list[str]:
    argv = [sys.executable, "-P", "-m", "node_agent.collector_child", f"--seed={seed}"]
    if mock_gpus is not None:
        argv.append(f"--mock={mock_gpus}")
    if faults_path is not None:
        argv.append(f"--faults={faults_path}")
    return argv
