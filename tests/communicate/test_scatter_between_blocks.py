"""All-reduces between matmuls: what becomes of the tokens between, dims, refusals, sampled programs on all ranks."""

from __future__ import annotations

import random
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade.communicate.scatter_between_blocks import ScatterBetweenBlocks, plan_scatters
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.gathers import find_gathers, find_scatters
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from tests.communicate.all_ranks import drawn, largest_difference, run_all
from tests.growth import grows_linearly

ALIKE = ScatterBetweenBlocks(("x*", "n*"))


def scattered(text: str, pass_: ScatterBetweenBlocks = ALIKE, ranks: int = 2) -> Program:
    done = run_passes(parse(textwrap.dedent(text), groups={"tp": ranks, "dp": 2}), [pass_])
    verify(done, recompute=True)
    return done


def same_on_all_ranks(text: str, done: Program, ranks: int) -> None:
    before = parse(textwrap.dedent(text), groups={"tp": ranks})
    value_of = drawn(lambda name: name[0] in "xn", torch.float64)
    difference = largest_difference(*(run_all(program, ranks, value_of) for program in (before, done)))
    assert difference < 1e-12


LAYERS = """
    x: f64[4, 3, 8] = input("x")
    w0: f64[8, 5] = input("w0")
    w1: f64[5, 8] = input("w1")
    n0: f64[8] = input("n0")
    a = aten.view(x, [12, 8])
    h = aten.mm(a, w0)
    m = aten.mm(h, w1)
    v = aten.view(m, [4, 3, 8])
    s = c10d.all_reduce(v, "sum", "tp")
    b: f64[4, 3, 8] = c10d.wait_tensor(s)
    y: f64[4, 3, 8] = aten.add.Tensor(x, b)
    l: (f64[4, 3, 8], f64[4, 3, 1], f64[4, 3, 1]) = aten.native_layer_norm(y, [8], n0, None, 1e-05)
    g: f64[4, 3, 8] = l[0]
    c: f64[12, 8] = aten.view(g, [12, 8])
    i = aten.mm(c, w0)
    k = aten.mm(i, w1)
    u = aten.view(k, [4, 3, 8])
    t = c10d.all_reduce(u, "sum", "tp")
    d: f64[4, 3, 8] = c10d.wait_tensor(t)
    z: f64[4, 3, 8] = aten.add.Tensor(y, d)
    return output("z", z)
"""


def test_the_residual_stays_in_parts_over_layers_and_leaves_whole() -> None:
    done = scattered(LAYERS)
    assert (
        render(done)
        == textwrap.dedent("""
        x: f64[4, 3, 8] = input("x")
        w0: f64[8, 5] = input("w0")
        w1: f64[5, 8] = input("w1")
        n0: f64[8] = input("n0")
        a: f64[12, 8] = aten.view(x, [12, 8])
        h: f64[12, 5] = aten.mm(a, w0)
        m: f64[12, 8] = aten.mm(h, w1)
        v: f64[4, 3, 8] = aten.view(m, [4, 3, 8])
        reduce_scatter_tensor: f64[2, 3, 8] = c10d.reduce_scatter_tensor(v, "sum", 2, "tp")
        wait_tensor: f64[2, 3, 8] = c10d.wait_tensor(reduce_scatter_tensor)
        own_part: f64[2, 3, 8] = crossfade.own_part(x, 0, 2, "tp")
        y: f64[2, 3, 8] = aten.add.Tensor(own_part, wait_tensor)
        l: (f64[2, 3, 8], f64[2, 3, 1], f64[2, 3, 1]) = aten.native_layer_norm(y, [8], n0, None, 1e-05)
        g: f64[2, 3, 8] = l[0]
        all_gather_into_tensor: f64[4, 3, 8] = c10d.all_gather_into_tensor(g, 2, "tp")
        wait_tensor_2: f64[4, 3, 8] = c10d.wait_tensor(all_gather_into_tensor)
        c: f64[12, 8] = aten.view(wait_tensor_2, [12, 8])
        i: f64[12, 5] = aten.mm(c, w0)
        k: f64[12, 8] = aten.mm(i, w1)
        u: f64[4, 3, 8] = aten.view(k, [4, 3, 8])
        reduce_scatter_tensor_1: f64[2, 3, 8] = c10d.reduce_scatter_tensor(u, "sum", 2, "tp")
        wait_tensor_1: f64[2, 3, 8] = c10d.wait_tensor(reduce_scatter_tensor_1)
        z: f64[2, 3, 8] = aten.add.Tensor(y, wait_tensor_1)
        all_gather_into_tensor_1: f64[4, 3, 8] = c10d.all_gather_into_tensor(z, 2, "tp")
        wait_tensor_3: f64[4, 3, 8] = c10d.wait_tensor(all_gather_into_tensor_1)
        return output("z", wait_tensor_3)
        """).strip()
    )
    assert done.history[0].counts == {"scattered": 2, "gathered": 2, "summed": 0, "cut": 1, "left": 0}
    assert str(done.history[0].verdicts[0]) == (
        "s: replaced: its result is computed on in parts, between matmuls that can be fused with what travels: "
        "along dim 0 of [4, 3, 8]; tp: 2 all-reduces become 2 reduce-scatters, 2 all-gathers, 0 small sums; "
        "1536 bytes sent become 1536"
    )
    same_on_all_ranks(LAYERS, done, 2)


def test_another_dim_where_the_first_does_not_divide() -> None:
    done = scattered(LAYERS, ranks=3)
    names = [node.name for node in done.graph.nodes]
    assert names[names.index("v") + 1 :][:9] == [
        "split",
        "getitem",
        "getitem_1",
        "getitem_2",
        "cat",
        "reduce_scatter_tensor",
        "wait_tensor",
        "own_part",
        "y",
    ]
    assert [(scatter.dim, scatter.ranks) for scatter in find_scatters(done.graph)[0]] == [(1, 3), (1, 3)]
    assert [(gather.part.name, gather.dim, gather.ranks) for gather in find_gathers(done.graph)[0]] == [
        ("g", 1, 3),
        ("z", 1, 3),
    ]
    same_on_all_ranks(LAYERS, done, 3)


def test_a_dim_behind_dims_of_one_element_is_not_laid_out_anew() -> None:
    text = LAYERS.replace("[4, 3, ", "[1, 12, ")
    done = scattered(text, ranks=4)
    targets = {str(node.target) for node in done.graph.nodes}
    assert "aten.cat.default" not in targets and "aten.clone.default" not in targets
    assert len(find_scatters(done.graph)[0]) == len(find_gathers(done.graph)[0]) == 2
    same_on_all_ranks(text, done, 4)


def test_a_view_of_the_result_is_cut_where_the_result_cannot_go_on_in_parts() -> None:
    text = """
        x: f64[3, 4, 8] = input("x")
        w: f64[8, 8] = input("w")
        h: f64[12, 8] = input("h")
        m = aten.mm(h, w)
        s = c10d.all_reduce(m, "avg", "tp")
        b: f64[12, 8] = c10d.wait_tensor(s)
        v: f64[3, 4, 8] = aten.view(b, [3, 4, 8])
        y = aten.add.Tensor(x, v)
        r = aten.relu(y)
        c = aten.view(r, [12, 8])
        z = aten.mm(c, w)
        return output("z", z)
    """
    done = scattered(text)
    assert [(scatter.whole.name, scatter.dim, scatter.reduce_op) for scatter in find_scatters(done.graph)[0]] == [
        ("view", 1, "avg")
    ]
    same_on_all_ranks(text, done, 2)


BACKWARD = """
    x: f64[4, 8] = input("x")
    w: f64[8, 8] = input("w")
    n: f64[8] = input("n")
    d: f64[4, 8] = input("d")
    h = aten.mm(d, w)
    s = c10d.all_reduce(h, "sum", "tp")
    g: f64[4, 8] = c10d.wait_tensor(s)
    l: (f64[4, 8], f64[4, 1], f64[4, 1]) = aten.native_layer_norm(x, [8], n, n, 1e-05)
    mean = l[1]
    rstd = l[2]
    b = aten.native_layer_norm_backward(g, x, [8], mean, rstd, n, n, [True, True, True])
    dx: f64[4, 8] = b[0]
    dw: f64[8] = b[1]
    db: f64[8] = b[2]
    e = aten.mul.Tensor(dx, 2.0)
    scale = aten.sum.dim_IntList(e, [0, 1])
    f = aten.add.Tensor(dx, x)
    bias = aten.sum.dim_IntList(f, [0], True)
    t = aten.permute(f, [1, 0])
    weight = aten.mm(t, d)
    before = aten.mm(f, w)
    return output("before", before), output("weight", weight), output("bias", bias), OTHERS
""".replace("OTHERS", 'output("dw", dw), output("db", db), output("scale", scale)')


def test_sums_over_tokens_are_of_own_tokens_or_of_what_is_gathered_anyway() -> None:
    pass_ = ScatterBetweenBlocks(ALIKE.alike, max_growth=1.0)
    done = scattered(BACKWARD, pass_)
    found = {(start.kind, start.inputs[0].name) for start in collectives.find(done.graph)}
    assert found == {
        (Kind.REDUCE_SCATTER, "h"),
        (Kind.ALL_GATHER, "f"),
        (Kind.ALL_REDUCE, "dw"),
        (Kind.ALL_REDUCE, "db"),
        (Kind.ALL_REDUCE, "scale"),
    }
    assert done.history[0].counts == {"scattered": 1, "gathered": 1, "summed": 3, "cut": 3, "left": 0}
    (gather,) = find_gathers(done.graph)[0]
    assert {user.name for user in gather.result.users} == {"bias", "t", "before"}
    same_on_all_ranks(BACKWARD, done, 2)


def between(made: str, more: str = "") -> str:
    """A program that makes `q` of an all-reduce's result `b`, and has a matmul read it."""
    return f"""
    x: f64[4, 8] = input("x")
    w: f64[8, 8] = input("w")
    o: f64[4, 8] = input("o")
    h = aten.mm(o, w)
    s = c10d.all_reduce(h, "sum", "tp")
    b: f64[4, 8] = c10d.wait_tensor(s)
    {made}
    z = aten.mm(q, w)
    return output("z", z){more}
    """


RESULT = ', output("r", r)'
SAY = "say it: groups={'tp': ...}"
REMEDY = "if it is alike, alike=('o', ...) says so"
LEFT: dict[str, tuple[str, int, str, str, str]] = {
    "maximum": (
        between("q = aten.relu(b)").replace('"sum"', '"max"'),
        2,
        "it reduces by something other than a sum or an average",
        "2 ranks, [4, 8]",
        "",
    ),
    "ranks": (between("q = aten.relu(b)"), 3, "no dim but the last divides by the ranks", "3 ranks, [4, 8]", ""),
    "one rank": (between("q = aten.relu(b)"), 1, "its group has one rank", "1 ranks, [4, 8]", ""),
    "size of the group": (between("q = aten.relu(b)"), 0, "the size of its group is not known", "0 ranks, [4, 8]", SAY),
    "written": (
        between("i = aten.add_.Tensor(b, 1.0)\n    q = aten.relu(b)"),
        2,
        "its memory is written in place",
        "2 ranks, [4, 8]",
        "",
    ),
    "two waits": (
        between("k = c10d.wait_tensor(s)\n    q = aten.add.Tensor(b, k)"),
        2,
        "it is not a plain collective with one wait",
        "2 ranks, [4, 8]",
        "",
    ),
    "no matmul before": (
        between("q = aten.relu(b)").replace("h = aten.mm(o, w)", "h = aten.add.Tensor(o, x)"),
        2,
        "no matmul makes what is reduced",
        "0 matmuls before, 1 after",
        "",
    ),
    "no matmul after": (
        between("r = aten.relu(b)\n    q = aten.exp(x)", ', output("r", r)'),
        2,
        "no matmul reads what is made of it",
        "1 matmuls before, 0 after",
        "",
    ),
    "not alike": (
        between("r = aten.add.Tensor(b, o)\n    q = aten.relu(r)"),
        2,
        "what it meets is not known to be alike on all ranks",
        "r, because of o",
        REMEDY,
    ),
    "random": (
        between("r = aten.bernoulli.p(x, 0.5)\n    y = aten.add.Tensor(b, r)\n    q = aten.relu(y)"),
        2,
        "what it meets is not known to be alike on all ranks",
        "y, because of r",
        "",
    ),
    "bytes": (
        between(
            "y = aten.add.Tensor(b, 1.0)\n    c = aten.cumsum(y, 0)\n    q = aten.relu(y)\n"
            "    r = aten.add.Tensor(q, b)",
            ', output("r", r)',
        ),
        2,
        "more bytes would travel",
        "256 bytes sent would become 512, more than 1.25 times as many",
        "",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    text, ranks, reason, detail, remedy = LEFT[name]
    program = parse(textwrap.dedent(text), groups={"tp": ranks})
    done = run_passes(program, [ALIKE])
    assert not done.history[0].changed and render(done) == render(program)
    (verdict,) = done.history[0].verdicts
    assert (verdict.reason, verdict.detail, verdict.remedy) == (reason, detail, remedy)


def test_sizes_that_are_not_known() -> None:
    """As torch.compile gives them with dynamic sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from crossfade.graph.program import from_graph_module

    def block(x: Tensor, w: Tensor) -> Tensor:
        y = collectives.wait(collectives.all_reduce(x @ w, "sum", "tp"))
        return torch.relu(y) @ w

    module = make_fx(block, tracing_mode="symbolic")(torch.ones(6, 8), torch.ones(8, 8))
    done = run_passes(from_graph_module(module, groups={"tp": 2}), [ScatterBetweenBlocks(("*",))])
    (verdict,) = done.history[0].verdicts
    assert verdict.reason == "its sizes are not known before it runs" and verdict.detail.startswith("2 ranks, [s")


def test_one_group_at_a_time_and_only_those_named() -> None:
    both = LAYERS.replace('c10d.all_reduce(u, "sum", "tp")', 'c10d.all_reduce(u, "sum", "dp")')
    done = scattered(both, ScatterBetweenBlocks(ALIKE.alike, max_growth=1.0))
    kinds = [(collective.kind, collective.group) for collective in collectives.find(done.graph)]
    assert kinds == [
        (Kind.REDUCE_SCATTER, "tp"),
        (Kind.ALL_GATHER, "tp"),
        (Kind.ALL_GATHER, "tp"),
        (Kind.ALL_REDUCE, "dp"),
    ]
    assert not scattered(both, ScatterBetweenBlocks(("x*", "n*"), groups=("pp",))).history[0].verdicts


def machine(latency: float) -> Machine:
    fabric = Fabric(dict.fromkeys(Kind, Link(latency, 1e6)))
    return Machine("toy", {"*": fabric}, {"float32": 1e6}, memory_bandwidth=1e9)


def test_a_machine_says_whether_two_collectives_pay() -> None:
    pays = scattered(LAYERS, ScatterBetweenBlocks(ALIKE.alike, machine=machine(1e-6)))
    assert pays.history[0].changed
    slow = scattered(LAYERS, ScatterBetweenBlocks(ALIKE.alike, machine=machine(1e-2)))
    assert [verdict.reason for verdict in slow.history[0].verdicts] == ["it would take longer on this machine"] * 2
    before, after = 2 * (1e-2 + 768e-6), 4 * (1e-2 + 384e-6)
    assert slow.history[0].verdicts[0].detail.startswith(f"{before * 1e6:.0f} us in sight would become")
    assert float(slow.history[0].verdicts[0].detail.split()[-2]) < after * 1e6


def test_one_gather_for_several_values_made_of_it() -> None:
    done = scattered(between("q = aten.view(b, [4, 8])\n    r = aten.relu(b)", ', output("r", r)'))
    gathers = [
        collective.inputs[0].name for collective in collectives.find(done.graph) if collective.kind is Kind.ALL_GATHER
    ]
    assert gathers == ["wait_tensor"]
    assert done.history[0].counts["gathered"] == 1


def test_results_lie_in_memory_as_before() -> None:
    turned = between("p = aten.permute(b, [1, 0])\n    r = aten.relu(p)\n    q = aten.view(b, [4, 8])", RESULT)
    done = scattered(turned)
    assert done.history[0].changed
    assert done.results[1].meta["val"].stride() == (1, 8)
    same_on_all_ranks(turned, done, 2)


def test_dims_are_followed_through_reductions_of_others() -> None:
    text = """
        x: f64[2, 4, 8] = input("x")
        w: f64[8, 8] = input("w")
        h: f64[8, 8] = input("h")
        m = aten.mm(h, w)
        v = aten.view(m, [2, 4, 8])
        s = c10d.all_reduce(v, "sum", "tp")
        b: f64[2, 4, 8] = c10d.wait_tensor(s)
        a: f64[4, 8] = aten.amax(b, [0])
        c: f64[4] = aten.sum.dim_IntList(a, [-1])
        u: f64[4, 1] = aten.unsqueeze(c, -1)
        q: f64[4, 8] = aten.mul.Tensor(a, u)
        z = aten.mm(q, w)
        return output("z", z)
    """
    done = scattered(text, ranks=4)
    assert [(gather.part.name, gather.dim) for gather in find_gathers(done.graph)[0]] == [("q", 0)]
    same_on_all_ranks(text, done, 4)


def test_plans_leave_the_program_as_it_is() -> None:
    program = parse(textwrap.dedent(LAYERS), groups={"tp": 2})
    text = render(program)
    plan = plan_scatters(program, "tp", ALIKE)
    assert render(program) == text
    assert str(plan) == (
        "tp: 2 all-reduces become 2 reduce-scatters, 2 all-gathers, 0 small sums; 1536 bytes sent become 1536"
    )


def sampled(seed: int) -> str:
    """A program of matmuls, all-reduces and what may stand between them, over a stream of tokens."""
    draw = random.Random(seed)
    shape = draw.choice([[4, 3, 4], [2, 4, 4], [1, 4, 4], [8, 4]])
    rows = 1
    for size in shape[:-1]:
        rows *= size
    lines = [f'x: f64{shape} = input("x")', 'w: f64[4, 4] = input("w")', 'n: f64[4] = input("n")']
    lines.append(f'xt: f64{shape} = input("xt")')
    stream, number = ["x", "xt"], 0

    def add(call: str) -> str:
        nonlocal number
        number += 1
        lines.append(f"v{number} = {call}")
        return f"v{number}"

    results: list[str] = []
    for _ in range(draw.randint(4, 14)):
        a, b = draw.choice(stream), draw.choice(stream)
        kind = draw.randrange(11)
        if kind < 4:
            flat = add(f"aten.view({a}, [{rows}, 4])")
            h = add(f"aten.mm({flat}, w)")
            if draw.random() < 0.3:
                start = add(f'c10d.all_reduce({h}, "sum", "tp")')
                wait = add(f"c10d.wait_tensor({start})")
                stream.append(add(f"aten.view({wait}, {shape})"))
            else:
                start = add(f'c10d.all_reduce({add(f"aten.view({h}, {shape})")}, "sum", "tp")')
                stream.append(add(f"c10d.wait_tensor({start})"))
        elif kind == 4:
            stream.append(add(f"aten.add.Tensor({a}, {b})"))
        elif kind == 5:
            norm = add(f"aten.native_layer_norm({a}, [4], n, n, 1e-05)")
            stream.append(add(f"{norm}[0]"))
            if draw.random() < 0.5:
                mean, rstd = add(f"{norm}[1]"), add(f"{norm}[2]")
                asked = [True, True, draw.random() < 0.5]
                back = add(f"aten.native_layer_norm_backward({b}, {a}, [4], {mean}, {rstd}, n, n, {asked})")
                stream.append(add(f"{back}[0]"))
                results += [add(f"{back}[{index}]") for index in (1, 2) if asked[index]]
        elif kind == 6:
            stream.append(add(f"aten.mul.Tensor({a}, n)"))
        elif kind == 7:
            squares = add(f"aten.pow.Tensor_Scalar({a}, 2)")
            mean = add(f"aten.mean.dim({squares}, [-1], True)")
            stream.append(add(f"aten.mul.Tensor({a}, {mean})"))
        elif kind == 8:
            dims = [*range(len(shape) - 1)]
            results.append(
                add(f"aten.sum.dim_IntList({a}, {draw.choice([dims, dims[:1], dims[-1:]])}, {draw.random() < 0.5})")
            )
        elif kind == 9:
            order = [1, 0, *range(2, len(shape))]
            turned = add(f"aten.permute({a}, {order})")
            results.append(turned)
            stream.append(add(f"aten.permute({add(f'aten.relu({turned})')}, {order})"))
        else:
            stream.append(add(f"aten.cumsum({a}, {draw.randrange(len(shape) - 1)})"))
    results += [stream[-1], draw.choice(stream)]
    kept = ", ".join(f'output("{index}", {name})' for index, name in enumerate(dict.fromkeys(results)))
    return "\n".join([*lines, f"return {kept}"])


def test_sampled_programs_compute_the_same() -> None:
    options = ScatterBetweenBlocks(("x*", "n"), max_growth=10.0)
    changed = 0
    for seed in range(60):
        text, ranks = sampled(seed), 2 + 2 * (seed % 2)
        done = scattered(text, options, ranks)
        changed += done.history[0].changed
        if done.history[0].changed:
            same_on_all_ranks(text, done, ranks)
    assert changed > 15


def test_what_is_emitted_is_recognised() -> None:
    for seed in range(8):
        done = scattered(sampled(seed), ScatterBetweenBlocks(("x*", "n"), max_growth=10.0))
        found = collectives.find(done.graph)
        for kind, find in ((Kind.ALL_GATHER, find_gathers), (Kind.REDUCE_SCATTER, find_scatters)):
            assert len(find(done.graph)[0]) == sum(collective.kind is kind for collective in found)


def deep(layers: int) -> Program:
    lines = ['x: f32[4, 8] = input("x")', 'w: f32[8, 8] = input("w")', "y_0 = aten.relu(x)"]
    for layer in range(layers):
        lines += [
            f"h_{layer} = aten.mm(y_{layer}, w)",
            f'r_{layer} = c10d.all_reduce(h_{layer}, "sum", "tp")',
            f"b_{layer} = c10d.wait_tensor(r_{layer})",
            f"y_{layer + 1} = aten.add.Tensor(y_{layer}, b_{layer})",
        ]
    return parse("\n".join([*lines, f'return output("y", y_{layers})']), groups={"tp": 2})


def test_work_grows_with_the_program() -> None:
    def work(layers: int) -> Any:
        program = deep(layers)
        return lambda: ScatterBetweenBlocks(("x",)).run(program)

    grows_linearly(work, 60)
