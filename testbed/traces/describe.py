"""What is in a trace, in figures."""

from __future__ import annotations

import polars as pl

from testbed.traces.table import Trace

Figures = dict[str, str | int | float | dict[str, int] | None]


def describe(trace: Trace) -> Figures:
    """Counts, spans and quantiles, by name."""
    jobs = trace.jobs
    if not jobs.height:
        return {"source": trace.source, "jobs": 0, "left_out": trace.left_out}
    span_s = float(jobs["submit_s"][-1]) - float(jobs["submit_s"][0])
    run_s = jobs["run_s"]
    gpu_s = float((jobs["gpus"] * run_s).sum())
    counts = jobs.group_by("gpus").len().sort("gpus")
    return {
        "source": trace.source,
        "jobs": jobs.height,
        "left_out": trace.left_out,
        "span_days": round(span_s / 86_400, 2),
        "users": _distinct(jobs, "user"),
        "names": _distinct(jobs, "name"),
        "partitions": _distinct(jobs, "partition"),
        "gpu_types": _distinct(jobs, "gpu_type"),
        "jobs_by_gpus": {str(g): int(n) for g, n in counts.iter_rows()},
        "run_mean_s": _rounded(run_s.mean()),
        "run_median_s": _rounded(run_s.median()),
        "run_p95_s": _rounded(run_s.quantile(0.95)),
        "run_max_s": _rounded(run_s.max()),
        "gpu_hours": round(gpu_s / 3600, 1),
        "mean_gpus_busy": round(gpu_s / span_s, 1) if span_s else None,
        "with_time_limit": jobs.height - jobs["time_limit_s"].null_count(),
    }


def _distinct(jobs: pl.DataFrame, column: str) -> int:
    return int(jobs[column].drop_nulls().n_unique())


def _rounded(value: object) -> float | None:
    return round(value, 1) if isinstance(value, int | float) else None
