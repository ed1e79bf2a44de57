"""Collective matmuls in one process: their shapes without data, their errors, pieces in place, and a world of one."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade.collective_matmul  # noqa: F401  makes the operators run
from crossfade import emulated
from crossfade.collective_matmul import chunked
from crossfade.collective_matmul.products import add_product, blocked, cut, multiply, piece
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.errors import NotYetError, RewriteError
from crossfade.graph import collectives
from crossfade.graph.collective_matmul import (
    GATHER_OPERATOR,
    gather_matmul,
    matmul_scatter,
    matmul_scatter_meanwhile,
    read_product,
)
from crossfade.graph.private import FakeTensorMode, TorchDispatchMode, symbolic_shapes

EQUATIONS = (
    ("mk", "kn", "mn"),
    ("mk", "kn", "nm"),
    ("bsk", "kn", "bsn"),
    ("bsk", "kn", "sbn"),
    ("bsk", "kn", "snb"),
    ("nk", "bsk", "bsn"),
    ("bmk", "bkn", "bmn"),
    ("bmk", "bkn", "mbn"),
    ("abmk", "abkn", "nabm"),
    ("abck", "kn", "abcn"),
    ("bsk", "bsn", "kn"),
    ("bsk", "nsk", "bn"),
)


def sampled(letters: str, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-2, 3, [sizes[letter] for letter in letters]).to(dtype)


@pytest.mark.parametrize("letters", EQUATIONS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_fills_its_piece_and_nothing_else(letters: tuple[str, str, str], dtype: torch.dtype) -> None:
    """Any slice of a larger tensor, in any layout, is written; around it nothing changes."""
    draw = random.Random(str(letters))
    torch.manual_seed(0)
    for _ in range(20):
        sizes = {letter: draw.randint(1, 4) for letter in "abcsmnk"}
        first, second = (sampled(side, sizes, dtype) for side in letters[:2])
        shape = [sizes[letter] for letter in letters[2]]
        order = draw.sample(range(len(shape)), len(shape))
        around = torch.full([shape[dim] + 2 for dim in order], 7.0, dtype=dtype)
        whole = around.permute([order.index(dim) for dim in range(len(shape))])
        starts = [draw.randint(0, 2) for _ in shape]
        out = whole
        for dim, start in enumerate(starts):
            out = out.narrow(dim, start, shape[dim])
        bias = draw.choice((None, torch.ones(shape[-1], dtype=dtype), torch.ones(shape, dtype=dtype)))
        multiply(letters, first, second, out, bias=bias)
        expected = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", first, second) + (0 if bias is None else 1)
        assert torch.equal(out, expected)
        out.fill_(7.0)
        assert bool((whole == 7.0).all())


@pytest.mark.parametrize("letters", EQUATIONS, ids="-".join)
def test_a_product_is_added_to_a_wider_sum(letters: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    sizes = dict(zip("abcsmnk", range(1, 8), strict=True))
    for dtype, wide in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        first, second = (sampled(side, sizes, dtype) for side in letters[:2])
        total = torch.full([sizes[letter] for letter in letters[2]], 0.5, dtype=wide)
        add_product(letters, first, second, total)
        expected = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", first, second).float() + 0.5
        assert torch.equal(total, expected)


def test_rows_are_written_in_place_by_one_matrix_product() -> None:
    """No temporary and no copy where the rows of a result lie together."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    result = blocked(torch.empty(2 * 4, 3, 5), 0, 2)
    with Watch():
        out = piece(result, 0, (1, 1), (2, 2))
        multiply(("Rbsk", "kn", "Rbsn"), torch.ones(1, 2, 3, 6), torch.ones(6, 5), out, bias=torch.ones(5))
    assert [name for name in called if "mm" in name] == ["aten.addmm.out"]
    assert not [name for name in called if "copy" in name or "clone" in name]
    assert torch.equal(result[1, 2:], torch.full((2, 3, 5), 7.0))


def test_pieces_cover_a_block_evenly() -> None:
    for rows in range(12):
        for chunks in range(1, 9):
            pieces = cut(rows, chunks)
            assert [row for start, size in pieces for row in range(start, start + size)] == list(range(rows))
            assert len(pieces) == min(rows, chunks)
            assert not pieces or max(size for _, size in pieces) - min(size for _, size in pieces) <= 1


@pytest.mark.parametrize("form", ["chunked", "ring", "symmetric"])
def test_a_world_of_one_needs_no_group(form: str) -> None:
    torch.manual_seed(0)
    part, weight, bias = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)
    settings: Any = {"dim": 1, "ranks": 1, "group": "nobody", "form": form, "chunks": 2}
    product, kept = gather_matmul(part, [weight], ["bsk,kn->bsn"], biases=[bias], keep=True, **settings)
    torch.testing.assert_close(product, part @ weight + bias)
    assert torch.equal(kept, part) and kept.data_ptr() != part.data_ptr()
    for reduce_op in ("sum", "avg"):
        found = matmul_scatter(part, weight, "bsk,kn->bsn", bias=bias, reduce_op=reduce_op, **settings)
        torch.testing.assert_close(found, part @ weight + bias)
        pairs = [(weight, weight.t()), (weight.t(), weight)]
        found = matmul_scatter_meanwhile(part, weight, "bsk,kn->bsn", pairs, reduce_op=reduce_op, **settings)
        torch.testing.assert_close(found, [part @ weight, weight @ weight.t(), weight.t() @ weight])


def test_shapes_without_data_and_with_symbolic_sizes() -> None:
    def fused(part: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        settings: Any = {"ranks": 4, "group": "tp", "chunks": 2}
        products = ["bsk,kn->bsn", "bsk,bsn->kn"]
        found = gather_matmul(part, [weight, gradient], products, dim=1, keep=True, **settings)
        return [*found, matmul_scatter(found[0], weight.t(), "bsn,nk->bsk", dim=1, form="ring", **settings)]

    arguments = torch.empty(2, 3, 6, dtype=torch.bfloat16), torch.empty(6, 5, dtype=torch.bfloat16)
    arguments = *arguments, torch.empty(2, 12, 5, dtype=torch.bfloat16)
    shapes = [[2, 12, 5], [6, 5], [2, 12, 6], [2, 3, 6]]
    with FakeTensorMode() as mode:
        found = fused(*(mode.from_tensor(value) for value in arguments))
    assert [list(value.shape) for value in found] == shapes
    assert all(value.dtype == torch.bfloat16 and value.is_contiguous() for value in found)

    graph = make_fx(fused, tracing_mode="symbolic")(*arguments).graph
    results = graph.output_node().args[0]
    assert [[int(size) for size in node.meta["val"].shape] for node in results] == shapes  # type: ignore[union-attr]
    starts = [node for node in graph.nodes if collectives.communicates(node.target)]
    assert [collectives.group_of(node) for node in starts] == ["tp", "tp"]
    assert starts[0].target is GATHER_OPERATOR


def test_a_dynamic_dim_stays_dynamic() -> None:
    mode = FakeTensorMode(shape_env=symbolic_shapes())
    part = mode.from_tensor(torch.empty(6, 4), static_shapes=False)
    weight = mode.from_tensor(torch.empty(4, 5), static_shapes=True)
    with mode:
        (product,) = gather_matmul(part, [weight], ["mk,kn->mn"], dim=0, ranks=2, group="tp")
        part_again = matmul_scatter(product, weight.t(), "mn,nk->mk", dim=0, ranks=2, group="tp")
    assert isinstance(product.shape[0], torch.SymInt) and int(product.shape[0]) == 12
    assert isinstance(part_again.shape[0], torch.SymInt) and int(part_again.shape[0]) == 6


E34, E45 = torch.empty(3, 4), torch.empty(4, 5)
GATHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a letter alone": ({"products": ["mk,nj->mn"]}, r"the product 'mk,nj->mn': expected two operands and a result"),
    "a letter twice": ({"products": ["mm,kn->mn"]}, r"the product 'mm,kn->mn'"),
    "no arrow": ({"products": ["mk,kn"]}, r"the product 'mk,kn'"),
    "no dtype": ({"products": ["mk,kn->mn float99"]}, r"'mk,kn->mn float99': expected 'EQUATION'"),
    "other sizes": ({"products": ["mk,nk->mn"]}, r"sizes 4 and 5 for the letter 'k' of mk,nk->mn"),
    "other dims": ({"products": ["bmk,kn->bmn"]}, r"shape \[6, 4\] for 'bmk' of bmk,kn->bmn: expected 3 dims"),
    "other dtypes": ({"others": [E45.double()]}, r"of torch.float32 and torch.float64 that returns torch.float32"),
    "a dtype without scales": ({"products": ["mk,kn->mn bfloat16"]}, r"that returns torch.bfloat16"),
    "one scale": ({"scales": [None, torch.ones(())]}, r"lacks a scale or the result's dtype"),
    "no such dim": ({"dim": 2}, r"2 dims to gather along dim 2"),
    "no such form": ({"form": "square"}, r"form='square', ranks=2, chunks=1: expected one of chunked, ring"),
    "no pieces": ({"chunks": 0}, r"chunks=0"),
    "bias": ({"biases": [torch.ones(3)]}, r"a bias of shape \[3\] for a result of \[6, 5\]"),
    "operands": ({"others": []}, r"0 operands, 1 biases and 0 scales for 1 products"),
}


@pytest.mark.parametrize("what", GATHERS)
def test_what_does_not_fit_is_refused(what: str) -> None:
    changed, message = GATHERS[what]
    given: dict[str, Any] = {"others": [E45], "products": ["mk,kn->mn"], "biases": [None], "dim": 0, "ranks": 2}
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RewriteError, match=message):
        gather_matmul(E34, group="tp", **{**given, **changed})


def test_scatters_that_do_not_fit_are_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(RewriteError, match="dim 0 of size 3 to scatter over 2 ranks: expected a multiple of 2"):
            matmul_scatter(E34, E45, "mk,kn->mn", dim=0, ranks=2, group="tp")
        with pytest.raises(RewriteError, match="the reduction 'max': expected sum or avg"):
            matmul_scatter(E34, E45, "mk,kn->mn", dim=1, ranks=1, reduce_op="max", group="tp")
        with pytest.raises(RewriteError, match="to scatter along dim 2"):
            matmul_scatter(E34, E45, "mk,kn->mn", dim=2, ranks=1, group="tp")
        scattered, other = matmul_scatter_meanwhile(
            E34, E45, "mk,kn->mn", [(E45.t(), E34.t())], dim=1, ranks=5, group="tp"
        )
        assert (scattered.shape, other.shape) == ((3, 1), (5, 3))
        for pair in ((E34, E34), (E34, E45.double()), (E34[0], E45)):
            with pytest.raises(RewriteError, match="to be multiplied meanwhile: expected two matrices of one dtype"):
                matmul_scatter_meanwhile(E34, E45, "mk,kn->mn", [pair], dim=1, ranks=5, group="tp")
        with pytest.raises(RewriteError, match="3 operands to be multiplied meanwhile: expected two for each"):
            alone = (E34, E45, None, [], "mk,kn->mn", 1, "sum", 5, "ring", 1, "tp", [E34, E45, E34])
            torch.ops.crossfade.matmul_scatter_meanwhile(*alone)


def test_scales_that_do_not_fit_are_refused() -> None:
    small = [torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn)]
    scales = [torch.ones(3, 1), torch.ones(1, 16)]
    with pytest.raises(RewriteError, match=r"a scale of shape \[3, 1\] for 'mk'.*: expected one number, or 4"):
        gather_matmul(small[0], small[1:], ["mk,kn->mn bfloat16"], dim=0, ranks=1, group="tp", scales=scales)


TOY = Machine("toy", {"*": Fabric(dict.fromkeys(collectives.Kind, Link(1e-6, 1e12)))}, {"float32": 1e10}, 1e10)


@pytest.mark.parametrize("form", ["chunked", "ring"])
def test_an_emulated_fabric_runs_them(form: str) -> None:
    """There every rank holds the same: all blocks of what a gather brings by collectives are this rank's own."""
    with emulated.world(TOY, 4, rank=1):
        group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        settings: Any = {"dim": 0, "ranks": 4, "group": group, "form": form, "chunks": 2}
        part, weight = torch.arange(12.0).view(3, 4), torch.ones(4, 5)
        product, kept = gather_matmul(part, [weight], ["mk,kn->mn"], keep=True, **settings)
        scattered = matmul_scatter(torch.cat([part] * 4), weight, "mk,kn->mn", **settings)
    assert product.shape == (12, 5) and scattered.shape == (3, 5)
    assert torch.equal(product[3:6], part @ weight) and torch.equal(kept[3:6], part)
    if form == "chunked":
        assert torch.equal(product, torch.cat([part] * 4) @ weight)


def test_a_single_number_is_sent_once_to_each_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one number that is seen several times, which torch 2.11 refuses to send."""
    monkeypatch.setattr(chunked, "group_named", lambda group: SimpleNamespace(rank=lambda: 1))
    monkeypatch.setattr(collectives, "all_to_all_split", lambda sent, *rest: (sent, *rest))
    sent, out, into, group = chunked._sent_to_others(torch.ones(1), 4, "tp")
    assert sent.is_contiguous() and sent.tolist() == [1.0] * 3
    assert (out, into, group) == ([1, 0, 1, 1], [1, 0, 1, 1], "tp")


def test_symmetric_memory_says_what_it_needs() -> None:
    with emulated.world(TOY, 2):
        group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        settings: Any = {"dim": 0, "ranks": 2, "group": group, "form": "symmetric"}
        message = "a tensor on cpu in a product fused through symmetric memory: expected one on a CUDA device"
        with pytest.raises(NotYetError, match=message):
            gather_matmul(torch.ones(2, 2), [torch.ones(2, 2)], ["mk,kn->mn"], **settings)
        with pytest.raises(NotYetError, match=message):
            matmul_scatter(torch.ones(2, 2), torch.ones(2, 2), "mk,kn->mn", **settings)


def test_importing_does_not_import_compilers_or_symmetric_memory() -> None:
    unwanted = [
        "torch._inductor",
        "triton",
        "torch.distributed._symmetric_memory",
        "crossfade.collective_matmul.symmetric",
    ]
    imported = f"[module for module in {unwanted} if module in sys.modules]"
    lines = f"import sys, crossfade.collective_matmul.operators; print({imported})"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_product_reads_as_it_is_spelled() -> None:
    assert str(read_product("bsk,kn->bsn bfloat16 fast")) == "bsk,kn->bsn"
    assert read_product("bsk,bsn->kn").contracted == "bs"
