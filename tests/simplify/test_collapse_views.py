"""Chains become one step or none; a step that something else reads stays, and so does one that might copy."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.simplify.collapse_views import CollapseViews
from tests.simplify.holds import declines, program_of, rewrites


def chain(*steps: tuple[str, str], kind: str = "[4, 6]") -> str:
    """Calls one after another, each on `{0}`, and a reader of the last."""
    lines, last = [f'x: f32{kind} = input("x")'], "x"
    for index, (call, result) in enumerate(steps):
        lines.append(f"a{index}: f32{result} = {call.format(last)}")
        last, kind = f"a{index}", result
    return "\n".join([*lines, f"z: f32{kind} = aten.neg({last})", 'return output("z", z)'])


VIEW, UNSAFE = ("aten.view({0}, [4, 2, 3])", "[4, 2, 3]"), ("aten._unsafe_view({0}, [8, 3])", "[8, 3]")
CASES = {
    "views": ((VIEW, UNSAFE), [("aten.view({0}, [8, 3])", "[8, 3]")], {"one-shape": 1}),
    "three views": (
        (VIEW, UNSAFE, ("aten.reshape({0}, [-1])", "[24]")),
        [("aten.view({0}, [-1])", "[24]")],
        {"one-shape": 2},
    ),
    "a view and back": ((VIEW, ("aten.flatten.using_ints({0}, 1)", "[4, 6]")), [], {"same-shape-again": 1}),
    "one more dim, one less": (
        (("aten.unsqueeze({0}, 1)", "[4, 1, 6]"), ("aten.squeeze.dim({0}, -2)", "[4, 6]")),
        [],
        {"same-shape-again": 1},
    ),
    "ones come and go": (
        (("aten.unsqueeze({0}, 1)", "[4, 1, 6]"), ("aten.unsqueeze({0}, 0)", "[1, 4, 1, 6]")),
        [("aten.view({0}, [1, 4, 1, 6])", "[1, 4, 1, 6]")],
        {"one-shape": 1},
    ),
    "ones that moved": (
        (
            ("aten.view({0}, [4, 1, 6])", "[4, 1, 6]"),
            ("aten.permute({0}, [1, 0, 2])", "[1, 4, 6]"),
            ("aten.view({0}, [24])", "[24]"),
        ),
        [("aten.view({0}, [24])", "[24]")],
        {"one-shape": 1, "shape-of-moved-ones": 1},
    ),
    "a reshape that copies, once": (
        (
            ("aten.permute({0}, [1, 0])", "[6, 4]"),
            ("aten.unsqueeze({0}, 1)", "[6, 1, 4]"),
            ("aten.reshape({0}, [24])", "[24]"),
        ),
        [("aten.permute({0}, [1, 0])", "[6, 4]"), ("aten.reshape({0}, [24])", "[24]")],
        {"one-shape": 1},
    ),
    "there and back in the order": (
        (("aten.permute({0}, [-1, 0])", "[6, 4]"), ("aten.t({0})", "[4, 6]")),
        [],
        {"one-permute": 1},
    ),
    "orders": (
        (
            VIEW,
            ("aten.permute({0}, [2, 0, 1])", "[3, 4, 2]"),
            ("aten.transpose.int({0}, 0, 2)", "[2, 4, 3]"),
        ),
        [VIEW, ("aten.permute({0}, [1, 0, 2])", "[2, 4, 3]")],
        {"one-permute": 1},
    ),
    "expansions": (
        (
            ("aten.view({0}, [4, 1, 6])", "[4, 1, 6]"),
            ("aten.expand({0}, [-1, 5, -1])", "[4, 5, 6]"),
            ("aten.expand({0}, [2, -1, -1, 6])", "[2, 4, 5, 6]"),
        ),
        [("aten.view({0}, [4, 1, 6])", "[4, 1, 6]"), ("aten.expand({0}, [2, -1, 5, 6])", "[2, 4, 5, 6]")],
        {"one-expand": 1},
    ),
    "copies": (
        (("aten.clone({0})", "[4, 6]"), ("aten.clone({0}, memory_format=contiguous_format)", "[4, 6]")),
        [("aten.clone({0}, memory_format=contiguous_format)", "[4, 6]")],
        {"one-copy": 1},
    ),
    "a copy of what is made contiguous": (
        (
            ("aten.permute({0}, [1, 0])", "[6, 4]"),
            ("aten.contiguous({0})", "[6, 4]"),
            ("aten.clone({0})", "[6, 4]"),
        ),
        [
            ("aten.permute({0}, [1, 0])", "[6, 4]"),
            ("aten.clone({0}, memory_format=contiguous_format)", "[6, 4]"),
        ],
        {"one-copy": 1},
    ),
    "a copy made contiguous": (
        (
            ("aten.permute({0}, [1, 0])", "[6, 4]"),
            ("aten.clone({0})", "[6, 4]"),
            ("aten.contiguous({0})", "[6, 4]"),
        ),
        [
            ("aten.permute({0}, [1, 0])", "[6, 4]"),
            ("aten.clone({0}, memory_format=contiguous_format)", "[6, 4]"),
        ],
        {"one-copy": 1},
    ),
}


def renamed(text: str) -> str:
    """A program's text with its values numbered, whatever a rewrite called them."""
    lines = text.strip().splitlines()
    for index, line in enumerate(lines[1:-2]):
        name = line.partition(":")[0]
        lines = [f" {line} ".replace(f"{name}:", f"a{index}:").replace(f"({name},", f"(a{index},") for line in lines]
        lines = [line.replace(f"({name})", f"(a{index})").strip() for line in lines]
    return "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_collapsed(name: str):
    steps, left, counts = CASES[name]
    done = run_passes(program_of(chain(*steps)), [CollapseViews()])
    assert renamed(str(done)) == chain(*left)
    rewrites(CollapseViews(), chain(*steps), str(done), counts)


SHARED = """
    x: f32[4, 6] = input("x")
    a: f32[4, 2, 3] = aten.view(x, [4, 2, 3])
    b: f32[8, 3] = aten.view(a, [8, 3])
    return output("a", a), output("b", b)
    """


def test_what_is_read_elsewhere_stays():
    after = """
        x: f32[4, 6] = input("x")
        a: f32[4, 2, 3] = aten.view(x, [4, 2, 3])
        view: f32[8, 3] = aten.view(x, [8, 3])
        return output("a", a), output("b", view)
        """
    rewrites(CollapseViews(), SHARED, after, {"one-shape": 1})


TURNED = ("aten.permute({0}, [1, 0])", "[6, 4]")
DECLINED = {
    "the first is not provably free of a copy": chain(
        TURNED, ("aten.reshape({0}, [24])", "[24]"), ("aten.view({0}, [3, 8])", "[3, 8]")
    ),
    "it ends in another shape": chain(
        TURNED, ("aten.reshape({0}, [24])", "[24]"), ("aten.view({0}, [3, 8])", "[3, 8]")
    ),
    "its strides would change": chain(
        TURNED, ("aten.reshape({0}, [24])", "[24]"), ("aten.view({0}, [6, 4])", "[6, 4]")
    ),
    "the first moves dims of several elements": chain(TURNED, ("aten.reshape({0}, [24])", "[24]")),
    "the second copies nothing": chain(("aten.clone({0})", "[4, 6]"), ("aten.contiguous({0})", "[4, 6]")),
    "it would read later what is written to": """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        w: f32[4] = aten.neg_(x)
        b: f32[4] = aten.clone(a)
        return output("b", b)
        """,
    "it is a result of the program, which keeps a tensor of its own": """
        x: f32[4, 6] = input("x")
        a: f32[6, 4] = aten.t(x)
        b: f32[4, 6] = aten.t(a)
        return output("b", b)
        """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_declined(reason: str):
    declines(CollapseViews(), DECLINED[reason], reason)


def test_symbolic_sizes():
    """Contiguous or not, what is provable for all sizes is done; no guard is added."""
    aten = torch.ops.aten

    def function(x, y):
        rows, columns = x.shape
        first = aten.view(aten.view(x, [rows, 1, columns]), [columns, rows])
        back = aten.squeeze.dim(aten.unsqueeze(aten.t(x), 1), 1)
        several = aten.unsqueeze(aten.unsqueeze(y, 0), 0)
        turned = aten.view(aten.unsqueeze(aten.t(y), 0), [y.shape[1], y.shape[0], 1])
        moved = aten.squeeze.dim(aten.permute(aten.unsqueeze(aten.t(y), 0), [1, 0, 2]), 1)
        return first.neg(), back.neg(), several.neg(), turned.neg(), moved.neg()

    program = from_graph_module(
        make_fx(function, tracing_mode="symbolic")(torch.ones(5, 6), torch.ones(7, 8)),
    )
    shapes = program.fake_mode.shape_env
    guards = len(shapes.guards)
    done = run_passes(program, [CollapseViews()])
    assert len(shapes.guards) == guards
    assert dict(done.history[0].counts) == {"one-shape": 1, "same-shape-again": 1}
    reasons = {verdict.reason for verdict in done.history[0].verdicts}
    assert {
        "several of its sizes are symbolic",
        "the first is not provably free of a copy",
        "it is not provably free of a copy",
    } <= reasons
    fresh = torch.randn(9, 6), torch.randn(2, 3)
    for expected, actual in zip(program.module()(*fresh), done.module()(*fresh), strict=True):
        assert torch.equal(expected, actual)
