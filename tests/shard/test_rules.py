"""Every sharding rule, against the operator on whole values: over placements of all operands, on 2 and 4 ranks."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from crossfade.shard.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from crossfade.shard.rules import _RULES
from tests.shard.one_operator import OneOperator, placements_of, tensors_of
from tests.shard.rule_cases import CASES, Case

UNTESTED = {
    "aten::_scaled_dot_product_flash_attention": "only on CUDA",
    "aten::_scaled_dot_product_efficient_attention": "only on CUDA",
    "aten::_scaled_dot_product_cudnn_attention": "only on CUDA",
    "aten::empty_like": "no value to compare",
    "aten::new_empty": "no value to compare",
    "aten::_assert_tensor_metadata": "no result",
    "aten::_assert_async.msg": "no result",
    "aten::sym_size.int": "no tensor",
    "aten::sym_numel": "no tensor",
}
NAMES = [f"{index}-{one.target}" for index, one in enumerate(CASES)]
SAMPLES = 6
"""How many placements of all operands are tried of each call, beside each operand's own."""


def test_every_rule_has_a_case():
    tested = {one.target._schema.name for one in CASES}
    tested |= {f"{one.target._schema.name}.{one.target._schema.overload_name}" for one in CASES}
    missing = {name for name in _RULES if name.startswith("aten::")} - tested - UNTESTED.keys()
    assert not missing


def check(one: Case, places: Any, ranks: int, left_split: bool) -> None:
    program = OneOperator(one.target, one.args, one.kwargs, places, ranks)
    expected = program.whole()
    for rank, found in enumerate(program.on_ranks(left_split=left_split)):
        torch.testing.assert_close(
            found,
            expected,
            rtol=1e-4,
            atol=1e-4,
            equal_nan=True,
            msg=partial("{} with {} on rank {} of {}: {}".format, one, ", ".join(map(str, places)), rank, ranks),
        )


@pytest.mark.parametrize("one", CASES, ids=NAMES)
def test_first_operand_split(one: Case):
    """Where each dim goes is part of the table: a rule that puts everything together would be right, and useless."""
    first, *others = tensors_of(one.args, one.kwargs)
    found = ""
    for dim, size in enumerate(first.shape):
        places = [Shard(dim), *([REPLICATE] * len(others))]
        if size % 2:
            found += "-"
            continue
        decision = OneOperator(one.target, one.args, one.kwargs, places, 2).decision()
        found += _letter(decision.results[0])
    assert found == one.goes


def _letter(place: Placement) -> str:
    return "P" if isinstance(place, Partial) else str(place.dim) if isinstance(place, Shard) else "-"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("one", CASES, ids=NAMES)
def test_equals_one_device(one: Case, ranks: int):
    """Each operand placed in every way beside whole ones, and a sample of all together."""
    if one.target is torch.ops.aten.scaled_dot_product_attention.default and one.args[4:] == (0.5,):
        pytest.skip("one device draws at another time")
    ways = [placements_of(value, ranks) for value in tensors_of(one.args, one.kwargs)]
    whole = (REPLICATE,) * len(ways)
    single = {(*whole[:i], place, *whole[i + 1 :]) for i, places in enumerate(ways) for place in places}
    together = [places for places in product(*ways) if places not in single]
    draw = random.Random(ranks)
    chosen = sorted(single, key=str) if ranks == 2 else draw.sample(sorted(single, key=str), min(4, len(single)))
    for index, places in enumerate([*chosen, *draw.sample(together, min(SAMPLES, len(together)))]):
        check(one, places, ranks, left_split=index % 2 == 0)
    if len(ways) > 1 and all(PARTIAL in places for places in ways):
        check(one, (PARTIAL,) * len(ways), ranks, left_split=False)
