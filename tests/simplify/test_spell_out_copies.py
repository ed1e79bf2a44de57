"""Copies spelled out: their value, dtype and layout stay."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse
from crossfade.simplify.spell_out_copies import SpellOutCopies

COPY = torch.ops.aten.copy.default


@pytest.mark.parametrize(
    ("into", "value"),
    [
        (torch.ones(4, 6), torch.rand(4, 6)),
        (torch.ones(4, 6).t(), torch.rand(6, 4)),
        (torch.ones(4, 6, dtype=torch.bfloat16), torch.rand(6)),
        (torch.ones(4, 6), torch.rand(4, 1, dtype=torch.float64)),
        (torch.ones(4, 8)[:, :6], torch.rand(4, 6)),
    ],
    ids=["same", "turned", "rounded", "expanded", "part"],
)
def test_a_copy_is_what_it_was(into: torch.Tensor, value: torch.Tensor) -> None:
    traced = make_fx(lambda into, value: COPY(into, value).neg(), tracing_mode="fake")(into, value)
    program = run_passes(from_graph_module(traced), [SpellOutCopies()])
    assert program.history[-1].changed
    assert not program.graph.find_nodes(op="call_function", target=COPY)
    found, expected = program.module()(into, value), COPY(into, value).neg()
    (found,) = found if isinstance(found, (tuple, list)) else (found,)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_programs_without_copies_are_left() -> None:
    text = 'x: f32[4] = input("x")\nexp: f32[4] = aten.exp(x)\nreturn output("y", exp)'
    program = parse(text)
    assert str(run_passes(program, [SpellOutCopies()])).strip() == text
