"""Concatenations that feed a collective become a buffer kept from step to step; each refusal with its reason."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.execute.executable import Executable
from crossfade.finish.pack_in_place import PackInPlace
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

END = """
        s: f32[{n}] = c10d.all_reduce(cat, "sum", "dp")
        w: f32[{n}] = c10d.wait_tensor(s)
        return output("y", w)
        """
PACKED = {
    "a member that something else reads is copied as soon as it is ready": (
        """
        x: f32[2, 2] = input("x")
        mm: f32[2, 2] = aten.mm(x, x)
        e: f32[2, 2] = aten.exp(mm)
        f: f32[4] = aten.view(mm, [-1])
        f1: f32[4] = aten.view(e, [-1])
        cat: f32[8] = aten.cat([f, f1])
        """
        + END.format(n=8),
        """
        mm: f32[2, 2] = aten.mm(x, x)
        slice_1: f32[4] = aten.slice.Tensor(bucket_0, 0, 0, 4)
        view: f32[2, 2] = aten.view(slice_1, [2, 2])
        copy_: f32[2, 2] = aten.copy_(view, mm)
        e: f32[2, 2] = aten.exp(mm)
        slice_2: f32[4] = aten.slice.Tensor(bucket_0, 0, 4, 8)
        view_1: f32[2, 2] = aten.view(slice_2, [2, 2])
        copy__1: f32[2, 2] = aten.copy_(view_1, e)
        s: f32[8] = c10d.all_reduce(bucket_0, "sum", "dp")
        """,
        {"buffers": 1, "written_directly": 0, "copied_in": 2},
    ),
    "one member twice": (
        """
        x: f32[2, 2] = input("x")
        mm: f32[2, 2] = aten.mm(x, x)
        f: f32[4] = aten.view(mm, [-1])
        cat: f32[8] = aten.cat([f, f])
        """
        + END.format(n=8),
        """
        slice_1: f32[4] = aten.slice.Tensor(bucket_0, 0, 0, 4)
        view: f32[2, 2] = aten.view(slice_1, [2, 2])
        mm: f32[2, 2] = aten.mm.out(x, x, out=view)
        slice_2: f32[4] = aten.slice.Tensor(bucket_0, 0, 4, 8)
        view_1: f32[2, 2] = aten.view(slice_2, [2, 2])
        copy_: f32[2, 2] = aten.copy_(view_1, mm)
        s: f32[8] = c10d.all_reduce(bucket_0, "sum", "dp")
        """,
        {"buffers": 1, "written_directly": 1, "copied_in": 1},
    ),
    "a member of another dtype is converted by the copy": (
        """
        x: f16[2, 2] = input("x")
        y: f32[2] = input("y")
        mm: f16[2, 2] = aten.mm(x, x)
        f: f16[4] = aten.view(mm, [-1])
        f1: f32[2] = aten.view(y, [-1])
        cat: f32[6] = aten.cat([f, f1])
        """
        + END.format(n=6),
        """
        mm: f16[2, 2] = aten.mm(x, x)
        slice_1: f32[4] = aten.slice.Tensor(bucket_0, 0, 0, 4)
        view: f32[2, 2] = aten.view(slice_1, [2, 2])
        copy_: f32[2, 2] = aten.copy_(view, mm)
        slice_2: f32[2] = aten.slice.Tensor(bucket_0, 0, 4, 6)
        copy__1: f32[2] = aten.copy_(slice_2, y)
        s: f32[6] = c10d.all_reduce(bucket_0, "sum", "dp")
        """,
        {"buffers": 1, "written_directly": 0, "copied_in": 2},
    ),
    "a member that is written later is copied where it is read": (
        """
        x: f32[2] = input("x")
        a: f32[2] = aten.neg(x)
        b: f32[2] = aten.add_.Tensor(a, 1)
        f: f32[2] = aten.view(a, [-1])
        cat: f32[2] = aten.cat([f])
        """
        + END.format(n=2),
        """
        a: f32[2] = aten.neg(x)
        b: f32[2] = aten.add_.Tensor(a, 1)
        slice_1: f32[2] = aten.slice.Tensor(bucket_0, 0, 0, 2)
        copy_: f32[2] = aten.copy_(slice_1, a)
        s: f32[2] = c10d.all_reduce(bucket_0, "sum", "dp")
        """,
        {"buffers": 1, "written_directly": 0, "copied_in": 1},
    ),
    "a scale between": (
        """
        x: f32[2] = input("x")
        a: f32[2] = aten.mul.Tensor(x, 3)
        f: f32[2] = aten.view(a, [-1])
        c: f32[2] = aten.cat([f])
        cat: f32[2] = aten.div.Tensor(c, 2)
        """
        + END.format(n=2),
        """
        slice_1: f32[2] = aten.slice.Tensor(bucket_0, 0, 0, 2)
        a: f32[2] = aten.mul.out(x, 3, out=slice_1)
        cat: f32[2] = aten.div.Tensor(bucket_0, 2)
        s: f32[2] = c10d.all_reduce(cat, "sum", "dp")
        """,
        {"buffers": 1, "written_directly": 1, "copied_in": 0},
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str):
    before, after, counts = PACKED[name]
    program = parse(textwrap.dedent(before), groups={"dp": 2})
    done = run_passes(program, [PackInPlace()])
    verify(done)
    lines = render(done).splitlines()
    assert [line.split(" = ")[1] for line in lines[: len(done.inputs)]][-1] == 'workspace("bucket.0")'
    assert "\n".join(lines[len(done.inputs) : -2]) == textwrap.dedent(after).strip()
    assert done.history[0].counts == counts
    assert [v.outcome for v in done.history[0].verdicts] == ["replaced"]


LEFT = {
    "something other than one collective reads it": """
        x: f32[2] = input("x")
        f: f32[2] = aten.view(x, [-1])
        cat: f32[4] = aten.cat([f, f])
        s: f32[4] = c10d.all_reduce(cat, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(cat)
        return output("y", w), output("n", n)
        """,
    "its members are not flattened tensors": """
        x: f32[2, 1] = input("x")
        cat: f32[4, 1] = aten.cat([x, x])
        """
    + END.format(n="4, 1"),
    "something writes it in place": """
        x: f32[2] = input("x")
        f: f32[2] = aten.view(x, [-1])
        cat: f32[4] = aten.cat([f, f])
        s: f32[4] = c10d.all_reduce_(cat, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("y", w)
        """,
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    done = run_passes(parse(textwrap.dedent(LEFT[reason]), groups={"dp": 2}), [PackInPlace()])
    assert [str(v) for v in done.history[0].verdicts] == [f"cat: left alone: {reason}"]
    assert not done.history[0].changed


SENT = """
    x: f32[4, 4] = input("x")
    g: f32[4, 4] = aten.mm(x, x)
    f: f32[2, 8] = aten.view(g, [2, 8])
    s: f32[2, 8] = c10d.all_to_all_single(f, [1, 1], [1, 1], "dp")
    w: f32[2, 8] = c10d.wait_tensor(s)
    return output("w", w)
"""


def test_what_is_sent_alone_is_computed_into_kept_memory_too():
    done = run_passes(parse(textwrap.dedent(SENT), groups={"dp": 2}), [PackInPlace(alone_kb=64 / 1024)])
    verify(done)
    assert render(done).splitlines()[1:6] == [
        'bucket_0: f32[16] = workspace("bucket.0")',
        "slice_1: f32[16] = aten.slice.Tensor(bucket_0, 0, 0, 16)",
        "view: f32[4, 4] = aten.view(slice_1, [4, 4])",
        "g: f32[4, 4] = aten.mm.out(x, x, out=view)",
        "f: f32[2, 8] = aten.view(g, [2, 8])",
    ]
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "g: replaced: computed into memory kept from step to step"
    ]


SENT_FROM_ELSEWHERE = {
    "it is smaller": (SENT, 65),
    "something else reads it": (SENT.replace('output("w", w)', 'output("w", w), output("g", g)'), 64),
    "its operator takes no memory": (SENT.replace("aten.mm(x, x)", "aten.exp(x)"), 64),
    "it is gathered": (
        SENT.replace(
            "[2, 8] = c10d.all_to_all_single(f, [1, 1], [1, 1],", "[4, 8] = c10d.all_gather_into_tensor(f, 2,"
        ).replace("w: f32[2, 8]", "w: f32[4, 8]"),
        64,
    ),
}


@pytest.mark.parametrize("name", SENT_FROM_ELSEWHERE)
def test_what_is_sent_alone_stays_in_fresh_memory(name: str):
    text, size = SENT_FROM_ELSEWHERE[name]
    done = run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [PackInPlace(alone_kb=size / 1024)])
    assert not done.history[0].changed
    asked_for = name not in ("it is smaller", "it is gathered")
    reason = "its operator takes no memory, or something else uses it: computed into fresh memory"
    assert [str(verdict) for verdict in done.history[0].verdicts] == [f"g: left alone: {reason}"] * asked_for


def test_symbolic_sizes_are_left():
    def packed(x: torch.Tensor) -> torch.Tensor:
        cat = torch.cat([torch.ops.aten.view(x, [-1]), torch.ops.aten.view(x, [-1])])
        return collectives.wait(collectives.all_reduce(cat, "sum", "dp"))

    program = from_graph_module(make_fx(packed, tracing_mode="symbolic")(torch.ones(5)), groups={"dp": 2})
    done = run_passes(program, [PackInPlace()])
    assert [v.reason for v in done.history[0].verdicts] == ["its size is not known before it runs"]


def test_a_second_buffer_has_a_name_of_its_own():
    text = textwrap.dedent("""
        x: f32[2] = input("x")
        b: f32[2] = workspace("bucket.0")
        f: f32[2] = aten.view(x, [-1])
        cat: f32[2] = aten.cat([f])
        s: f32[2] = c10d.all_reduce(cat, "sum", "dp")
        w: f32[2] = c10d.wait_tensor(s)
        return output("y", w), output("b", b)
    """)
    done = run_passes(parse(text, groups={"dp": 2}), [PackInPlace()])
    assert [item.name for item in done.inputs] == ["x", "bucket.0", "bucket.1"]


def test_results_of_one_step_survive_the_next():
    """What the caller holds must not live in a buffer that the next step fills."""
    text = textwrap.dedent("""
        x: f32[2] = input("x")
        a: f32[2] = aten.mul.Tensor(x, 3)
        f: f32[2] = aten.view(a, [-1])
        cat: f32[2] = aten.cat([f])
        s: f32[2] = c10d.all_reduce(cat, "sum", "dp")
        w: f32[2] = c10d.wait_tensor(s)
        return loss("loss", w)
    """)
    program = parse(text, groups={"dp": 2})
    done = run_passes(program, [PackInPlace(), UpdateInPlace()])
    for node in list(done.graph.nodes):  # one rank: a collective is its input
        if collectives.is_collective(node) or collectives.is_wait(node):
            node.replace_all_uses_with(node.args[0])
            done.graph.erase_node(node)
    step, bucket = Executable(done, {}), torch.full((2,), float("nan"))
    (first,) = step([torch.ones(2), bucket])
    (second,) = step([torch.ones(2) * 2, bucket])
    assert first.tolist() == [3, 3] and second.tolist() == [6, 6]
