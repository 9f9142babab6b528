"""Makes sure that nothing of an ended attempt is left on its GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from node_agent.attempts import ProcessIdentity
from node_agent.processes import belongs
from protos.messages import GpuProcess

GpuQuery = Callable[
    [tuple[str, ...]], Awaitable[Mapping[str, tuple[GpuProcess, ...] | None] | None]
]
"""Processes now on the given GPUs, by UUID. None for a GPU: the card cannot tell (then it counts
as free); None for all: NVML did not answer."""

PATIENCE_S = 60.0
FIRST_DELAY_S = 0.02
MAX_DELAY_S = 2.0


async def wait_for_free_gpus(
    attempt_dir: Path,
    gpu_uuids: tuple[str, ...],
    survivors: Iterable[ProcessIdentity],
    *,
    query: GpuQuery,
    monotonic: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> dict[str, str]:
    """Kills the attempt's processes that still hold a GPU, until NVML shows none, for 60 s.

    Returns the GPUs that stay dirty, each with a sentence why. Processes of others are not
    touched and not our concern here: telemetry reports them.
    """
    deadline_s = monotonic() + PATIENCE_S
    delay_s = FIRST_DELAY_S
    while gpu_uuids:
        answer = await query(gpu_uuids)
        dirty = await asyncio.to_thread(_judge, attempt_dir, gpu_uuids, tuple(survivors), answer)
        if not dirty or monotonic() >= deadline_s:
            return dirty
        await sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)
    return {}


def _judge(
    attempt_dir: Path,
    gpu_uuids: tuple[str, ...],
    survivors: tuple[ProcessIdentity, ...],
    answer: Mapping[str, tuple[GpuProcess, ...] | None] | None,
) -> dict[str, str]:
    """One look: which GPUs are still dirty and why; their processes of ours get a SIGKILL."""
    dirty = {}
    for uuid in gpu_uuids:
        if answer is None or uuid not in answer:
            dirty[uuid] = f"NVML did not say for {PATIENCE_S:.0f} s who uses it"
            continue
        ours = [p.pid for p in answer[uuid] or () if belongs(p.pid, attempt_dir, survivors)]
        for pid in ours:
            _kill(pid)
        if ours:
            pids = ", ".join(map(str, ours))
            dirty[uuid] = f"still held by pid {pids} of ended rank {attempt_dir.name}"
    return dirty


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
