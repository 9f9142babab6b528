"""The mix of 16 training jobs that the RLTune authors ran on eight P100 of Chameleon.

Model, GPUs, batch size, epochs and mode are theirs. Two things are made small enough for a
machine without GPUs: an epoch counts as a few steps on a data set that needs no download, and
the models shrink as `workloads.train` does on a CPU. Every job still trains to its real end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protos.messages import JobSpec
from testbed.values import MINUTE_S
from workloads import catalogue

STEPS_PER_EPOCH = 4
LANGUAGE_MODEL_STEPS = 6
"""The authors give language models no epochs."""
CPUS_PER_GPU = 4
TIME_LIMIT_S = 15 * MINUTE_S
MEAN_GAP_S = 1.0
"""Mean time between two submissions."""


@dataclass(frozen=True, slots=True)
class MixJob:
    """One job of the mix."""

    model: str
    gpus: int
    batch_size: int
    epochs: int | None = None
    mode: str = "single"

    @property
    def name(self) -> str:
        """Model, batch size and mode in a word."""
        mode = "" if self.mode == "single" else f"-{self.mode}"
        return f"{self.model}-b{self.batch_size}{mode}"

    @property
    def steps(self) -> int:
        """Training steps on this machine."""
        return LANGUAGE_MODEL_STEPS if self.epochs is None else self.epochs * STEPS_PER_EPOCH


MIX_16 = (
    MixJob("resnet34", 4, 32, 1, "dp"),
    MixJob("resnet101", 4, 32, 1, "dp"),
    MixJob("resnet34", 1, 128, 6),
    MixJob("densenet201", 2, 32, 5, "ddp"),
    MixJob("bloom-3b", 4, 1),
    MixJob("opt-2.7b", 2, 1),
    MixJob("opt-125m", 1, 2),
    MixJob("densenet169", 2, 64, 1, "dp"),
    MixJob("opt-1.3b", 4, 1),
    MixJob("opt-2.7b", 2, 1),
    MixJob("resnet152", 2, 32, 6, "dp"),
    MixJob("opt-1.3b", 4, 16),
    MixJob("densenet121", 2, 64, 5, "dp"),
    MixJob("opt-125m", 2, 8),
    MixJob("opt-2.7b", 2, 8),
    MixJob("resnet101", 4, 32, 6, "dp"),
)


def job_spec(job: MixJob, *, user: str, cwd: Path, seed: int) -> JobSpec:
    """The submission of a job; `seed` decides its weights and the order of its data."""
    options = {
        "--batch-size": str(job.batch_size),
        "--steps": str(job.steps),
        "--mode": job.mode,
        "--seed": str(seed),
        "--progress-every": "1",
    }
    return JobSpec(
        name=job.name,
        user=user,
        argv=catalogue.command(job.model, [word for pair in options.items() for word in pair]),
        cwd=str(cwd),
        # One thread a process: the mock GPUs' jobs share few cores. PYTHONSAFEPATH reaches
        # torchrun's ranks, which `-P` does not.
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        gpus=job.gpus,
        gpu_types=("P100",),
        cpus=CPUS_PER_GPU * job.gpus,
        time_limit_s=TIME_LIMIT_S,
    )


def arrivals_s(count: int, rng: np.random.Generator) -> Sequence[float]:
    """Submission times from the first on: a Poisson process, as traces of clusters look."""
    gaps_s = rng.exponential(MEAN_GAP_S, count - 1)
    return [0.0, *(float(at_s) for at_s in np.cumsum(gaps_s))]
