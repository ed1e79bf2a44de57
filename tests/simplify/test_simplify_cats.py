"""What is cut and joined again becomes what it was; nothing is moved that was not moved before."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from crossfade.simplify.simplify_cats import SimplifyCats
from tests.simplify.holds import declines, rewrites

CASES = {
    "pieces with other users": (
        """
        x: f32[2, 6] = input("x")
        split: (f32[2, 1], f32[2, 2], f32[2, 3]) = aten.split_with_sizes(x, [1, 2, 3], 1)
        a: f32[2, 1] = split[0]
        b: f32[2, 2] = split[1]
        c: f32[2, 3] = split[-1]
        cat: f32[2, 6] = aten.cat([a, b, c], -1)
        y: f32[2, 6] = aten.neg(cat)
        z: f32[2, 2] = aten.neg(b)
        return output("y", y), output("z", z)
        """,
        """
        x: f32[2, 6] = input("x")
        split: (f32[2, 1], f32[2, 2], f32[2, 3]) = aten.split_with_sizes(x, [1, 2, 3], 1)
        b: f32[2, 2] = split[1]
        y: f32[2, 6] = aten.neg(x)
        z: f32[2, 2] = aten.neg(b)
        return output("y", y), output("z", z)
        """,
        {"join-parts": 1},
    ),
    "a run of pieces": (
        """
        x: f32[7, 2] = input("x")
        chunk: (f32[2, 2], f32[2, 2], f32[2, 2], f32[1, 2]) = aten.chunk(x, 4)
        b: f32[2, 2] = chunk[1]
        c: f32[2, 2] = chunk[2]
        d: f32[1, 2] = chunk[3]
        cat: f32[5, 2] = aten.cat([b, c, d])
        y: f32[5, 2] = aten.neg(cat)
        return output("y", y)
        """,
        """
        x: f32[7, 2] = input("x")
        slice_1: f32[5, 2] = aten.slice.Tensor(x, 0, 2, 7)
        y: f32[5, 2] = aten.neg(slice_1)
        return output("y", y)
        """,
        {"join-parts": 1},
    ),
    "two runs among others": (
        """
        x: f32[2, 6] = input("x")
        y: f32[2, 1] = input("y")
        a: f32[2, 2] = aten.slice.Tensor(x, 1, 1, 3)
        b: f32[2, 2] = aten.slice.Tensor(x, 1, -3, 5)
        c: f32[2, 3] = aten.slice.Tensor(x, 1, 0, 3)
        d: f32[2, 3] = aten.slice.Tensor(x, 1, 3, 100)
        cat: f32[2, 11] = aten.cat([a, b, y, c, d], 1)
        return output("cat", cat)
        """,
        """
        x: f32[2, 6] = input("x")
        y: f32[2, 1] = input("y")
        slice_1: f32[2, 4] = aten.slice.Tensor(x, 1, 1, 5)
        cat_1: f32[2, 11] = aten.cat([slice_1, y, x], 1)
        return output("cat", cat_1)
        """,
        {"join-parts": 1},
    ),
    "a cat of one": (
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 2] = aten.slice.Tensor(x, 0, 1, 3)
        cat: f32[2, 2] = aten.cat([a])
        y: f32[2, 2] = aten.neg(cat)
        return output("y", y)
        """,
        """
        x: f32[4, 2] = input("x")
        a: f32[2, 2] = aten.slice.Tensor(x, 0, 1, 3)
        y: f32[2, 2] = aten.neg(a)
        return output("y", y)
        """,
        {"join-parts": 1},
    ),
    "cut where it was joined": (
        """
        x: f32[2, 3] = input("x")
        y: f32[4, 3] = input("y")
        cat: f32[6, 3] = aten.cat([x, y])
        split: (f32[2, 3], f32[2, 3], f32[2, 3]) = aten.split.Tensor(cat, 2)
        a: f32[2, 3] = split[0]
        b: f32[2, 3] = split[2]
        p: f32[2, 3] = aten.neg(a)
        q: f32[2, 3] = aten.neg(b)
        return output("p", p), output("q", q)
        """,
        """
        x: f32[2, 3] = input("x")
        y: f32[4, 3] = input("y")
        slice_1: f32[2, 3] = aten.slice.Tensor(y, 0, 2, 4)
        p: f32[2, 3] = aten.neg(x)
        q: f32[2, 3] = aten.neg(slice_1)
        return output("p", p), output("q", q)
        """,
        {"piece-of-cat": 2},
    ),
    "cats in cats": (
        """
        x: f32[2, 1] = input("x")
        y: f32[2, 2] = input("y")
        z: f32[2, 3] = input("z")
        a: f32[2, 3] = aten.cat([x, y], 1)
        b: f32[2, 6] = aten.cat([a, z], 1)
        c: f32[2, 12] = aten.cat([b, b], -1)
        return output("c", c)
        """,
        """
        x: f32[2, 1] = input("x")
        y: f32[2, 2] = input("y")
        z: f32[2, 3] = input("z")
        cat_1: f32[2, 12] = aten.cat([x, y, z, x, y, z], 1)
        return output("c", cat_1)
        """,
        {"join-parts": 2},
    ),
    "a cat, a slice of it, and both joined": (
        """
        x: f32[2, 3] = input("x")
        y: f32[2, 4] = input("y")
        a: f32[2, 7] = aten.cat([x, y], 1)
        b: f32[2, 2] = aten.slice.Tensor(a, 1, 0, 2)
        c: f32[2, 3] = aten.slice.Tensor(a, 1, 2, 5)
        d: f32[2, 12] = aten.cat([a, b, c], 1)
        return output("d", d)
        """,
        """
        x: f32[2, 3] = input("x")
        y: f32[2, 4] = input("y")
        slice_3: f32[2, 2] = aten.slice.Tensor(y, 1, 0, 2)
        cat_1: f32[2, 12] = aten.cat([x, y, x, slice_3], 1)
        return output("d", cat_1)
        """,
        {"join-parts": 2},
    ),
    "slices of slices and of pieces": (
        """
        x: f32[9, 2] = input("x")
        a: f32[7, 2] = aten.slice.Tensor(x, 0, 2)
        b: f32[4, 2] = aten.slice.Tensor(a, 0, 1, -2)
        split: (f32[5, 2], f32[4, 2]) = aten.split.Tensor(x, 5)
        c: f32[4, 2] = split[1]
        d: f32[2, 2] = aten.slice.Tensor(c, 0, 1, 3)
        return output("b", b), output("d", d)
        """,
        """
        x: f32[9, 2] = input("x")
        slice_1: f32[4, 2] = aten.slice.Tensor(x, 0, 3, 7)
        slice_2: f32[2, 2] = aten.slice.Tensor(x, 0, 6, 8)
        return output("b", slice_1), output("d", slice_2)
        """,
        {"slice-of-slice": 1, "slice-of-piece": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_simplified(name: str) -> None:
    rewrites(SimplifyCats(), *CASES[name])


HEAD = """
    x: f32[4, 2] = input("x")
    y: f32[4, 2] = input("y")
    h: f16[4, 2] = input("h")
    n: int = input("n")
    e: f32[0] = input("e")
"""
LEFT = {
    "conversions": ("cat: f32[8, 2] = aten.cat([x, h])", "its inputs are of several dtypes"),
    "skipped empties": ("cat: f32[4, 2] = aten.cat([x, e])", "its inputs are of several dtypes or numbers of dims"),
    "parts of a conversion": (
        """
        c: f32[8, 2] = aten.cat([x, h])
        cat: f32[4, 2] = aten.slice.Tensor(c, 0, 4, 8)
        """,
        "its inputs are of several dtypes",
    ),
    "conversions by a stack": ("cat: f32[2, 4, 2] = aten.stack([x, h])", "its inputs are of several dtypes"),
    "elements of a conversion": (
        """
        c: f32[2, 4, 2] = aten.stack([x, h])
        cat: f32[4, 2] = aten.select.int(c, 0, 1)
        """,
        "its inputs are of several dtypes",
    ),
    "unrelated inputs": ("cat: f32[8, 2] = aten.cat([x, y])", "its inputs are neither adjoining"),
    "the wrong order": (
        """
        s: (f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        a: f32[2, 2] = s[0]
        b: f32[2, 2] = s[1]
        cat: f32[4, 2] = aten.cat([b, a])
        """,
        "its inputs are neither adjoining",
    ),
    "another dim": (
        """
        s: (f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2)
        a: f32[2, 2] = s[0]
        b: f32[2, 2] = s[1]
        cat: f32[2, 4] = aten.cat([a, b], 1)
        """,
        "its inputs are neither adjoining",
    ),
    "an inner cat with other users": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        other: f32[8, 2] = aten.neg(c)
        cat: f32[12, 2] = aten.cat([c, x])
        """,
        "a cat among its inputs has other users",
    ),
    "an inner cat, a part of which has other users": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        part: f32[2, 2] = aten.slice.Tensor(c, 0, 3, 5)
        other: f32[2, 2] = aten.neg(part)
        cat: f32[10, 2] = aten.cat([c, part])
        """,
        "a cat among its inputs has other users",
    ),
    "a number given at run time": (
        """
        a: f32[3, 2] = aten.slice.Tensor(x, 0, n)
        b: f32[2, 2] = aten.slice.Tensor(a, 0, 1)
        cat: f32[2, 2] = aten.neg(b)
        """,
        "it takes along another dim, or with steps",
    ),
    "several inputs": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        cat: f32[2, 2] = aten.slice.Tensor(c, 0, 3, 5)
        """,
        "it does not lie inside one input",
    ),
    "steps": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        cat: f32[2, 2] = aten.slice.Tensor(c, 0, 0, 4, 2)
        """,
        "it takes along another dim, or with steps",
    ),
    "a slice along another dim than the cat": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        cat: f32[8, 1] = aten.slice.Tensor(c, 1, 0, 1)
        """,
        "it takes along another dim",
    ),
    "a slice along another dim than the slice": (
        """
        c: f32[2, 2] = aten.slice.Tensor(x, 0, 0, 2)
        cat: f32[2, 1] = aten.slice.Tensor(c, 1, 0, 1)
        """,
        "it takes along another dim",
    ),
    "an element along another dim than the cat": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        cat: f32[8] = aten.select.int(c, 1, 0)
        """,
        "it takes along another dim",
    ),
    "an element given at run time": (
        """
        c: f32[8, 2] = aten.cat([x, y])
        cat: f32[2] = aten.select.int(c, 0, n)
        """,
        "its bounds are not provably",
    ),
    "elements that are none": ("cat: f32[2, 4, 2] = aten.stack([x, y])", "its inputs are not neighbouring elements"),
    "elements out of order": (
        """
        a: f32[2] = aten.select.int(x, 0, 1)
        b: f32[2] = aten.select.int(x, 0, 0)
        cat: f32[2, 2] = aten.stack([a, b])
        """,
        "its inputs are not neighbouring elements",
    ),
    "elements of another dim": (
        """
        a: f32[2] = aten.select.int(x, 0, 0)
        b: f32[2] = aten.select.int(x, 0, 1)
        cat: f32[2, 2] = aten.stack([a, b], 1)
        """,
        "its inputs are not neighbouring elements",
    ),
    "a value written after an inner cat read it": (
        """
        k: f32[4, 2] = aten.clone(y)
        c: f32[8, 2] = aten.cat([x, k])
        w: f32[4, 2] = aten.add_.Tensor(k, 1)
        cat: f32[12, 2] = aten.cat([c, k])
        """,
        "is written to",
    ),
    "a value written after it was joined": (
        """
        k: f32[4, 2] = aten.clone(y)
        c: f32[8, 2] = aten.cat([x, k])
        w: f32[4, 2] = aten.add_.Tensor(k, 1)
        s: f32[4, 2] = aten.slice.Tensor(c, 0, 4, 8)
        cat: f32[4, 2] = aten.neg(s)
        """,
        "its memory is written to",
    ),
    "other strides": (
        """
        c: f32[4, 4] = aten.cat([x, y], 1)
        s: f32[4, 2] = aten.slice.Tensor(c, 1, 0, 2)
        cat: f32[] = aten.sum(s)
        """,
        "its strides would change, and cat may then round in another way",
    ),
    "other strides, read by what rounds single elements in another way": (
        """
        c: f32[4, 4] = aten.cat([x, y], 1)
        s: f32[4, 2] = aten.slice.Tensor(c, 1, 0, 2)
        cat: f32[4, 2] = aten.sigmoid(s)
        """,
        "its strides would change, and cat may then round in another way",
    ),
    "other strides, returned": (
        """
        c: f32[4, 4] = aten.cat([x, y], 1)
        cat: f32[4, 2] = aten.slice.Tensor(c, 1, 0, 2)
        """,
        "a result of the program shares its memory",
    ),
    "other strides, in a row": (
        """
        p: f32[4, 4] = aten.cat([x, y], 1)
        k: f32[4, 4] = aten.neg(p)
        a: f32[4, 1] = aten.slice.Tensor(k, 1, 1, 2)
        b: f32[4, 1] = aten.slice.Tensor(k, 1, 2, 3)
        c: f32[4, 2] = aten.cat([a, b], 1)
        cat: f32[8] = aten.view(c, [8])
        """,
        "a view of it could not be taken",
    ),
    "elements moved, few": (
        """
        a: f32[2] = aten.select.int(x, 0, 0)
        b: f32[2] = aten.select.int(x, 0, 1)
        cat: f32[2, 2] = aten.stack([a, b], 1)
        """,
        "its inputs are few or read elsewhere",
    ),
    "elements of a cat, in another order": (
        """
        a: f32[2] = aten.select.int(x, 0, 1)
        b: f32[2] = aten.select.int(x, 0, 0)
        cat: f32[4] = aten.cat([a, b])
        """,
        "its inputs are not neighbouring elements",
    ),
    "neighbours that would be copied twice": (
        """
        k: f32[4, 4] = aten.cat([x, y], 1)
        m: f32[4, 4] = aten.neg(k)
        t: f32[4, 4] = aten.t(m)
        a: f32[4] = aten.select.int(t, 0, 0)
        b: f32[4] = aten.select.int(t, 0, 1)
        z: f32[4] = aten.select.int(y, 1, 0)
        cat: f32[12] = aten.cat([a, b, z])
        """,
        "cannot be seen in its shape without a copy of their own",
    ),
    "a seam that is not the cut": (
        """
        a: f32[1, 2] = aten.slice.Tensor(x, 0, 0, 1)
        b: f32[1, 2] = aten.slice.Tensor(x, 0, 1, 2)
        c: f32[2, 1] = aten.view(a, [2, 1])
        d: f32[2, 1] = aten.view(b, [2, 1])
        cat: f32[2, 2] = aten.cat([c, d], 1)
        """,
        "its inputs are not neighbouring elements",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    body, reason = LEFT[name]
    lines = textwrap.dedent(HEAD) + textwrap.dedent(body)
    used = [name for name in ("other", "w") if f"\n{name}: " in lines]
    results = ", ".join(f'output("{name}", {name})' for name in ("cat", *used))
    declines(SimplifyCats(), f"{lines}\nreturn {results}", reason)


def test_only_so_many_inputs_are_joined_at_once() -> None:
    lines = ['x: f32[1] = input("x")', "j0: f32[2] = aten.cat([x, x])"]
    lines += [f"j{i}: f32[{i + 2}] = aten.cat([j{i - 1}, x])" for i in range(1, 200)]
    done = run_passes(parse("\n".join([*lines, 'return output("y", j199)'])), [SimplifyCats()])
    cats = done.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert [len(node.args[0]) for node in cats] == [128, 74]
    assert any(verdict.reason == "it would have too many inputs" for verdict in done.history[0].verdicts)


# ------------------------------------------------------------------------------------------------- symbolic sizes


def simplified(function, *examples: torch.Tensor) -> Program:
    module = make_fx(function, tracing_mode="symbolic")(*examples)
    done = run_passes(from_graph_module(module), [SimplifyCats()])
    verify(done)
    return done


def calls(program: Program) -> list[str]:
    return [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]


def test_symbolic_sizes_are_proved() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        joined = torch.cat([x, y])
        parts = joined[:n].neg(), joined[n:].exp()
        halves = x[:n].neg(), torch.cat([x[:2], x[2:]]).neg()
        return [*parts, *halves]

    done = simplified(function, torch.randn(5, 3), torch.randn(7, 3))
    assert done.history[0].counts == {"slice-of-cat": 2, "join-parts": 1}
    assert "cat.default" not in calls(done)
    for sizes in ((5, 7), (2, 9), (11, 4)):
        x, y = (torch.randn(size, 3) for size in sizes)
        for expected, actual in zip(function(x, y), done.module()(x, y), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_unprovable_sizes_are_left() -> None:
    """Whether x ends after three rows is not known: the slice may lie in x or reach into y."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y])[:3].neg()

    done = simplified(function, torch.randn(5, 3), torch.randn(7, 3))
    assert not done.history[0].changed
    assert "its bounds are not provably where they would have to be" in {v.reason for v in done.history[0].verdicts}
