"""Diffs of program texts."""

from __future__ import annotations

from crossfade.report.diff import LineKind, unified


def test_a_diff_has_three_lines_of_context() -> None:
    before = [f"line {i}" for i in range(20)]
    after = [*before[:10], "new", *before[10:]]
    lines = unified("\n".join(before), "\n".join(after)).lines
    assert [line.kind for line in lines] == [LineKind.HUNK, *[LineKind.SAME] * 3, LineKind.ADDED, *[LineKind.SAME] * 3]
    assert lines[0].text == "@@ -8,6 +8,7 @@"


def test_a_diff_keeps_lines_that_look_like_its_own_signs() -> None:
    diff = unified("-- a\nx", "++ b\nx")
    assert [(line.kind, line.text) for line in diff.lines[1:]] == [
        (LineKind.REMOVED, "-- a"),
        (LineKind.ADDED, "++ b"),
        (LineKind.SAME, "x"),
    ]
