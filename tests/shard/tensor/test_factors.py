"""Which factor of an operator's dims is split: by whom, if it may be, and what becomes of the others."""

from __future__ import annotations

import pytest

from crossfade.errors import PlanError
from crossfade.shard.tensor.factors import Decision, Factors, Operand, WeightStuck, decide, parse_factors, refuse
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Placement, Shard

LINEAR = "... i, o i, o -> ... o"
X, W, B = (2, 6, 8), (4, 8), (4,)


def linear(x: Placement, weight: Placement, bias: Placement, *, is_weight: bool = True, ranks: int = 2) -> Decision:
    factors = parse_factors(LINEAR, (3, 2, 1), added=frozenset({2}), linear=(frozenset({0, 2}),))
    operands = (
        Operand(x, X, bytes=96),
        Operand(weight, W, bytes=32, is_weight=is_weight),
        Operand(bias, B, bytes=4, is_weight=is_weight, is_constant=True),
    )
    return decide(factors, operands, ranks)


def test_columns_of_the_weight_split_the_result():
    found = linear(REPLICATE, Shard(0), Shard(0))
    assert found == Decision((REPLICATE, Shard(0), Shard(0)), (Shard(2),))


def test_rows_of_the_weight_leave_a_partial_sum_to_which_one_rank_adds_the_bias():
    found = linear(Shard(2), Shard(1), REPLICATE)
    assert found == Decision((Shard(2), Shard(1), PARTIAL), (PARTIAL,))


def test_whole_activations_are_split_where_the_weight_asks_for_it():
    assert linear(REPLICATE, Shard(1), REPLICATE).wants == (Shard(2), Shard(1), PARTIAL)


def test_weights_decide_before_larger_activations():
    assert linear(Shard(0), Shard(0), Shard(0)).results == (Shard(2),)
    assert linear(Shard(0), Shard(0), REPLICATE, is_weight=False).results == (Shard(0),)


def test_blocks_travel_with_the_factor():
    fused = Shard(0, sizes=(2, 2))
    assert linear(REPLICATE, fused, fused).results == (fused.on(2),)


def test_partial_sums_stay_such_through_what_is_linear_in_them():
    assert linear(PARTIAL, REPLICATE, REPLICATE) == Decision((PARTIAL, REPLICATE, PARTIAL), (PARTIAL,))


def test_nothing_else_keeps_a_partial_sum():
    found = decide(Factors((("a",),), (("a",),)), (Operand(PARTIAL, (4,)),), 2)
    assert found == Decision((REPLICATE,), (REPLICATE,), why="it is not linear in the partial sum")


PROBLEMS = {
    "it needs that dim whole": Factors((("a", "k"),), (("a", "k"),), fixed=frozenset("k")),
    "it reduces over that dim by other than a sum": Factors((("a", "k"),), (("a",),), summed=False),
    "its 6 do not divide by 4 ranks": Factors((("a", "k"),), (("a", "k"),)),
}


@pytest.mark.parametrize("why", PROBLEMS)
def test_what_cannot_be_split_is_made_whole_and_says_why(why: str):
    operand = Operand(Shard(1), (8, 6))
    ranks = 4 if "ranks" in why else 2
    assert decide(PROBLEMS[why], (operand,), ranks) == Decision((REPLICATE,), (REPLICATE,), why=why)
    with pytest.raises(WeightStuck, match=why) as stuck:
        decide(PROBLEMS[why], (Operand(Shard(1), (8, 6), is_weight=True),), ranks)
    assert stuck.value.operand == 0


def test_a_dim_of_one_that_broadcasts_carries_no_factor():
    added = Factors((("a", "b"), ("a", "b")), (("a", "b"),))
    found = decide(added, (Operand(Shard(1), (4, 8)), Operand(REPLICATE, (4, 1))), 2)
    assert found == Decision((Shard(1), REPLICATE), (Shard(1),))


@pytest.mark.parametrize("text", ["a b", "a -> b -> c", "a a -> a", "a! -> b, c-d"])
def test_texts_that_are_no_factors_are_refused(text: str):
    with pytest.raises(PlanError, match="cannot be read: expected names of dims"):
        parse_factors(text, (2,))


@pytest.mark.parametrize("ranks_of", [(3, 3), (2, 2, 1, 1)])
def test_operands_of_more_dims_than_names_are_refused(ranks_of: tuple[int, ...]):
    with pytest.raises(PlanError, match=r"do not fit operands of .* dims: expected a name for every dim"):
        parse_factors(LINEAR, ranks_of)


def test_a_weight_that_would_be_gathered_is_refused_in_a_sentence():
    assert str(refuse("up.weight", Shard(1), "it needs that dim whole")).startswith(
        "the parameter up.weight is split on dim 1, but it needs that dim whole: expected every split parameter"
    )
