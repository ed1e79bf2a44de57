"""How ranks that run different programs say so: what explains the rest first, then what they communicate, then text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfade.graph.launches import Launch, Sent, TensorType
from crossfade.ranks.members import account, first_difference

MINE = Launch("a", "0.weight", "all_reduce", "dp", (TensorType("f32", (4,)),), "sum")
NEXT = replace(MINE, node="b", source="model.py:7")


def said(ours: str, theirs: str) -> str:
    """What ranks 3 and 5 with these accounts are told."""
    return first_difference(ours, theirs, 3, 5, "programs") if ours != theirs else ""


START = "different programs, first in the 2nd collective of dp, which differs in "
OURS = "rank 3 starts all_reduce(sum) of f32[4] on dp (node b [model.py:7])"


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            replace(NEXT, tensors=(TensorType("f32", (8,)),), source="model.py:9"),
            f"{START}sizes: {OURS}, rank 5 starts all_reduce(sum) of f32[8] on dp (node b [model.py:9])",
        ),
        (
            replace(NEXT, kind="all_gather", reduce_op=""),
            f"{START}collectives: {OURS}, rank 5 starts all_gather of f32[4] on dp (node b [model.py:7])",
        ),
        (None, f"{START}numbers of collectives: {OURS}, rank 5 ends"),
        (
            replace(NEXT, messages=(Sent(True, 1, 0, TensorType("f32", (4,))),)),
            f"{START}messages: {OURS}, rank 5 starts a send of f32[4] to rank 1 of dp (node b [model.py:7])",
        ),
    ],
    ids=["sizes", "kinds", "numbers", "messages"],
)
def test_the_first_difference_in_what_is_communicated_is_told(theirs: Launch | None, message: str) -> None:
    other = [MINE] if theirs is None else [MINE, theirs]
    assert said(account(["m"], [[MINE, NEXT]], "w abc"), account(["m"], [other], "w def")) == message


def test_what_explains_the_rest_comes_first_and_text_last() -> None:
    ours = account(["planned for a"], [[MINE]], "w abc")
    assert said(ours, account(["planned for b"], [[NEXT, NEXT]], "w def")) == (
        "different programs, first at line 1: rank 3 has `planned for a`, rank 5 has `planned for b`"
    )
    assert said(ours, account(["planned for a"], [[MINE]], "w def")) == (
        "different programs, first at line 2: rank 3 has `w abc`, rank 5 has `w def`"
    )
    assert said(ours, ours) == ""


def test_a_launch_that_only_stands_elsewhere_is_the_same() -> None:
    moved = account([], [[replace(MINE, node="z", source="other.py:1")]], "x")
    assert said(account([], [[MINE]], "y"), moved).startswith("different programs, first at line 1")
