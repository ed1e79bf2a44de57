"""Factors of products that are reduce-scattered: exchanged where that is less to send, shared, cut, and left alone."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from crossfade.communicate.exchange_factors import ExchangeFactors
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

ETHERNET = preset("ethernet-1gbit")
PRODUCT = """
    g: f32[8, 512] = input("g")
    x: f32[8, 512] = input("x")
    t: f32[512, 8] = aten.t(g)
    w: f32[512, 512] = aten.mm(t, x)
    start: f32[256, 512] = c10d.reduce_scatter_tensor(w, "{op}", 2, "dp")
    done: f32[256, 512] = c10d.wait_tensor(start)
    return gradient("w", done)
"""
LEFT = PRODUCT.format(op="sum")


def after(text: str, pass_: ExchangeFactors) -> tuple[list[str], Program]:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [pass_])
    verify(done, recompute=True)
    return [line for line in render(done).splitlines() if "input(" not in line], done


def with_pieces_of(size: int) -> Machine:
    fabric = ETHERNET.fabric("dp")
    exchange = replace(fabric.links[Kind.ALL_TO_ALL], piece=size, latency=0.0)
    return replace(ETHERNET, fabrics={"*": replace(fabric, links={**fabric.links, Kind.ALL_TO_ALL: exchange})})


def test_an_average_is_taken_of_the_gathered_factor():
    text, done = after(PRODUCT.format(op="avg"), ExchangeFactors(ETHERNET))
    assert text[1:4] == [
        "mul: f32[8, 512] = aten.mul.Tensor(x, 0.5)",
        'all_gather_into_tensor: f32[16, 512] = c10d.all_gather_into_tensor(mul, 2, "dp")',
        "wait_tensor: f32[16, 512] = c10d.wait_tensor(all_gather_into_tensor)",
    ]
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "start: replaced: its factors travel instead, and are multiplied where the product is kept",
        "all_gather_into_tensor: inserted: gathers a product's second factor",
        "all_to_all_single: inserted: exchanges what each rank needs of a product's first factor",
    ]


def test_products_with_the_same_second_factor_gather_it_once():
    more = """
        h: f32[8, 512] = input("h")
        u: f32[512, 8] = aten.t(h)
        v: f32[512, 512] = aten.mm(u, x)
        begun: f32[256, 512] = c10d.reduce_scatter_tensor(v, "sum", 2, "dp")
        ended: f32[256, 512] = c10d.wait_tensor(begun)
        return gradient("w", done), gradient("v", ended)
    """
    both = LEFT.replace('    return gradient("w", done)\n', textwrap.indent(textwrap.dedent(more), "    "))
    text, done = after(both.replace("\n\n", "\n"), ExchangeFactors(ETHERNET))
    assert sum("c10d.all_gather_into_tensor" in line for line in text) == 1
    assert sum("c10d.all_to_all_single" in line for line in text) == 2
    assert done.history[0].counts == {"replaced": 2}


def test_an_exchange_is_cut_where_it_would_be_slow_in_one():
    text, _ = after(LEFT, ExchangeFactors(with_pieces_of(8192)))
    assert sum("c10d.all_to_all_single" in line for line in text) == 2
    assert text[-7:] == [
        "view_1: f32[2, 4, 256] = aten.view(wait_tensor_1, [2, -1, 256])",
        "view_2: f32[2, 4, 256] = aten.view(wait_tensor_2, [2, -1, 256])",
        "cat: f32[2, 8, 256] = aten.cat([view_1, view_2], 1)",
        "view_3: f32[16, 256] = aten.view(cat, [16, 256])",
        "t_1: f32[256, 16] = aten.t(view_3)",
        "mm: f32[256, 512] = aten.mm(t_1, wait_tensor)",
        'return gradient("w", mm)',
    ]


REASONS = {
    "only the plain reduce-scatter is replaced": LEFT.replace(
        "    return", "    other: f32[256, 512] = aten.neg(start)\n    return"
    ).replace("return", 'return output("other", other),'),
    "its reduction is no sum of floats": PRODUCT.format(op="max"),
    "something else uses the product": LEFT.replace("return", 'return output("w", w),'),
    "one of its factors is written to in place": LEFT.replace(
        "    start:", "    added: f32[8, 512] = aten.add_.Scalar(x, 1)\n    start:"
    ),
    "a factor divided by the ranks could become too small for half precision": PRODUCT.format(op="avg").replace(
        "f32", "f16"
    ),
    "its rows do not divide by the ranks": PRODUCT.format(op="sum")
    .replace('f32[8, 512] = input("g")', 'f32[8, 511] = input("g")')
    .replace("t: f32[512, 8]", "t: f32[511, 8]")
    .replace("w: f32[512, 512]", "w: f32[511, 512]")
    .replace("    start:", "    pad: f32[512, 512] = aten.constant_pad_nd(w, [0, 0, 0, 1])\n    start:")
    .replace("reduce_scatter_tensor(w", "reduce_scatter_tensor(pad"),
    "its factors would not travel in less time": LEFT.replace("8", "300"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_left(reason: str):
    before = parse(textwrap.dedent(REASONS[reason]), groups={"dp": 2})
    done = run_passes(before, [ExchangeFactors(ETHERNET)])
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]
    assert render(done) == render(before)


def test_products_of_other_groups_are_no_gradients():
    before = parse(textwrap.dedent(LEFT.replace('"dp"', '"tp"')), groups={"tp": 2})
    done = run_passes(before, [ExchangeFactors(ETHERNET)])
    assert done.history[0].verdicts == () and render(done) == render(before)


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("machine", [ETHERNET, with_pieces_of(4096)], ids=["whole", "in pieces"])
def test_on_ranks_every_sum_is_the_same(ranks: Any, op: str, count: int, machine: Machine):
    """Of whole numbers, which have one sum in whatever order: bit for bit."""
    text = PRODUCT.format(op=op).replace(", 2, ", f", {count}, ").replace("[256", f"[{512 // count}")
    compare = functools.partial(differences, whole_numbers=True)
    for found in ranks(count).run(compare, text, ExchangeFactors(machine)):
        assert found == [0.0]
