"""Small programs whose nodes are ordered by more than data, and how tests name what is in them."""

from __future__ import annotations

from crossfade.graph.program import Program
from crossfade.graph.text import parse

GROUPS = {"dp": 2, "tp": 2}


def program_of(text: str) -> Program:
    return parse(text, groups=GROUPS)


def named(program: Program) -> dict:
    return {node.name: node for node in program.graph.nodes}


def names(nodes) -> list[str]:
    return [node.name for node in nodes]


MUTATED_INPUT = """
    x: f32[4] = input("x")
    before: f32[4] = aten.relu(x)
    write: f32[4] = aten.add_.Tensor(x, 1)
    after: f32[4] = aten.neg(x)
    other: f32[4] = aten.exp(before)
    return output("a", before), output("b", after), output("c", other)
"""
MUTATED_THROUGH_VIEW = """
    x: f32[4] = input("x")
    left: f32[2] = aten.slice.Tensor(x, 0, 0, 2)
    right: f32[2] = aten.slice.Tensor(x, 0, 2, 4)
    before: f32[2] = aten.relu(right)
    write: f32[2] = aten.mul_.Tensor(left, 2)
    after: f32[4] = aten.neg(x)
    return output("a", before), output("b", after)
"""
WRITTEN_TWICE = """
    x: f32[4] = input("x")
    first: f32[4] = aten.add_.Tensor(x, 1)
    second: f32[4] = aten.mul_.Tensor(x, 2)
    return output("x", x)
"""
RANDOM = """
    x: f32[4] = input("x")
    first: f32[4] = aten.rand_like(x)
    plain: f32[4] = aten.relu(x)
    second: f32[4] = aten.bernoulli(x)
    return output("a", first), output("b", second), output("c", plain)
"""
GROUPS_APART = """
    x: f32[4] = input("x")
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    b: f32[4] = c10d.all_reduce(x, "sum", "tp")
    c: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
    wa: f32[4] = c10d.wait_tensor(a)
    wb: f32[4] = c10d.wait_tensor(b)
    wc: f32[8] = c10d.wait_tensor(c)
    return output("a", wa), output("b", wb), output("c", wc)
"""
READ_UNTIL_WAIT = """
    x: f32[4] = input("x")
    start: f32[8] = c10d.all_gather_into_tensor(x, 2, "dp")
    free: f32[4] = aten.relu(x)
    wait: f32[8] = c10d.wait_tensor(start)
    write: f32[4] = aten.add_.Tensor(x, 1)
    return output("a", wait), output("b", free)
"""
IN_PLACE_COLLECTIVE = """
    x: f32[4] = input("x")
    buffer: f32[4] = aten.clone(x)
    half: f32[2] = aten.slice.Tensor(buffer, 0, 0, 2)
    before: f32[4] = aten.relu(buffer)
    start: f32[4] = c10d.all_reduce_(buffer, "sum", "dp")
    wait: f32[4] = c10d.wait_tensor(start)
    after: f32[2] = aten.neg(half)
    return output("a", before), output("b", after)
"""
OUT_BUFFER = """
    x: f32[4] = input("x")
    buffer: f32[8] = aten.empty.memory_format([8])
    start: f32[8] = c10d.all_gather_into_tensor_out(x, 2, "dp", out=buffer)
    wait: f32[8] = c10d.wait_tensor(start)
    after: f32[8] = aten.neg(buffer)
    return output("a", after)
"""
START_READ_AFTER_WAIT = """
    x: f32[4] = input("x")
    start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    wait: f32[4] = c10d.wait_tensor(start)
    after: f32[4] = aten.neg(start)
    return output("a", after)
"""
IN_PLACE_COALESCED = """
    x: f32[4] = input("x")
    p: f32[4] = aten.clone(x)
    q: f32[4] = aten.clone(x)
    both: (f32[4], f32[4]) = c10d.all_reduce_coalesced_([p, q], "sum", "dp")
    b0: f32[4] = both[0]
    b1: f32[4] = both[1]
    w0: f32[4] = c10d.wait_tensor(b0)
    w1: f32[4] = c10d.wait_tensor(b1)
    r0: f32[4] = aten.neg(p)
    r1: f32[4] = aten.neg(q)
    return output("a", r0), output("b", r1)
"""
WRITTEN_SIBLING = """
    x: f32[4] = input("x")
    both: (f32[2], f32[2]) = c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 2, "dp")
    b0: f32[2] = both[0]
    b1: f32[2] = both[1]
    early: f32[4] = aten.exp(x)
    w0: f32[2] = c10d.wait_tensor(b0)
    w1: f32[2] = c10d.wait_tensor(b1)
    write: f32[2] = aten.mul_.Tensor(w0, 2)
    r0: f32[2] = aten.neg(w0)
    r1: f32[2] = aten.neg(w1)
    return output("a", r0), output("b", r1), output("c", early)
"""
READ_SIBLING = WRITTEN_SIBLING.replace("mul_", "mul")
OWN_ELEMENTS = """
    x: f32[4] = input("x")
    pair: (f32[], f32[]) = aten.aminmax(x)
    low: f32[] = pair[0]
    high: f32[] = pair[1]
    write: f32[] = aten.add_.Tensor(low, 1)
    read_high: f32[] = aten.neg(high)
    read_low: f32[] = aten.neg(low)
    return output("a", read_high), output("b", read_low)
"""
SPLIT_ELEMENTS = """
    x: f32[4] = input("x")
    parts: (f32[2], f32[2]) = aten.split.Tensor(x, 2)
    last: f32[2] = parts[1]
    write: f32[2] = aten.add_.Tensor(last, 1)
    read: f32[4] = aten.neg(x)
    return output("a", read)
"""
LIST_READ_WHOLE = """
    x: f32[4] = input("x")
    pair: (f32[4], f32[4]) = aten._foreach_add.Scalar([x, x], 1)
    element: f32[4] = pair[1]
    write: f32[4] = aten.add_.Tensor(element, 1)
    joined: f32[8] = aten.cat(pair)
    return output("a", joined)
"""
UNDECLARED_ALIAS = """
    x: f32[4] = input("x")
    flat: f32[2, 2] = aten._unsafe_view(x, [2, 2])
    write: f32[2, 2] = aten.add_.Tensor(flat, 1)
    read: f32[4] = aten.neg(x)
    return output("a", read)
"""
TRAINING_BATCH_NORM = """
    x: f32[2, 3, 4] = input("x")
    mean: f32[3] = buffer("mean")
    var: f32[3] = buffer("var")
    norm: f32[2, 3, 4] = aten.batch_norm(x, None, None, mean, var, True, 0.1, 1e-05, False)
    read: f32[3] = aten.neg(mean)
    return output("a", norm), output("b", read)
"""
EVAL_BATCH_NORM = TRAINING_BATCH_NORM.replace("True", "False")
SAME_CONSTANT = """
    k: f32[4] = constant("k")
    again: f32[4] = constant("k")
    write: f32[4] = aten.add_.Tensor(k, 1)
    read: f32[4] = aten.neg(again)
    return output("a", read)
"""
FOREACH_WRITE = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    write = aten._foreach_add_.Scalar([x, y], 1)
    read: f32[4] = aten.neg(y)
    return output("a", read)
"""
SIDE_EFFECTS = """
    x: f32[4] = input("x")
    ok: b8[] = aten.all(x)
    first = aten._assert_async.msg(ok, "one")
    plain: f32[4] = aten.relu(x)
    second = aten._assert_async.msg(ok, "two")
    return output("a", plain)
"""
NO_INPUTS = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    ones: f32[4] = aten.ones([4])
    write: f32[4] = aten.add_.Tensor(x, 1)
    return output("a", ones)
"""
