"""Durations and figures as people read them."""

from __future__ import annotations

ABSENT = "–"


def duration(seconds: float | None) -> str:
    """A duration: `0.4 s`, `12.3 s`, `3m 05s`, `2h 10m`, `4d 03h`; a dash if there is none."""
    if seconds is None:
        return ABSENT
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def clock(seconds: float) -> str:
    """A tick of a time axis: `15s`, `2m`, `2m30s`, `1h05m`, `2d`."""
    if seconds != int(seconds):
        return f"{seconds:g}s"
    whole = int(seconds)
    parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"))
    said = "".join(f"{value}{unit}" for value, unit in parts if value)
    return f"{said}{whole % 60}s" if whole % 60 or not said else said


def percent(ratio_pct: float | None) -> str:
    """A percentage without decimals; a dash if there is none."""
    return ABSENT if ratio_pct is None else f"{ratio_pct:.0f} %"
