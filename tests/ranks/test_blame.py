"""Who is named when a collective fails: the rank whose last word weighs most against it."""

from __future__ import annotations

from typing import Any

import pytest

from crossfade.ranks.blame import named, sign_of, suspects
from crossfade.ranks.mailbox import Unreachable


@pytest.mark.parametrize(
    ("said", "step", "sign"),
    [
        ((None, None, None), None, ("answers", 0)),
        (("2", None, None), 2, ("answers, and is in step 2", 0)),
        (("1", "about to save", None), 1, ("is about to save", 1)),
        (("1", None, None), 2, ("has not reached step 2 (last seen in step 1)", 2)),
        ((None, "busy", None), 0, ("has not reached step 0 (last seen in step none, busy)", 2)),
        (("9", None, '{"why": "rank 7 has ended", "because": [7]}'), 2, ("gave up: rank 7 has ended", 3)),
        (("9", None, '{"why": "KeyError", "because": []}'), 2, ("failed: KeyError", 4)),
        (Unreachable("has ended"), 2, ("has ended", 4)),
    ],
    ids=str,
)
def test_what_weighs_against_a_rank(said: Any, step: int | None, sign: tuple[str, int]) -> None:
    assert sign_of(said, None, step) == sign


def test_what_a_rank_told_when_it_left_counts_once_it_cannot_be_asked() -> None:
    told = '{"why": "KeyError", "because": []}'
    assert sign_of(Unreachable("has ended"), told, 2) == ("failed: KeyError", 4)


def test_those_against_whom_most_is_said_are_named() -> None:
    signs = {0: ("answers", 0), 1: ("failed: KeyError", 4), 2: ("gave up: rank 1", 3), 3: ("has ended", 4)}
    assert suspects(signs) == {1: "failed: KeyError", 3: "has ended"}
    assert suspects({}) == {}


def test_at_most_eight_are_named() -> None:
    assert named(dict.fromkeys(range(10), "has ended")).endswith("rank 7 has ended; and 2 more")
