"""Rows in the order of groups, on their way to the ranks that have the groups and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph.events import events_of
from crossfade.graph.exchange_rows import exchange_rows, row_routes
from crossfade.graph.text import parse


@st.composite
def counts(draw: st.DrawFn) -> torch.Tensor:
    """How many rows each rank has for each group, [ranks, groups]; often none."""
    ranks, own = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    numbers = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=ranks * own, max_size=ranks * own)
    return torch.tensor([draw(numbers) for _ in range(ranks)])


@settings(max_examples=60, deadline=None)
@given(counts())
def test_rows_come_in_the_order_of_groups_and_go_back(numbers: torch.Tensor) -> None:
    ranks, groups = numbers.shape
    own, each = groups // ranks, int(numbers.sum(1).max())
    rows = [[(rank, group, i) for group in range(groups) for i in range(numbers[rank, group])] for rank in range(ranks)]
    for rank in range(ranks):
        mine = range(rank * own, (rank + 1) * own)
        arriving = numbers[:, mine.start : mine.stop].flatten()
        sent, received, order, back, ends = row_routes(numbers[rank], arriving, ranks, each * ranks)
        assert sent.tolist() == [numbers[rank, to * own : (to + 1) * own].sum() for to in range(ranks)]
        arrived = [row for source in rows for row in source if row[1] in mine]
        assert received.tolist() == [sum(row[0] == source for row in arrived) for source in range(ranks)]
        sorted_here = sorted(arrived, key=lambda row: (row[1], row[0], row[2]))
        assert [arrived[place] for place in order[: len(arrived)]] == sorted_here
        assert [sorted_here[place] for place in back[: len(arrived)]] == arrived
        assert sorted(order.tolist()) == sorted(back.tolist()) == list(range(each * ranks))
        assert ends.tolist() == [sum(row[1] <= group for row in arrived) for group in mine]


PROGRAM = """
x: f32[6, 8] = input("x")
sent: i64[2] = input("sent")
received: i64[2] = input("received")
start: f32[12, 8] = crossfade.exchange_rows(x, sent, received, 12, "ep")
done: f32[12, 8] = c10d.wait_tensor(start)
return output("y", done)
"""


def test_it_is_an_all_to_all_of_as_many_bytes_as_there_are_rows() -> None:
    program = parse(PROGRAM, groups={"ep": 2})
    (found,) = collectives.find(program.graph)
    assert (found.kind, found.group, found.bytes) == (collectives.Kind.ALL_TO_ALL, "ep", 6 * 8 * 4)
    assert collectives.equal_parts(found.node) is None
    (launch,) = events_of(program).launches
    assert launch.group == "ep"


def test_without_room_it_says_so() -> None:

    with pytest.raises(RewriteError, match="no more rows than there are"):
        exchange_rows(torch.ones(2, 1), torch.tensor([2, 1]), torch.tensor([0, 0]), 4, "ep")
