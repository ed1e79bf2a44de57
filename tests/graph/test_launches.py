"""In what the launches of two ranks differ, and where first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crossfade.graph.launches import Launch, Sent, TensorType, difference, first_apart

F32 = TensorType("f32", (4, 2))
REDUCE = Launch("a", "m.py:1", "all_reduce", "dp", (F32,), "sum", members=2)
EXCHANGE = Launch("e", "", "all_to_all", "dp", (F32,), sent=(1, 3), received=(2, 2))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"node": "b", "source": "other.py:2"}, None),
        ({"kind": "all_gather"}, "collectives"),
        ({"coalesced": True}, "collectives"),
        ({"reduce_op": "max"}, "reductions"),
        ({"tensors": (F32, F32)}, "numbers of tensors"),
        ({"tensors": (TensorType("bf16", (4, 2)),)}, "dtypes"),
        ({"tensors": (TensorType("f32", (2, 4)),)}, "sizes"),
        ({"root": 1}, "roots"),
        ({"members": 4}, "group sizes"),
        ({"settings": "(2,)"}, "settings"),
    ],
)
def test_each_difference_has_a_name(change: dict[str, Any], expected: str | None) -> None:
    assert difference(REDUCE, replace(REDUCE, **change)) == expected


def test_only_the_rows_of_an_exchange_may_differ() -> None:
    assert difference(EXCHANGE, replace(EXCHANGE, tensors=(TensorType("f32", (7, 2)),))) is None
    assert difference(EXCHANGE, replace(EXCHANGE, tensors=(TensorType("f32", (4, 3)),))) == "sizes"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([REDUCE, EXCHANGE], None),
        ([REDUCE], (2, "numbers of collectives")),
        ([REDUCE, replace(EXCHANGE, group="tp")], (2, "groups")),
        ([replace(REDUCE, reduce_op="max"), EXCHANGE], (1, "reductions")),
        ([REDUCE, replace(EXCHANGE, sent=(2, 2))], (2, "splits")),
        ([REDUCE, replace(EXCHANGE, messages=(Sent(True, 1, 0, F32),))], (2, "messages")),
    ],
)
def test_the_first_place_apart(theirs: list[Launch], expected: tuple[int, str] | None) -> None:
    found = first_apart([REDUCE, EXCHANGE], theirs)
    assert (found and (found.number, found.what)) == expected


def test_a_difference_is_said_of_both_ranks() -> None:
    apart = first_apart([REDUCE], [])
    assert apart is not None
    assert apart.said(0, 3) == (
        "the 1st collective of dp, which differs in numbers of collectives: "
        "rank 0 starts all_reduce(sum) of f32[4, 2] on dp (node a [m.py:1]), rank 3 ends"
    )
