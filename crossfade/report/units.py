"""Numbers as people read them, the same on the terminal and on the page."""

from __future__ import annotations

import math
import re

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUMBER_WITH_UNIT = re.compile(r"[-+~]?\d[\d.,_]*\s?[%\w/]{0,6}")

Cell = str | int | float | None
"""What a table cell may hold; None prints as nothing."""


def format_bytes(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least one of it.

    >>> [format_bytes(size) for size in (0, 1023, 1536, 25 * 2**20, 2**30)]
    ['0 B', '1,023 B', '1.5 KiB', '25 MiB', '1 GiB']
    """
    power = 0
    # 1023.96 KiB would print as 1,024: it belongs to the next unit.
    while abs(size) / 1024**power >= 1023.95 and power < len(_BYTE_UNITS) - 1:
        power += 1
    if power == 0:
        return f"{size:,} B"
    return f"{size / 1024**power:.1f}".removesuffix(".0") + f" {_BYTE_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """A duration in milliseconds, seconds or minutes.

    >>> [format_seconds(seconds) for seconds in (0.00042, 0.0342, 1.5, 125)]
    ['0.42 ms', '34.2 ms', '1.50 s', '2 min 5 s']
    """
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_change(before: float, after: float) -> str:
    """How much `after` differs from `before`, in percent.

    >>> [format_change(*pair) for pair in ((8, 2), (4, 5), (3, 3), (0, 7), (1000, 999))]
    ['-75%', '+25%', 'unchanged', 'new', '-0.1%']
    """
    if before == after:
        return "unchanged"
    if before == 0:
        return "new"
    percent = abs(after / before - 1) * 100
    sign = "-" if after < before else "+"
    return f"{sign}{percent:.0f}%" if percent >= 1 else f"{sign}{max(percent, 0.1):.1f}%"


def format_cell(cell: Cell) -> str:
    """One table cell as text: thousands separated, floats to about four digits.

    >>> [format_cell(cell) for cell in (1234, 0.123456, 12345.6, "x", None, True)]
    ['1,234', '0.1235', '12,346', 'x', '', 'yes']
    """
    match cell:
        case None:
            return ""
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            return _format_float(cell)
    return str(cell)


def is_numeric(cells: list[Cell]) -> bool:
    """Whether a column reads as numbers, and so is set flush right.

    >>> is_numeric([1, "2.5 ms", None]), is_numeric(["1.8x", "n/a"]), is_numeric([])
    (True, False, False)
    """
    filled = [cell for cell in cells if cell not in (None, "")]
    return bool(filled) and all(_is_number(cell) for cell in filled)


def plural(number: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "pass"), plural(1200, "pass"), plural(2, "node")
    ('1 pass', '1,200 passes', '2 nodes')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def _format_float(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 3 - magnitude)}f}"


def _is_number(cell: Cell) -> bool:
    if isinstance(cell, str):
        return _NUMBER_WITH_UNIT.fullmatch(cell.strip()) is not None
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)
