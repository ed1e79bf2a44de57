"""What changes nothing goes; what changes a bit, or memory that is seen, stays with a reason."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.simplify.remove_noops import RemoveNoops
from tests.simplify.holds import declines, program_of, rewrites


def one(kind: str, call: str, result: str | None = None) -> str:
    """A program with one call on `x`, whose result is read."""
    return f"""
        x: {kind} = input("x")
        y: {result or kind} = {call}
        z: {result or kind} = aten.bitwise_not(y)
        return output("z", z)
        """.replace("bitwise_not", "neg" if (result or kind)[0] in "fc" else "bitwise_not")


NOOPS = {
    "slice": [
        "aten.slice.Tensor(x, 0, 0, 9223372036854775807)",
        "aten.slice.Tensor(x, -1, None, 3)",
        "aten.slice.Tensor(x)",
        "aten.slice.Tensor(x, 1, -3, 9, 1)",
        "aten.slice.Tensor(end=4, self=x)",
        "aten.narrow(x, 1, 0, 3)",
    ],
    "repeat": ["aten.repeat(x, [1, 1])", "aten.tile(x, [1])"],
    "expand": ["aten.expand(x, [4, 3])", "aten.expand(x, [-1, -1])", "aten.broadcast_to(x, [4, 3])"],
    "view": [
        "aten.view(x, [4, -1])",
        "aten._unsafe_view(x, [4, 3])",
        "aten.reshape(x, [-1, 3])",
        "aten.view_as(x, x)",
        "aten._reshape_alias(x, [4, 3], [3, 1])",
        "aten.flatten.using_ints(x, 1, 1)",
        "aten.unflatten.int(x, 0, [4])",
    ],
    "squeeze": ["aten.squeeze(x)", "aten.squeeze.dim(x, 0)", "aten.squeeze.dims(x, [0, 1])"],
    "permute": ["aten.permute(x, [0, -1])", "aten.transpose.int(x, 1, -1)"],
    "view-dtype": ["aten.view.dtype(x, f32)"],
    "pad": ["aten.constant_pad_nd(x, [0, 0, 0, 0], 1.0)"],
    "cat": ["aten.cat([x])", "aten.cat([x], -1)"],
    "clone": ["aten.clone(x)", "aten.clone(x, memory_format=contiguous_format)"],
    "contiguous": ["aten.contiguous(x)"],
    "lift": ["aten.lift_fresh_copy(x)", "aten.lift_fresh(x)"],
    "copy": ["aten.copy(x, x)"],
    "conversion": [
        "aten._to_copy(x, dtype=f32)",
        'aten._to_copy(x, dtype=f32, layout=strided, device=device("cpu"), pin_memory=False)',
        "aten.to.dtype(x, f32)",
        'aten.to.dtype_layout(x, dtype=f32, layout=strided, device=device("cpu"))',
        'aten.to.device(x, device("cpu"), f32)',
        "aten.to.other(x, x)",
        "aten.type_as(x, x)",
        "prims.convert_element_type(x, f32)",
        'prims.device_put(x, device("cpu"))',
    ],
    "power-of-one": ["aten.pow.Tensor_Scalar(x, 1)", "aten.pow.Tensor_Scalar(x, 1.0)"],
    "times-one": [
        "aten.mul.Tensor(x, 1)",
        "aten.mul.Scalar(x, 1.0)",
        "aten.div.Tensor(x, 1)",
        "aten.div.Scalar(x, 1.0)",
    ],
    "plus-zero": ["aten.sub.Tensor(x, 0)", "aten.sub.Scalar(x, 0.0)", "aten.add.Tensor(x, -0.0)"],
}


@pytest.mark.parametrize(("rule", "call"), [(rule, call) for rule, calls in NOOPS.items() for call in calls])
def test_removed(rule: str, call: str):
    after = """
        x: f32[4, 3] = input("x")
        z: f32[4, 3] = aten.neg(x)
        return output("z", z)
        """
    rewrites(RemoveNoops(), one("f32[4, 3]", call), after, {rule: 1})


@pytest.mark.parametrize(
    ("kind", "call", "rule"),
    [
        ("i64[4]", "aten.floor(x)", "round-integers"),
        ("i32[4]", "aten.ceil(x)", "round-integers"),
        ("u8[4]", "aten.round(x)", "round-integers"),
        ("i8[4]", "aten.trunc(x)", "round-integers"),
        ("i32[4]", "aten.add.Tensor(x, 0)", "plus-zero"),
        ("i32[4]", "aten.sub.Tensor(x, 0)", "plus-zero"),
        ("i32[4]", "aten.mul.Tensor(x, 1)", "times-one"),
        ("i32[4]", "aten.pow.Tensor_Scalar(x, 1)", "power-of-one"),
        ("c64[4]", "aten.pow.Tensor_Scalar(x, 1)", "power-of-one"),
        ("i32[0, 3]", "aten.slice.Tensor(x, 0, 5, 9)", "slice"),
        ("i32[0, 3]", "aten.repeat(x, [7, 1])", "repeat"),
        ("f32[1, 1, 4]", "aten.permute(x, [1, 0, 2])", "permute"),
        ("f32[4]", "aten.t(x)", "permute"),
        ("f32[4, 3]", "aten.slice_scatter(x, x, 1, 0, 9)", "slice-scatter"),
        ("f32[4, 3]", "aten.slice_scatter(x, x)", "slice-scatter"),
        ("f32[4, 3]", "aten.slice_scatter(x, x, -1, None, 9223372036854775807)", "slice-scatter"),
        ("f32[4, 3]", "aten.dropout(x, 0.0, False)", "dropout"),
    ],
)
def test_removed_of_other_kinds(kind: str, call: str, rule: str):
    done = run_passes(program_of(one(kind, call)), [RemoveNoops()])
    counts = {name: count for name, count in done.history[0].counts.items() if count}
    assert counts == {rule: 1}
    last = done.results[0]
    assert last.all_input_nodes == done.placeholders
    rewrites(RemoveNoops(), one(kind, call), str(done))


def test_empty_inputs_of_cat_count_for_nothing():
    before = """
        x: f32[2, 3] = input("x")
        a: f32[0] = input("a")
        b: f32[0, 3] = input("b")
        c: f32[2, 3] = aten.cat([a, x, b])
        n: f32[2, 3] = aten.neg(c)
        return output("n", n)
        """
    after = """
        x: f32[2, 3] = input("x")
        a: f32[0] = input("a")
        b: f32[0, 3] = input("b")
        n: f32[2, 3] = aten.neg(x)
        return output("n", n)
        """
    rewrites(RemoveNoops(), before, after, {"cat": 1})


def test_the_same_on_both_sides_and_a_split_in_one():
    before = """
        x: f32[4, 3] = input("x")
        m: b8[4, 3] = input("m")
        w: f32[4, 3] = aten.where.self(m, x, x)
        s: (f32[4, 3],) = aten.split.Tensor(w, 4)
        p: f32[4, 3] = s[0]
        t: (f32[4, 3], f32[4, 0]) = aten.split_with_sizes(p, [3, 0], 1)
        q: f32[4, 3] = t[0]
        n: f32[4, 3] = aten.neg(q)
        return output("n", n)
        """
    after = """
        x: f32[4, 3] = input("x")
        m: b8[4, 3] = input("m")
        n: f32[4, 3] = aten.neg(x)
        return output("n", n)
        """
    rewrites(RemoveNoops(), before, after, {"where": 1, "split": 2})


DECLINED = {
    "it changes the shape": [
        one("f32[4, 3]", "aten.slice.Tensor(x, 0, 1, 4)", "f32[3, 3]"),
        one("f32[4, 3]", "aten.slice.Tensor(x, 0, 0, 4, 2)", "f32[2, 3]"),
        one("f32[4]", "aten.repeat(x, [1, 1])", "f32[1, 4]"),
        one("f32[1, 4]", "aten.permute(x, [1, 0])", "f32[4, 1]"),
        one("f32[1, 4]", "aten.squeeze(x)", "f32[4]"),
        one("f32[0, 3]", "aten.view(x, [3, 0])", "f32[3, 0]"),
    ],
    "it moves dims of several elements": [one("f32[3, 3]", "aten.t(x)"), one("f32[3, 3]", "aten.permute(x, [1, 0])")],
    "it does not provably write everything": [
        one("f32[4]", "aten.slice_scatter(x, x, 0, -4, 4)"),
        one("f32[1]", "aten.slice_scatter(x, x, 0, 0, 1, 2)"),
        """
        x: f32[4] = input("x")
        s: f32[3] = input("s")
        y: f32[4] = aten.slice_scatter(x, s, 0, 0, 3)
        z: f32[4] = aten.neg(y)
        return output("z", z)
        """,
    ],
    "it pads": [one("f32[4]", "aten.constant_pad_nd(x, [1, -1])")],
    "it joins several inputs": [one("f32[4]", "aten.cat([x, x])", "f32[8]")],
    "it must be a copy": [one("f32[4]", "aten.to.dtype(x, f32, False, True)")],
    "it asks for a memory format": [one("f32[4]", "aten.to.dtype(x, f32, memory_format=contiguous_format)")],
    "it changes dtype, device or layout": [
        one("f32[4]", "aten._to_copy(x, dtype=f64)", "f64[4]"),
        one("f32[4]", "aten.view.dtype(x, i32)", "i32[4]"),
        one("f32[4]", 'prims.device_put(x, device("meta"))'),
        one("f32[4]", "aten.to.dtype(x, f16)", "f16[4]"),
    ],
    "it drops values": [one("f32[4]", "aten.dropout(x, 0.5, True)")],
    "nothing reads it": [one("f32[4]", "aten.dropout(x, 0.5, False)").replace("aten.neg(y)", "aten.neg(x)")],
    "it rounds fractions": [one("f32[4]", "aten.floor(x)"), one("bf16[4]", "aten.round(x)")],
    "a complex product can turn an infinity into a NaN": [one("c64[4]", "aten.mul.Tensor(x, 1)")],
    "a complex sum has two zeros": [one("c64[4]", "aten.sub.Tensor(x, 0)")],
    "it turns -0.0 into 0.0": [
        one("f32[4]", "aten.add.Tensor(x, 0)"),
        one("f32[4]", "aten.add.Tensor(x, 0.0)"),
        one("f32[4]", "aten.sub.Tensor(x, -0.0)"),
    ],
    "its dtype or device would change": [
        one("i32[4]", "aten.div.Tensor(x, 1)", "f32[4]"),
        one("i32[4]", "aten.pow.Tensor_Scalar(x, 1.0)", "f32[4]"),
        one("i32[4]", "aten.mul.Tensor(x, 1.0)", "f32[4]"),
    ],
    "its strides would change": [
        """
        x: f32[4, 3] = input("x")
        t: f32[3, 4] = aten.t(x)
        c: f32[3, 4] = aten.clone(t, memory_format=contiguous_format)
        z: f32[3, 4] = aten.neg(c)
        return output("z", z)
        """,
        """
        x: f32[4, 3] = input("x")
        t: f32[3, 4] = aten.t(x)
        c: f32[3, 4] = aten.contiguous(t)
        z: f32[3, 4] = aten.neg(c)
        return output("z", z)
        """,
    ],
    "a result of the program would share memory with an input": [
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        return output("c", c)
        """,
    ],
    "its memory is written to": [
        """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        w: f32[4] = aten.neg_(x)
        z: f32[4] = aten.neg(c)
        return output("z", z)
        """,
    ],
}


@pytest.mark.parametrize(("reason", "text"), [(reason, text) for reason, texts in DECLINED.items() for text in texts])
def test_declined(reason: str, text: str):
    declines(RemoveNoops(), text, reason)


FILLED = """
    x: {kind} = input("x")
    f: {filled} = {fill}
    {write}y: {kind} = {call}
    z: {kind} = aten.abs(y)
    return output("z", z)
"""


def with_filled(call: str, fill: str, kind: str = "f32[4, 3]", filled: str = "f32[4, 3]", write: str = "") -> str:
    return FILLED.format(kind=kind, filled=filled, fill=fill, call=call, write=write and write + "\n    ")


@pytest.mark.parametrize(
    ("call", "fill", "filled", "kind", "rule"),
    [
        ("aten.sub.Tensor(x, f)", "aten.zeros([4, 3])", "f32[4, 3]", "f32[4, 3]", "plus-zeros"),
        ("aten.sub.Tensor(x, f)", "aten.zeros_like(x)", "f32[4, 3]", "f32[4, 3]", "plus-zeros"),
        ("aten.add.Tensor(f, x)", "aten.full([3], -0.0)", "f32[3]", "f32[4, 3]", "plus-zeros"),
        ("aten.add.Tensor(x, f)", "aten.zeros([4], dtype=i32)", "i32[4]", "i32[4]", "plus-zeros"),
        ("aten.mul.Tensor(x, f)", "aten.ones([3])", "f32[3]", "f32[4, 3]", "times-ones"),
        ("aten.mul.Tensor(f, x)", "aten.full([], 1)", "i64[]", "f32[4, 3]", "times-ones"),
        ("aten.mul.Tensor(f, x)", "aten.ones([4, 3], dtype=b8)", "b8[4, 3]", "bf16[4, 3]", "times-ones"),
        ("aten.div.Tensor(x, f)", "aten.full([4, 3], 1.0)", "f32[4, 3]", "f32[4, 3]", "times-ones"),
    ],
)
def test_filled_tensors_that_change_nothing(call: str, fill: str, filled: str, kind: str, rule: str):
    after = f"""
    x: {kind} = input("x")
    z: {kind} = aten.abs(x)
    return output("z", z)
    """
    rewrites(RemoveNoops(), with_filled(call, fill, kind, filled), after, {rule: 1})


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            "its other operand is not filled",
            with_filled("aten.mul.Tensor(x, f)", "aten.full([3], 2.0)", filled="f32[3]"),
        ),
        ("its other operand is not filled", with_filled("aten.div.Tensor(f, x)", "aten.ones([4, 3])")),
        ("its other operand is not filled", with_filled("aten.sub.Tensor(f, x)", "aten.zeros([4, 3])")),
        ("it turns -0.0 into 0.0", with_filled("aten.add.Tensor(x, f)", "aten.zeros([4, 3])")),
        ("it turns -0.0 into 0.0", with_filled("aten.sub.Tensor(x, f)", "aten.full([4, 3], -0.0)")),
        (
            "it turns -0.0 into 0.0",
            with_filled("aten.add.Tensor(x, f)", "aten.full([4, 3], -0.0, dtype=i32)", filled="i32[4, 3]"),
        ),
        ("is written to", with_filled("aten.mul.Tensor(x, f)", "aten.ones([4, 3])", write="aten.add_.Tensor(f, 1)")),
        ("its shape is not", with_filled("aten.mul.Tensor(x, f)", "aten.ones([4, 3])", kind="f32[3]")),
        ("a complex product", with_filled("aten.mul.Tensor(x, f)", "aten.ones([4, 3])", kind="c64[4, 3]")),
    ],
)
def test_filled_tensors_that_change_something(reason: str, text: str):
    text = text.replace("    aten.add_.Tensor", "    a: f32[4, 3] = aten.add_.Tensor")
    if "x: f32[3]" in text:
        text = text.replace("y: f32[3]", "y: f32[4, 3]").replace("z: f32[3]", "z: f32[4, 3]")
    text = text.replace("z: c64[4, 3] = aten.abs(y)", "z: c64[4, 3] = aten.neg(y)")
    declines(RemoveNoops(), text, reason)


def test_waiting_twice_is_waiting_once():
    before = """
    x: f32[4] = input("x")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    w: f32[4] = c10d.wait_tensor(s)
    v: f32[4] = c10d.wait_tensor(w)
    y: f32[4] = aten.neg(v)
    return output("y", y)
    """
    after = """
    x: f32[4] = input("x")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    w: f32[4] = c10d.wait_tensor(s)
    y: f32[4] = aten.neg(w)
    return output("y", y)
    """
    rewrites(RemoveNoops(), before, after, {"wait": 1}, dp=2)


def test_pinned_memory_is_declined():
    program = program_of(one("f32[4]", "aten._to_copy(x, dtype=f32)"))
    copy = list(program.graph.nodes)[1]
    copy.kwargs = {**copy.kwargs, "pin_memory": True}  # fake tensors refuse to be made so
    (verdict,) = run_passes(program, [RemoveNoops()]).history[0].verdicts
    assert verdict.reason == "it pins its memory"


def test_symbolic_sizes_are_proved():
    """Whole slices and expansions are seen to be so for all sizes, without a guess about any."""

    def function(x, y):
        rows = x.shape[0]
        a = torch.ops.aten.slice.Tensor(x, 0, 0, rows).expand(rows, x.shape[1]).view(rows, -1)
        b = torch.slice_scatter(y, a, 0, 0, rows)
        return b.neg(), torch.ops.aten.slice.Tensor(x, 0, 0, 3).neg()

    module = make_fx(function, tracing_mode="symbolic")(torch.ones(5, 7), torch.ones(5, 7))
    program = from_graph_module(module)
    shapes = program.fake_mode.shape_env
    guards = len(shapes.guards)
    done = run_passes(program, [RemoveNoops()])
    targets = [str(node.target) for node in done.graph.nodes if node.op == "call_function" and "sym" not in node.name]
    assert targets == ["aten.neg.default", "aten.slice.Tensor", "aten.neg.default"]
    assert len(shapes.guards) == guards
