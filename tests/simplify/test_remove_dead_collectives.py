"""Unused collectives go, with what only they used; what writes, is partly used or of one rank's own stays."""

from __future__ import annotations

import pytest

from crossfade.simplify.remove_dead_collectives import RemoveDeadCollectives
from tests.simplify.holds import declines, rewrites


def test_chains_go_whole() -> None:
    rewrites(
        RemoveDeadCollectives(),
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        s: f32[2] = c10d.reduce_scatter_tensor(n, "sum", 2, "dp")
        w: f32[2] = c10d.wait_tensor(s)
        e: f32[2] = aten.exp(w)
        g: (f32[4], f32[8]) = c10d.all_gather_into_tensor_coalesced([e, n], 2, "dp")
        a: f32[4] = g[0]
        b: f32[8] = g[1]
        v: f32[4] = c10d.wait_tensor(a)
        u: f32[8] = c10d.wait_tensor(b)
        r: f32[4] = c10d.all_reduce(x, "sum", "dp")
        y: f32[4] = c10d.wait_tensor(r)
        z: f32[4] = c10d.wait_tensor(r)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        r: f32[4] = c10d.all_reduce(x, "sum", "dp")
        y: f32[4] = c10d.wait_tensor(r)
        z: f32[4] = c10d.wait_tensor(r)
        return output("y", y)
        """,
        {"removed": 2},
        dp=2,
    )


DECLINED = {
    "in place": (
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        s: f32[4] = c10d.all_reduce_(c, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        y: f32[4] = aten.neg(c)
        return output("y", y)
        """,
        "it writes into memory that others may read",
        2,
    ),
    "partly used": (
        """
        x: f32[4] = input("x")
        g: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = g[0]
        b: f32[4] = g[1]
        v: f32[4] = c10d.wait_tensor(a)
        u: f32[4] = c10d.wait_tensor(b)
        return output("v", v)
        """,
        "another of its results is used",
        2,
    ),
    "a group of unknown size": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("x", x)
        """,
        "the size of its group is not known",
        0,
    ),
    "beside communication of another kind": (
        """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        p: f32[4] = symm_mem.one_shot_all_reduce(x, "sum", "dp")
        return output("p", p)
        """,
        "the program also communicates in ways of its own",
        2,
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name: str) -> None:
    text, reason, size = DECLINED[name]
    declines(RemoveDeadCollectives(), text, reason, dp=size)
