"""Experts spread over ranks, as text: what travels, what is computed where, and what is refused."""

from __future__ import annotations

import importlib
import re

import pytest

from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.shard.average_expert_gradients import AverageExpertGradients
from crossfade.shard.split_experts import SplitExperts

FORWARD = """
w: bf16[4, 8, 32] = parameter("w")
v: bf16[4, 8, 16] = parameter("v")
x: bf16[6, 8] = input("x")
scale: bf16[6, 1] = input("scale")
bias: bf16[16] = input("bias")
ends: i32[4] = input("ends")
up: bf16[6, 32] = aten._grouped_mm(x, w, ends)
halves: (bf16[6, 16], bf16[6, 16]) = aten.split.Tensor(up, 16, -1)
gate: bf16[6, 16] = halves[0]
other: bf16[6, 16] = halves[1]
silu: bf16[6, 16] = aten.silu(gate)
mul: bf16[6, 16] = aten.mul.Tensor(silu, other)
shifted: bf16[6, 16] = aten.add.Tensor(mul, bias)
turned: bf16[4, 16, 8] = aten.transpose.int(v, 1, 2)
down: bf16[6, 8] = aten._grouped_mm(shifted, turned, ends)
scaled: bf16[6, 8] = aten.mul.Tensor(down, scale)
grad: bf16[6, 8] = aten.roll(scaled, [1], [0])
columns: bf16[16, 6] = aten.transpose.int(shifted, 0, 1)
grad_of_v: bf16[4, 16, 8] = aten._grouped_mm(columns, grad, ends)
turned_back: bf16[4, 8, 16] = aten.transpose.int(grad_of_v, 1, 2)
inputs: bf16[8, 6] = aten.transpose.int(x, 0, 1)
grad_up: bf16[6, 32] = aten.cat([shifted, shifted], 1)
grad_of_w: bf16[4, 8, 32] = aten._grouped_mm(inputs, grad_up, ends)
halved: bf16[4, 8, 32] = aten.div.Tensor(grad_of_w, 2)
return output("y", scaled), gradient("v", turned_back), gradient("w", halved)
"""

SPLIT = """
w: bf16[2, 8, 32] = parameter("w")
v: bf16[2, 8, 16] = parameter("v")
x: bf16[6, 8] = input("x")
scale: bf16[6, 1] = input("scale")
bias: bf16[16] = input("bias")
exchange_rows: bf16[12, 8] = crossfade.exchange_rows(x, getitem, getitem_1, 12, "ep")
up: bf16[12, 32] = aten._grouped_mm(index_select, w, getitem_4)
halves: (bf16[12, 16], bf16[12, 16]) = aten.split.Tensor(up, 16, -1)
silu: bf16[12, 16] = aten.silu(gate)
mul: bf16[12, 16] = aten.mul.Tensor(silu, other)
shifted: bf16[12, 16] = aten.add.Tensor(mul, bias)
turned: bf16[2, 16, 8] = aten.transpose.int(v, 1, 2)
down: bf16[12, 8] = aten._grouped_mm(shifted, turned, getitem_4)
exchange_rows_1: bf16[6, 8] = crossfade.exchange_rows(index_select_1, getitem_1, getitem, 6, "ep")
scaled: bf16[6, 8] = aten.mul.Tensor(wait_tensor_2, scale)
grad: bf16[6, 8] = aten.roll(scaled, [1], [0])
columns: bf16[16, 12] = aten.transpose.int(shifted, 0, 1)
exchange_rows_2: bf16[12, 8] = crossfade.exchange_rows(grad, getitem, getitem_1, 12, "ep")
grad_of_v: bf16[2, 16, 8] = aten._grouped_mm(columns, index_select_2, getitem_4)
turned_back: bf16[2, 8, 16] = aten.transpose.int(grad_of_v, 1, 2)
grad_up: bf16[12, 32] = aten.cat([shifted, shifted], 1)
inputs_1: bf16[8, 12] = aten.transpose.int(index_select, 0, 1)
grad_of_w: bf16[2, 8, 32] = aten._grouped_mm(inputs_1, grad_up, getitem_4)
halved: bf16[2, 8, 32] = aten.div.Tensor(grad_of_w, 2)
return output("y", scaled), gradient("v", turned_back), gradient("w", halved)
"""


def split(text: str, ranks: int = 2) -> str:
    return str(run_passes(parse(text, groups={"ep": ranks}), [SplitExperts(ranks=ranks)]))


def test_what_is_between_products_is_computed_where_experts_are() -> None:
    """Forward and backward; what moves rows (a roll here) is done where they came from."""
    found = split(FORWARD).splitlines()
    shown = [line for line in found if re.match(r"(exchange_rows|return|\w+: .*(bf16).*)", line)]
    hidden = ("index_select", "wait_tensor", "gate", "other")
    assert [line for line in shown if not line.startswith(hidden)] == SPLIT.strip().splitlines()


FALLBACK = """
w: f32[4, 8, 16] = parameter("w")
x: f32[6, 8] = input("x")
ends: i32[4] = input("ends")
y: f32[6, 16] = transformers.grouped_mm_fallback(x, w, ends)
grad: f32[6, 16] = aten.silu_backward(y, y)
both: (f32[6, 8], f32[4, 8, 16]) = transformers.grouped_mm_fallback_backward(x, w, ends, grad)
of_x: f32[6, 8] = both[0]
of_w: f32[4, 8, 16] = both[1]
return output("y", of_x), gradient("w", of_w)
"""


def test_the_librarys_kernel_for_other_dtypes_is_known() -> None:
    importlib.import_module("transformers.integrations.moe")  # registers it
    found = split(FALLBACK)
    for line in (
        "y: f32[12, 16] = transformers.grouped_mm_fallback(index_select, w, getitem_4)",
        "grad: f32[12, 16] = aten.silu_backward(y, y)",
        "both: (f32[12, 8], f32[2, 8, 16]) = "
        "transformers.grouped_mm_fallback_backward(index_select, w, getitem_4, grad)",
        "index_select_1: f32[12, 8] = aten.index_select(of_x, 0, getitem_3)",
        "of_w: f32[2, 8, 16] = both[1]",
    ):
        assert line in found


def test_rows_that_are_used_twice_travel_once() -> None:
    program = run_passes(parse(FORWARD, groups={"ep": 2}), [SplitExperts()])
    sent = [found.inputs[0].name for found in collectives.find(program.graph)]
    assert sent.count("x") == 1
    assert program.history[-1].counts["split"] == 2


def test_what_nothing_uses_brings_no_rows_back() -> None:
    text = FORWARD.replace("shifted: bf16", "unused: bf16[6, 16] = aten.exp(mul)\nshifted: bf16", 1)
    assert split(text) == split(FORWARD)


def test_every_ends_is_a_region_of_its_own() -> None:
    text = """
    w: bf16[4, 8, 8] = parameter("w")
    x: bf16[6, 8] = input("x")
    ends: i32[4] = input("ends")
    others: i32[4] = input("others")
    a: bf16[6, 8] = aten._grouped_mm(x, w, ends)
    b: bf16[6, 8] = aten.relu(a)
    c: bf16[6, 8] = aten._grouped_mm(b, w, others)
    return output("y", c)
    """
    program = run_passes(parse(text, groups={"ep": 2}), [SplitExperts()])
    assert program.history[-1].counts == {"split": 1, "exchanges": 6}
    assert "b: bf16[6, 8] = aten.relu(" in str(program)  # at home: what comes next is in another order


def test_programs_without_experts_stay_as_they_are() -> None:
    text = 'x: f32[4] = input("x")\ny: f32[4] = aten.neg(x)\nreturn output("y", y)\n'
    assert split(text).strip() == text.strip()


ONE = """
w: bf16[4, 8, 8] = parameter("w")
x: bf16[6, 8] = input("x")
ends: i32[4] = input("ends")
y: bf16[6, 8] = aten._grouped_mm(x, {matrices}, ends)
{more}
return output("y", {result})
"""


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ({}, 3, r"4 experts \(w\) over 3 ranks"),
        ({"more": "s: bf16[] = aten.sum(w)", "result": "s"}, 2, "uses the matrices of all experts at once"),
        ({"result": "w"}, 2, r"is a result of its own \(y\)"),
        ({"more": "z: bf16[4, 8, 8] = aten.neg(w)", "result": "z"}, 2, r"z is a result of its own \(y\)"),
    ],
)
def test_what_cannot_be_split_is_refused(change: dict[str, str], ranks: int, reason: str) -> None:
    text = ONE.format(**{"matrices": "w", "more": "", "result": "y", **change})
    with pytest.raises(PassError, match=reason):
        split(text, ranks)


def test_matrices_that_are_no_parameter_are_refused() -> None:
    text = ONE.format(matrices="w", more="", result="y").replace('parameter("w")', 'input("w")')
    with pytest.raises(PassError, match="matrices that are no parameter"):
        split(text)


def test_gradients_of_experts_are_divided_by_the_ranks_whose_rows_they_are_of() -> None:
    text = """
    w: f32[2, 4] = parameter("w")
    g: f32[2, 4] = aten.neg(w)
    h: f32[2, 4] = aten.exp(w)
    return gradient("w", g), gradient("v", h)
    """
    alone = run_passes(parse(text), [AverageExpertGradients(("w",), 4, "")])
    assert "aten.mul.Tensor(g, 0.25)" in str(alone)
    assert 'gradient("v", h)' in str(alone)
    assert not collectives.find(alone.graph)
    summed = run_passes(parse(text, groups={"dp": 2}), [AverageExpertGradients(("w",), 4, "dp", "sum")])
    assert 'c10d.all_reduce(g, "sum", "dp")' in str(summed)
