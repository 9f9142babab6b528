"""What jobs used: GPU telemetry by attempt, and decayed GPU-seconds by user for fair share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from controller.lifecycle.attempt import Attempt, AttemptKey
from controller.lifecycle.events import UsageMeasured
from controller.lifecycle.state import StateView, held_on
from controller.store.store import EndedUsage
from protos.messages import AttemptState, RankPhase, Telemetry

MAX_SAMPLE_S = 30.0
"""A sample stands for the time since the one before, but for no longer than this."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What telemetry says about one attempt so far."""

    utilization_pct_s: float = 0.0
    sampled_s: float = 0.0
    peak_bytes: int | None = None
    is_stored: bool = True


class TelemetryAccount:
    """Mean GPU utilization (weighted by time) and peak GPU memory of running attempts.

    Kept in memory, one addition per sample; the attempt's row gets it at the attempt's end and
    now and then before.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._measured: dict[AttemptKey, _Measured] = {}
        self._sampled_at_s: dict[str, float] = {}

    def sample(self, state: StateView, node: str, telemetry: Telemetry, monotonic_s: float) -> None:
        """Adds a heartbeat's readings to the attempts that hold the node's GPUs.

        Readings that the collector could not renew count for nothing.
        """
        last_s = self._sampled_at_s.get(node)
        self._sampled_at_s[node] = monotonic_s
        if last_s is None or not telemetry.gpus:
            return
        span_s = min(monotonic_s - last_s, MAX_SAMPLE_S)
        if telemetry.telemetry_age_s > span_s:
            return
        samples = {sample.uuid: sample for sample in telemetry.gpus}
        for node_rank, attempt in held_on(state, node):
            rank = attempt.ranks[node_rank]
            if rank.phase is not RankPhase.RUNNING or not rank.gpu_uuids:
                continue
            measured = self._measured.get(attempt.key) or _stored(attempt)
            for uuid in rank.gpu_uuids:
                sample = samples.get(uuid)
                if sample is not None:
                    measured = _with_sample(
                        measured, sample.gpu_utilization_pct, sample.memory_used_bytes, span_s
                    )
            self._measured[attempt.key] = measured

    def news(self, keys: Iterable[AttemptKey] | None = None) -> list[UsageMeasured]:
        """What is not stored yet, of all attempts or of some."""
        wanted = list(self._measured) if keys is None else [k for k in keys if k in self._measured]
        return [
            UsageMeasured(
                job_id=key[0],
                attempt=key[1],
                gpu_utilization_mean_pct=(
                    measured.utilization_pct_s / measured.sampled_s if measured.sampled_s else None
                ),
                gpu_memory_peak_bytes=measured.peak_bytes,
                gpu_sampled_s=measured.sampled_s,
            )
            for key in wanted
            if not (measured := self._measured[key]).is_stored
        ]

    def stored(self, attempts: Iterable[Attempt]) -> None:
        """The rows of these attempts are written; those that ended are forgotten."""
        for attempt in attempts:
            measured = self._measured.get(attempt.key)
            if measured is None:
                continue
            if attempt.state is AttemptState.ENDED:
                del self._measured[attempt.key]
            elif measured.sampled_s == attempt.gpu_sampled_s:
                self._measured[attempt.key] = replace(measured, is_stored=True)


def _stored(attempt: Attempt) -> _Measured:
    mean_pct = attempt.gpu_utilization_mean_pct
    return _Measured(
        utilization_pct_s=0.0 if mean_pct is None else mean_pct * attempt.gpu_sampled_s,
        sampled_s=attempt.gpu_sampled_s,
        peak_bytes=attempt.gpu_memory_peak_bytes,
    )


def _with_sample(
    measured: _Measured, utilization_pct: float | None, memory_bytes: int | None, span_s: float
) -> _Measured:
    if utilization_pct is not None:
        measured = replace(
            measured,
            utilization_pct_s=measured.utilization_pct_s + utilization_pct * span_s,
            sampled_s=measured.sampled_s + span_s,
            is_stored=False,
        )
    if memory_bytes is not None and memory_bytes > (measured.peak_bytes or -1):
        measured = replace(measured, peak_bytes=memory_bytes, is_stored=False)
    return measured


class FairShare:
    """GPU-seconds by user, halved every half-life (as Slurm's `PriorityDecayHalfLife`).

    An ended attempt counts from its end, a running one up to now.
    """

    def __init__(self, half_life_s: float, ended: Iterable[EndedUsage]) -> None:
        """`ended` are the attempts that ended within the last ten half-lives or so."""
        self._half_life_s = half_life_s
        self._usage: dict[str, tuple[float, float]] = {}
        for usage in sorted(ended, key=lambda usage: usage.ended_at_s):
            self.add(usage)

    def add(self, usage: EndedUsage) -> None:
        """Counts an attempt that has ended."""
        gpu_s, at_s = self._usage.get(usage.user, (0.0, usage.ended_at_s))
        later_s = max(at_s, usage.ended_at_s)
        total = gpu_s * self._decay(later_s - at_s)
        total += usage.gpu_s * self._decay(later_s - usage.ended_at_s)
        self._usage[usage.user] = (total, later_s)

    def usage_gpu_s(
        self, running: Iterable[tuple[str, float]], now_s: float
    ) -> Mapping[str, float]:
        """Usage by user as of now, with (user, GPU-seconds) of what runs."""
        found = {
            user: gpu_s * self._decay(max(0.0, now_s - at_s))
            for user, (gpu_s, at_s) in self._usage.items()
        }
        for user, gpu_s in running:
            found[user] = found.get(user, 0.0) + gpu_s
        return found

    def _decay(self, age_s: float) -> float:
        return float(0.5 ** (age_s / self._half_life_s))
