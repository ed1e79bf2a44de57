"""Softmax's maximum and sum found together: the same maxima, sums as close as summing is, NaNs where they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.errors import RewriteError
from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from crossfade.simplify.prepare_softmax_online import PrepareSoftmaxOnline
from crossfade.simplify.softmax_statistics import softmax_statistics
from tests.simplify.holds import declines, rewrites

ON_CPU = PrepareSoftmaxOnline(devices=("cpu",))


def test_log_softmax() -> None:
    rewrites(
        ON_CPU,
        """
        x: f32[4, 3, 5] = input("x")
        amax: f32[4, 1, 5] = aten.amax(x, [-2], True)
        sub: f32[4, 3, 5] = aten.sub.Tensor(x, amax)
        exp: f32[4, 3, 5] = aten.exp(sub)
        total: f32[4, 1, 5] = aten.sum.dim_IntList(exp, [1], True)
        log: f32[4, 1, 5] = aten.log(total)
        y: f32[4, 3, 5] = aten.sub.Tensor(sub, log)
        return output("y", y), output("amax", amax)
        """,
        """
        x: f32[4, 3, 5] = input("x")
        softmax_statistics: (f32[4, 1, 5], f32[4, 1, 5]) = crossfade.softmax_statistics(x, 1)
        getitem: f32[4, 1, 5] = softmax_statistics[0]
        getitem_1: f32[4, 1, 5] = softmax_statistics[1]
        sub: f32[4, 3, 5] = aten.sub.Tensor(x, getitem)
        log: f32[4, 1, 5] = aten.log(getitem_1)
        y: f32[4, 3, 5] = aten.sub.Tensor(sub, log)
        return output("y", y), output("amax", getitem)
        """,
        {"maximum": 1, "sum": 1},
    )


def test_a_sum_that_had_no_node_gets_one() -> None:
    rewrites(
        ON_CPU,
        """
        x: f32[4, 3] = input("x")
        both: (f32[4, 1], f32[4, 1]) = crossfade.softmax_statistics(x, 1)
        most: f32[4, 1] = both[0]
        sub: f32[4, 3] = aten.sub.Tensor(x, most)
        exp: f32[4, 3] = aten.exp(sub)
        total: f32[4, 1] = aten.sum.dim_IntList(exp, [1], True)
        return output("y", total)
        """,
        """
        x: f32[4, 3] = input("x")
        both: (f32[4, 1], f32[4, 1]) = crossfade.softmax_statistics(x, 1)
        getitem: f32[4, 1] = both[1]
        return output("y", getitem)
        """,
        {"sum": 1},
    )


SOFTMAX = """
    x: f32[4, 3] = input("x")
    amax: f32[4, 1] = aten.amax(x, [1], True)
    sub: f32[4, 3] = aten.sub.Tensor(x, amax)
    exp: f32[4, 3] = aten.exp(sub)
    total: f32[4, 1] = aten.sum.dim_IntList(exp, [1], True)
    y: f32[4, 3] = aten.div.Tensor(exp, total)
    return output("y", y)
"""
NO_SUM = "no sum of exponentials below this maximum"
LEFT = {
    "halves": (SOFTMAX.replace("f32", "f16"), "not computed in single or double precision"),
    "another dim": (
        SOFTMAX.replace("[4, 1] = aten.sum.dim_IntList(exp, [1]", "[1, 3] = aten.sum.dim_IntList(exp, [0]"),
        NO_SUM,
    ),
    "all dims": (SOFTMAX.replace("[4, 1] = aten.amax(x, [1]", "[1, 1] = aten.amax(x, [0, 1]"), NO_SUM),
    "no sum": (SOFTMAX.replace("aten.sum.dim_IntList(exp, [1], True)", "aten.amin(exp, [1], True)"), NO_SUM),
    "a dim that goes": (
        SOFTMAX.replace("[4, 1] = aten.sum.dim_IntList(exp, [1], True)", "[4] = aten.sum.dim_IntList(exp, [1])")
        .replace("y: f32[4, 3] = aten.div.Tensor(exp, total)", "y: f32[4] = aten.neg(total)"),
        NO_SUM,
    ),
    "a sum in another dtype": (
        SOFTMAX.replace("[1], True)\n    y: f32", "[1], True, dtype=f64)\n    y: f64")
        .replace("total: f32", "total: f64"),
        NO_SUM,
    ),
    "a multiple of the maximum": (SOFTMAX.replace("(x, amax)", "(x, amax, alpha=2)"), NO_SUM),
    "the maximum of another": (
        SOFTMAX.replace("    sub:", "    z: f32[4, 3] = aten.neg(x)\n    sub:").replace("Tensor(x,", "Tensor(z,"),
        NO_SUM,
    ),
    "exponentials that are written": (
        SOFTMAX.replace("    total:", "    w: f32[4, 3] = aten.add_.Tensor(exp, 1)\n    total:"),
        "is written to",
    ),
    "a value that is written": (
        SOFTMAX.replace("    sub:", "    w: f32[4, 3] = aten.add_.Tensor(x, 1)\n    sub:"),
        "is written to",
    ),
    "a sum of another dim beside what is found": (
        """
        x: f32[4, 4] = input("x")
        both: (f32[4, 1], f32[4, 1]) = crossfade.softmax_statistics(x, 1)
        most: f32[4, 1] = both[0]
        sub: f32[4, 4] = aten.sub.Tensor(x, most)
        exp: f32[4, 4] = aten.exp(sub)
        total: f32[1, 4] = aten.sum.dim_IntList(exp, [0], True)
        return output("y", total)
        """,
        NO_SUM,
    ),
    "exponentials written beside what is found": (
        """
        x: f32[4, 4] = input("x")
        both: (f32[4, 1], f32[4, 1]) = crossfade.softmax_statistics(x, 1)
        most: f32[4, 1] = both[0]
        sub: f32[4, 4] = aten.sub.Tensor(x, most)
        exp: f32[4, 4] = aten.exp(sub)
        w: f32[4, 4] = aten.add_.Tensor(exp, 1)
        total: f32[4, 1] = aten.sum.dim_IntList(exp, [1], True)
        return output("y", total)
        """,
        "is written to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    declines(ON_CPU, *LEFT[name])


def test_a_device_without_a_kernel_for_it() -> None:
    declines(PrepareSoftmaxOnline(), SOFTMAX, "its device has no kernel that finds both in one reading")


def test_symbolic_sizes() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        exp = (x - x.amax(1, keepdim=True)).exp()
        return exp / exp.sum(1, keepdim=True)

    done = run_passes(from_graph_module(make_fx(softmax, tracing_mode="symbolic")(torch.ones(3, 5))), [ON_CPU])
    assert done.history[0].counts == {"maximum": 1, "sum": 1}
    x = torch.randn(7, 11)
    torch.testing.assert_close(done.module()(x)[0], softmax(x))


def expected(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = x.amax(dim, keepdim=True)
    return most, (x - most).exp().sum(dim, keepdim=True)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([1, 2, 5]), min_size=0, max_size=2),
    st.sampled_from([1, 3, 4095, 4096, 4097, 9000]),
    st.integers(0, 2),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(), (float("-inf"),), (float("inf"),), (float("nan"),), (float("-inf"), float("nan"))]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_sampled_statistics(
    others: list[int], width: int, place: int, dtype: torch.dtype, odd: tuple[float, ...], much: bool, seed: int
) -> None:
    dim = place % (len(others) + 1)
    draw = torch.Generator().manual_seed(seed)
    x = 30 * torch.randn([*others[:dim], width, *others[dim:]], generator=draw, dtype=dtype)
    for value in odd:
        x[torch.rand(x.shape, generator=draw) < (0.999 if much else 0.001)] = value
    actual, wanted = softmax_statistics(x, dim), expected(x, dim)
    torch.testing.assert_close(actual[0], wanted[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[1], wanted[1], equal_nan=True)
    assert all(found.stride() == other.stride() for found, other in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), 3.0])
@pytest.mark.parametrize("width", [4, 9000])
def test_rows_of_one_value(value: float, width: int) -> None:
    x = torch.full([2, width], value)
    for actual, wanted in zip(softmax_statistics(x, 1), expected(x, 1), strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize("masked", [slice(0, 5000), slice(4000, 9000)], ids=["first", "last"])
def test_blocks_of_nothing_but_masked_elements(masked: slice) -> None:
    x = torch.randn(2, 9000)
    x[:, masked] = float("-inf")
    assert expected(x, 1)[1].isfinite().all()
    for actual, wanted in zip(softmax_statistics(x, 1), expected(x, 1), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_the_operator_is_well_behaved() -> None:
    torch.library.opcheck(torch.ops.crossfade.softmax_statistics.default, (torch.randn(3, 5), -1))
    torch.library.opcheck(torch.ops.crossfade.softmax_statistics.default, (torch.randn(3, 5, 4).transpose(0, 2), 1))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RewriteError, match="floating-point numbers and one of their dims"):
        softmax_statistics(torch.ones(3), 1)
    with pytest.raises(RewriteError, match="floating-point numbers"):
        softmax_statistics(torch.ones(3, dtype=torch.int64), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (7, 1), (5, 1000), (3, 4096), (2, 3, 100_003)])
@pytest.mark.parametrize("odd", [None, float("-inf"), float("inf"), float("nan")])
def test_statistics_on_cuda(shape: tuple[int, ...], odd: float | None) -> None:
    x = 30 * torch.randn(shape, device="cuda")
    if odd is not None:
        x.view(-1)[::3] = odd
    actual, wanted = softmax_statistics(x, -1), expected(x, -1)
    torch.testing.assert_close(actual[0], wanted[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[1], wanted[1], equal_nan=True)


def test_values_that_lie_otherwise() -> None:
    transposed = 't: f32[3, 4] = input("x")\n    x: f32[4, 3] = aten.t(t)'
    done = run_passes(parse(SOFTMAX.replace('x: f32[4, 3] = input("x")', transposed)), [ON_CPU])
    verify(done, recompute=True)
    assert done.history[0].counts == {"maximum": 1, "sum": 1}
    x = torch.randn(3, 4)
    torch.testing.assert_close(done.module()(x)[0], x.t().softmax(1))
