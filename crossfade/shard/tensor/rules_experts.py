"""Sharding rules of matmuls in groups of rows, each with a matrix of its own: the products of routed experts."""

from __future__ import annotations

from crossfade.shard.tensor.factors import Decision, WeightStuck
from crossfade.shard.tensor.placements import Shard, is_multiple, local_size
from crossfade.shard.tensor.rules import PlacedCall, rule

_BY_DIMS = {
    (2, 3): "!s k, !e k n, !e -> !s n",  # rows in groups, each by its matrix
    (3, 2): "!e m k, k !s, !e -> m !s",  # columns in groups
    (2, 2): "m !s, !s n, !e -> !e m n",  # a product of each group's columns and rows
    (3, 3): "e m k, e k n -> e m n",
}
"""What is the same thing in a matmul in groups, by its operands' numbers of dims. Where groups end is not in sight."""

_ALIGNED = 16
"""Bytes: torch's kernel wants the rows of its operands to begin at multiples of so many."""


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(call: PlacedCall) -> Decision:
    """What each matrix takes and puts out may be split, as of one matrix; rows, and which matrix is theirs, may not."""
    left, right = (len(shape) for shape in call.shapes[:2])
    if call.args.get("bias") is not None:
        return call.replicated("it adds a bias by group")
    decision = call.by_text(_BY_DIMS[left, right], linear=(frozenset({0}), frozenset({1})))
    if call.name == "aten::_grouped_mm":
        for index, want in enumerate(decision.wants[:2]):
            if isinstance(want, Shard) and not _stays_aligned(call, index, want):
                why = f"a rank's rows would not begin at multiples of {_ALIGNED} bytes"
                if call.operands[index].is_weight:
                    raise WeightStuck(index, why)
                return call.replicated(why)
    return decision


def _stays_aligned(call: PlacedCall, index: int, want: Shard) -> bool:
    """Whether a rank's part of an operand is as the kernel takes it: of the dim that lies side by side in memory."""
    value = call.sources[index].meta["val"]
    if value.stride(want.dim) != 1:
        return True
    return is_multiple(local_size(want, value.shape[want.dim], call.ranks) * value.itemsize, _ALIGNED)
