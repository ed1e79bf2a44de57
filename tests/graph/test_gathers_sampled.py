"""Sampled gathers and scatters: any shape, dim, number of ranks and spelling, compared with all ranks' values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossfade.graph import collectives
from crossfade.graph.gathers import Scatter
from tests.graph.traced_gathers import checked, traced

Spelled = Callable[[Tensor, int, int], Tensor]


def _waited(x: Tensor, ranks: int) -> Tensor:
    return collectives.wait(collectives.all_gather(x.contiguous(), ranks, "tp"))


def _gather_by_split(x: Tensor, dim: int, ranks: int) -> Tensor:
    return torch.cat(_waited(x, ranks).chunk(ranks), dim)


def _gather_by_view(x: Tensor, dim: int, ranks: int) -> Tensor:
    whole = _waited(x, ranks).view(ranks, *x.shape)
    return whole.movedim(0, dim).flatten(dim, dim + 1)


def _gather_turned(x: Tensor, dim: int, ranks: int) -> Tensor:
    return _waited(x.movedim(dim, 0), ranks).movedim(0, dim)


def _gather_flat(x: Tensor, dim: int, ranks: int) -> Tensor:
    return torch.stack(_waited(x.flatten(), ranks).view(ranks, *x.shape).unbind(), dim).flatten(dim, dim + 1)


def _gather_bytes(x: Tensor, dim: int, ranks: int) -> Tensor:
    whole = _waited(x.contiguous().view(torch.uint8), ranks)
    return torch.cat([chunk.view(x.dtype) for chunk in whole.chunk(ranks)], dim)


def _scattered(x: Tensor, ranks: int) -> Tensor:
    return collectives.wait(collectives.reduce_scatter(x.contiguous(), "sum", ranks, "tp"))


def _scatter_by_split(x: Tensor, dim: int, ranks: int) -> Tensor:
    return _scattered(torch.cat(x.chunk(ranks, dim)), ranks)


def _scatter_by_view(x: Tensor, dim: int, ranks: int) -> Tensor:
    apart = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0)
    return _scattered(apart, ranks)[0]


def _scatter_turned(x: Tensor, dim: int, ranks: int) -> Tensor:
    return _scattered(x.movedim(dim, 0), ranks).movedim(0, dim)


def _scatter_flat(x: Tensor, dim: int, ranks: int) -> Tensor:
    parts = torch.stack(x.chunk(ranks, dim)).flatten()
    shape = list(x.shape)
    shape[dim] //= ranks
    return _scattered(parts, ranks).view(shape)


GATHERING: list[Spelled] = [_gather_by_split, _gather_by_view, _gather_turned, _gather_flat, _gather_bytes]
SCATTERING: list[Spelled] = [_scatter_by_split, _scatter_by_view, _scatter_turned, _scatter_flat]


@st.composite
def spelled(draw: st.DrawFn, spellings: list[Spelled]) -> tuple[Spelled, tuple[int, ...], int, int]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    ranks, dim = draw(st.integers(2, 4)), draw(st.integers(0, len(shape) - 1))
    return draw(st.sampled_from(spellings)), tuple(shape), dim, ranks


@given(spelled(GATHERING))
@settings(max_examples=60, deadline=None)
def test_sampled_gathers(case: tuple[Spelled, tuple[int, ...], int, int]) -> None:
    spelling, shape, dim, ranks = case
    program = traced(lambda x: spelling(x, dim, ranks) + 0, torch.zeros(shape))
    (found,) = checked(program, ranks)
    expected = torch.cat([torch.zeros(shape)] * ranks, dim).shape
    assert found.result.meta["val"].shape == expected


@given(spelled(SCATTERING))
@settings(max_examples=60, deadline=None)
def test_sampled_scatters(case: tuple[Spelled, tuple[int, ...], int, int]) -> None:
    spelling, part, dim, ranks = case
    shape = [size * ranks if index == dim else size for index, size in enumerate(part)]
    program = traced(lambda x: spelling(x, dim, ranks) + 0, torch.zeros(shape))
    (found,) = checked(program, ranks)
    assert isinstance(found, Scatter) and found.result.meta["val"].shape == part
