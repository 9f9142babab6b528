"""Durations, sizes, GPU requests and job selectors as people write them.

Each `parse_*` takes the text of an option and raises `InvalidValue`, whose message quotes what
was written and whose hint shows how to write it. Each `format_*` makes text for people; what
`format_duration` and `format_size` make can be read back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

MINUTE_S = 60.0
HOUR_S = 3_600.0
DAY_S = 86_400.0
LONGEST_S = 10 * 366 * DAY_S
"""No job and no wait is meant to take longer than ten years."""
LARGEST_BYTES = 2**62
MAX_SELECTED_JOBS = 100_000
"""A range such as `1-999999999` is a slip of the finger, not a wish."""

_UNIT_SECONDS = {"d": DAY_S, "h": HOUR_S, "m": MINUTE_S, "s": 1.0}
_UNITS = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNIT_SECONDS), re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,6}):(\d{2}):(\d{2}(?:\.\d+)?)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP])(i?B)?", re.IGNORECASE | re.ASCII)
_SIZE_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_JOB_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class InvalidValue(ValueError):
    """Text that cannot be meant. `hint` shows how to write it."""

    def __init__(self, problem: str, hint: str) -> None:
        """Make the error for one text."""
        self.problem = problem
        self.hint = hint
        super().__init__(f"{problem}: {hint}")


# ------------------------------------------------------------------ durations


def parse_duration(text: str) -> float:
    """Seconds; infinity for `unlimited`.

    Takes `90s`, `90m`, `2h30m`, `1d12h`, `HH:MM:SS` and `D-HH:MM:SS`. A bare number is refused,
    since it means minutes to Slurm's users and seconds to everybody else.

    Raises:
        InvalidValue: the text is no positive duration.
    """
    word = text.strip().lower()
    if word == "unlimited":
        return math.inf
    seconds = _duration_seconds(word, text)
    if seconds <= 0:
        raise InvalidValue(
            f"{text!r} is not longer than nothing", "write e.g. 90s, 2h30m or 1-12:00:00"
        )
    return seconds


def parse_finite_duration(text: str) -> float:
    """Seconds, like `parse_duration`; `0s` is allowed, `unlimited` is not.

    Raises:
        InvalidValue: the text is no finite duration.
    """
    word = text.strip().lower()
    if word == "unlimited":
        raise InvalidValue("'unlimited' has no place here", "write e.g. 30s or 5m")
    return _duration_seconds(word, text)


def _duration_seconds(word: str, text: str) -> float:
    seconds = _any_seconds(word, text)
    if seconds > LONGEST_S:
        raise InvalidValue(f"{text!r} is longer than ten years", "write e.g. 90s, 90m or 2h30m")
    return seconds


def _any_seconds(word: str, text: str) -> float:
    if _NUMBER.fullmatch(word):
        raise InvalidValue(f"{text!r} has no unit", f"write {word}s or {word}m")
    if clock := _CLOCK.fullmatch(word):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        if minutes >= 60 or seconds >= 60 or (clock[1] and hours >= 24):
            raise InvalidValue(
                f"{text!r} is not a time on a clock", "minutes and seconds go up to 59"
            )
        return days * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
    match = _UNITS.fullmatch(word)
    if match is None or not word:
        if re.fullmatch(r"\d+:\d+", word, re.ASCII):
            first, second = word.split(":")
            raise InvalidValue(
                f"{text!r} can be read in two ways",
                f"write {first}h{second}m or {first}m{second}s",
            )
        raise InvalidValue(
            f"{text!r} is not a duration", "write e.g. 90s, 90m, 2h30m, 1-12:00:00 or unlimited"
        )
    return sum(
        float(part) * seconds
        for part, seconds in zip(match.groups(), _UNIT_SECONDS.values(), strict=True)
        if part
    )


def format_duration(seconds: float | None) -> str:
    """`HH:MM:SS` or `D-HH:MM:SS`, cut to whole seconds; `unlimited` for None."""
    if seconds is None or seconds == math.inf:
        return "unlimited"
    whole = int(max(0.0, seconds))
    days, rest = divmod(whole, int(DAY_S))
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


# ------------------------------------------------------------------ sizes


def parse_size(text: str) -> int:
    """Bytes. `32G` and `32GiB` are 32 x 1024^3, `32GB` is 32 x 1000^3; `0` is no request.

    Raises:
        InvalidValue: the text is no size, or has no unit.
    """
    word = text.strip()
    if word == "0":
        return 0
    if _NUMBER.fullmatch(word):
        raise InvalidValue(f"{text!r} has no unit", f"write {word}G or {word}M")
    match = _SIZE.fullmatch(word)
    if match is None:
        raise InvalidValue(f"{text!r} is not a size", "write e.g. 32G (= 32GiB), 512M or 32GB")
    number, unit, suffix = match.groups()
    base = 1000 if suffix and suffix.upper() == "B" else 1024
    scale: int = base ** _SIZE_POWERS[unit.upper()]
    size_bytes = float(number) * scale
    if size_bytes > LARGEST_BYTES:
        raise InvalidValue(f"{text!r} is more than any memory", "is one digit too many?")
    return round(size_bytes)


def format_size(size_bytes: int | None) -> str:
    """Binary units with at most one decimal, e.g. `15.9GiB`; `-` for None."""
    if size_bytes is None:
        return "-"
    if size_bytes < 1024:
        return f"{size_bytes}B"
    value, unit = float(size_bytes), ""
    for unit in "KMGTP":
        value /= 1024
        if value < 1023.95 or unit == "P":
            break
    return f"{value:.1f}".removesuffix(".0") + f"{unit}iB"


# ------------------------------------------------------------------ GPUs


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """How many GPUs in all, and which types will do (empty: any)."""

    count: int
    types: tuple[str, ...] = ()


def parse_gpus(text: str) -> GpuRequest:
    """`4` or `p100:4`.

    Raises:
        InvalidValue: the text names no number of GPUs.
    """
    word = text.strip()
    gpu_type, colon, number = word.rpartition(":")
    if not re.fullmatch(r"\d{1,9}", number, re.ASCII):
        is_type = _GPU_TYPE.fullmatch(word) and not word.isdigit()
        hint = f"write {word}:1" if is_type else "write 4 or p100:4"
        raise InvalidValue(f"{text!r} is not a number of GPUs", hint)
    types = (parse_gpu_type(gpu_type),) if colon else ()
    return GpuRequest(int(number), types)


def parse_gpu_types(text: str) -> tuple[str, ...]:
    """One type or several with commas, in order of preference: `p100,v100`.

    Raises:
        InvalidValue: one of them cannot be a type's name.
    """
    return tuple(parse_gpu_type(part.strip()) for part in text.split(","))


def parse_gpu_type(word: str) -> str:
    """A GPU type's name, e.g. `p100`.

    Raises:
        InvalidValue: it holds other signs than letters, digits and `. _ + -`.
    """
    if not _GPU_TYPE.fullmatch(word):
        raise InvalidValue(
            f"{word!r} is not a GPU type", "write e.g. p100; `rltune gpus` shows those there are"
        )
    return word


# ------------------------------------------------------------------ jobs


class SelectorKind(StrEnum):
    """In which of four ways jobs are named."""

    IDS = "ids"
    LAST = "last"
    ALL = "all"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class Selector:
    """Jobs as named on the command line; the client turns it into ids."""

    kind: SelectorKind
    ids: tuple[int, ...] = ()
    name: str = ""


def parse_selector(text: str) -> Selector:
    """`12`, `1,3,5-8`, `last` (your newest), `all` (yours) or `@name`.

    Raises:
        InvalidValue: the text names no jobs.
    """
    word = text.strip()
    if word in {"last", "all"}:
        return Selector(SelectorKind(word))
    if word.startswith("@") and len(word) > 1:
        return Selector(SelectorKind.NAME, name=word[1:])
    ids: dict[int, None] = {}
    for part in word.split(","):
        first, last = _job_range(part.strip(), text)
        if len(ids) + last - first >= MAX_SELECTED_JOBS:
            raise InvalidValue(
                f"{text!r} names more than {MAX_SELECTED_JOBS:,} jobs", "name fewer at once"
            )
        ids.update(dict.fromkeys(range(first, last + 1)))
    return Selector(SelectorKind.IDS, ids=tuple(ids))


def _job_range(part: str, text: str) -> tuple[int, int]:
    match = _JOB_RANGE.fullmatch(part)
    if match is None:
        raise InvalidValue(f"{text!r} names no jobs", "write 12, 1,3,5-8, last, all or @name")
    first = int(match[1])
    last = int(match[2] or first)
    if first < 1:
        raise InvalidValue(f"{text!r} names no jobs", "job numbers begin at 1")
    if last < first:
        raise InvalidValue(f"{part!r} runs backwards", f"write {last}-{first}")
    return first, last


def parse_nodes(text: str) -> int:
    """How many nodes: a number, or `auto` (0) for as few as possible in any shares.

    Raises:
        InvalidValue: it is neither.
    """
    if text.strip().lower() == "auto":
        return 0
    if not text.strip().isdecimal() or int(text) == 0:
        raise InvalidValue(f"{text!r} is no number of nodes", "write e.g. 2, or auto")
    return int(text)
