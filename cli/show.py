"""How values look: sizes, rates, times, counts, and tables that fit the terminal."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TextIO

import click

Cell = str | tuple[str, str]
"""A text, or a text and its style (the name of a colour, `dim` or `bold`)."""


def nbytes(count: float) -> str:
    """Bytes in decimal units with three digits: `8.41 GB`, `512 B`.

    >>> nbytes(0), nbytes(999), nbytes(999_999), nbytes(8_412_345_678)
    ('0 B', '999 B', '1.00 MB', '8.41 GB')
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 999.5 or unit == "PB":
            return f"{size:.0f} B" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1000
    raise AssertionError


def memory(count: float) -> str:
    """Bytes of memory in binary units: `256 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size == int(size) else f"{_three(size)} {unit}"
        size /= 1024
    raise AssertionError


def rate(bytes_per_s: float) -> str:
    """`412 MB/s`."""
    return f"{nbytes(bytes_per_s)}/s"


def count(number: int) -> str:
    """A whole number with separators: `1,234,567`."""
    return f"{number:,}"


def plural(number: int, noun: str, many: str | None = None) -> str:
    """`1 file`, `3 files`."""
    return f"{count(number)} {noun if number == 1 else many or noun + 's'}"


def duration(seconds: float) -> str:
    """A time with two units at most: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`.

    >>> duration(0.041), duration(12.4), duration(200), duration(7500), duration(3600), duration(360000)
    ('0.04 s', '12 s', '3 min 20 s', '2 h 5 min', '1 h', '4 d 4 h')
    """
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.095 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, size, smaller, limit in (
        ("min", 60, "s", 60),
        ("h", 3600, "min", 24),
        ("d", 86400, "h", 10**9),
    ):
        first, rest = divmod(whole, size)
        if first < limit:
            second = rest // {"s": 1, "min": 60, "h": 3600}[smaller]
            return f"{first} {unit}" + (f" {second} {smaller}" if second else "")
    raise AssertionError


def age(seconds: float) -> str:
    """A time in its largest unit, as lists show it: `41 s`, `3 min`, `2 h`, `4 d`."""
    return (
        " ".join(duration(max(0.0, seconds)).split()[:2]) if seconds >= 59.5 else f"{max(0.0, seconds):.0f} s"
    )


def some(rows: Sequence[str], most: int = 12) -> str:
    """The first rows, a line each, and how many more there are."""
    hidden = len(rows) - most
    return "\n".join([*rows[:most], f"… and {count(hidden)} more (--json has all)"] if hidden > 1 else rows)


def number(value: float, digits: int = 4) -> str:
    """A number with a few digits, as tables show it; NaN and infinities by name."""
    if not isfinite(value):
        return str(value)
    return "0" if value == 0 else f"{value:.{digits}g}"


def share(part: float, whole: float) -> str:
    """`12.5%`; `0` for none, so that the rare non-zero ones stand out."""
    if not part or not whole:
        return "0"
    percent = 100 * part / whole
    return f"{percent:.3g}%" if percent < 99.95 or part == whole else "99.9%"


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream (standard output unless given) is, or None where it is none."""
    if not (stream or sys.stdout).isatty():
        return None
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` columns; what is left out in the middle shows as `…`."""
    if len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    tail = (width - 1) * 3 // 5
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading, or an empty text.
        right: Aligned to the right, as numbers are.
        cut: Where the terminal is narrow its texts are shortened to this width; 0: never.
        spare: Left out where the terminal is too narrow for all; the highest goes first. 0: never.
    """

    title: str
    right: bool = False
    cut: int = 0
    spare: int = 0


@dataclass
class Table:
    """Rows in aligned columns, two spaces apart. Fits `width`: spare columns go first, then texts are cut."""

    columns: Sequence[Column]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    indent: int = 0

    def add(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(cells)

    def lines(self, width: int | None = None) -> Iterable[str]:
        """The table's lines, styled. `width` is None where nothing needs to fit."""
        shown = [c for c in range(len(self.columns)) if any(_text(row[c]) for row in self.rows)]
        widths = {
            c: max([len(self.columns[c].title), *(len(_text(row[c])) for row in self.rows)]) for c in shown
        }
        if width is not None:
            self._fit(shown, widths, width)
        if any(self.columns[c].title for c in shown):
            heading = [(self.columns[c].title, "dim") for c in range(len(self.columns))]
            yield self._line(heading, shown, widths)
        for row in self.rows:
            yield self._line(row, shown, widths)

    def _fit(self, shown: list[int], widths: dict[int, int], width: int) -> None:
        """Remove from `shown`, and lower `widths`, until a line has at most `width` columns or nothing more can go."""

        def excess() -> int:
            return self.indent + sum(widths[c] for c in shown) + 2 * (len(shown) - 1) - width

        while excess() > 0:
            cuttable = sorted((c for c in shown if self.columns[c].cut), key=lambda c: -self.columns[c].spare)
            spare = max(
                (c for c in shown if self.columns[c].spare), key=lambda c: self.columns[c].spare, default=None
            )
            if (
                sum(max(0, widths[c] - self.columns[c].cut) for c in cuttable) < excess()
                and spare is not None
            ):
                shown.remove(spare)
                continue
            for c in cuttable:
                widths[c] = max(min(widths[c], self.columns[c].cut), widths[c] - max(0, excess()))
            for c in cuttable:  # too narrow for comfort: nothing but the numbers stays whole
                widths[c] = max(min(widths[c], 6), widths[c] - max(0, excess()))
            return

    def _line(self, row: Sequence[Cell], shown: Sequence[int], widths: dict[int, int]) -> str:
        parts = []
        for c in shown:
            cell = row[c]
            text = shorten(_text(cell), widths[c])
            pad = " " * (widths[c] - len(text))
            styled = text if isinstance(cell, str) else style(text, cell[1])
            parts.append(pad + styled if self.columns[c].right else styled + ("" if c == shown[-1] else pad))
        return (" " * self.indent + "  ".join(parts)).rstrip()

    def echo(self) -> None:
        """Print to standard output."""
        for line in self.lines(terminal_width()):
            click.echo(line)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def style(text: str, name: str) -> str:
    """`text` in a colour, `bold` or `dim`; click removes it where the output is no terminal."""
    if not name or not text:
        return text
    if name in ("bold", "dim"):
        return click.style(text, **{name: True})
    return click.style(text, fg=name)


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Print `label  value` lines on standard output; long values wrap below themselves at commas and spaces."""
    shown = [(label, value) for label, value in pairs if value]
    wide = max((len(label) for label, _ in shown), default=0)
    width = terminal_width()
    for label, value in shown:
        room = 10**9 if width is None else max(16, width - wide - 2)
        first, *more = wrap(value, room)
        click.echo(f"{style(label.ljust(wide), 'dim')}  {first}")
        for line in more:
            click.echo(" " * (wide + 2) + line)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken at spaces where there are any; escapes of styles take no room."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in re.findall(r"\S+|\s+", paragraph):
            room = width - len(click.unstyle(line))
            if len(click.unstyle(word).rstrip()) > room and line.strip():
                lines.append(line.rstrip())
                line = "" if word.isspace() else word
            else:
                line += word
        lines.append(line.rstrip())
    return lines


def hang(text: str, width: int | None) -> list[str]:
    """As `wrap`, further lines two columns deeper than the first."""
    if width is None:
        return [text]
    deep = " " * (len(text) - len(text.lstrip()) + 2)
    first, *rest = wrap(text, width)
    return [first, *(deep + line for line in wrap(" ".join(rest), width - len(deep)) if rest)]


def say(text: str) -> None:
    """Print a sentence on standard output. On a terminal lines break at spaces."""
    width = terminal_width()
    click.echo(text if width is None else "\n".join(wrap(text, width)))


def tell(text: str) -> None:
    """Print on standard error what is no data: notes and errors. On a terminal lines break at spaces."""
    width = terminal_width(sys.stderr)
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(text if width is None else "\n".join(wrap(text, width)), err=True, color=colour)
