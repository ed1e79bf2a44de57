"""Collective matmuls on real ranks against the same products of whole tensors in one process.

Operands are -1, 0 and 1 and scales powers of two: every sum is exact in every dtype, so results must be equal bit by
bit, in whatever order pieces come.
"""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crossfade as cf
import crossfade.collective_matmul
from crossfade.errors import MeshError, RankFailedError
from crossfade.graph.collective_matmul import gather_matmul, matmul_scatter, matmul_scatter_meanwhile, read_product

EQUATIONS = (
    "mk,kn->mn",
    "kn,mk->mn",
    "mk,nk->nm",
    "nk,bsk->bsn",
    "bsk,kn->bsn",
    "bsk,nk->nbs",
    "bmk,bkn->bmn",
    "bkm,bnk->nbm",
    "bsk,bsn->kn",
    "bsk,bn->skn",
    "abck,kn->abcn",
    "abck,abcn->nk",
)
CHUNKS = (1, 2, 3, 5)


def numbers(shape: list[int], dtype: torch.dtype, draw: random.Random) -> Tensor:
    """-1, 0 and 1, in a layout that is contiguous or not."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    order = list(range(len(shape)))
    if draw.random() < 0.3:
        draw.shuffle(order)
    values = torch.randint(-1, 2, [shape[dim] for dim in order], generator=generator)
    return values.to(dtype).permute([order.index(dim) for dim in range(len(shape))])


def bias_for(shape: list[int], dtype: torch.dtype, draw: random.Random) -> Tensor | None:
    kind = draw.choice(("none", "none", "last", "rows", "full"))
    shapes = {"last": shape[-1:], "rows": [1] * (len(shape) - 1) + shape[-1:], "full": shape}
    return None if kind == "none" else numbers(shapes[kind], dtype, draw)


def exact(product: str, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    result = torch.einsum(str(read_product(product)), first.double(), second.double())
    return result if bias is None else result + bias.double()


def sizes_of(product: str, cut: str, ranks: int, draw: random.Random) -> dict[str, int]:
    """A size for each letter; of the one that is cut, the size of one rank's block."""
    equation = read_product(product)
    letters = dict.fromkeys(equation.first + equation.second)
    return {letter: draw.randint(1, 7) if letter == cut else draw.randint(1, 4) for letter in letters}


def gather_case(number: int, form: str, ranks: int) -> str:
    """What is wrong with one sampled gather on this rank, or nothing."""
    draw = random.Random(number)
    places = [(product, dim) for product in EQUATIONS for dim in range(len(read_product(product).first))]
    product, dim = places[number % len(places)]
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    first = read_product(product).first
    sizes = sizes_of(product, first[dim], ranks, draw)
    parts = [numbers([sizes[letter] for letter in first], dtype, draw) for _ in range(ranks)]
    alike = [equation for equation in EQUATIONS if read_product(equation).first == first]
    products = [product, *draw.choices(alike, k=draw.choice((0, 0, 2)))]
    whole = {**sizes, first[dim]: sizes[first[dim]] * ranks}
    for equation in products:
        for letter in read_product(equation).second:
            whole.setdefault(letter, draw.randint(1, 4))
    others = [
        numbers([whole[letter] for letter in read_product(equation).second], dtype, draw) for equation in products
    ]
    biases = [
        bias_for([whole[letter] for letter in read_product(equation).result], dtype, draw) for equation in products
    ]
    keep, chunks = draw.random() < 0.5, draw.choice(CHUNKS)
    gathered = torch.cat(parts, dim)
    expected = [exact(*each).to(dtype) for each in zip(products, [gathered] * 3, others, biases, strict=False)]
    found = gather_matmul(
        parts[dist.get_rank()],
        others,
        products,
        dim=dim,
        ranks=ranks,
        group=dist.group.WORLD.group_name,  # type: ignore[union-attr]
        form=form,
        chunks=chunks,
        keep=keep,
        biases=biases,
    )
    case = f"gather {number}: {products} of {dtype} along {dim} in {chunks}, sizes {whole}, keep={keep}"
    return differences(case, found, [*expected, gathered] if keep else expected)


def scatter_case(number: int, form: str, ranks: int) -> str:
    """What is wrong with one sampled scatter on this rank, or nothing."""
    draw = random.Random(number)
    places = [(product, dim) for product in EQUATIONS for dim in range(len(read_product(product).result))]
    product, dim = places[number % len(places)]
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    equation = read_product(product)
    sizes = sizes_of(product, equation.result[dim], ranks, draw)
    sizes[equation.result[dim]] *= ranks
    shapes = [[sizes[letter] for letter in letters] for letters in (equation.first, equation.second, equation.result)]
    operands = [(numbers(shapes[0], dtype, draw), numbers(shapes[1], dtype, draw)) for _ in range(ranks)]
    bias, reduce_op, chunks = bias_for(shapes[2], dtype, draw), draw.choice(("sum", "avg")), draw.choice(CHUNKS)
    total = torch.stack([exact(product, *each, bias) for each in operands]).sum(0)
    expected = (total / ranks if reduce_op == "avg" else total).chunk(ranks, dim)[dist.get_rank()].to(dtype)
    settings: Any = {"dim": dim, "ranks": ranks, "reduce_op": reduce_op, "form": form, "chunks": chunks, "bias": bias}
    settings["group"] = dist.group.WORLD.group_name  # type: ignore[union-attr]
    found = matmul_scatter(*operands[dist.get_rank()], product, **settings)
    case = f"scatter {number}: {product} of {dtype} along {dim} in {chunks} by {reduce_op}, sizes {sizes}"
    if number % 2:
        return differences(case, [found], [expected])
    rows = [draw.randint(1, 9) for _ in range(2)]
    pairs = [(numbers([size, 3], dtype, draw), numbers([3, 4], dtype, draw)) for size in rows]
    every = matmul_scatter_meanwhile(*operands[dist.get_rank()], product, pairs, **settings)
    return differences(case, [found, *every], [expected, expected, *(left @ other for left, other in pairs)])


def scaled_case(number: int, form: str, ranks: int) -> str:
    """What is wrong with a sampled product of numbers of 8 bits, gathered and scattered, or nothing."""
    draw, rank = random.Random(number), dist.get_rank()
    equation, dim = [("mk,kn->mn", 0), ("mk,kn->mn", 1), *(("bsk,kn->bsn", dim) for dim in range(3))][number % 5]
    dtype, chunks, rows = draw.choice((torch.bfloat16, torch.float32)), draw.choice(CHUNKS), draw.random() < 0.5
    rows = rows and torch.__version__ >= "2.12"  # before, a CPU knows one scale for all rows only
    sizes = {"b": ranks, "s": 2 * ranks, "m": 3 * ranks, "k": 16 * ranks, "n": 16 * ranks}
    shape = [sizes[letter] for letter in read_product(equation).first]
    firsts = [numbers(shape, torch.float8_e4m3fn, draw) for _ in range(ranks)]
    second = numbers([sizes["k"], sizes["n"]], torch.float8_e4m3fn, draw)
    bias = numbers([sizes["n"]], dtype, draw) if draw.random() < 0.5 else None
    scales = [
        2.0 ** torch.randint(-1, 2, [*lengths] if rows else [], generator=torch.Generator().manual_seed(number))
        for lengths in ((firsts[0].numel() // sizes["k"], 1), (1, sizes["n"]))
    ]
    by_rows = scales[0].view(*shape[:-1], 1) if rows else scales[0]
    wholes = [exact(equation, first.double() * by_rows, second.double() * scales[1], bias) for first in firsts]
    settings: Any = {"dim": dim, "ranks": ranks, "group": dist.group.WORLD.group_name, "form": form}  # type: ignore[union-attr]
    product = f"{equation} {str(dtype).removeprefix('torch.')}"
    part = firsts[0].view(torch.uint8).chunk(ranks, dim)[rank].view(torch.float8_e4m3fn)
    gathered = gather_matmul(
        part, [second], [product], scales=scales, biases=[bias], chunks=chunks, keep=True, **settings
    )
    scattered = matmul_scatter(firsts[rank], second, product, scales=scales, bias=bias, chunks=chunks, **settings)
    found = [gathered[0], gathered[1].float(), scattered]
    expected = [
        wholes[0].to(dtype),
        firsts[0].float().contiguous(),
        torch.stack(wholes).sum(0).chunk(ranks, dim)[rank].to(dtype),
    ]
    return differences(f"scaled {number}: {product} along {dim} in {chunks}, by rows: {rows}", found, expected)


def differences(case: str, found: list[Tensor], expected: list[Tensor]) -> str:
    if len(found) != len(expected):
        return f"{case}: {len(found)} results\n"
    wrong = ""
    for index, (result, other) in enumerate(zip(found, expected, strict=True)):
        if result.dtype != other.dtype or result.shape != other.shape or not result.is_contiguous():
            wrong += f"{case}: result {index} is {result.dtype} {list(result.shape)}, strides {result.stride()}\n"
        elif not torch.equal(result, other):
            wrong += f"{case}: result {index} differs by {float((result.double() - other.double()).abs().max())}\n"
    return wrong


def run_cases(form: str, count: int) -> str:
    """Everything that is wrong with many sampled cases on this rank."""
    ranks = dist.get_world_size()
    wrong = [kind(number, form, ranks) for number in range(count) for kind in (gather_case, scatter_case)]
    return "".join([*wrong, *(scaled_case(number, form, ranks) for number in range(count // 3))])


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["chunked", "ring"])
@pytest.mark.parametrize("count", [2, 4])
def test_sampled_products(ranks: Any, count: int, form: str) -> None:
    assert ranks(count).run(run_cases, form, 90 if count == 2 else 45) == [""] * count


def in_groups_of_two(form: str) -> str:
    """What is wrong with products among every second rank: their ranks in the group are not those in the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group, place = groups[rank % 2], rank // 2
    parts = [numbers([3, 4], torch.float32, random.Random(10 * (rank % 2) + place)) for place in range(2)]
    right = numbers([4, 5], torch.float32, random.Random(5))
    settings: Any = {"dim": 0, "ranks": 2, "group": group.group_name, "form": form, "chunks": 2}
    gathered = gather_matmul(parts[place], [right], ["mk,kn->mn"], **settings)
    scattered = matmul_scatter(torch.cat([parts[place]] * 2), right, "mk,kn->mn", **settings)
    return differences("groups", [*gathered, scattered], [torch.cat(parts) @ right, sum(parts) @ right])


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["chunked", "ring"])
def test_ranks_of_a_group_are_not_those_of_the_world(ranks: Any, form: str) -> None:
    assert ranks(4).run(in_groups_of_two, form) == [""] * 4


def in_too_small_a_group(form: str) -> str:
    part = torch.ones(2, 2)
    try:
        gather_matmul(part, [part], ["mk,kn->mn"], dim=0, ranks=4, group=dist.group.WORLD.group_name, form=form)  # type: ignore[union-attr]
    except MeshError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["chunked", "ring"])
def test_a_group_of_another_size_is_refused(ranks: Any, form: str) -> None:
    for message in ranks(2).run(in_too_small_a_group, form):
        assert (
            "has 2 ranks, and a product is exchanged between 4: expected 4 ranks. Remedy: run the program on a mesh"
            in message
        )


def without_rank_1(forms: list[str]) -> list[str]:
    """What each rank sees of products in which one of four takes no part: a gather and a scatter of each form."""
    seen, left, right = [], torch.ones(4, 4), torch.ones(4, 4)
    cases = [(form, kind) for form in forms for kind in ("gather", "scatter")]
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=4)) for _ in cases]
    for (form, kind), group in zip(cases, groups, strict=True):
        settings: Any = {"dim": 0, "ranks": 4, "group": group.group_name, "form": form, "chunks": 2}
        try:
            if dist.get_rank() == 1:
                seen.append("absent")
            elif kind == "gather":
                seen.append(str(gather_matmul(left, [right], ["mk,kn->mn"], **settings)))
            else:
                seen.append(str(matmul_scatter(left, right, "mk,kn->mn", **settings)))
        except RuntimeError as error:
            seen.append(f"error: {error}")
    return seen


@pytest.mark.ranks
def test_a_rank_that_takes_no_part_ends_the_others_within_the_timeout() -> None:
    with cf.Ranks(4, timeout=300, start="forkserver") as world:  # not the pool: these have lost count of each other
        seen = world.run(without_rank_1, ["chunked", "ring"])
    assert seen[1] == ["absent"] * 4
    for rank in (0, 2, 3):
        assert all(message.startswith("error: ") for message in seen[rank]), seen[rank]
    assert all(any("Timed out" in seen[rank][case] for rank in (0, 2, 3)) for case in range(4)), seen


def raise_on_rank_1(form: str) -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of data")
    without_rank_1([form])


@pytest.mark.ranks
def test_a_rank_that_raises_before_is_named() -> None:
    with (
        cf.Ranks(2, timeout=120, start="forkserver") as world,
        pytest.raises(RankFailedError, match="ValueError: out of data on rank 1"),
    ):
        world.run(raise_on_rank_1, "ring")
