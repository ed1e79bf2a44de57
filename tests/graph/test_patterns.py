"""Patterns match calls however their arguments are written, and mistakes in them are named."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import RewriteError
from crossfade.graph.patterns import compile_pattern
from tests.graph.small_programs import named, program_of

MATCHES = [
    ("aten.add.Tensor(a, b)", "aten.add.Tensor(x, y)", {"a": "x", "b": "y"}),
    ("aten.add.Tensor(a, a)", "aten.add.Tensor(x, x)", {"a": "x"}),
    ("aten.add.Tensor(a, a)", "aten.add.Tensor(x, y)", None),
    ("aten.add.Tensor(_, _)", "aten.add.Tensor(x, y)", {}),
    ("aten.add.Tensor(a, 1)", "aten.add.Tensor(x, 1)", {"a": "x"}),
    ("aten.add.Tensor(a, 1)", "aten.add.Tensor(x, True)", None),
    ("aten.add.Tensor(a, 1)", "aten.add.Tensor(x, 1.0)", None),
    ("aten.add.Tensor(a, True)", "aten.add.Tensor(x, 1)", None),
    ("aten.add.Tensor(a, -1)", "aten.add.Tensor(x, -1)", {"a": "x"}),
    ("aten.add.Tensor(a, b)", "aten.add.Tensor(x, y, alpha=2)", None),
    ("aten.add.Tensor(a, b)", "aten.add.Tensor(x, y, alpha=1)", {"a": "x", "b": "y"}),
    ("aten.add.Tensor(a, b, alpha=k)", "aten.add.Tensor(x, y, alpha=2)", {"a": "x", "b": "y", "k": 2}),
    ("aten.add.Tensor(a, b, alpha=k)", "aten.add.Tensor(x, y)", {"a": "x", "b": "y", "k": 1}),
    ("aten.add.Tensor(a, b, alpha=2)", "aten.add.Tensor(x, y, alpha=3)", None),
    ("aten.add.Tensor(a, b)", "aten.add.Tensor(x, other=y)", {"a": "x", "b": "y"}),
    ("(aten.sub.Tensor | aten.add.Tensor)(a, b)", "aten.add.Tensor(x, y)", {"a": "x", "b": "y"}),
    ("(aten.sub.Tensor | aten.mul.Tensor)(a, b)", "aten.add.Tensor(x, y)", None),
    ("aten.sum.dim_IntList(a, [0])", "aten.sum.dim_IntList(x, [0])", {"a": "x"}),
    ("aten.sum.dim_IntList(a, [0])", "aten.sum.dim_IntList(x, [0], True)", None),
    ("aten.sum.dim_IntList(a, [0])", "aten.sum.dim_IntList(x, [0], False)", {"a": "x"}),
    ("aten.sum.dim_IntList(a, [0])", "aten.sum.dim_IntList(x, [1])", None),
    ("aten.sum.dim_IntList(a, [d])", "aten.sum.dim_IntList(x, [1])", {"a": "x", "d": 1}),
    ("aten.sum.dim_IntList(a, [d])", "aten.sum.dim_IntList(x, [0, 1])", None),
    ("aten.sum.dim_IntList(a, dims)", "aten.sum.dim_IntList(x, [0, 1])", {"a": "x", "dims": [0, 1]}),
    ("aten.cat([a, b])", "aten.cat([x, y])", {"a": "x", "b": "y"}),
    ("aten.cat([a, a])", "aten.cat([x, y])", None),
    ("aten.cat(aten.split.Tensor(a, 1))", "aten.cat(x)", None),
    ("aten.transpose.int(a, d, d)", "aten.transpose.int(x, 1, 1)", {"a": "x", "d": 1}),
    ("aten.neg(a)", "aten.relu(x)", None),
]


@pytest.mark.parametrize(("pattern", "call", "bound"), MATCHES, ids=str)
def test_patterns(pattern: str, call: str, bound: dict | None):
    if call == "aten.cat(x)":
        call = "aten.cat([x])"
    program = program_of(f'x: f32[2, 2] = input("x")\ny: f32[2, 2] = input("y")\nz = {call}\nreturn output("z", z)')
    found: dict = {}
    matched = compile_pattern(pattern).matches(named(program)["z"], found)
    assert matched == (bound is not None)
    if bound is not None:
        assert {k: v.name if isinstance(v, torch.fx.Node) else v for k, v in found.items()} == bound


def test_patterns_nest_and_take_elements():
    program = program_of("""
        x: f32[4] = input("x")
        parts: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
        a: f32[2] = parts[1]
        z: f32[2] = aten.neg(a)
        return output("z", z)
    """)
    root = named(program)["z"]
    assert compile_pattern("aten.neg(aten.split.Tensor(x, 2)[1])").matches(root, {})
    assert not compile_pattern("aten.neg(aten.split.Tensor(x, 2)[0])").matches(root, {})
    assert compile_pattern("aten.neg(aten.split.Tensor(x, n)[i])").depth == 3


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x", r"the pattern 'x': expected a call at its root"),
        ("aten.nothing(x)", r"the pattern 'aten.nothing\(x\)'"),
        ("aten.neg(x", r"the pattern 'aten.neg\(x'"),
        ("aten.neg(x + 1)", r"the pattern 'aten.neg\(x \+ 1\)'"),
    ],
)
def test_bad_patterns_are_named(pattern: str, message: str):
    with pytest.raises(RewriteError, match=message):
        compile_pattern(pattern)
