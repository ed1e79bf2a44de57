"""Reductions that start from what another one has reduced already."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import WRITTEN, Match, Rule
from crossfade.graph.rule_pass import RulePass

_aten = torch.ops.aten
_KINDS = {
    **dict.fromkeys((_aten.amax.default, _aten.max.default), "max"),
    **dict.fromkeys((_aten.amin.default, _aten.min.default), "min"),
    **dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims), "any"),
    **dict.fromkeys((_aten.all.default, _aten.all.dim, _aten.all.dims), "all"),
}
_OVER_DIMS = {"max": _aten.amax.default, "min": _aten.amin.default, "any": _aten.any.dims, "all": _aten.all.dims}

_WITHOUT_NEGATIVE_ZERO = frozenset({_aten.abs.default, _aten.exp.default, _aten.sigmoid.default})
_WITHOUT_NEW_ZEROS = frozenset({
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.permute.default, _aten.t.default),
    *(_aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.clone.default),
    *(_aten.expand.default, _aten.slice.Tensor, _aten.select.int, _aten.detach.default, _aten.alias.default),
    _aten._to_copy.default,
})  # fmt: skip
"""Operators whose result has no negative zeros if their first argument has none."""

_MOST_USERS = 256
"""How many users of a value are looked at: a value with more is a parameter or a bucket, not an activation."""

_NONE = "no other reduction of this kind takes fewer dims of the same value"
_BELOW = "the reduction of fewer dims stands below it"
_ZERO_SIGN = "its value may hold zeros of both signs, and the order decides which sign the result has"


@dataclass(frozen=True)
class ReusePartialReductions(RulePass):
    """Let the maximum (minimum, any, all) over many dims be taken of the one over some, which is smaller to read.

    Per-row and per-tensor scales of quantization ask for both. NaNs travel through either way. Sums are left alone:
    their order shows in the last bits. So does that of zeros of both signs in a maximum: floats are taken only where
    their value is an absolute value, an exponential or a sigmoid, or a view of one, which has no negative zeros.

    Not in a default pipeline: only quantization asks for both. Add it with
    `simplification().after("simplify-nodes", ReusePartialReductions())`.

    Also known as: Inductor's `register_partial_reduction_pattern`.

    Before:
        x: f32[64, 64] = input("x")
        abs_1: f32[64, 64] = aten.abs(x)
        row: f32[64, 1] = aten.amax(abs_1, [1], True)
        whole: f32[] = aten.amax(abs_1)
        return output("row", row), output("whole", whole)

    After:
        x: f32[64, 64] = input("x")
        abs_1: f32[64, 64] = aten.abs(x)
        row: f32[64, 1] = aten.amax(abs_1, [1], True)
        amax: f32[] = aten.amax(row, [0, 1])
        return output("row", row), output("whole", amax)
    """

    name = "reuse-partial-reductions"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """One for each spelling of a reduction over some dims or all."""
        some = "(aten.amax | aten.amin | aten.any.dims | aten.all.dims | aten.any.dim | aten.all.dim)(x, _, _)"
        every = "(aten.max | aten.min | aten.any | aten.all)(x)"
        return (
            Rule("partly-reduced", some, _reduce_further, _reason_against),
            Rule("wholly-reduced", every, _reduce_further, _reason_against),
        )


def _reason_against(match: Match) -> str | None:
    root, partial = match.root, _partial(match.root)
    if partial is None:
        return _NONE
    if not partial < root:
        return _BELOW
    if match["x"].meta["val"].dtype.is_floating_point and not _is_safe(root):
        return _ZERO_SIGN
    return WRITTEN if match.is_written(match["x"], partial) else None


def _is_safe(root: fx.Node) -> bool:
    """Whether the order of a reduction cannot be seen: no zeros of both signs are among a float's elements."""
    value = _argument(root)
    while value.target in _WITHOUT_NEW_ZEROS:
        value = _argument(value)
    return _KINDS[root.target] in ("any", "all") or value.target in _WITHOUT_NEGATIVE_ZERO  # type: ignore[index]


def _argument(node: fx.Node) -> fx.Node:
    value = arguments(node)["self"]
    assert isinstance(value, fx.Node)
    return value


def _partial(root: fx.Node) -> Any:
    """The reduction of fewer dims of the same value that leaves least to do, those above it first."""
    kind, dims = _KINDS[root.target], _dims(root)  # type: ignore[index]
    users = itertools.islice(_argument(root).users, _MOST_USERS)
    found = [user for user in users if _KINDS.get(user.target) == kind and _dims(user) < dims]  # type: ignore[call-overload]
    return max(found, key=lambda user: (user < root, len(_dims(user))), default=None)


def _dims(reduction: fx.Node) -> frozenset[int]:
    """The dims that a reduction takes."""
    given, rank = arguments(reduction), _argument(reduction).meta["val"].dim()
    dims = given.get("dim")
    # `any` and `all` over an empty list of dims take none, and amax and amin all
    if dims is None or (dims == [] and _KINDS[reduction.target] in ("max", "min")):  # type: ignore[index]
        return frozenset(range(rank))
    return frozenset(dim % rank if rank else 0 for dim in ([dims] if isinstance(dims, int) else dims))


def _reduce_further(match: Match) -> fx.Node:
    root, partial = match.root, _partial(match.root)
    dims, gone = _dims(root), sorted(_dims(partial))
    reduce = _OVER_DIMS[_KINDS[root.target]]  # type: ignore[index]
    keep = bool(arguments(root).get("keepdim", False))
    kept = arguments(partial)["keepdim"]
    rest = sorted(dims) if kept else [dim - sum(before < dim for before in gone) for dim in sorted(dims - set(gone))]

    def further(value: Tensor) -> Tensor:
        result = reduce(value, rest, keep) if keep else reduce(value, rest)
        for dim in gone if keep and not kept else ():
            result = result.unsqueeze(dim)
        return result

    return match.splice(further, partial)
