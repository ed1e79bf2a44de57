"""Layouts against torch itself: every re-layout of numbered elements reads the numbers that its layout says."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossfade.graph import layouts
from crossfade.graph.layouts import Layout, LayoutFactor, Unreadable, natural
from crossfade.graph.private import FakeTensorMode, guards_of, symbolic_shapes
from crossfade.graph.relayouts import CHAIN, ancestors, layout_of, spread
from crossfade.graph.text import parse
from tests.growth import grows_linearly


def numbers(layout: Layout) -> Tensor:
    """The elements that a layout reads, by their number in the source."""
    places = torch.tensor(layout.offset)
    for factors in layout.dims:
        along = torch.zeros(1, dtype=torch.int64)
        for size, stride in factors:
            along = (along[:, None] + torch.arange(size) * stride).flatten()
        places = places[..., None] + along
    return places


Relaid = tuple[Tensor, Layout]


@st.composite
def relaid(draw: st.DrawFn) -> Relaid:
    """A tensor of its own numbers after some re-layouts, each also done on the layout."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    layout = natural(shape, 1)
    for kind in draw(st.lists(st.sampled_from(["view", "permute", "slice", "split", "expand"]), max_size=5)):
        made = _step(draw, kind, value, layout)
        if made is None:
            break
        value, layout = made
    return value, layout


def _step(draw: st.DrawFn, kind: str, value: Tensor, layout: Layout) -> Relaid | None:
    """One re-layout, or None where no layout says it."""
    rank = value.dim()
    dim = draw(st.integers(0, rank - 1))
    try:
        if kind == "view":
            sizes = [factor for size in value.shape for factor in _prime_factors(size)]
            ends = sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=3)))
            shape = [torch.Size(sizes[a:b]).numel() for a, b in itertools.pairwise([0, *ends, len(sizes)])]
            return value.reshape(shape), layouts.viewed(layout, shape)
        if kind == "permute":
            order = draw(st.permutations(range(rank)))
            return value.permute(order), layouts.permuted(layout, order)
        if kind == "slice":
            start = draw(st.integers(0, value.shape[dim] - 1))
            length = draw(st.integers(1, value.shape[dim] - start))
            return value.narrow(dim, start, length), layouts.sliced(layout, dim, start, length)
        if kind == "expand":
            shape = [3 if size == 1 else size for size in (1, *value.shape)]
            return value.expand(shape), layouts.broadcast(layout, shape)
        count = draw(st.sampled_from([n for n in (1, 2, 3) if value.shape[dim] % n == 0]))
        size, to = value.shape[dim] // count, draw(st.integers(0, rank - 1))
        cut = [layouts.sliced(layout, dim, index * size, size) for index in range(count)]
        return torch.cat(value.split(size, dim), to), layouts.joined(cut, to)
    except Unreadable:
        return None


def _prime_factors(size: int) -> list[int]:
    return {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}.get(size, [size])


@given(relaid())
@settings(max_examples=300, deadline=None)
def test_a_layout_reads_what_the_tensor_has(made: Relaid) -> None:
    value, layout = made
    assert torch.equal(numbers(layout), value)
    assert layout.shape == tuple(value.shape)


@given(relaid())
@settings(max_examples=100, deadline=None)
def test_equal_numbers_have_one_layout(made: Relaid) -> None:
    """Viewed flat and back, a layout is the same again: its factors are merged in one way only."""
    _, layout = made
    flat = layouts.viewed(layout, (layouts.product(layout.shape),))
    assert layouts.same_layout(layouts.viewed(flat, layout.shape), layout)


@pytest.mark.parametrize(("shape", "dtype", "other"), [((3, 4), 4, 1), ((3, 4), 2, 4), ((2, 6), 1, 2), ((5,), 8, 8)])
def test_other_dtypes_in_the_same_bytes(shape: tuple[int, ...], dtype: int, other: int) -> None:
    by_size: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = torch.empty(shape, dtype=by_size[dtype]).view(by_size[other])
    layout = layouts.retyped(natural(shape, dtype), other)
    assert layouts.same_layout(layout, natural(value.shape, other))
    assert layouts.same_layout(layouts.retyped(layout, dtype), natural(shape, dtype))


def test_bytes_are_seen_as_elements_only_where_they_lie_together() -> None:
    apart = layouts.permuted(natural((4, 6), 1), (1, 0))
    with pytest.raises(Unreadable, match="where they lie together: 4 of"):
        layouts.retyped(apart, 4)


def test_what_no_layout_says_is_refused() -> None:
    turned = layouts.permuted(natural((4, 3), 1), (1, 0))
    with pytest.raises(Unreadable, match=r"cuts across dims that lie apart: factors of 3 4 viewed as \[2, 6\]"):
        layouts.viewed(turned, (2, 6))
    both = layouts.viewed(turned, (12,))
    with pytest.raises(Unreadable, match="cuts across what makes up its dim: 5 from 1 on, of a dim made of 3 4"):
        layouts.sliced(both, 0, 1, 5)
    pieces = [layouts.sliced(natural((6, 2), 1), 0, start, 2) for start in (0, 4, 2)]
    with pytest.raises(Unreadable, match="not equal pieces at equal distances: piece 2 begins at byte 4, not 16"):
        layouts.joined(pieces, 1)


def test_pieces_of_dims() -> None:
    source = natural((4, 6, 5), 2)
    (whole,) = layouts.viewed(source, (120,)).dims
    assert layouts.pieces(whole, source) == [(0, 4, 60), (1, 6, 10), (2, 5, 2)]
    assert layouts.pieces((LayoutFactor(2, 30),), source) == [(1, 2, 30)]
    assert layouts.pieces((LayoutFactor(8, 30), LayoutFactor(3, 0)), source) == [(0, 4, 60), (1, 2, 30), (-1, 3, 0)]
    with pytest.raises(Unreadable, match="reads dims of the tensor in pieces"):
        layouts.pieces((LayoutFactor(3, 24),), source)


SPELLINGS = [
    "w: f32[4, 12] = aten.view(x, [4, 12])",
    "w: f32[4, 12] = aten.reshape(x, [4, -1])",
    "w: f32[4, 12] = aten.flatten.using_ints(x, 1, 2)",
    """
    c: f32[4, 6, 2] = aten.clone(x, memory_format=contiguous_format)
    u: f32[4, 1, 6, 2] = aten.unsqueeze(c, 1)
    q: f32[4, 6, 2] = aten.squeeze.dim(u, 1)
    w: f32[4, 12] = aten._unsafe_view(q, [4, 12])
    """,
    """
    t: f32[2, 6, 4] = aten.transpose.int(x, 0, -1)
    p: f32[4, 6, 2] = aten.permute(t, [2, 1, 0])
    w: f32[4, 12] = aten.reshape(p, [4, 12])
    """,
    """
    m: f32[6, 2, 4] = aten.movedim.int(x, 0, -1)
    b: f32[4, 6, 2] = aten.movedim.intlist(m, [0, 1], [1, 2])
    w: f32[4, 12] = aten.reshape(b, [4, 12])
    """,
    """
    s: (f32[4, 2, 2], f32[4, 2, 2], f32[4, 2, 2]) = aten.split.Tensor(x, 2, 1)
    a: f32[4, 2, 2] = s[0]
    b: f32[4, 2, 2] = s[1]
    c: f32[4, 2, 2] = s[2]
    j: f32[4, 6, 2] = aten.cat([a, b, c], 1)
    w: f32[4, 12] = aten.view(j, [4, 12])
    """,
    """
    s: (f32[4, 3, 2], f32[4, 3, 2]) = aten.split_with_sizes(x, [3, 3], -2)
    a: f32[4, 3, 2] = s[0]
    b: f32[4, 3, 2] = aten.slice.Tensor(x, 1, -3)
    va: f32[4, 6] = aten.view(a, [4, 6])
    vb: f32[4, 6] = aten.reshape(b, [4, 6])
    w: f32[4, 12] = aten.cat([va, vb], -1)
    """,
    """
    s: (f32[4, 2], f32[4, 2], f32[4, 2], f32[4, 2], f32[4, 2], f32[4, 2]) = aten.unbind.int(x, 1)
    a: f32[4, 2] = s[0]
    b: f32[4, 2] = s[1]
    c: f32[4, 2] = s[2]
    d: f32[4, 2] = s[3]
    e: f32[4, 2] = aten.select.int(x, 1, 4)
    f: f32[4, 2] = aten.select.int(x, 1, -1)
    j: f32[4, 6, 2] = aten.stack([a, b, c, d, e, f], 1)
    w: f32[4, 12] = aten.view(j, [4, 12])
    """,
    """
    y: u8[4, 6, 8] = aten.view.dtype(x, u8)
    n: u8[4, 48] = aten.view(y, [4, 48])
    w: f32[4, 12] = aten.view.dtype(n, f32)
    """,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_one_layout(spelling: str) -> None:
    text = f'x: f32[4, 6, 2] = input("x")\n{textwrap.dedent(spelling).strip()}\nreturn output("w", w)'
    graph = parse(text).graph
    x, *_, w, _ = graph.nodes
    assert ancestors(w)[-1] is x
    assert layouts.same_layout(layout_of(w, x), natural((4, 12), 4))
    reached = spread({x: natural((4, 6, 2), 4)})
    assert reached.layouts[w] == natural((4, 12), 4)
    assert [node.op for node in reached.readers] == ["output"] and not reached.refused


def test_what_is_no_relayout_reads() -> None:
    graph = parse(
        """
        x: f32[4, 6] = input("x")
        y: f32[4, 6] = input("y")
        both: f32[8, 6] = aten.cat([x, y])
        some: f32[4, 3] = aten.slice.Tensor(x, 1, 0, 6, 2)
        half: f32[4, 6] = aten.to.dtype(x, f32)
        return output("both", both), output("some", some), output("half", half)
        """
    ).graph
    x, *_ = graph.nodes
    reached = spread({x: natural((4, 6), 4)})
    assert [node.name for node in reached.readers] == ["both", "some", "half"]
    assert [str(error) for error in reached.refused.values()] == ["a slice leaves elements out in between: step 2"]


def test_symbolic_sizes_add_no_guard() -> None:
    mode = FakeTensorMode(shape_env=symbolic_shapes())
    value = mode.from_tensor(torch.empty(5, 7, 8), static_shapes=False)
    kept = guards_of(mode)
    batch, length, width = value.shape
    layout = layouts.of_tensor(value)
    flat = layouts.viewed(layout, (batch * length, width))
    assert layouts.same_layout(layouts.viewed(flat, (batch, length, width)), layout)
    assert [piece.dim for piece in layouts.pieces(flat.dims[0], layout)] == [0, 1]
    with pytest.raises(Unreadable, match="cuts across"):
        layouts.viewed(layouts.permuted(layout, (1, 0, 2)), (batch, length, width))
    doubled = layouts.joined([layout, layouts.replace(layout, offset=batch * length * width * 4)], 1)
    assert str(doubled.shape[1]) == f"2*{length}"
    assert guards_of(mode) == kept


def test_a_chain_is_followed_in_linear_work() -> None:
    def work(size: int) -> Any:
        lines = [f"x{index + 1}: f32[4, 6] = aten.view(x{index}, [4, 6])" for index in range(size)]
        graph = parse("\n".join(['x0: f32[4, 6] = input("x0")', *lines, f'return output("y", x{size})'])).graph
        first, *_, last, _ = graph.nodes
        assert len(ancestors(last)) == CHAIN + 1
        return lambda: spread({first: natural((4, 6), 4)})

    grows_linearly(work, 200)
