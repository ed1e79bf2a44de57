"""What a pass changed in the program's text, as lines ready to be coloured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

CONTEXT = 3
LINE_LIMIT = 2000
"""A diff shows at most this many lines, and says how many it cut."""


class LineKind(StrEnum):
    """What a line of a diff is; the page has a colour for each."""

    ADDED = "added"
    REMOVED = "removed"
    SAME = "same"
    HUNK = "hunk"


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line, without the sign or the newline."""

    kind: LineKind
    text: str


@dataclass(frozen=True, slots=True)
class Diff:
    """The lines shown, how many lines were added and removed in all, and how many of the diff's lines were cut."""

    lines: tuple[DiffLine, ...]
    added: int
    removed: int
    cut: int = 0


def unified(before: str, after: str, *, limit: int = LINE_LIMIT) -> Diff:
    """The unified diff of two texts, without the file header.

    >>> diff = unified("a\\nb\\nc", "a\\nc\\nd")
    >>> for line in diff.lines:
    ...     print(f"{line.kind:8}{line.text}")
    hunk    @@ -1,3 +1,3 @@
    same    a
    removed b
    same    c
    added   d
    >>> unified("a\\nb\\nc", "a\\nc\\nd", limit=2).cut
    3
    """
    raw = difflib.unified_diff(before.splitlines(), after.splitlines(), n=CONTEXT, lineterm="")
    lines = [_line(text) for text in list(raw)[2:]]
    return Diff(
        lines=tuple(lines[:limit]),
        added=sum(line.kind is LineKind.ADDED for line in lines),
        removed=sum(line.kind is LineKind.REMOVED for line in lines),
        cut=max(0, len(lines) - limit),
    )


def _line(text: str) -> DiffLine:
    kinds = {"+": LineKind.ADDED, "-": LineKind.REMOVED, " ": LineKind.SAME}
    kind = kinds.get(text[:1], LineKind.HUNK)
    return DiffLine(kind, text if kind is LineKind.HUNK else text[1:])
