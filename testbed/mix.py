"""The mix of 16 training jobs that the RLTune authors ran on eight P100 of Chameleon.

Model, GPUs, batch size and mode are theirs. Three things fit it to a machine without GPUs: the
data are scikit-learn's digits and the text of Python's standard library, which need no download;
the models shrink as `workloads.train` does on a CPU; and an epoch counts as a fixed number of
steps. Every job trains to its real end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.job_request import JobRequest
from testbed.values import MINUTE_S

STEPS_PER_EPOCH = 15
LANGUAGE_MODEL_STEPS = 20
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


def job_request(job: MixJob, *, cwd: Path, seed: int) -> JobRequest:
    """The submission of a job; `seed` decides its weights and the order of its data."""
    options = {
        "--batch-size": str(job.batch_size),
        "--steps": str(job.steps),
        "--mode": job.mode,
        "--seed": str(seed),
        "--progress-every": "1",
    }
    return JobRequest(
        workload=job.model,
        workload_options=tuple(word for pair in options.items() for word in pair),
        name=job.name,
        cwd=str(cwd),
        # The mock GPUs' jobs share few cores: one thread for each of their processes.
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        gpus=job.gpus,
        gpu_types=("P100",),
        cpus=CPUS_PER_GPU * job.gpus,
        time_limit_s=TIME_LIMIT_S,
    )


def arrivals_s(count: int, rng: np.random.Generator) -> Sequence[float]:
    """Submission times from the first on: a Poisson process, as traces of clusters look."""
    gaps_s = rng.exponential(MEAN_GAP_S, count - 1)
    return [0.0, *(float(at_s) for at_s in np.cumsum(gaps_s))]
