"""Coalesced all-gathers taken apart; the docstring's program is tested with those of all passes."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
from on_ranks import differences

from crossfade.communicate.lower_coalesced_gathers import LowerCoalescedGathers
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse

TEXT = inspect.cleandoc(LowerCoalescedGathers.__doc__ or "").split("Before:\n")[1].split("\n\nAfter")[0]


def test_other_groups_keep_theirs() -> None:
    done = run_passes(parse(TEXT, groups={"dp": 2}), [LowerCoalescedGathers(groups=("tp",))])
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "both: left alone: its group's backend takes lists"
    ]


@pytest.mark.ranks
def test_the_same_arrives(ranks: Any) -> None:
    compare = functools.partial(differences, whole_numbers=False)
    assert ranks(2).run(compare, TEXT, LowerCoalescedGathers()) == [[0.0, 0.0]] * 2
