"""In which units a split dim comes, and what follows where these do not divide by the ranks.

Heads are not in a parameter's shape: nine of 64 channels are 576 rows, which two ranks could halve, but not so that
each goes on by itself. A column-wise projection is followed through the graph to the projections that contract over
what it puts out; the coarsest factor on the way is its unit. What meets in one contraction is cut alike: queries of
nine heads as five and four. Keys and values of fewer heads than that stay whole if these do not divide, and every rank
takes what its queries see. Where padding would cost more than half again, a dim stays whole, or is cut through its
units.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from crossfade.graph.operators import arguments
from crossfade.shard.tensor.placements import units_each
from crossfade.shard.tensor.plan_channel_factors import ChannelFactor, Channels, sizes_of
from crossfade.shard.tensor.plan_channels import follow_all, is_normed
from crossfade.shard.tensor.plan_meetings import adds_earlier, is_value, lends
from crossfade.shard.tensor.plan_names import ProgramNames, Use

Split = tuple[int | None, tuple[int, ...]]

_WASTE = 1.5
"""How many times its own size a padded dim may have at most."""

_FAR = 1000
"""How many nodes a projection's channels are followed through at most."""


@dataclass
class Fitted:
    """Of split parameters by name: the units of those that are padded, and why others stay whole."""

    units: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def fit(splits: Mapping[str, Split], names: ProgramNames, ranks: int) -> Fitted:
    """Decide for every split parameter, by canonical name, with the dim and the blocks that it is split in."""
    fitted = Fitted()
    known: set[str] = set()
    apart = _groups_apart(names, ranks)
    for meeting in _meetings(splits, names):
        known |= _fit_meeting(meeting, splits, ranks, fitted)
    for name, (dim, blocks) in splits.items():
        if dim is None or name in known:
            continue
        if name in apart:
            fitted.whole[name] = apart[name]
            continue
        sizes = blocks or (int(names.tensors[name].shape[dim]),)
        if all(size % ranks == 0 for size in sizes):
            continue
        units = math.gcd(*sizes)
        if _wasted(units, ranks):
            fitted.whole[name] = f"{' + '.join(map(str, sizes))} at dim {dim} over {ranks} ranks"
        else:
            fitted.units[name] = units
    fitted.whole = {name: fitted.whole[name] for name in splits if name in fitted.whole}
    return fitted


def _groups_apart(names: ProgramNames, ranks: int) -> dict[str, str]:
    """Convolutions in groups of several channels, and their biases, of which ranks would have parts of a group."""
    every = [(name, use) for name, uses in names.uses.items() for use in uses if use.node is not None]
    found: dict[fx.Node | None, str] = {}
    for _, use in every:
        if use.in_groups and use.node is not None:
            given = arguments(use.node)
            groups, channels = given["groups"], given["weight"].meta["val"].shape[0]
            if groups % ranks and groups != channels:
                found[use.node] = f"{groups} groups over {ranks} ranks"
    return {name: found[use.node] for name, use in every if use.node in found and (use.in_groups or use.role == "bias")}


def _wasted(units: int, ranks: int) -> bool:
    """Whether padding would make too much of it.

    >>> _wasted(9, 2), _wasted(3, 2), _wasted(2, 4)
    (False, False, True)
    """
    return units_each(units, ranks) * ranks > _WASTE * units


@dataclass
class _Meeting:
    """Projections that the same ones contract over: the units of each, and the weights at the ends."""

    starts: dict[str, int] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)
    biases: dict[str, str] = field(default_factory=dict)
    """Of biases, the weight whose result they are added to."""


def _fit_meeting(meeting: _Meeting, splits: Mapping[str, Split], ranks: int, fitted: Fitted) -> set[str]:
    """Cut what meets alike; returns the parameters that were decided."""
    finest = max(meeting.starts.values())
    if all(units % ranks == 0 for units in meeting.starts.values()):
        return {*meeting.starts, *meeting.ends, *meeting.biases}  # as the sizes say
    if finest % ranks and _wasted(finest, ranks):
        return set()
    for name, units in meeting.starts.items():
        if units != finest and units % ranks:
            fitted.whole[name] = f"{units} heads over {ranks} ranks"
    if finest % ranks:
        cut = [name for name, units in meeting.starts.items() if units == finest]
        fitted.units |= dict.fromkeys([*cut, *meeting.ends], finest)
    for bias, weight in meeting.biases.items():
        if weight in fitted.whole:
            fitted.whole[bias] = fitted.whole[weight]
        elif weight in fitted.units:
            fitted.units[bias] = fitted.units[weight]
    return {*meeting.starts, *meeting.ends, *meeting.biases}


def _meetings(splits: Mapping[str, Split], names: ProgramNames) -> list[_Meeting]:
    """Projections split by columns, with those split by rows that they end in; what shares an end is together."""
    every = {use.node: (name, use) for name, uses in names.uses.items() for use in uses if use.multiplies}
    biases = {use.node: name for name, uses in names.uses.items() for use in uses if use.role == "bias"}
    found: dict[str, _Meeting] = {}
    for name, use in every.values():
        dim, blocks = splits.get(name, (None, ()))
        if dim is None or dim != use.out_dim:
            continue
        units, ends = _followed(use, blocks, every, splits)
        joined = _Meeting({name: units}, set(ends))
        if use.node in biases and splits.get(biases[use.node], (None, ()))[0] is not None:
            joined.biases[biases[use.node]] = name
        for other in {id(found[key]): found[key] for key in (*ends, name) if key in found}.values():
            for start, count in other.starts.items():
                joined.starts[start] = math.gcd(count, joined.starts.get(start, count))
            joined.ends |= other.ends
            joined.biases |= other.biases
        found |= dict.fromkeys((*joined.ends, *joined.starts), joined)
    return list({id(meeting): meeting for meeting in found.values()}.values())


def _followed(
    use: Use, blocks: tuple[int, ...], every: Mapping[fx.Node | None, tuple[str, Use]], splits: Mapping[str, Split]
) -> tuple[int, list[str]]:
    """In how many units every block of a projection's channels comes, and the weights that contract over them."""
    start = use.node
    assert start is not None
    width = sizes_of(start)[use.out_at]
    whole = Channels(0, width, (ChannelFactor(use.out_at, width),))
    units, ends = dict(_ranges(blocks or (width,))), []
    seen, pending = {(start, whole)}, deque([(start, whole)])
    while pending and len(seen) < _FAR:
        node, channels = pending.popleft()
        for (first, size), count in units.items():
            if first <= channels.start and channels.start + channels.length <= first + size:
                unit = channels.length // channels.first.size
                units[first, size] = math.gcd(count, size // unit if size % unit == 0 else 1)
        for user in node.users:
            name, end = every.get(user, ("", None))
            if end is not None and end.activations is node:
                in_pairs = end.in_dim is not None and splits.get(name, (None, ()))[0] == end.in_dim
                if channels.first.dim == end.in_at and in_pairs:
                    ends.append(name)
                continue
            if not is_value(user) or lends(user, node) or adds_earlier(user, start):
                continue
            after = (channels,) if is_normed(user, node, channels) else follow_all(user, node, channels)
            new = [(user, now) for now in after if (user, now) not in seen]
            seen.update(new)
            pending.extend(new)
    return math.gcd(*units.values()), list(dict.fromkeys(ends))


def _ranges(blocks: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], int]]:
    start = 0
    for size in blocks:
        yield (start, size), size
        start += size
