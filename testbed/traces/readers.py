"""Readers of public trace formats, each into the one table (`table`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from testbed.traces.table import (
    REQUIRED,
    SCHEMA,
    Trace,
    TraceProblem,
    column,
    make_trace,
    numbers,
    read_columns,
    times,
)

RLTUNE_COLUMNS = [
    *("job_id", "submit", "wait", "run", "gpus", "cpu_time", "used_memory", "cpus", "time_asked"),
    *("memory", "status", "user", "group", "executable", "queue", "partition", "preceding"),
    *("virtual_cluster", "gpu_type"),
]
"""RLTune's 19 columns; with 20, a think time stands before the virtual cluster."""
RLTUNE_TYPES = {"0": "T4", "1": "MISC", "2": "P100", "3": "V100-16GB", "4": "V100-32GB"}
SWF_FIELDS = 18
_SWF_COLUMNS = [n for n in SCHEMA if n not in {"gpu_type", "cpus", "memory_bytes"}]
UNKNOWN = "-1"


def read_trace(path: Path, kind: str | None = None) -> Trace:
    """Reads a trace; its format is told by its beginning unless `kind` names it.

    Raises:
        TraceProblem: it cannot be read, or is of no known format; file, row and column are named.
    """
    kind = kind or detect(path)
    if kind not in READERS:
        raise TraceProblem(f"no trace format is named {kind!r}", f"there are {', '.join(READERS)}")
    return READERS[kind](path)


def detect(path: Path) -> str:
    """The format of a file.

    Raises:
        TraceProblem: it cannot be read, or it is none that is known.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for _, line in zip(range(200), file, strict=False)]
    except OSError as error:
        raise TraceProblem(f"{path}: {error.strerror}", "is the path right?") from error
    first = next((line for line in lines if line and not line.startswith(";")), "")
    header = {word.strip() for word in first.split(",")}
    for kind, needed in _HEADERS.items():
        if needed <= header:
            return kind
    if first.count("|") > 3 and "JobID" in first:
        return "sacct"
    if len(first.split()) == SWF_FIELDS and "," not in first:
        return "swf"
    if len(first.split(",")) in (len(RLTUNE_COLUMNS), len(RLTUNE_COLUMNS) + 1):
        return "rltune"
    raise TraceProblem(
        f"{path}: the format is not known", f"name one of {', '.join(READERS)} with --format"
    )


_HEADERS = {
    "table": {"job_id", "submit_s", "run_s", "gpus"},
    "philly": {"timestamp", "duration", "num_gpus"},
    "helios": {"job_id", "user", "gpu_num", "submit_time", "duration"},
    "openb": {"name", "num_gpu", "creation_time", "deletion_time", "scheduled_time"},
    "simple": {"job_id", "submit_time", "num_gpu", "duration"},
}
"""Columns by which a format with a header is known."""


def read_table(path: Path) -> Trace:
    """Our own CSV, as `rltune trace convert` writes it."""
    frame = read_columns(path)
    found = {}
    for name, kind in SCHEMA.items():
        if name not in frame.columns and name not in REQUIRED:
            continue
        texts = column(frame, name, path)
        is_text = kind is pl.String
        found[name] = texts.set(texts == "", None) if is_text else numbers(texts, name, path)
    return make_trace(pl.DataFrame(found), str(path), rows=_rows(frame))


def read_philly(path: Path) -> Trace:
    """Microsoft Philly as a CSV: timestamp, duration, num_gpus, gpu_time, cluster."""
    frame = read_columns(path)
    jobs = pl.DataFrame(
        {
            "job_id": [str(i) for i in range(1, frame.height + 1)],
            "submit_s": times(column(frame, "timestamp", path), "timestamp", path),
            "run_s": numbers(column(frame, "duration", path), "duration", path),
            "gpus": numbers(column(frame, "num_gpus", path), "num_gpus", path),
            "partition": column(frame, "cluster", path) if "cluster" in frame.columns else None,
        }
    )
    return make_trace(jobs, str(path), rows=_rows(frame))


def read_helios(path: Path) -> Trace:
    """SenseTime Helios: `cluster_log.csv` of a cluster."""
    frame = read_columns(path)
    jobs = pl.DataFrame(
        {
            "job_id": column(frame, "job_id", path),
            "submit_s": times(column(frame, "submit_time", path), "submit_time", path),
            "run_s": numbers(column(frame, "duration", path), "duration", path),
            "gpus": numbers(column(frame, "gpu_num", path), "gpu_num", path),
            "user": column(frame, "user", path),
            "partition": column(frame, "vc", path) if "vc" in frame.columns else None,
            "cpus": numbers(column(frame, "cpu_num", path), "cpu_num", path)
            if "cpu_num" in frame.columns
            else None,
            "name": column(frame, "jobname", path) if "jobname" in frame.columns else None,
            "status": column(frame, "state", path) if "state" in frame.columns else None,
        }
    )
    return make_trace(jobs, str(path), rows=_rows(frame))


def read_openb(path: Path) -> Trace:
    """Alibaba `openb` pods (2023). Pods that were never scheduled or deleted are left out."""
    frame = read_columns(path)
    fields = ("creation_time", "deletion_time", "scheduled_time", "num_gpu")
    created, deleted, scheduled, gpus = (
        numbers(column(frame, name, path), name, path) for name in fields
    )
    jobs = pl.DataFrame(
        {
            "job_id": column(frame, "name", path),
            "submit_s": created,
            "run_s": deleted - scheduled,
            "gpus": gpus,
            "gpu_type": column(frame, "gpu_spec", path).replace("", None),
            "partition": column(frame, "qos", path),
            "cpus": (numbers(column(frame, "cpu_milli", path), "cpu_milli", path) / 1000).ceil(),
            "memory_bytes": numbers(column(frame, "memory_mib", path), "memory_mib", path) * 2**20,
            "status": column(frame, "pod_phase", path),
            "wait_s": scheduled - created,
            "row": _rows(frame),
        }
    )
    ran = jobs.filter(pl.col("run_s").is_not_null() & (pl.col("run_s") >= 0))
    trace = make_trace(ran.drop("row"), str(path), rows=ran["row"])
    return Trace(trace.jobs, trace.source, left_out=frame.height - ran.height)


def read_simple(path: Path) -> Trace:
    """The CSVs of Gavel- and Tiresias-style simulators: job_id, submit_time, num_gpu, duration."""
    frame = read_columns(path)
    fields = ("submit_time", "num_gpu", "duration")
    submit, gpus, run = (numbers(column(frame, name, path), name, path) for name in fields)
    jobs = pl.DataFrame(
        {"job_id": column(frame, "job_id", path), "submit_s": submit, "run_s": run, "gpus": gpus}
    )
    return make_trace(jobs, str(path), rows=_rows(frame))


def read_rltune(path: Path) -> Trace:
    """RLTune's 19 or 20 columns without a header; -1 is unknown, a run time of -1 is 10 s."""
    with path.open(encoding="utf-8", errors="replace") as file:
        width = len(next((s for s in file if s.strip() and s[0] != ";"), "").split(","))
    names = list(RLTUNE_COLUMNS)
    if width == len(names) + 1:
        names.insert(names.index("virtual_cluster"), "think_time")
    frame = read_columns(path, names=names, comment=";")

    def number(name: str) -> pl.Series:
        parsed = numbers(column(frame, name, path), name, path, first_row=1)
        return parsed.set(parsed == -1, None)

    def text(name: str) -> pl.Series:
        found = column(frame, name, path)
        return found.set(found == UNKNOWN, None)

    jobs = pl.DataFrame(
        {
            "job_id": column(frame, "job_id", path),
            "submit_s": number("submit"),
            "run_s": number("run").fill_null(10.0),
            "gpus": number("gpus"),
            "gpu_type": text("gpu_type").replace(RLTUNE_TYPES),
            "user": text("user"),
            "group": text("group"),
            "name": column(frame, "job_id", path).str.replace(r"[-_]\d+(_\d+)?$", ""),
            "partition": text("virtual_cluster"),
            "time_limit_s": number("time_asked"),
            "status": text("status"),
            "wait_s": number("wait"),
        }
    )
    return make_trace(jobs, str(path), rows=_rows(frame, first=1))


def read_swf(path: Path) -> Trace:
    """The Standard Workload Format (Parallel Workloads Archive); processors count as GPUs.

    Jobs without a known run time or number of processors did not run and are left out.
    """
    rows: list[list[float]] = []
    numbers_of: list[int] = []
    left_out = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                words = line.split()
                if not words or words[0].startswith(";"):
                    continue
                if len(words) < SWF_FIELDS:
                    raise TraceProblem(
                        f"{path}: row {number}: has {len(words)} fields, SWF has {SWF_FIELDS}"
                    )
                try:
                    values = [float(word) for word in words[:SWF_FIELDS]]
                except ValueError as error:
                    raise TraceProblem(f"{path}: row {number}: {error}") from None
                processors = values[4] if values[4] > 0 else values[7]
                if values[3] < 0 or processors <= 0:
                    left_out += 1
                    continue
                rows.append([*values, processors])
                numbers_of.append(number)
    except OSError as error:
        raise TraceProblem(f"{path}: {error.strerror}", "is the path right?") from error
    table = list(zip(*rows, strict=True)) if rows else [()] * (SWF_FIELDS + 1)

    def known(field: int) -> list[str | None]:
        return [None if value < 0 else str(int(value)) for value in table[field]]

    jobs = pl.DataFrame(
        {
            "job_id": [str(int(value)) for value in table[0]],
            "submit_s": list(table[1]),
            "run_s": list(table[3]),
            "gpus": [int(value) for value in table[SWF_FIELDS]],
            "user": known(11),
            "group": known(12),
            "name": known(13),
            "partition": known(15),
            "time_limit_s": [None if value <= 0 else value for value in table[8]],
            "status": known(10),
            "wait_s": [None if value < 0 else value for value in table[2]],
        },
        schema_overrides={name: SCHEMA[name] for name in _SWF_COLUMNS},
    )
    trace = make_trace(jobs, str(path), rows=pl.Series(numbers_of))
    return Trace(trace.jobs, trace.source, left_out=left_out)


def read_sacct(path: Path) -> Trace:
    """`sacct --parsable2 -X` with JobID, User, JobName, Submit, Start, End, State and AllocTRES."""
    frame = read_columns(path, separator="|")
    submit, start, end = (
        times(column(frame, name, path).replace(["Unknown", "None"], ["", ""]), name, path)
        for name in ("Submit", "Start", "End")
    )
    tres = column(frame, "AllocTRES", path)
    gpus = tres.str.extract(r"gres/gpu=(\d+)").cast(pl.Float64).fill_null(0)
    jobs = pl.DataFrame(
        {
            "job_id": column(frame, "JobID", path),
            "submit_s": submit,
            "run_s": end - start,
            "gpus": gpus,
            "gpu_type": tres.str.extract(r"gres/gpu:([^=,]+)="),
            "user": column(frame, "User", path),
            "name": column(frame, "JobName", path) if "JobName" in frame.columns else None,
            "partition": column(frame, "Partition", path) if "Partition" in frame.columns else None,
            "cpus": tres.str.extract(r"cpu=(\d+)").cast(pl.Float64),
            "status": column(frame, "State", path),
            "wait_s": start - submit,
            "row": _rows(frame),
        }
    )
    ran = jobs.filter(pl.col("run_s").is_not_null())
    trace = make_trace(ran.drop("row"), str(path), rows=ran["row"])
    return Trace(trace.jobs, trace.source, left_out=frame.height - ran.height)


READERS: dict[str, Callable[[Path], Trace]] = {
    "table": read_table,
    "philly": read_philly,
    "helios": read_helios,
    "openb": read_openb,
    "simple": read_simple,
    "rltune": read_rltune,
    "swf": read_swf,
    "sacct": read_sacct,
}


def _rows(frame: pl.DataFrame, first: int = 2) -> pl.Series:
    return pl.Series(range(first, first + frame.height), dtype=pl.Int64)
