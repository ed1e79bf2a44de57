"""One number scattered into another is a comparison, bit by bit the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import DTYPES, parse
from crossfade.graph.verify import verify
from crossfade.simplify.replace_scatters import ReplaceScatters
from tests.simplify.holds import declines, rewrites

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def test_a_filled_tensor_is_scattered_like_its_number() -> None:
    rewrites(
        ReplaceScatters(),
        """
        i: i64[1, 3] = input("i")
        ones: i64[1, 4] = aten.ones([1, 4], dtype=i64)
        full: i64[5, 3] = aten.full([5, 3], -100)
        scatter: i64[5, 3] = aten.scatter.src(full, -2, i, ones)
        return output("y", scatter)
        """,
        """
        i: i64[1, 3] = input("i")
        arange: i64[5] = aten.arange(5, dtype=i64, device=device("cpu"))
        view: i64[5, 1] = aten.view(arange, [5, 1])
        eq: b8[5, 3] = aten.eq.Tensor(view, i)
        full_1: i64[] = aten.full([], 1, dtype=i64, device=device("cpu"))
        full_2: i64[] = aten.full([], -100, dtype=i64, device=device("cpu"))
        where: i64[5, 3] = aten.where.self(eq, full_1, full_2)
        return output("y", where)
        """,
        {"scatter-a-tensor": 1},
    )


HEAD = 'i: i64[4, 1] = input("i")\nx: f32[4, 8] = input("x")\nb: f32[4, 8] = aten.zeros([4, 8])\n'
LEFT = {
    "into another tensor": ("y: f32[4, 8] = aten.scatter.value(x, 1, i, 1)", "is not one number everywhere"),
    "another tensor": ("y: f32[4, 8] = aten.scatter.src(b, 1, i, x)", "is not one number everywhere"),
    "bytes": (
        "c: u8[4, 8] = aten.zeros([4, 8], dtype=u8)\ny: u8[4, 8] = aten.scatter.value(c, 1, i, 1)",
        "its elements are of one byte",
    ),
    "complex": (
        "c: c64[4, 8] = aten.zeros([4, 8], dtype=c64)\ny: c64[4, 8] = aten.scatter.value(c, 1, i, 1)",
        "its dtype does not hold its numbers",
    ),
    "a fraction cut off": (
        "c: i64[4, 8] = aten.zeros([4, 8], dtype=i64)\ny: i64[4, 8] = aten.scatter.value(c, 1, i, 1.5)",
        "its dtype does not hold its numbers",
    ),
    "not a number": ('y: f32[4, 8] = aten.scatter.value(b, 1, i, float("nan"))', "its dtype does not hold its numbers"),
    "several along the dim": (
        'j: i64[4, 2] = input("j")\ny: f32[4, 8] = aten.scatter.value(b, 1, j, 1)',
        "its index is not provably of size one",
    ),
    "fewer along another": (
        'j: i64[3, 1] = input("j")\ny: f32[4, 8] = aten.scatter.value(b, 1, j, 1)',
        "its index is not provably of size one",
    ),
    "no dims": (
        'j: i64[] = input("j")\nc: f32[] = aten.zeros([])\ny: f32[] = aten.scatter.value(c, 0, j, 1)',
        "its index is not provably of size one",
    ),
    "a background that is written": (
        "w: f32[4, 8] = aten.add_.Tensor(b, x)\ny: f32[4, 8] = aten.scatter.value(b, 1, i, 1)",
        "is written to",
    ),
    "a source that is written": (
        "c: f32[4, 8] = aten.ones([4, 8])\nw: f32[4, 8] = aten.add_.Tensor(c, x)\n"
        "y: f32[4, 8] = aten.scatter.src(b, 1, i, c)",
        "is written to",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    body, reason = LEFT[name]
    lines = sorted((HEAD + body).splitlines(), key=lambda line: "input(" not in line)
    declines(ReplaceScatters(), "\n".join([*lines, 'return output("y", y)']), reason)


def one_hot(index: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.zeros(index.shape[0], classes).scatter(1, index, 1.0)


def test_symbolic_sizes() -> None:
    module = make_fx(lambda index: one_hot(index, 8), tracing_mode="symbolic")(torch.tensor([[1], [2], [3]]))
    done = run_passes(from_graph_module(module), [ReplaceScatters()])
    assert done.history[0].counts == {"scatter-a-number": 1}
    index = torch.tensor([[7], [0], [3], [3], [5]])
    assert torch.equal(done.module()(index)[0], one_hot(index, 8))


def test_a_symbolic_number_of_classes_is_left() -> None:
    module = make_fx(lambda i, x: one_hot(i, x.shape[0]), tracing_mode="symbolic")(
        torch.tensor([[1], [2]]), torch.ones(9)
    )
    done = run_passes(from_graph_module(module), [ReplaceScatters()])
    assert [verdict.reason for verdict in done.history[0].verdicts] == ["its size along the dim is not a known number"]


NUMBERS = [0, 1, -7, 2.5, -0.0, float("inf"), float("nan"), 1e-8, 0.1, 70000, 1e300, True]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.sampled_from(
        [torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    ),
    st.integers(0, 2**32 - 1),
)
def test_sampled_scatters(
    shape: list[int], dim: int, counted: bool, value: float, background: float, dtype: torch.dtype, seed: int
) -> None:
    dim %= len(shape)
    index_shape = [1 if d == dim else size for d, size in enumerate(shape)]
    spelled = [repr(number) if math.isfinite(number) else f'float("{number}")' for number in (value, background)]
    text = f"""
        i: i64{index_shape} = input("i")
        full = aten.full({shape}, {spelled[1]}, dtype={NAMES[dtype]})
        y = aten.scatter.value(full, {dim - len(shape) * counted}, i, {spelled[0]})
        return output("y", y)
    """
    program = parse(text)
    index = torch.randint(0, shape[dim], index_shape, generator=torch.Generator().manual_seed(seed))
    try:
        (expected,) = program.module()(index)
    except RuntimeError:  # a number that the dtype does not hold
        return
    done = run_passes(program, [ReplaceScatters()])
    verify(done, recompute=True)
    (actual,) = done.module()(index)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), f"{program}\n{done}"
    assert actual.stride() == expected.stride() and actual.dtype == expected.dtype
