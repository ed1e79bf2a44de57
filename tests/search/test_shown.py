"""A bar on the terminal, or the caller's own."""

from __future__ import annotations

import io
import sys

import pytest

from crossfade.search.shown import shown


def test_a_bar_is_shown_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_PROGRESS", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown(None, "a model") as tell:
        tell(1, 4, "dp=2 zero1")
    assert "dp=2 zero1" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown(None, "a model") as tell:
        tell(1, 4, "dp=2 zero1")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_who_asks_is_told_instead() -> None:
    told: list[tuple[int, int, str]] = []
    with shown(lambda *each: told.append(each), "a model") as tell:
        tell(1, 4, "dp=2 zero1")
    assert told == [(1, 4, "dp=2 zero1")]
