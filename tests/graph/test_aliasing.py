"""What somebody could see in memory if one value stood for another: each reason once, and where there is none."""

from __future__ import annotations

import pytest
import torch

from crossfade.graph.aliasing import Aliasing
from tests.simplify.holds import program_of


def answer(text: str, node: str, other: str) -> str | None:
    program = program_of(text)
    nodes = {node.name: node for node in program.graph.nodes}
    return Aliasing(program).may_replace(nodes[node], nodes[other])


REASONS = {
    "its dtype or device would change": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f64[4] = aten.to.dtype(x, f64)
        return output("y", node)
    """,
    "its shape is not provably the same": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[2, 2] = aten.view(x, [2, 2])
        return output("y", node)
    """,
    "its strides would change": """
        x: f32[3, 3] = input("x")
        other: f32[3, 3] = aten.t(x)
        node: f32[3, 3] = aten.neg(x)
        return output("y", node)
    """,
    "its conjugate or negative bit would change": """
        x: c64[3] = input("x")
        other: c64[3] = aten._conj(x)
        node: c64[3] = aten.conj_physical(x)
        return output("y", node)
    """,
    "it is a result of the program, which keeps a tensor of its own": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.alias(other)
        return output("y", node), output("z", other)
    """,
    "its memory is written to": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.clone(other)
        w: f32[4] = aten.add_.Tensor(node, 1)
        y: f32[4] = aten.exp(w)
        return output("y", y)
    """,
    "a view reads its memory by strides": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.clone(other)
        v: f32[2] = aten.as_strided(node, [2], [2])
        y: f32[2] = aten.exp(v)
        return output("y", y)
    """,
    "a result of the program shares its memory": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        c: f32[4] = aten.clone(other)
        node: f32[4] = aten.alias(c)
        y: f32[4] = aten.exp(node)
        return output("c", c), output("y", y)
    """,
    "a result of the program would share memory with an input": """
        other: f32[4] = input("x")
        node: f32[4] = aten.clone(other)
        return output("y", node)
    """,
    "two results of the program would share memory": """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.clone(other)
        return output("y", node), output("z", other)
    """,
}


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason(reason: str):
    assert answer(REASONS[reason], "node", "other") == reason


@pytest.mark.parametrize(
    "text",
    [
        """
        other: f32[4] = input("x")
        node: f32[4] = aten.clone(other)
        y: f32[4] = aten.exp(node)
        return output("y", y)
        """,
        """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.clone(other)
        return output("y", node)
        """,
        """
        x: f32[4] = input("x")
        other: f32[4] = aten.neg(x)
        node: f32[4] = aten.alias(other)
        w: f32[4] = aten.add_.Tensor(node, 1)
        return output("y", other)
        """,
        """
        other: f32[4] = input("x")
        node: f32[4] = aten.alias(other)
        y: f32[4] = aten.exp(node)
        return output("y", y)
        """,
    ],
    ids=["an input inside", "a result takes over memory", "one memory, though it is written", "a name of an input"],
)
def test_nobody_sees_it(text: str):
    assert answer(text, "node", "other") is None


def test_an_input_of_its_own_name_is_not_returned_for_an_alias():
    text = """
        other: f32[4] = input("x")
        node: f32[4] = aten.alias(other)
        return output("y", node)
    """
    assert answer(text, "node", "other") == "it is a result of the program, which keeps a tensor of its own"


def test_values_that_are_no_tensors_share_nothing():
    text = """
        n: int = input("n")
        other: int = operator.add(n, 1)
        node: int = operator.mul(other, 1)
        return output("y", node)
    """
    assert answer(text, "node", "other") is None


def test_a_replacement_is_remembered():
    """Once `b` is returned for `c`, it is a result: `d` may not become it too."""
    program = program_of("""
        x: f32[4] = input("x")
        b: f32[4] = aten.neg(x)
        c: f32[4] = aten.clone(b)
        d: f32[4] = aten.clone(b)
        return output("c", c), output("d", d)
    """)
    _, b, c, d, _ = program.graph.nodes
    aliasing = Aliasing(program)
    assert aliasing.may_replace(c, b) is None
    aliasing.replaced(c, b)
    c.replace_all_uses_with(b)
    assert aliasing.may_replace(d, b) == "two results of the program would share memory"


def test_what_is_written_is_known_by_its_memory():
    program = program_of("""
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        v: f32[2, 2] = aten.view(c, [2, 2])
        w: f32[2, 2] = aten.add_.Tensor(v, 1)
        return output("w", w)
    """)
    aliasing = Aliasing(program)
    assert [node.name for node in program.graph.nodes if aliasing.is_written(node)] == ["c", "v", "w"]


def test_symbolic_sizes_are_compared_without_guards():
    from crossfade.graph.private import FakeTensorMode, symbolic_shapes

    program = program_of(REASONS["two results of the program would share memory"].replace(', output("z", other)', ""))
    env = symbolic_shapes()
    mode = FakeTensorMode(shape_env=env)
    short, long = (mode.from_tensor(torch.empty(size), static_shapes=False) for size in (4, 6))
    _, other, node, _ = program.graph.nodes
    other.meta["val"], node.meta["val"] = short, long
    guards = len(env.guards)
    assert Aliasing(program).may_replace(node, other) == "its shape is not provably the same"
    node.meta["val"] = short
    assert Aliasing(program).may_replace(node, other) is None
    assert len(env.guards) == guards
