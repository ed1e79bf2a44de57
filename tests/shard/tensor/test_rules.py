"""Every sharding rule, against the operator on whole values: over placements of all operands, on 2 and 4 ranks."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx

from crossfade.graph.private import FakeTensorMode
from crossfade.shard.tensor.factors import Operand
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from crossfade.shard.tensor.rules import _RULES, PlacedCall, rule_of
from tests.shard.tensor.one_operator import OneOperator, placements_of, tensors_of
from tests.shard.tensor.rule_cases import CASES, Case, case

aten = torch.ops.aten

UNTESTED = {
    "aten::_scaled_dot_product_flash_attention": "only on CUDA: described below",
    "aten::_scaled_dot_product_efficient_attention": "only on CUDA: described below",
    "aten::_scaled_dot_product_cudnn_attention": "only on CUDA: described below",
    "aten::empty_like": "no value to compare",
    "aten::new_empty": "no value to compare",
    "aten::_assert_tensor_metadata": "no result",
    "aten::_assert_async.msg": "no result",
    "aten::sym_size.int": "no tensor",
    "aten::sym_numel": "no tensor",
}
NAMES = [f"{index}-{tried.target}" for index, tried in enumerate(CASES)]
SAMPLES = 2
"""How many placements of all operands are tried of each call, beside each operand's own."""


def test_every_rule_has_a_case():
    tested = {tried.target._schema.name for tried in CASES}
    tested |= {f"{tried.target._schema.name}.{tried.target._schema.overload_name}" for tried in CASES}
    missing = {name for name in _RULES if name.startswith("aten::")} - tested - UNTESTED.keys()
    assert not missing


def check(tried: Case, places: Any, ranks: int, left_split: bool) -> None:
    program = OneOperator(tried.target, tried.args, tried.kwargs, places, ranks)
    torch.manual_seed(0)
    expected = program.whole()
    torch.manual_seed(0)
    for rank, found in enumerate(program.on_ranks(left_split=left_split)):
        torch.testing.assert_close(
            found,
            expected,
            rtol=1e-4,
            atol=1e-4,
            equal_nan=True,
            msg=partial("{} with {} on rank {} of {}: {}".format, tried, ", ".join(map(str, places)), rank, ranks),
        )


@pytest.mark.parametrize("tried", CASES, ids=NAMES)
def test_first_operand_split(tried: Case):
    """Where each dim goes is part of the table: a rule that puts everything together would be right, and useless."""
    first, *others = tensors_of(tried.args, tried.kwargs)
    found = ""
    for dim, size in enumerate(first.shape):
        places = [Shard(dim), *([REPLICATE] * len(others))]
        if size % 2:
            found += "-"
            continue
        decision = OneOperator(tried.target, tried.args, tried.kwargs, places, 2).decision()
        found += _letter(decision.results[0])
    assert found == tried.goes


def _letter(place: Placement) -> str:
    return "P" if isinstance(place, Partial) else str(place.dim) if isinstance(place, Shard) else "-"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tried", CASES, ids=NAMES)
def test_equals_one_device(tried: Case, ranks: int):
    """Each operand placed in every way beside whole ones, and a sample of all together."""
    ways = [placements_of(value, ranks) for value in tensors_of(tried.args, tried.kwargs)]
    whole = (REPLICATE,) * len(ways)
    single = {(*whole[:i], place, *whole[i + 1 :]) for i, places in enumerate(ways) for place in places}
    together = [places for places in product(*ways) if places not in single]
    draw = random.Random(ranks)
    chosen = sorted(single, key=str) if ranks == 2 else draw.sample(sorted(single, key=str), min(4, len(single)))
    for index, places in enumerate([*chosen, *draw.sample(together, min(SAMPLES, len(together)))]):
        check(tried, places, ranks, left_split=index % 2 == 0)
    sums = [PARTIAL if value.is_floating_point() else REPLICATE for value in tensors_of(tried.args, tried.kwargs)]
    if sums.count(PARTIAL) > 1:
        check(tried, sums, ranks, left_split=False)


@pytest.mark.parametrize(
    ("target", "rest", "results"),
    [
        (aten.slice.Tensor, (1, 0, 8), [Shard(1)]),
        (aten.slice.Tensor, (1, 8, 9223372036854775807), [Shard(1, outer=2)]),
        (aten.slice.Tensor, (1, -8), [Shard(1)]),
        (aten.slice.Tensor, (-1, 0, -8), [Shard(1, outer=2)]),
        (aten.narrow.default, (1, -16, 8), [Shard(1)]),
        (aten.slice.Tensor, (1, 4, 12), []),
        (aten.split.Tensor, (8, 1), [Shard(1)] * 3),
        (aten.split_with_sizes.default, ([16, 8], -1), [Shard(1, outer=2), Shard(1)]),
        (aten.split_with_sizes.default, ([12, 12], 1), []),
        (aten.chunk.default, (3, 1), [Shard(1)] * 3),
        (aten.chunk.default, (2, 1), []),
        (aten.tensor_split.indices, ([8, 16], 1), [Shard(1)] * 3),
    ],
)
def test_whole_blocks_are_taken_without_communication(target: Any, rest: Any, results: list[Shard]):
    """A fused projection of three, each split over the ranks."""
    tried = case(target, torch.arange(96.0).view(4, 24), *rest, goes="")
    fused = (Shard(1, outer=3),)
    decision = OneOperator(target, tried.args, {}, fused, 2).decision()
    if results:
        assert (decision.wants, list(decision.results)) == (fused, results)
    else:
        assert decision.wants == (REPLICATE,) and "the split dim" in decision.why
    for ranks in (2, 4):
        check(tried, fused, ranks, left_split=True)


def test_blocks_of_all_are_joined():
    parts = [torch.rand(4, 16), torch.rand(4, 8), torch.rand(4, 8)]
    tried = case(aten.cat.default, parts, 1, goes="")
    places = [Shard(1), Shard(1, outer=2), Shard(1)]
    assert OneOperator(aten.cat.default, tried.args, {}, places, 2).decision().results == (
        Shard(1, sizes=(16, 4, 4, 8)),
    )
    check(tried, places, 2, left_split=True)
    check(tried, places, 2, left_split=False)


@pytest.mark.parametrize("name", [name for name, why in UNTESTED.items() if "CUDA" in why])
def test_kernels_of_cuda_describe_their_parts(name: str):
    """Without a device: what is said of the results is what the kernel says of half the heads."""
    target: Any = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    more = () if "flash" in name else (None, True)
    with FakeTensorMode():
        whole, half = (torch.empty(2, heads, 48, 16, dtype=torch.bfloat16, device="cuda") for heads in (8, 4))
        results, parts = target(*[whole] * 3, *more), target(*[half] * 3, *more)
    graph = fx.Graph()
    sources = [graph.placeholder(letter) for letter in "qkv"]
    node = graph.call_function(target, (*sources, *more))
    node.meta["val"] = results
    operands = [Operand(Shard(1), tuple(whole.shape))] * 3
    rule = rule_of(target)
    assert rule is not None
    decision = rule(PlacedCall(node, operands, sources, 2))
    assert decision.results[:2] == (Shard(1), Shard(1)) and set(decision.results[2:]) == {REPLICATE}
    for place, result, part in zip(decision.results, results, parts, strict=True):
        if isinstance(result, torch.Tensor):
            sizes = [size // 2 if place == Shard(dim) else size for dim, size in enumerate(result.shape)]
            assert sizes == list(part.shape)
