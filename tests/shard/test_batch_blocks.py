"""Where samples lie within merged dims: what a rank takes of a draw along them is its own samples' part."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import PassError
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from crossfade.shard.batch_blocks import blocks_of
from crossfade.shard.batch_dims import mark_batch_dims
from crossfade.shard.draw_globally import DrawGlobally

BODIES = {
    "samples first": ("a = aten.view(x, [{rows3}, 4])\ny = aten.rand_like(a)", 1),
    "samples second": ("t = aten.transpose.int(x, 0, 1)\nc = aten.clone(t, memory_format=contiguous_format)\n"
                       "a = aten.view(c, [{rows3}, 4])\ny = aten.rand_like(a)", 3),
    "through a product": ("t = aten.transpose.int(x, 0, 1)\nc = aten.clone(t, memory_format=contiguous_format)\n"
                          "v = aten.view(c, [{rows3}, 4])\nw = aten.ones([4, 5], pin_memory=False)\nm = aten.mm(v, w)\n"
                          "y = aten.rand_like(m)", 3),
    "one below the other": ("n = aten.neg(x)\na = aten.cat([x, n])\ny = aten.rand_like(a)", 2),
    "repeated": ("a = aten.repeat(x, [2, 1, 1])\ny = aten.rand_like(a)", 2),
    "a half of what was joined": ("a = aten.cat([x, x, x, x])\nh = aten.slice.Tensor(a, 0, 0, {rows2})\n"
                                  "y = aten.rand_like(h)", 2),
    "by what it is added to": ("t = aten.transpose.int(x, 0, 1)\nc = aten.clone(t, memory_format=contiguous_format)\n"
                               "v = aten.view(c, [{rows3}, 4])\ny = aten.rand([{rows3}, 4], pin_memory=False)\n"
                               "z = aten.add.Tensor(v, y)", 3),
    "by how it is viewed": ("y = aten.rand([{rows3}, 4], pin_memory=False)\nz = aten.view(y, [3, {rows}, 4])", 3),
    "probabilities": ("t = aten.transpose.int(x, 0, 1)\nc = aten.clone(t, memory_format=contiguous_format)\n"
                      "v = aten.view(c, [{rows3}, 4])\na = aten.sigmoid(v)\ny = aten.bernoulli(a)", 3),
}  # fmt: skip


def program_of(body: str, rows: int) -> Program:
    text = f'x: f32[{rows}, 3, 4] = input("x")\n{body.format(rows=rows, rows2=2 * rows, rows3=3 * rows)}\n'
    return parse(text + 'return output("y", y)')


def marked(body: str, rows: int, ranks: int) -> Program:
    program = program_of(body, rows)
    mark_batch_dims(program, program_of(body, rows * ranks))
    return program


def own_part(whole: torch.Tensor, blocks: int, rank: int, ranks: int) -> torch.Tensor:
    each = whole.unflatten(0, (blocks, -1)).chunk(ranks, 1)[rank]
    return each.flatten(0, 1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", BODIES)
def test_parts_are_those_of_one_device(name: str, ranks: int):
    body, blocks = BODIES[name]
    x = torch.randn(2 * ranks, 3, 4, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    (expected,) = Executable(program_of(body, 2 * ranks), {})([x])
    program = marked(body, 2, ranks)
    (draw,) = (node for node in program.graph.nodes if node.name == "y")
    assert blocks_of(draw) == blocks
    done = run_passes(program, [DrawGlobally(ranks)])
    verify(done, recompute=True)
    for rank in range(ranks):
        torch.manual_seed(7)
        (found,) = Executable(done, {})([x[2 * rank : 2 * rank + 2], rank])
        assert torch.equal(found, own_part(expected, blocks, rank, ranks))


UNKNOWN = r"it is not known which elements along dim 0 belong to which sample.*semantics=\"per-rank\""


@pytest.mark.parametrize(
    "body",
    [
        "y = aten.rand([{rows3}, 4], pin_memory=False)",
        "a = aten.view(x, [{rows3}, 4])\nb = aten.select.int(x, 1, 0)\nc = aten.cat([a, b])\ny = aten.rand_like(c)",
        "a = aten.select.int(x, 1, 0)\np = aten.constant_pad_nd(a, [0, 0, 0, 1])\ny = aten.rand_like(p)",
    ],
    ids=["sizes alone", "rows of different length joined", "a row of nobody's"],
)
def test_what_cannot_be_told_apart_is_refused(body: str):
    with pytest.raises(PassError, match=UNKNOWN):
        run_passes(marked(body, 2, 2), [DrawGlobally(2)])
