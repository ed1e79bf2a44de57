"""Operators that write their arguments are called by themselves, on clones where something would see the writing."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.lower_auto_functionalized import LowerAutoFunctionalized
from tests.simplify.holds import declines, rewrites, same_results

LOWER = LowerAutoFunctionalized()


OPERATORS = torch.library.Library("written_for_test", "FRAGMENT")
"""Operators that write: one tensor and return another, a list, and one that may be None."""


def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def double_all(xs: list[torch.Tensor], extra: torch.Tensor | None) -> None:
    for x in xs:
        x.mul_(2)
    if extra is not None:
        extra.add_(1)


OPERATORS.define("double(Tensor(a!) x, Tensor y) -> Tensor")
OPERATORS.define("double_all(Tensor(a!)[] xs, Tensor(b!)? extra) -> ()")
OPERATORS.impl("double", double, "CPU")
OPERATORS.impl("double", lambda x, y: torch.empty_like(x), "Meta")
OPERATORS.impl("double_all", double_all, "CPU")
OPERATORS.impl("double_all", lambda xs, extra: None, "Meta")


LOWERED = {
    "an input is cloned, what dies is not": (
        """
        x: f32[4] = input("x")
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=x, y=x)
        r: f32[4] = a[0]
        v: f32[4] = a[1]
        b: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=v, y=r)
        w: f32[4] = b[1]
        return output("w", w), output("r", r)
        """,
        """
        x: f32[4] = input("x")
        clone: f32[4] = aten.clone(x)
        double: f32[4] = written_for_test.double(clone, x)
        double_1: f32[4] = written_for_test.double(clone, double)
        return output("w", clone), output("r", double)
        """,
        {"lowered": 2, "clones": 1, "dropped": 1},
    ),
    "what is read later is cloned, a view of it counts": (
        """
        x: f32[2, 2] = input("x")
        n: f32[2, 2] = aten.neg(x)
        t: f32[2, 2] = aten.t(n)
        a: (f32[2, 2], f32[2, 2]) = higher_order.auto_functionalized(written_for_test.double, x=n, y=x)
        v: f32[2, 2] = a[1]
        y: f32[2, 2] = aten.add.Tensor(v, t)
        return output("y", y)
        """,
        """
        x: f32[2, 2] = input("x")
        n: f32[2, 2] = aten.neg(x)
        t: f32[2, 2] = aten.t(n)
        clone: f32[2, 2] = aten.clone(n)
        double: f32[2, 2] = written_for_test.double(clone, x)
        y: f32[2, 2] = aten.add.Tensor(clone, t)
        return output("y", y)
        """,
        {"lowered": 1, "clones": 1},
    ),
    "what was written itself and is read later is cloned then": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=n, y=x)
        v: f32[4] = a[1]
        b: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=v, y=x)
        w: f32[4] = b[1]
        y: f32[4] = aten.add.Tensor(w, v)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        double: f32[4] = written_for_test.double(n, x)
        clone_1: f32[4] = aten.clone(n)
        double_1: f32[4] = written_for_test.double(clone_1, x)
        y: f32[4] = aten.add.Tensor(clone_1, n)
        return output("y", y)
        """,
        {"lowered": 2, "clones": 1, "dropped": 1},
    ),
    "what the operator also reads is cloned": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=n, y=n)
        v: f32[4] = a[1]
        return output("v", v)
        """,
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        clone: f32[4] = aten.clone(n)
        double: f32[4] = written_for_test.double(clone, n)
        return output("v", clone)
        """,
        {"lowered": 1, "clones": 1},
    ),
    "what is a result is cloned": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=n, y=x)
        v: f32[4] = a[1]
        return output("n", n), output("v", v)
        """,
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        clone: f32[4] = aten.clone(n)
        double: f32[4] = written_for_test.double(clone, x)
        return output("n", n), output("v", clone)
        """,
        {"lowered": 1, "clones": 1},
    ),
    "lists, and arguments that are left out": (
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        e: f32[4] = aten.exp(x)
        a: (None, (f32[4], f32[4]), None) = higher_order.auto_functionalized(\
written_for_test.double_all, xs=[n, e], extra=None)
        l: (f32[4], f32[4]) = a[1]
        v: f32[4] = l[0]
        w: f32[4] = l[1]
        y: f32[4] = aten.add.Tensor(v, w)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        e: f32[4] = aten.exp(x)
        double_all: None = written_for_test.double_all([n, e], None)
        y: f32[4] = aten.add.Tensor(n, e)
        return output("y", y)
        """,
        {"lowered": 1, "dropped": 2},
    ),
    "views of bases": (
        """
        x: f32[4, 2] = input("x")
        y: f32[2, 2] = input("y")
        n: f32[4, 2] = aten.neg(x)
        a: (f32[2, 2], f32[4, 2]) = higher_order.auto_functionalized_v2(written_for_test.double, y=y, \
_x_base_index=0, _x_slice_dim=0, _x_slice_start=1, _x_slice_end=3, _all_bases=[n])
        v: f32[4, 2] = a[1]
        e: f32[4, 2] = aten.exp(v)
        return output("e", e)
        """,
        """
        x: f32[4, 2] = input("x")
        y: f32[2, 2] = input("y")
        n: f32[4, 2] = aten.neg(x)
        slice_1: f32[2, 2] = aten.slice.Tensor(n, 0, 1, 3)
        double: f32[2, 2] = written_for_test.double(slice_1, y)
        e: f32[4, 2] = aten.exp(n)
        return output("e", e)
        """,
        {"lowered": 1, "dropped": 1},
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name: str) -> None:
    rewrites(LOWER, *LOWERED[name])


def test_values_on_their_way_to_other_ranks_are_cloned() -> None:
    program = parse(
        textwrap.dedent("""
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        g: f32[8] = c10d.all_gather_into_tensor(n, 2, "dp")
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=n, y=x)
        v: f32[4] = a[1]
        w: f32[8] = c10d.wait_tensor(g)
        return output("v", v), output("w", w)
    """),
        groups={"dp": 2},
    )
    done = run_passes(program, [LOWER])
    assert done.history[0].counts == {"lowered": 1, "left": 0, "clones": 1, "dropped": 0}


def test_what_torch_makes_of_operators_that_write() -> None:
    """The graph that torch.export gives, with views by strides."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = x.sin()
            torch.ops.written_for_test.double(z[1], y)
            r = torch.ops.written_for_test.double(z.t()[0], z.t()[1].clone())
            return z + r.sum()

    inputs = (torch.randn(2, 2), torch.randn(2))
    exported = torch.export.export(Model(), inputs).run_decompositions({})
    program = from_graph_module(exported.graph_module)
    assert "auto_functionalized" in render(program)
    done = run_passes(program, [LOWER])
    verify(done, recompute=True)
    assert "auto_functionalized" not in render(done)
    same_results(program, done, LOWER.numerics)


DECLINED = {
    "what it writes has gaps or overlaps": """
        x: f32[4, 2] = input("x")
        y: f32[2] = input("y")
        s: f32[4] = aten.select.int(x, 1, 0)
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=s, y=s)
        v: f32[4] = a[1]
        return output("v", v)
    """,
    "a view that it writes is counted from the beginning of other memory": """
        x: f32[4, 2] = input("x")
        y: f32[2] = input("y")
        n: f32[4, 2] = aten.neg(x)
        s: f32[2, 2] = aten.slice.Tensor(n, 0, 2, 4)
        a: (f32[2], f32[2, 2]) = higher_order.auto_functionalized_v2(written_for_test.double, y=y, \
_x_base_index=0, _x_size=(2,), _x_stride=(1,), _x_storage_offset=0, _all_bases=[s])
        v: f32[2, 2] = a[1]
        return output("v", v)
    """,
}


@pytest.mark.parametrize("reason", DECLINED)
def test_declined(reason: str) -> None:
    declines(LOWER, DECLINED[reason], reason)


def test_results_used_as_a_whole_are_left() -> None:
    program = parse(
        textwrap.dedent("""
        x: f32[4] = input("x")
        a: (f32[4], f32[4]) = higher_order.auto_functionalized(written_for_test.double, x=x, y=x)
        v: f32[4] = a[1]
        return output("v", v)
    """)
    )
    wrapper = next(node for node in program.graph.nodes if node.name == "a")
    program.output_node.args = ((wrapper,),)
    result = LOWER.run(program)
    assert [(verdict.outcome, verdict.reason) for verdict in result.verdicts] == [
        (Outcome.LEFT, "its results are used as a whole")
    ]


def test_other_calls_are_left() -> None:
    program = parse(
        textwrap.dedent("""
        x: f32[4] = input("x")
        a: (f32[4], f32[4]) = higher_order.auto_functionalized_v2(written_for_test.double, y=x, \
_x_base_index=0, _all_bases=[x])
        v: f32[4] = a[1]
        return output("v", v)
    """)
    )
    wrapper = next(node for node in program.graph.nodes if node.name == "a")
    wrapper.args = (torch.ops.higher_order.while_loop,)
    assert LOWER.run(program).verdicts[0].reason == "it calls something that is no operator"
    wrapper.args = (torch.ops.written_for_test.double.default,)
    wrapper.kwargs = {**wrapper.kwargs, "_all_bases": []}
    assert LOWER.run(program).verdicts[0].reason == "it writes memory that it makes itself"
