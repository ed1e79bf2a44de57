"""Channels are followed as long as their outermost factor stays apart; then a rank would need the others' pieces."""

from __future__ import annotations

import pytest

from crossfade.graph.text import parse
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels
from crossfade.shard.tensor.plan_channels import follow, follow_all, is_summed

WHOLE = Channels(0, 12, (ChannelFactor(2, 12),))
"""Twelve channels in the last dim of a tensor of three."""

FOLLOWED = {
    "f32[2, 5, 12] = aten.relu(x)": WHOLE,
    "f32[2, 12, 5] = aten.transpose.int(x, 1, 2)": Channels(0, 12, (ChannelFactor(1, 12),)),
    "f32[2, 5, 4, 3] = aten.view(x, [2, 5, 4, 3])": Channels(0, 12, (ChannelFactor(2, 4), ChannelFactor(3, 3))),
    "f32[10, 12] = aten.view(x, [10, 12])": Channels(0, 12, (ChannelFactor(1, 12),)),
    "f32[120] = aten.view(x, [120])": Channels(0, 12, (ChannelFactor(0, 12, outer=10),)),
    "f32[2, 5, 6] = aten.slice.Tensor(x, 2, 6, 12)": Channels(6, 6, (ChannelFactor(2, 6),)),
    "f32[2, 3, 12] = aten.slice.Tensor(x, 1, 0, 3)": WHOLE,
    "f32[2, 12] = aten.select.int(x, 1, 0)": Channels(0, 12, (ChannelFactor(1, 12),)),
    "f32[2, 5, 12] = aten._softmax(x, 1, False)": WHOLE,
    "f32[2, 5, 12] = aten._softmax(x, 2, False)": None,
    "f32[2, 5, 12] = aten.cumsum(x, 2)": None,
    "f32[2, 5] = aten.sum.dim_IntList(x, [2])": None,
    "f32[2, 5, 12] = aten.flip(x, [2])": None,
    "f32[2, 12] = aten.std.correction(x, [1])": Channels(0, 12, (ChannelFactor(1, 12),)),
    "f32[2, 5] = aten.std.correction(x, [2])": None,
    'f32[12, 2, 5] = aten.einsum("...i->i...", [x])': Channels(0, 12, (ChannelFactor(0, 12),)),
    'f32[2, 5] = aten.einsum("bsi->bs", [x])': None,
    "f32[1, 5, 12] = aten.glu(x, 0)": WHOLE,
}


@pytest.mark.parametrize("line", FOLLOWED)
def test_where_channels_go(line: str):
    program = parse(f'x: f32[2, 5, 12] = input("x")\ny: {line}\nreturn output("y", y)')
    x, y, _ = program.graph.nodes
    assert follow(y, x, WHOLE) == FOLLOWED[line]


@pytest.mark.parametrize(
    ("sizes", "channels", "after"),
    [
        ("12", Channels(0, 12, (ChannelFactor(0, 12),)), ((0, 6), (6, 6))),
        ("12", Channels(24, 12, (ChannelFactor(0, 12),)), ((24, 6), (30, 6))),
        ("12", Channels(0, 3, (ChannelFactor(0, 3, inner=4),)), ()),
        ("12", Channels(0, 6, (ChannelFactor(0, 6, outer=2),)), ()),
    ],
)
def test_halves_that_gate_are_blocks_of_channels(sizes: str, channels: Channels, after: tuple[tuple[int, int], ...]):
    text = f'x: f32[{sizes}] = input("x")\ny: f32[6] = aten.glu(x)\nreturn output("y", y)'
    x, y, _ = parse(text).graph.nodes
    found = follow_all(y, x, channels)
    assert tuple((each.start, each.length) for each in found) == after
    assert all(each.factors == (ChannelFactor(0, 6),) for each in found)


@pytest.mark.parametrize(
    ("start", "stop", "step", "made", "left"),
    [(1, 12, 2, 6, 6), (2, 12, 2, 5, None), (0, 10, 2, 5, None), (0, 12, 5, 3, None)],
)
def test_interleaved_channels_stay_apart_in_steps(start: int, stop: int, step: int, made: int, left: int | None):
    call = f"aten.slice.Tensor(x, 0, {start}, {stop}, {step})"
    x, y, _ = parse(f'x: f32[12] = input("x")\ny: f32[{made}] = {call}\nreturn output("y", y)').graph.nodes
    expected = Channels(0, 12, (ChannelFactor(0, left),)) if left else None
    assert follow(y, x, Channels(0, 12, (ChannelFactor(0, 12),))) == expected


def test_what_is_written_into_another_value_is_not_followed():
    text = 'x: f32[4] = input("x")\nz: f32[4] = aten.neg(x)\ny: f32[4] = aten.copy_(z, x)\nreturn output("y", y)'
    x, _, y, _ = parse(text).graph.nodes
    assert follow(y, x, Channels(0, 4, (ChannelFactor(0, 4),))) is None


@pytest.mark.parametrize(("width", "dims", "found"), [(64, [1], True), (64, [0], False), (8, [1], False)])
def test_statistics_over_many_channels_are_sums_that_ranks_can_add(width: int, dims: list[int], found: bool):
    kept = [3, width][1 - dims[0]]
    text = f'x: f32[3, {width}] = input("x")\ny: f32[{kept}] = aten.mean.dim(x, {dims})\nreturn output("y", y)'
    x, y, _ = parse(text).graph.nodes
    assert is_summed(y, x, Channels(0, width, (ChannelFactor(1, width),))) is found


def test_a_step_along_the_outermost_factor():
    assert Channels(0, 12, (ChannelFactor(2, 4), ChannelFactor(3, 3))).unit == 3
