"""All-to-alls packed: tokens with their weights and positions; dependent ones apart; moved; and numbers on ranks."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossfade import Ranks
from crossfade.communicate.bucket_all_to_alls import BucketAllToAlls
from crossfade.communicate.lower_all_to_alls import LowerAllToAlls
from crossfade.compile.pipeline import optimize
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

DISPATCH = """
    x: f32[8, 16] = input("x")
    p: bf16[8] = input("p")
    e: f32[16, 16] = parameter("e")
    s: f32[8, 16] = c10d.all_to_all_single(x, [4, 4], [4, 4], "dp")
    w: f32[8, 16] = c10d.wait_tensor(s)
    t: bf16[8] = c10d.all_to_all_single(p, [4, 4], [4, 4], "dp")
    v: bf16[8] = c10d.wait_tensor(t)
    h: f32[8, 16] = aten.mm(w, e)
    b: f32[8, 16] = c10d.all_to_all_single(h, [4, 4], [4, 4], "dp")
    y: f32[8, 16] = c10d.wait_tensor(b)
    n: bf16[8] = aten.neg(v)
    return output("y", y), output("n", n)
"""
"""Tokens to the experts with their weights, and back."""


def packed(text: str, **options: Any) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [BucketAllToAlls(**options)])
    verify(done, recompute=True)
    return done


def test_tokens_travel_with_their_weights_and_return_alone() -> None:
    apart, together = packed(DISPATCH), packed(DISPATCH, mixed_dtypes=True)
    assert len(collectives.find(apart.graph)) == 3 and not apart.history[0].changed
    there, back = collectives.find(together.graph)
    assert there.dtype is torch.uint8 and there.bytes == 8 * 16 * 4 + 8 * 2
    assert back.dtype is torch.float32


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("c10d.all_to_all_single(x, [5, 3], [5, 3], {})", "its parts differ in size, or are not known before it runs"),
        ("c10d.all_to_all_single(x, [4, 4], [4, 4], {})", "it is the only one of its group, dtype and reduction"),
    ],
    ids=["unequal", "alone"],
)
def test_refusals(line: str, reason: str) -> None:
    call = line.format('"dp"')
    text = f'x: f32[8] = input("x")\ns: f32[8] = {call}\nw: f32[8] = c10d.wait_tensor(s)\nreturn output("w", w)'
    done = packed(text)
    assert not done.history[0].changed
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]


def test_the_default_pipeline_packs_moves_and_cuts_them() -> None:
    text = """
        x: f32[8, 65536] = input("x")
        p: f32[8, 65536] = input("p")
        a: f32[8, 8] = input("a")
        m: f32[8, 8] = aten.mm(a, a)
        k: f32[8, 8] = aten.mm(m, a)
        s: f32[8, 65536] = c10d.all_to_all_single(x, [4, 4], [4, 4], "dp")
        w: f32[8, 65536] = c10d.wait_tensor(s)
        t: f32[8, 65536] = c10d.all_to_all_single(p, [4, 4], [4, 4], "dp")
        v: f32[8, 65536] = c10d.wait_tensor(t)
        o: f32[8, 8] = aten.mm(k, a)
        y: f32[8, 65536] = aten.add.Tensor(w, v)
        return output("y", y), output("o", o)
    """
    program = parse(textwrap.dedent(text), groups={"dp": 2})
    done = from_graph_module(optimize(program.module(), groups={"dp": 2}, backends={"dp": "gloo"}).module)
    lines = [line.split(":")[0].rstrip("_0123456789") for line in str(done).splitlines()]
    order = [line for line in lines if line in ("all_to_all_single", "wait_tensor", "m", "k", "o", "mm")]
    first, last = order.index("all_to_all_single"), len(order) - 1 - order[::-1].index("wait_tensor")
    matmuls = [place for place, line in enumerate(order) if line in ("m", "k", "o", "mm")]
    assert order.count("all_to_all_single") == 4  # one of 4 MB, in pieces of 1
    assert first < min(matmuls) and order.index("wait_tensor") > max(matmuls) and last > first


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_stay_to_the_last_bit(ranks: Callable[[int], Ranks], count: int) -> None:
    parts = str([8 // count] * count)
    text = DISPATCH.replace("[4, 4]", parts)
    for found in ranks(count).run(
        functools.partial(differences, whole_numbers=False), text, BucketAllToAlls(mixed_dtypes=True)
    ):
        assert found == [0.0, 0.0]


LARGE = """
    x: f32[8, 100003] = input("x")
    s: f32[8, 100003] = c10d.all_to_all_single(x, PARTS, PARTS, "dp")
    w: f32[8, 100003] = c10d.wait_tensor(s)
    return output("w", w)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_pieces_are_the_whole(ranks: Callable[[int], Ranks], count: int) -> None:
    text = LARGE.replace("PARTS", str([8 // count] * count))
    for found in ranks(count).run(functools.partial(differences, whole_numbers=False), text, LowerAllToAlls()):
        assert found == [0.0]
