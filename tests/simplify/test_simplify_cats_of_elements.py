"""Elements and pieces that are joined again, in whatever shape they come, and elements of joins."""

from __future__ import annotations

import pytest

from crossfade.simplify.simplify_cats import SimplifyCats
from tests.simplify.holds import rewrites

CASES = {
    "elements stacked again": (
        """
        x: f32[3, 2] = input("x")
        unbind: (f32[2], f32[2], f32[2]) = aten.unbind.int(x)
        a: f32[2] = unbind[0]
        b: f32[2] = unbind[1]
        c: f32[2] = aten.select.int(x, 0, -1)
        stack: f32[3, 2] = aten.stack([a, b, c])
        y: f32[3, 2] = aten.neg(stack)
        part: f32[2, 2] = aten.stack([b, c])
        z: f32[2, 2] = aten.neg(part)
        return output("y", y), output("z", z)
        """,
        """
        x: f32[3, 2] = input("x")
        y: f32[3, 2] = aten.neg(x)
        slice_1: f32[2, 2] = aten.slice.Tensor(x, 0, 1, 3)
        z: f32[2, 2] = aten.neg(slice_1)
        return output("y", y), output("z", z)
        """,
        {"join-elements": 2},
    ),
    "elements of joins": (
        """
        x: f32[2] = input("x")
        y: f32[2] = input("y")
        stack: f32[2, 2] = aten.stack([x, y])
        unbind: (f32[2], f32[2]) = aten.unbind.int(stack)
        a: f32[2] = unbind[1]
        b: f32[2] = aten.select.int(stack, 0, 0)
        cat: f32[4] = aten.cat([x, y])
        c: f32[] = aten.select.int(cat, 0, -1)
        p: f32[2] = aten.neg(a)
        q: f32[2] = aten.neg(b)
        r: f32[] = aten.neg(c)
        return output("p", p), output("q", q), output("r", r)
        """,
        """
        x: f32[2] = input("x")
        y: f32[2] = input("y")
        select: f32[] = aten.select.int(y, 0, 1)
        p: f32[2] = aten.neg(y)
        q: f32[2] = aten.neg(x)
        r: f32[] = aten.neg(select)
        return output("p", p), output("q", q), output("r", r)
        """,
        {"unbind-of-join": 1, "element-of-join": 2},
    ),
    "stacks of neighbours of two values": (
        """
        x: f32[2, 3] = input("x")
        y: f32[4, 3] = input("y")
        ux: (f32[3], f32[3]) = aten.unbind.int(x)
        uy: (f32[3], f32[3], f32[3], f32[3]) = aten.unbind.int(y)
        a: f32[3] = ux[0]
        b: f32[3] = ux[1]
        c: f32[3] = uy[1]
        d: f32[3] = uy[2]
        e: f32[3] = uy[0]
        stack: f32[5, 3] = aten.stack([a, b, c, d, e])
        return output("stack", stack)
        """,
        """
        x: f32[2, 3] = input("x")
        y: f32[4, 3] = input("y")
        uy: (f32[3], f32[3], f32[3], f32[3]) = aten.unbind.int(y)
        e: f32[3] = uy[0]
        slice_1: f32[2, 3] = aten.slice.Tensor(y, 0, 1, 3)
        unsqueeze: f32[1, 3] = aten.unsqueeze(e, 0)
        cat: f32[5, 3] = aten.cat([x, slice_1, unsqueeze])
        return output("stack", cat)
        """,
        {"join-elements": 1},
    ),
    "a stack as decompositions spell it": (
        """
        x: f32[4, 3] = input("x")
        a: f32[3] = aten.select.int(x, 0, 1)
        b: f32[3] = aten.select.int(x, 0, 2)
        u: f32[1, 3] = aten.unsqueeze(a, 0)
        v: f32[1, 3] = aten.unsqueeze(b, 0)
        cat: f32[2, 3] = aten.cat([u, v])
        y: f32[2, 3] = aten.neg(cat)
        return output("y", y)
        """,
        """
        x: f32[4, 3] = input("x")
        slice_1: f32[2, 3] = aten.slice.Tensor(x, 0, 1, 3)
        y: f32[2, 3] = aten.neg(slice_1)
        return output("y", y)
        """,
        {"join-elements": 1},
    ),
    "a cat of selects": (
        """
        x: f32[4, 3, 2] = input("x")
        a: f32[3, 2] = aten.select.int(x, 0, 1)
        b: f32[3, 2] = aten.select.int(x, 0, 2)
        cat: f32[6, 2] = aten.cat([a, b])
        y: f32[6, 2] = aten.neg(cat)
        return output("y", y)
        """,
        """
        x: f32[4, 3, 2] = input("x")
        slice_1: f32[2, 3, 2] = aten.slice.Tensor(x, 0, 1, 3)
        view: f32[6, 2] = aten.view(slice_1, [6, 2])
        y: f32[6, 2] = aten.neg(view)
        return output("y", y)
        """,
        {"join-elements": 1},
    ),
    "a cat of views of pieces": (
        """
        x: f32[2, 6] = input("x")
        z: f32[2, 1, 2] = input("z")
        split: (f32[2, 2], f32[2, 2], f32[2, 2]) = aten.split.Tensor(x, 2, 1)
        a: f32[2, 2] = split[0]
        b: f32[2, 2] = split[1]
        c: f32[2, 1, 2] = aten.view(a, [2, 1, 2])
        d: f32[2, 1, 2] = aten.reshape(b, [2, 1, 2])
        cat: f32[2, 3, 2] = aten.cat([c, d, z], 1)
        return output("cat", cat)
        """,
        """
        x: f32[2, 6] = input("x")
        z: f32[2, 1, 2] = input("z")
        slice_1: f32[2, 4] = aten.slice.Tensor(x, 1, 0, 4)
        view: f32[2, 2, 2] = aten.view(slice_1, [2, 2, 2])
        cat_1: f32[2, 3, 2] = aten.cat([view, z], 1)
        return output("cat", cat_1)
        """,
        {"join-elements": 1},
    ),
    "neighbouring pieces along the last dim": (
        """
        x: f32[4, 6] = input("x")
        w: f32[4, 3] = input("w")
        split: (f32[4, 2], f32[4, 2], f32[4, 2]) = aten.split.Tensor(x, 2, 1)
        b: f32[4, 2] = split[1]
        c: f32[4, 2] = split[2]
        cat: f32[4, 4] = aten.cat([b, c], 1)
        y: f32[4, 4] = aten.neg(cat)
        mm: f32[4, 3] = aten.mm(cat, w)
        return output("y", y), output("mm", mm)
        """,
        """
        x: f32[4, 6] = input("x")
        w: f32[4, 3] = input("w")
        slice_1: f32[4, 4] = aten.slice.Tensor(x, 1, 2, 6)
        y: f32[4, 4] = aten.neg(slice_1)
        mm: f32[4, 3] = aten.mm(slice_1, w)
        return output("y", y), output("mm", mm)
        """,
        {"join-parts": 1},
    ),
    "elements moved": (
        """
        x: f32[3, 4] = input("x")
        unbind: (f32[4], f32[4], f32[4]) = aten.unbind.int(x)
        a: f32[4] = unbind[0]
        b: f32[4] = unbind[1]
        stack: f32[4, 2] = aten.stack([a, b], 1)
        w: f32[4, 2] = input("w")
        y: f32[4, 2] = aten.mul.Tensor(w, stack)
        return output("y", y)
        """,
        """
        x: f32[3, 4] = input("x")
        w: f32[4, 2] = input("w")
        slice_1: f32[2, 4] = aten.slice.Tensor(x, 0, 0, 2)
        permute: f32[4, 2] = aten.permute(slice_1, [1, 0])
        y: f32[4, 2] = aten.mul.Tensor(w, permute)
        return output("y", y)
        """,
        {"join-moved": 1},
    ),
    "elements moved and joined": (
        """
        x: f32[3, 2, 4] = input("x")
        unbind: (f32[2, 4], f32[2, 4], f32[2, 4]) = aten.unbind.int(x)
        a: f32[2, 4] = unbind[0]
        b: f32[2, 4] = unbind[1]
        c: f32[2, 4] = unbind[2]
        cat: f32[2, 12] = aten.cat([a, b, c], 1)
        return output("cat", cat)
        """,
        """
        x: f32[3, 2, 4] = input("x")
        permute: f32[2, 3, 4] = aten.permute(x, [1, 0, 2])
        clone: f32[2, 3, 4] = aten.clone(permute, memory_format=contiguous_format)
        view: f32[2, 12] = aten.view(clone, [2, 12])
        return output("cat", view)
        """,
        {"join-moved": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_simplified(name: str) -> None:
    rewrites(SimplifyCats(), *CASES[name])
