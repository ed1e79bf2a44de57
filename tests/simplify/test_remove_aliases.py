"""Names for the same value go; results of the program keep a tensor of their own."""

from __future__ import annotations

import pytest

from crossfade.simplify.remove_aliases import RemoveAliases
from tests.simplify.holds import rewrites

CASES = {
    "a result keeps its alias": (
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.alias(x)
        d: f32[4] = aten.detach(a)
        n: f32[4] = aten.neg(a)
        return output("d", d), output("n", n)
        """,
        """
        x: f32[4] = input("x")
        d: f32[4] = aten.detach(x)
        n: f32[4] = aten.neg(x)
        return output("d", d), output("n", n)
        """,
        {"alias": 1},
    ),
    "a chain goes whole": (
        """
        x: f32[2, 3] = input("x")
        a: f32[2, 3] = aten.alias(x)
        t: f32[3, 2] = aten.t(a)
        d: f32[3, 2] = aten.detach(t)
        u: f32[2, 3] = aten.t(d)
        b: f32[2, 3] = aten.alias(u)
        n: f32[2, 3] = aten.neg(b)
        return output("n", n)
        """,
        """
        x: f32[2, 3] = input("x")
        n: f32[2, 3] = aten.neg(x)
        return output("n", n)
        """,
        {"alias": 2, "detach": 1, "double-transpose": 1},
    ),
    "an alias that is written is the value": (
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        a: f32[4] = aten.alias(c)
        w: f32[4] = aten.add_.Tensor(a, 1)
        n: f32[4] = aten.neg(c)
        return output("n", n)
        """,
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        w: f32[4] = aten.add_.Tensor(c, 1)
        n: f32[4] = aten.neg(c)
        return output("n", n)
        """,
        {"alias": 1},
    ),
    "transposes of a result stay": (
        """
        x: f32[2, 3] = input("x")
        t: f32[3, 2] = aten.t(x)
        u: f32[2, 3] = aten.t(t)
        return output("u", u)
        """,
        """
        x: f32[2, 3] = input("x")
        t: f32[3, 2] = aten.t(x)
        u: f32[2, 3] = aten.t(t)
        return output("u", u)
        """,
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_removed(name: str):
    rewrites(RemoveAliases(), *CASES[name])
