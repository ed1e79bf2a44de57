"""Sharding rules of what stands between convolutions: each channel is computed by itself, positions together."""

from __future__ import annotations

from dataclasses import replace

from crossfade.shard.tensor.factors import Decision, Factors
from crossfade.shard.tensor.placements import Shard
from crossfade.shard.tensor.rules import PlacedCall, rule


@rule("batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(call: PlacedCall) -> Decision:
    """With statistics that are given, every element by itself; while they are taken, each channel."""
    rank = len(call.shapes[0])
    names = ("b", "c", *(f"x{dim}" for dim in range(2, rank)))
    taken = frozenset(names) - {"c"} if call.args.get("training") else frozenset()
    inputs = (names, *((("c",),) * (len(call.operands) - 1)))
    rest = ((None,),) * 2 if len(call.results) > 1 else ()
    return call.decide(Factors(inputs, (names, *rest), taken))


@rule("group_norm")
def group_norm(call: PlacedCall) -> Decision:
    """Samples pass; channels pass in whole groups, of which every rank then has fewer."""
    rank, groups = len(call.shapes[0]), call.args["num_groups"]
    names = ("b", "c", *(f"x{dim}" for dim in range(2, rank)))
    splits = [placement for placement in call.placements if isinstance(placement, Shard)]
    plain = all(split.outer == 1 and not split.sizes and not split.units for split in splits)
    fixed = frozenset(names[2:]) | (frozenset() if plain and groups % call.ranks == 0 else {"c"})
    inputs = (names, *((("c",),) * (len(call.operands) - 1)))
    decision = call.decide(Factors(inputs, (names,), fixed))
    after = decision.results[0]
    by_channel = isinstance(after, Shard) and after.dim == 1
    return replace(decision, divide=(("num_groups", None),) if by_channel else ())


_WINDOWS = {1: "1d", 2: "2d", 3: "3d"}
_POOLS = tuple(f"{kind}{size}" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
               for size in _WINDOWS.values())  # fmt: skip


@rule(*_POOLS, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
      "max_pool1d_with_indices", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
      "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")  # fmt: skip
def by_window(call: PlacedCall) -> Decision:
    """Samples and channels pass; positions are taken together, as many dims of them as the operator's name says."""
    space = next(size for size, text in _WINDOWS.items() if text in call.name)
    rank = len(call.shapes[0])
    names = tuple(f"d{dim}" for dim in range(rank))
    linear = (frozenset({0}),) if "avg_pool" in call.name or "upsample" in call.name else ()
    return call.decide(Factors((names,), (names,) * len(call.results), frozenset(names[rank - space :]), linear=linear))


@rule("glu")
def gated(call: PlacedCall) -> Decision:
    """The two halves of a dim are multiplied: it may be split if each half is."""
    dim, split = call.dim(), call.placements[0]
    names = tuple(f"d{index}" for index in range(len(call.shapes[0])))
    if isinstance(split, Shard) and split.dim == dim:
        halves = split.outer == 2 or (len(split.sizes) == 2 and split.sizes[0] == split.sizes[1])
        return (
            Decision((split,), (Shard(dim, units=split.units),)) if halves else call.replicated("its halves are apart")
        )
    return call.decide(Factors((names,), (names,), frozenset({names[dim]})))
