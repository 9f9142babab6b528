"""The little SVG that the charts need: escaped elements and a linear axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

_CONTROL = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127], "�")
"""Characters that no HTML document may contain, and what is shown instead."""


def text(value: str) -> str:
    """Any string as HTML text or attribute value."""
    return escape(value.translate(_CONTROL), quote=True)


def number(value: float) -> str:
    """A coordinate with a tenth of a pixel's precision."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; attribute names are given with `_` for `-` (and `class_` for `class`).

    `content` is markup already; attribute values are escaped here.
    """
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{text(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{rendered}>{content}</{name}>"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values `low..high` to pixels `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(high: float, most: int) -> list[float]:
    """Round positions from 0 to `high` (which must be positive), at most `most` + 1 of them.

    Steps are 1, 2 or 5 times a power of ten.
    """
    magnitude = 10.0 ** math.floor(math.log10(high / most))
    step = next(
        factor * magnitude for factor in (1, 2, 5, 10, 20) if factor * magnitude * most >= high
    )
    # The small addition keeps 0.3 / 0.1 from losing its last tick.
    return [index * step for index in range(math.floor(high / step + 1e-9) + 1)]


def time_ticks(high_s: float, most: int) -> list[float]:
    """Like `ticks`, in steps that people count time in."""
    if high_s <= 10:
        return ticks(high_s, most)
    minute, hour, day = 60, 3600, 86400
    steps = [1, 2, 5, 10, 15, 30, *(n * minute for n in (1, 2, 5, 10, 15, 30))]
    steps += [hour, 2 * hour, 3 * hour, 6 * hour, 12 * hour, day, 2 * day, 7 * day]
    step = next((step for step in steps if step * most >= high_s), None)
    if step is None:
        return [days * day for days in ticks(high_s / day, most)]
    return [float(at_s) for at_s in range(0, math.floor(high_s) + 1, step)]
