"""The one table of a workload, whatever format it came from.

| column | meaning |
|---|---|
| job_id | as the source names it (text) |
| submit_s | submission, seconds from any fixed moment |
| run_s | run time, seconds |
| gpus | GPUs of the job together; 0 for CPU jobs |
| gpu_type | type asked for, or null |
| user, group, name | texts, or null |
| partition | the source's virtual cluster or queue, or null |
| time_limit_s | limit or estimate of the user, or null |
| cpus, memory_bytes | of the job together, or null |
| status | as the source has it, or null |
| wait_s | recorded wait, or null |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from testbed.client_errors import InvalidRequest

SCHEMA: dict[str, type[pl.DataType]] = {
    "job_id": pl.String,
    "submit_s": pl.Float64,
    "run_s": pl.Float64,
    "gpus": pl.Int64,
    "gpu_type": pl.String,
    "user": pl.String,
    "group": pl.String,
    "name": pl.String,
    "partition": pl.String,
    "time_limit_s": pl.Float64,
    "cpus": pl.Int64,
    "memory_bytes": pl.Int64,
    "status": pl.String,
    "wait_s": pl.Float64,
}
REQUIRED = ("job_id", "submit_s", "run_s", "gpus")


class TraceProblem(InvalidRequest):
    """A trace that cannot be used; the message names the file, the row and the column."""

    default_code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload."""

    jobs: pl.DataFrame
    """By `SCHEMA`, in order of submission."""
    source: str
    """File or generator, for people."""
    left_out: int = 0
    """Rows of the source that are no job that ran."""


def make_trace(jobs: pl.DataFrame, source: str, *, rows: pl.Series | None = None) -> Trace:
    """Completes and checks a table.

    Args:
        jobs: some or all of the columns, with their types; the required ones must be there.
        source: for messages.
        rows: the row (or line) of each job in the source; counted from 1 if absent.

    Raises:
        TraceProblem: a value is missing where it must not, or out of range.
    """
    if rows is None:
        rows = pl.Series(range(1, jobs.height + 1))
    checks = (
        ("submit_s", pl.col("submit_s").is_finite(), "is no time"),
        ("run_s", pl.col("run_s").is_finite() & (pl.col("run_s") >= 0), "is no run time"),
        ("gpus", pl.col("gpus") >= 0, "is no number of GPUs"),
    )
    for column, is_good, words in checks:
        bad = jobs.select(~is_good.fill_null(value=False)).to_series().arg_true()
        if bad.len():
            first = int(bad[0])
            value = jobs[column][first]
            raise TraceProblem(f"{source}: row {rows[first]}: {column}: {value} {words}")
    absent = [pl.lit(None, kind).alias(name) for name, kind in SCHEMA.items()
              if name not in jobs.columns]  # fmt: skip
    full = jobs.with_columns(absent).select(pl.col(name).cast(t) for name, t in SCHEMA.items())
    return Trace(full.sort("submit_s", maintain_order=True), source)


def read_columns(path: Path, *, separator: str = ",", names: list[str] | None = None,
                 comment: str | None = None) -> pl.DataFrame:  # fmt: skip
    """A delimited file with all values as text; `names` if it has no header.

    Raises:
        TraceProblem: it cannot be read as such a file.
    """
    try:
        frame = pl.read_csv(
            path,
            separator=separator,
            has_header=names is None,
            infer_schema=False,
            comment_prefix=comment,
            truncate_ragged_lines=False,
        )
    except OSError as error:
        raise TraceProblem(f"{path}: {error.strerror or error}", "is the path right?") from error
    except pl.exceptions.PolarsError as error:
        words = str(error).splitlines()[0]
        raise TraceProblem(f"{path} is no such table: {words}") from error
    if names is not None:
        if frame.width != len(names):
            raise TraceProblem(f"{path} has {frame.width} columns, this format has {len(names)}")
        frame.columns = names
    return frame.rename({column: column.strip() for column in frame.columns})


def column(frame: pl.DataFrame, name: str, path: Path) -> pl.Series:
    """A column by name, stripped.

    Raises:
        TraceProblem: there is none.
    """
    if name not in frame.columns:
        raise TraceProblem(
            f"{path} has no column {name!r}", f"it has {', '.join(frame.columns[:12])}"
        )
    return frame[name].str.strip_chars()


def numbers(texts: pl.Series, name: str, path: Path, *, first_row: int = 2) -> pl.Series:
    """Texts as numbers; empty ones are null.

    Raises:
        TraceProblem: a text is no number; the message names the row (the header is row 1).
    """
    given = texts.set(texts == "", None)
    parsed = given.cast(pl.Float64, strict=False)
    bad = (parsed.is_null() & given.is_not_null()).arg_true()
    if bad.len():
        row = int(bad[0])
        raise TraceProblem(f"{path}: row {row + first_row}: {name}: {texts[row]!r} is no number")
    return parsed


def times(texts: pl.Series, name: str, path: Path, *, first_row: int = 2) -> pl.Series:
    """Texts such as `2017-09-04 10:30:41` as seconds since the epoch (UTC); empty ones null.

    Raises:
        TraceProblem: a text is no time.
    """
    given = texts.set(texts == "", None).str.replace("T", " ").str.strip_suffix("Z")
    parsed = given.str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False)
    bad = (parsed.is_null() & given.is_not_null()).arg_true()
    if bad.len():
        row = int(bad[0])
        raise TraceProblem(
            f"{path}: row {row + first_row}: {name}: {texts[row]!r} is no time",
            "write YYYY-MM-DD HH:MM:SS",
        )
    return parsed.dt.epoch("s").cast(pl.Float64)
