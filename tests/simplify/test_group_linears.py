"""Products become one where that pays, none needs another, and nothing sees it in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.graph.passes import Outcome, run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.verify import verify
from crossfade.simplify.group_linears import GroupLinears
from tests.simplify.holds import declines, program_of, rewrites, run, same_results

SLOW_CALLS = Machine("slow calls", {}, {"float32": 1e12}, 1e12, overhead=1e-3, device="cuda")
"""Every call takes a millisecond, and nothing else counts."""
ANY = GroupLinears(machine=SLOW_CALLS)
SLOW_MEMORY = GroupLinears(machine=Machine("slow memory", {}, {"float32": 1e12}, 1e3, device="cuda"))
CPU = GroupLinears(machine=preset("loopback-gloo"))


BIASED = """
    x: f32[64, 4] = input("x")
    v: f32[4, 2] = input("v")
    w: f32[4, 3] = input("w")
    b: f32[2] = input("b")
    c: f32[3] = input("c")"""


def test_biases_and_sizes_of_their_own():
    before = """
    p: f32[64, 2] = aten.addmm(b, x, v)
    d: f32[64, 2] = aten.relu(p)
    q: f32[64, 3] = aten.addmm(c, x, w)
    e: f32[64, 3] = aten.relu(q)
    return output("d", d), output("e", e)
    """
    after = """
    cat: f32[4, 5] = aten.cat([v, w], 1)
    cat_1: f32[5] = aten.cat([b, c])
    addmm: f32[64, 5] = aten.addmm(cat_1, x, cat)
    split_with_sizes: (f32[64, 2], f32[64, 3]) = aten.split_with_sizes(addmm, [2, 3], 1)
    getitem: f32[64, 2] = split_with_sizes[0]
    getitem_1: f32[64, 3] = split_with_sizes[1]
    d: f32[64, 2] = aten.relu(getitem)
    e: f32[64, 3] = aten.relu(getitem_1)
    return output("d", d), output("e", e)
    """
    rewrites(SLOW_MEMORY, BIASED + before, BIASED + after, {"concatenated": 2})


@pytest.mark.parametrize("first", ["aten.addmm(b, x, v, beta=2)", "aten.addmm(k, x, v)", "aten.mm(x, v)"])
def test_other_products_are_no_candidates(first: str):
    text = f"""{BIASED}
    k: f32[64, 1] = input("k")
    p: f32[64, 2] = {first}
    d: f32[64, 2] = aten.relu(p)
    q: f32[64, 3] = aten.addmm(c, x, w)
    e: f32[64, 3] = aten.relu(q)
    return output("d", d), output("e", e)
    """
    assert not run_passes(program_of(text), [SLOW_MEMORY]).history[0].changed


LINEARS = """
    x: f32[2, 5, 4] = input("x")
    v: f32[6, 4] = input("v")
    w: f32[6, 4] = input("w")
    u: f32[6, 4] = input("u")
    p: f32[2, 5, 6] = aten.linear(x, v)
    h: f32[2, 5, 3, 2] = aten.view(p, [2, 5, 3, 2])
    g: f32[2, 3, 5, 2] = aten.permute(h, [0, 2, 1, 3])
    q: f32[2, 5, 6] = aten.linear(x, w)
    m: f32[2, 5, 6] = aten.mul.Tensor(q, 2)
    t: f32[2, 5, 6] = aten.linear(x, u)
    n: f32[2, 5, 6] = aten.add.Tensor(m, t)
    s: f32[2, 3, 5, 2] = {last}
    return output("s", s), output("n", n)
"""


@pytest.mark.parametrize("last", ["aten.clone(g, memory_format=contiguous_format)", "aten.exp(g)", "aten.clone(g)"])
def test_views_of_parts_are_described_anew(last: str):
    """The heads of attention are views of a part of the product; what is computed from them lies as before."""
    text = LINEARS.format(last=last)
    program = program_of(text)
    done = run_passes(program, [ANY])
    assert done.history[0].counts["concatenated"] == 3
    heads = next(node for node in done.graph.nodes if node.name == "h")
    assert heads.meta["val"].stride() == (90, 18, 2, 1)
    same_results(program, done, GroupLinears.numerics)
    verify(done, recompute=True)


PAIR = """
    x: f32[64, 4] = input("x")
    v: f32[4, 2] = input("v")
    w: f32[4, 2] = input("w")
    p: f32[64, 2] = aten.mm(x, v)
    q: f32[64, 2] = aten.mm(x, w)
    {more}
"""
READERS = {
    "a view of it could not be taken": """
    f: f32[128] = aten.view(p, [128])
    a: f32[128] = aten.neg(f)
    b: f32[64, 2] = aten.neg(q)
    return output("a", a), output("b", b)
    """,
    "something communicates or writes it": """
    s: f32[64, 2] = c10d.all_reduce(p, "sum", "dp")
    a: f32[64, 2] = c10d.wait_tensor(s)
    b: f32[64, 2] = aten.neg(q)
    return output("a", a), output("b", b)
    """,
    "something goes by its strides": """
    f: int = aten.sym_stride.int(p, 0)
    a: f32[64, 2] = aten.mul.Tensor(q, f)
    b: f32[64, 2] = aten.neg(p)
    return output("a", a), output("b", b)
    """,
    "it does not need less of everything": """
    a: f32[64, 2] = aten.neg(p)
    b: f32[64, 2] = aten.neg(q)
    return output("a", a), output("b", b)
    """,
    "an op of another library would read it by other strides": """
    a: f32[64, 2] = prims.neg(p)
    b: f32[64, 2] = aten.neg(q)
    return output("a", a), output("b", b)
    """,
}


@pytest.mark.parametrize("reason", READERS)
def test_declined(reason: str):
    step = GroupLinears() if "everything" in reason else SLOW_MEMORY
    declines(step, PAIR.format(more=READERS[reason].strip()), reason, dp=2)


def test_products_that_need_one_another_stay_apart():
    text = """
        x: f32[4, 4] = input("x")
        v: f32[4, 4] = input("v")
        p: f32[4, 4] = aten.mm(x, v)
        r: f32[4, 4] = aten.relu(p)
        q: f32[4, 4] = aten.mm(x, r)
        return output("s", q)
    """.replace('return output("s", q)', 's: f32[4, 4] = aten.exp(q)\n        return output("s", s)')
    declines(ANY, text, "it needs the result of another one like it")


def test_two_groups_never_need_each_other():
    """a feeds d and c feeds b: {a, b} and {c, d} would each come before the other."""
    text = """
        x: f32[4, 4] = input("x")
        y: f32[4, 4] = input("y")
        w: f32[4, 4] = input("w")
        a: f32[4, 4] = aten.mm(x, w)
        a1: f32[4, 4] = aten.mm(x, y)
        a2: f32[4, 4] = aten.mm(x, x)
        c: f32[4, 4] = aten.mm(y, w)
        c1: f32[4, 4] = aten.mm(y, x)
        d: f32[4, 4] = aten.mm(y, a)
        b: f32[4, 4] = aten.mm(x, c)
        e: f32[4, 4] = aten.add.Tensor(b, a1)
        f: f32[4, 4] = aten.add.Tensor(d, c1)
        g: f32[4, 4] = aten.relu(a2)
        return output("e", e), output("f", f), output("g", g)
    """
    program = program_of(text)
    done = run_passes(program, [ANY])
    assert done.history[0].counts["concatenated"] == 6
    left = [verdict for verdict in done.history[0].verdicts if verdict.subject == "b"]
    assert [verdict.reason for verdict in left] == ["it needs the result of another one like it"]
    same_results(program, done, GroupLinears.numerics)


def small(count: int, sizes: str = "8, 8") -> str:
    names = range(count)
    lines = [f'x{i}: f32[{sizes}] = input("x{i}")\n    w{i}: f32[{sizes}] = input("w{i}")' for i in names]
    lines += [f"p{i}: f32[{sizes}] = aten.mm(x{i}, w{i})\n    r{i}: f32[{sizes}] = aten.relu(p{i})" for i in names]
    return "    " + "\n    ".join(lines) + "\n    return " + ", ".join(f'output("r{i}", r{i})' for i in names)


def test_small_products_become_a_batch():
    done = rewrites(
        CPU,
        small(6),
        "\n".join(
            [
                *small(6).splitlines()[:12],
                "    stack: f32[6, 8, 8] = aten.stack([x0, x1, x2, x3, x4, x5])",
                "    stack_1: f32[6, 8, 8] = aten.stack([w0, w1, w2, w3, w4, w5])",
                "    bmm: f32[6, 8, 8] = aten.bmm(stack, stack_1)",
                f"    unbind: ({', '.join(['f32[8, 8]'] * 6)}) = aten.unbind.int(bmm)",
                *(f"    getitem{f'_{i}' if i else ''}: f32[8, 8] = unbind[{i}]" for i in range(6)),
                *(f"    r{i}: f32[8, 8] = aten.relu(getitem{f'_{i}' if i else ''})" for i in range(6)),
                small(6).splitlines()[-1],
            ]
        ),
        {"batched": 6},
    )
    (verdict,) = done.history[0].verdicts
    assert verdict.outcome is Outcome.FUSED
    assert "6 products" in verdict.detail and "us on loopback-gloo" in verdict.detail


@pytest.mark.parametrize(
    "reader", ["aten.alias(p0)", "aten.add_.Tensor(p0, 1)", "aten.as_strided(p0, [8, 8], [8, 1], 0)"]
)
def test_memory_that_somebody_sees_is_no_part_of_a_batch(reader: str):
    """A result, what is written, what is read by strides from the memory's beginning."""
    program = program_of(small(7).replace("aten.relu(p0)", reader))
    done = run_passes(program, [CPU])
    assert done.history[0].counts["batched"] == 6
    left = {verdict.subject: verdict.reason for verdict in done.history[0].verdicts if verdict.outcome is Outcome.LEFT}
    assert left == {"p0": "its memory is returned, written to, or looked at by strides"}
    same_results(program, done, GroupLinears.numerics)


def test_large_products_are_no_batch():
    assert not run_passes(program_of(small(4, "512, 512")), [CPU]).history[0].changed
    assert not run_passes(program_of(small(6)), [GroupLinears()]).history[0].changed


def test_weights_that_are_concatenated_beforehand_cost_no_copy():
    text = """
        x: f32[16, 256] = input("x")
        v: f32[256, 256] = constant("v")
        w: f32[256, 256] = constant("w")
        p: f32[16, 256] = aten.mm(x, v)
        q: f32[16, 256] = aten.mm(x, w)
        y: f32[16, 256] = aten.add.Tensor(p, q)
        return output("y", y)
    """
    program = program_of(text)
    program.constants = {"v": torch.ones(256, 256), "w": torch.ones(256, 256)}
    machine = preset("h200-nvlink-node")
    expensive = run_passes(program, [GroupLinears(machine)])
    verdict = expensive.history[0].verdicts[0]
    assert verdict.reason == "it would not be faster on this machine" and "B, 2 calls ->" in verdict.detail
    assert run_passes(program, [GroupLinears(machine, folds_constants=True)]).history[0].changed


def test_collectives_keep_their_order():
    text = """
        x: f32[4, 4] = input("x")
        v: f32[4, 2] = input("v")
        p: f32[4, 2] = aten.mm(x, v)
        r: f32[4, 2] = aten.relu(p)
        s: f32[4, 2] = c10d.all_reduce(r, "sum", "dp")
        z: f32[4, 2] = c10d.all_reduce(v, "sum", "dp")
        w: f32[4, 2] = c10d.wait_tensor(z)
        q: f32[4, 2] = aten.mm(x, w)
        n: f32[4, 2] = aten.neg(q)
        d: f32[4, 2] = c10d.wait_tensor(s)
        return output("d", d), output("n", n)
    """
    declines(ANY, text, "it needs the result of another one like it", dp=2)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([0, 1, 40, 57]),
    st.lists(st.integers(0, 4), min_size=2, max_size=4),
    st.sampled_from(["f32", "bf16", "f64"]),
)
def test_values(rows: int, columns: list[int], dtype: str):
    lines = [f'x: {dtype}[{rows}, 8] = input("x")']
    lines += [f'w{i}: {dtype}[8, {n}] = input("w{i}")' for i, n in enumerate(columns)]
    lines += [f"p{i}: {dtype}[{rows}, {n}] = aten.mm(x, w{i})" for i, n in enumerate(columns)]
    lines += [f"r{i}: {dtype}[{rows}, {n}] = aten.neg(p{i})" for i, n in enumerate(columns)]
    program = program_of(
        "\n".join([*lines, "return " + ", ".join(f'output("{i}", r{i})' for i in range(len(columns)))])
    )
    done = run_passes(program, [SLOW_MEMORY])
    assert done.history[0].changed or rows < 40
    found, (x, *weights) = run(done, 0)
    tolerance = {"bf16": 0.02, "f32": 1e-5}.get(dtype, 1e-12)
    for product, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(product.double(), -(x.double() @ weight.double()), rtol=tolerance, atol=tolerance)


def test_a_captured_attention_block():
    def attention(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        heads = [torch.nn.functional.linear(x, weight).view(2, 5, 2, 4).transpose(1, 2) for weight in weights]
        return torch.nn.functional.scaled_dot_product_attention(*heads)

    inputs = [torch.randn(10, 8), *(torch.randn(8, 8) for _ in range(3))]
    program = from_graph_module(make_fx(attention, tracing_mode="fake")(*inputs))
    done = run_passes(program, [ANY])
    assert done.history[0].counts["concatenated"] == 3
    verify(done, recompute=True)
    torch.testing.assert_close(done.module()(*inputs)[0], attention(*inputs))
