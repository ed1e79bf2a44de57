"""Draws for the whole batch on every rank: the parts of all ranks are what one device draws, bit by bit."""

from __future__ import annotations

import pytest
import torch

from crossfade.errors import PassError
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.shard.batch_dims import BATCH_DIMS
from crossfade.shard.draw_globally import DrawGlobally


def program_of(call: str, rows: int, dims: tuple[int, ...], *, shape: str = "{rows}, 3") -> Program:
    size = shape.format(rows=rows)
    text = f'x: f32[{size}] = input("x")\ndraw = {call.format(rows=rows)}\n'
    if "native_dropout" in call:
        text += 'y = draw[0]\nmask = draw[1]\nreturn output("y", y), output("mask", mask)'
    else:
        text += 'return output("y", draw)'
    program = parse(text)
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = dims if isinstance(node.meta.get("val"), torch.Tensor) else ()
    return program


CALLS = {
    "rand": "aten.rand([{rows}, 3], dtype=f32, device=device('cpu'), pin_memory=False)",
    "randn": "aten.randn([{rows}, 3], dtype=f32, device=device('cpu'), pin_memory=False)",
    "rand_like": "aten.rand_like(x, pin_memory=False)",
    "randn_like": "aten.randn_like(x, pin_memory=False)",
    "bernoulli": "aten.bernoulli.p(x, 0.25)",
    "uniform": "aten.uniform(x, 2.0, 3.0)",
    "exponential": "aten.exponential(x)",
    "normal": "aten.normal_functional(x)",
    "dropout": "aten.native_dropout(x, 0.25, True)",
    "dropout of everything": "aten.native_dropout(x, 1.0, True)",
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_parts_are_those_of_one_device(name: str, ranks: int):
    rows = 5
    x = torch.randn(rows * ranks, 3, generator=torch.Generator().manual_seed(3))
    whole = Executable(program_of(CALLS[name], rows * ranks, (0,)), {})
    torch.manual_seed(7)
    expected, state = whole([x]), torch.get_rng_state()
    done = run_passes(program_of(CALLS[name], rows, (0,)), [DrawGlobally(ranks)])
    verify(done, recompute=True)
    assert [item.name for item in done.inputs] == ["x", "rank"]
    parts = []
    for rank in range(ranks):
        torch.manual_seed(7)
        parts.append(Executable(done, {})([x[rank * rows : (rank + 1) * rows], rank]))
        assert torch.equal(torch.get_rng_state(), state), "later draws would differ"
    for drawn, *mine in zip(expected, *parts, strict=True):
        assert torch.equal(torch.cat(mine), drawn)


def test_another_dim_and_two_draws_share_one_rank_input():
    text = """
x: f32[3, 4] = input("x")
a: f32[3, 4] = aten.rand_like(x)
b: f32[3, 4] = aten.rand_like(x)
return output("a", a), output("b", b)
"""
    program = parse(text)
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (1,)
    done = run_passes(program, [DrawGlobally(4)])
    lines = render(done).splitlines()
    assert lines[:6] == [
        'x: f32[3, 4] = input("x")',
        'rank: int = scalar("rank")',
        "new_empty: f32[3, 16] = aten.new_empty(x, [3, 16])",
        "rand_like: f32[3, 16] = aten.rand_like(new_empty)",
        "mul: int = operator.mul(rank, 4)",
        "add: int = operator.add(mul, 4)",
    ]
    assert lines[6:8] == [
        "slice_1: f32[3, 4] = aten.slice.Tensor(rand_like, 1, mul, add)",
        "clone: f32[3, 4] = aten.clone(slice_1)",
    ]
    assert len(done.inputs) == 2 and done.history[0].counts == {"widened": 2}


@pytest.mark.parametrize("name", ["rand_like", "randn_like", "dropout"])
@pytest.mark.parametrize("dim", [0, 2])
def test_numbers_follow_the_layout_in_memory(name: str, dim: int):
    """Two dims change places in memory, as under channels_last: what is drawn first is what lies first."""
    ranks, shape = 2, [5, 3, 7]

    def permuted(size: int) -> Program:
        sizes = [size if d == dim else n for d, n in enumerate(shape)]
        lines = [f'x0: f32[{sizes[0]}, {sizes[2]}, {sizes[1]}] = input("x")', "x = aten.transpose.int(x0, 1, 2)"]
        lines += [f"draw = {CALLS[name]}"] + (["y = draw[0]", "m = draw[1]"] if name == "dropout" else [])
        last = 'output("y", y), output("m", m)' if name == "dropout" else 'output("y", draw)'
        program = parse("\n".join([*lines, f"return {last}"]))
        for node in program.graph.nodes:
            node.meta[BATCH_DIMS] = (dim,) if isinstance(node.meta.get("val"), torch.Tensor) else ()
        return program

    done = run_passes(permuted(shape[dim]), [DrawGlobally(ranks)])
    verify(done, recompute=True)
    whole = [n * ranks if d == dim else n for d, n in enumerate(shape)]
    x = torch.randn(whole[0], whole[2], whole[1])
    torch.manual_seed(7)
    expected = Executable(permuted(shape[dim] * ranks), {})([x])
    cut = {0: 0, 2: 1}[dim]
    parts = []
    for rank in range(ranks):
        torch.manual_seed(7)
        parts.append(Executable(done, {})([x.chunk(ranks, cut)[rank].contiguous(), rank]))
    for drawn, *mine in zip(expected, *parts, strict=True):
        assert torch.equal(torch.cat(mine, dim), drawn)


def test_a_tensor_of_the_model_named_rank_is_no_rank():
    text = 'r: f32[4] = parameter("rank")\nd: f32[4] = aten.rand_like(r)\nreturn output("d", d)'
    program = parse(text)
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (0,)
    with pytest.raises(PassError, match="the model has a tensor named 'rank'"):
        run_passes(program, [DrawGlobally()])


LEFT = {
    "its shape does not depend on the batch: the same on every rank": ("aten.rand_like(x)", ()),
    "it draws nothing outside training": ("aten.native_dropout(x, 0.5, False)", (0,)),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    call, dims = LEFT[reason]
    done = run_passes(program_of(call, 4, dims), [DrawGlobally()])
    assert [str(v) for v in done.history[0].verdicts] == [f"draw: left alone: {reason}"]
    assert not done.history[0].changed and len(done.inputs) == 1


@pytest.mark.parametrize(
    ("call", "dims", "message"),
    [
        ("aten.rand_like(x)", (0, 1), r"whose dims \(0, 1\) all grow with the batch"),
        ("aten.poisson(x)", (0,), "whose numbers cannot be drawn for the whole batch"),
        ("aten.mul.Tensor(x, x)\nz: i64[4] = aten.randperm(4)", (0,), "randperm.* cannot be drawn for the whole batch"),
    ],
)
def test_draws_that_cannot_be_divided_are_refused(call, dims, message):
    program = parse(f'x: f32[4, 4] = input("x")\ny: f32[4, 4] = {call}\nreturn output("y", y)')
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = dims
    with pytest.raises(PassError, match=f'{message}.*Remedy: pass semantics="per-rank"') as caught:
        run_passes(program, [DrawGlobally()])
    assert "leave draw-globally out" not in str(caught.value)


def test_integers_drawn_for_the_batch_are_those_of_the_whole():
    program = parse('x: f32[4] = input("x")\ny: i64[4] = aten.randint.low(3, 9, [4])\nreturn output("y", y)')
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (0,)
    done = run_passes(program, [DrawGlobally()])
    torch.manual_seed(7)
    whole = torch.randint(3, 9, (8,))
    for rank in range(2):
        torch.manual_seed(7)
        assert torch.equal(Executable(done, {})([torch.ones(4), rank])[0], whole[4 * rank : 4 * rank + 4])
