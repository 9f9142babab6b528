"""Text for people: tables that never cut an id, and names that cannot play tricks.

A name from a user may hold terminal codes or end-of-line marks; everything shown goes through
`plain`. Widths count cells as a terminal does, so that wide characters stay in their column.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

GAP = "  "
ELLIPSIS = "…"
LEAST_CUT = 6
"""A column that may be cut keeps so many cells."""
ABSENT = "-"

_SGR = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "dim": "2", "bold": "1"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """Aligned to the right, for numbers."""
    cut: bool = False
    """May be shortened to fit the screen; ids and numbers never are."""


def plain(text: str) -> str:
    """Text without anything that moves the cursor, changes colours or reverses direction."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def writable(text: str, encoding: str) -> str:
    r"""Text with `\xe9` for what an encoding lacks, so that its width is known before writing."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def cell_width(text: str) -> int:
    """How many cells of a terminal a text fills."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def use_color(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour: FORCE_COLOR, else not with NO_COLOR, else on a real terminal."""
    if environ.get("FORCE_COLOR"):
        return True
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def screen_width(stream: TextIO, environ: Mapping[str, str] = os.environ) -> int | None:
    """COLUMNS, else the terminal's width; None (no limit) when the output goes elsewhere."""
    columns = environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if stream.isatty() else None


def paint(text: str, color: str | None) -> str:
    """Text in a colour; unchanged without one."""
    return text if color is None else f"\x1b[{_SGR[color]}m{text}\x1b[0m"


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    width: int | None = None,
    colors: Sequence[str | None] | None = None,
    encoding: str = "utf-8",
) -> list[str]:
    """Lines of a table; `colors` gives one a row. Cells are made harmless here."""
    cells = [[writable(plain(cell), encoding) for cell in row] for row in rows]
    mark = ELLIPSIS if writable(ELLIPSIS, encoding) == ELLIPSIS else "..."
    widths = [
        max([cell_width(column.title), *(cell_width(row[i]) for row in cells)])
        for i, column in enumerate(columns)
    ]
    _narrow(widths, columns, width)
    lines = [_line([column.title for column in columns], columns, widths, mark)]
    for i, row in enumerate(cells):
        line = _line(row, columns, widths, mark)
        lines.append(paint(line, colors[i] if colors else None))
    return lines


def _narrow(widths: list[int], columns: Sequence[Column], width: int | None) -> None:
    """Take from the widest column that may be cut until the table fits."""
    if width is None:
        return
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    may_shrink = [i for i, column in enumerate(columns) if column.cut]
    while excess > 0 and may_shrink:
        widest = max(may_shrink, key=lambda i: widths[i])
        if widths[widest] <= LEAST_CUT:
            return
        widths[widest] -= 1
        excess -= 1


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], mark: str) -> str:
    parts = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = _cut(cell, width, mark)
        padding = " " * (width - cell_width(text))
        parts.append(padding + text if column.right else text + padding)
    return GAP.join(parts).rstrip()


def _cut(text: str, width: int, mark: str) -> str:
    if cell_width(text) <= width:
        return text
    kept = ""
    for c in text:
        if cell_width(kept + c) > width - len(mark):
            break
        kept += c
    return kept + mark


def say(line: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(line + "\n")


def say_lines(lines: Iterable[str]) -> None:
    """Lines on standard output."""
    sys.stdout.write("".join(line + "\n" for line in lines))


def tell(line: str) -> None:
    """A line on standard error: for people, never for programs."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def show_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    colors: Sequence[str | None] | None = None,
) -> None:
    """Print a table as the screen and the environment want it."""
    shown = colors if use_color(sys.stdout) else None
    width, encoding = screen_width(sys.stdout), sys.stdout.encoding
    say_lines(table(columns, rows, width=width, colors=shown, encoding=encoding))
