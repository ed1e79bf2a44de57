"""How members of a group agree, differ, fail and are blamed; two of them meet in one process here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from crossfade.errors import CrossfadeError, RankFailedError, StateError
from crossfade.graph.launches import Launch, Sent, TensorType
from crossfade.ranks.mailbox import Mailbox
from crossfade.ranks.members import Members, account, first_difference

MINE = Launch("a", "0.weight", "all_reduce", "dp", (TensorType("f32", (4,)),), "sum")
NEXT = replace(MINE, node="b", source="model.py:7")


def said(ours: str, theirs: str) -> str:
    """What ranks 3 and 5 hear of these accounts."""
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
def test_the_first_difference_in_what_is_communicated_is_named(theirs: Launch | None, message: str) -> None:
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


class Pair:
    """Two members of one group, ranks 3 and 5, in one process: each has a mailbox of its own."""

    def __init__(self, timeout: float = 1.0) -> None:
        self.boxes = [Mailbox("localhost") for _ in range(2)]
        self.members = [
            Members((3, 5), index, timeout, box=box, cards={1 - index: self.boxes[1 - index].card}, scope="us")
            for index, box in enumerate(self.boxes)
        ]
        for box in self.boxes:
            box.accept("us")

    def both(self, *calls: Callable[[Members], Any]) -> list[Any]:
        """What each member's call returns, or the error that it raises as text; they run at the same time."""

        def call(member: Members, function: Callable[[Members], Any]) -> Any:
            try:
                return function(member)
            except CrossfadeError as error:
                return f"{type(error).__name__}: {error}"

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, self.members, calls))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for box in made.boxes:
        box.close()


def test_members_that_agree_keep_the_offers_of_all_in_the_first_ones_order(pair: Pair) -> None:
    found = pair.both(
        lambda first: first.agree("same", "text", ["a", "b", "c"]),
        lambda second: second.agree("same", "text", ["c", "b", "x"]),
    )
    assert found == [["b", "c"], ["b", "c"]]


def test_all_members_are_given_the_first_difference(pair: Pair) -> None:
    found = pair.both(lambda first: first.agree("1", "a\nb"), lambda second: second.agree("2", "a\nc"))
    said = "different programs, first at line 2: rank 3 has `b`, rank 5 has `c`"
    assert [message.partition(": expected")[0] for message in found] == [f"RankMismatchError: {said}"] * 2


def test_a_member_that_shares_first_and_then_fails_is_heard_where_the_others_agree(pair: Pair) -> None:
    first, second = pair.members
    assert first.share(lambda: 7) == 7
    first.fail("out of memory")
    assert second.share(lambda: 8) == 7
    with pytest.raises(RankFailedError, match=r"^rank 3: out of memory. Remedy"):
        second.agree("2", "text")


def test_a_member_that_fails_before_it_shares_is_heard_by_those_who_wait_for_that(pair: Pair) -> None:
    _, heard = pair.both(lambda first: first.fail("out of memory"), lambda second: second.share(lambda: 8))
    assert heard.startswith("RankFailedError: rank 3: out of memory. Remedy")


def test_another_members_failure_is_heard_by_the_first(pair: Pair) -> None:
    heard, _ = pair.both(lambda first: first.agree("1", "text"), lambda second: second.fail("no data"))
    assert heard.startswith("RankFailedError: rank 5: no data. Remedy")


def test_a_member_that_goes_on_after_it_left_is_not_blamed_for_leaving(pair: Pair) -> None:
    first, second = pair.members
    second.leave("ValueError: once")
    assert "rank 5 failed: ValueError: once" in str(first.blamed("it failed", "closed"))
    second.note("step", "4")
    assert "rank 5 answers, and is in step 4" in str(first.blamed("it failed", "closed"))


def test_a_member_that_ended_is_blamed_before_those_that_fell_behind(pair: Pair) -> None:
    first, second = pair.members
    second.note("step", "1")
    error = first.blame(2, "all_reduce of 4 B", RuntimeError("Connection   closed"))
    assert str(error).startswith(
        "a collective failed in step 2: all_reduce of 4 B (rank 5 has not reached step 2 (last seen in step 1); "
        "the backend said: Connection closed): expected every rank to take part within 1 s. Remedy"
    )
    pair.boxes[1].close()
    assert "(rank 5 has ended, or has dropped the step; " in str(first.blame(2, "", RuntimeError("gone")))


def test_only_errors_of_the_backend_and_plain_ones_of_ours_blame_others(pair: Pair) -> None:
    first, _ = pair.members
    with pytest.raises(ValueError, match="mine"), first.together("save a checkpoint"):
        raise ValueError("mine")
    with pytest.raises(StateError, match="also mine"), first.together("save a checkpoint"):
        raise StateError("also mine", remedy="none")
    with pytest.raises(RankFailedError, match="could not save a checkpoint"), first.together("save a checkpoint"):
        raise RuntimeError("gloo: connection reset")


def test_who_is_alone_agrees_with_itself_and_blames_nobody() -> None:
    alone = Members((0, 1), 0, 1.0, alone=True)
    assert alone.agree("1", "text", ["offer"]) == ["offer"]
    assert alone.share(lambda: 7) == 7
    assert alone.guard("adding", lambda: 3) == 3
    assert "no other rank to ask" in str(alone.blame(1, "all_reduce", RuntimeError("x")))
