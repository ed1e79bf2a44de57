"""One spelling: every change of shape that copies nothing is a `view`, every change of order a `permute`."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.simplify.canonicalize_views import CanonicalizeViews, is_contiguous, is_view, spelled_sizes
from tests.simplify.holds import declines, rewrites


def one(call: str, result: str, kind: str = "[4, 1, 6]") -> str:
    return f"""
        x: f32{kind} = input("x")
        y: f32{result} = {call}
        z: f32{result} = aten.neg(y)
        return output("z", z)
        """


VIEWS = {
    "unsafe-view": [("aten._unsafe_view(x, [4, -1])", "[4, 6]")],
    "reshape": [
        ("aten.reshape(x, [8, 3])", "[8, 3]"),
        ("aten.reshape(shape=[-1], self=x)", "[24]"),
        ("aten._reshape_alias(x, [4, 6], [6, 1])", "[4, 6]"),
        ("aten.reshape_as(x, x)", "[4, 1, 6]"),
    ],
    "flatten": [("aten.flatten.using_ints(x)", "[24]"), ("aten.flatten.using_ints(x, 1)", "[4, 6]")],
    "unflatten": [("aten.unflatten.int(x, -1, [2, -1])", "[4, 1, 2, 3]")],
    "squeeze": [
        ("aten.squeeze(x)", "[4, 6]"),
        ("aten.squeeze.dim(x, -2)", "[4, 6]"),
        ("aten.squeeze.dims(x, [0, 1])", "[4, 6]"),
    ],
    "unsqueeze": [("aten.unsqueeze(x, 0)", "[1, 4, 1, 6]"), ("aten.unsqueeze(x, -1)", "[4, 1, 6, 1]")],
    "inferred-size": [("aten.view(x, [2, -1, 3])", "[2, 4, 3]"), ("aten.view(x, [-1])", "[24]")],
}


@pytest.mark.parametrize(
    ("rule", "call", "result"), [(rule, call, result) for rule, calls in VIEWS.items() for call, result in calls]
)
def test_view(rule: str, call: str, result: str):
    after = f"""
        x: f32[4, 1, 6] = input("x")
        view: f32{result} = aten.view(x, {result})
        z: f32{result} = aten.neg(view)
        return output("z", z)
        """
    rewrites(CanonicalizeViews(), one(call, result), after, {rule: 1})


@pytest.mark.parametrize(
    ("call", "result", "order"),
    [
        ("aten.transpose.int(x, 0, -1)", "[6, 1, 4]", "[2, 1, 0]"),
        ("aten.swapaxes(x, 1, 2)", "[4, 6, 1]", "[0, 2, 1]"),
        ("aten.mT(x)", "[4, 6, 1]", "[0, 2, 1]"),
    ],
)
def test_permute(call: str, result: str, order: str):
    after = f"""
        x: f32[4, 1, 6] = input("x")
        permute: f32{result} = aten.permute(x, {order})
        z: f32{result} = aten.neg(permute)
        return output("z", z)
        """
    rewrites(CanonicalizeViews(), one(call, result), after, {"transpose": 1})


@pytest.mark.parametrize("call", ["aten.t(x)", "aten.numpy_T(x)", "aten.transpose.int(dim1=1, dim0=0, self=x)"])
def test_permute_of_a_matrix(call: str):
    after = """
        x: f32[4, 6] = input("x")
        permute: f32[6, 4] = aten.permute(x, [1, 0])
        z: f32[6, 4] = aten.neg(permute)
        return output("z", z)
        """
    rewrites(CanonicalizeViews(), one(call, "[6, 4]", "[4, 6]"), after, {"transpose": 1})


def test_what_is_written_keeps_its_spelling():
    """A reshape that may copy is not taken for the view it happens to be where a write would tell them apart."""
    declines(
        CanonicalizeViews(),
        """
        x: f32[4, 6] = input("x")
        y: f32[24] = aten.reshape(x, [24])
        w: f32[24] = aten.neg_(y)
        return output("y", y)
        """,
        "its memory is written to",
    )


DECLINED = {
    "it is not provably free of a copy": """
        x: f32[4, 6] = input("x")
        t: f32[6, 4] = aten.permute(x, [1, 0])
        y: f32[24] = aten.reshape(t, [24])
        return output("y", y)
        """,
    "it orders no dims": """
        x: f32[4] = input("x")
        y: f32[4] = aten.t(x)
        z: f32[4] = aten.neg(y)
        return output("z", z)
        """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_declined(reason: str):
    declines(CanonicalizeViews(), DECLINED[reason], reason)


def traced(function, *inputs: torch.Tensor) -> Program:
    return from_graph_module(make_fx(function, tracing_mode="symbolic")(*inputs))


def test_symbolic_sizes():
    """One symbolic size is left to torch, given ones are taken, of several nothing is made; no guard is added."""
    aten = torch.ops.aten

    def function(x, y):
        rows = aten.view(x, [x.shape[0], 2, 3])  # a row of x has 6 elements from here on
        row = aten.unsqueeze(rows, 0)
        given = aten._unsafe_view(y, [y.shape[0], 1, y.shape[1]])
        several = aten.unsqueeze(y, 0)
        inferred = aten.view(x, [-1, 3])
        return row.neg(), given.neg(), several.neg(), inferred.neg()

    program = traced(function, torch.ones(5, 6), torch.ones(7, 8))
    shapes = program.fake_mode.shape_env
    guards = len(shapes.guards)
    done = run_passes(program, [CanonicalizeViews()])
    assert len(shapes.guards) == guards
    views = [node.args[1] for node in done.graph.find_nodes(op="call_function", target=aten.view.default)]
    assert [1, -1, 2, 3] in views and [-1, 3] in views and len(views) == 4
    reasons = {verdict.reason for verdict in done.history[0].verdicts}
    assert reasons == {"several of its sizes are symbolic", "its sizes are symbolic"}
    fresh = torch.randn(9, 6), torch.randn(2, 3)
    for expected, actual in zip(program.module()(*fresh), done.module()(*fresh), strict=True):
        assert torch.equal(expected, actual)


def test_is_view_is_what_torch_says():
    """All shapes of 12 elements, from all layouts of one of them."""
    layouts = [torch.empty(12), torch.empty(4, 3), torch.empty(3, 4).t(), torch.empty(2, 2, 3).permute(1, 0, 2)]
    layouts += [
        torch.empty(2, 1, 6).transpose(0, 1),
        torch.empty(4, 6)[:, ::2],
        torch.empty(8, 3)[::2],
        torch.empty(0, 3),
    ]
    layouts += [torch.empty(1, 3).expand(4, 3), torch.empty(4, 1).expand(4, 3), torch.empty(()).expand(4, 3)]
    checked = 0
    for value in layouts:
        for shape in product(range(13), repeat=3):
            if torch.Size(shape).numel() == value.numel():
                assert is_view(value, shape) == torch_views(value, shape), f"{value.shape} {value.stride()} {shape}"
                checked += 1
        assert not is_contiguous(value) or value.is_contiguous()
    assert checked > 100


def torch_views(value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    try:
        value.view(shape)
    except RuntimeError:
        return False
    return True


def test_spelled_sizes_of_numbers():
    assert spelled_sizes(torch.empty(0, 3)) == [0, 3]
    assert spelled_sizes(torch.empty(())) == []
