"""One spelling for tensors seen in another shape, and one for dims in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossfade.graph.operators import permutation_of
from crossfade.graph.passes import Numerics
from crossfade.graph.private import size_expression, statically_equal
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass

_aten = torch.ops.aten

REORDERINGS = (
    "aten.permute({0}, _)",
    "(aten.transpose.int | aten.swapaxes)({0}, _, _)",
    "(aten.t | aten.mT | aten.numpy_T)({0})",
)
"""The ways to reorder dims, as patterns with a gap for what they order."""


@dataclass(frozen=True)
class CanonicalizeViews(RulePass):
    """Spell each change of shape `view` with its sizes written out, and each change of the order of dims `permute`.

    `view` says the most: it never copies. A `reshape` that stays is one that copies, or may. With symbolic sizes, a
    size is left to torch as -1 where it is the only one, and no node is added to compute it.

    Also known as: Inductor's `view_to_reshape`, which settles on the other spelling.

    Before:
        x: f32[4, 6] = input("x")
        reshape: f32[4, 2, 3] = aten.reshape(x, [4, -1, 3])
        unsqueeze: f32[4, 2, 1, 3] = aten.unsqueeze(reshape, 2)
        transpose: f32[2, 4, 1, 3] = aten.transpose.int(unsqueeze, 0, 1)
        neg: f32[2, 4, 1, 3] = aten.neg(transpose)
        return output("y", neg)

    After:
        x: f32[4, 6] = input("x")
        view: f32[4, 2, 3] = aten.view(x, [4, 2, 3])
        view_1: f32[4, 2, 1, 3] = aten.view(view, [4, 2, 1, 3])
        permute: f32[2, 4, 1, 3] = aten.permute(view_1, [1, 0, 2, 3])
        neg: f32[2, 4, 1, 3] = aten.neg(permute)
        return output("y", neg)
    """

    name = "canonicalize-views"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """What becomes a `view`, then what becomes a `permute`."""
        return _RULES


def is_view(value: Tensor, shape: Sequence[Any]) -> bool:
    """Whether a tensor provably can be seen in another shape (of as many elements) without a copy.

    >>> is_view(torch.empty(4, 6), [8, 3]), is_view(torch.empty(6, 4).t(), [8, 3])
    (True, False)
    """
    if is_contiguous(value):
        return True
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride(), *shape)):
        return False
    return value.numel() == 0 or _is_cut_within(_runs(value), [size for size in shape if size != 1])


def is_contiguous(value: Tensor) -> bool:
    """Whether a tensor is provably dense and in order, whatever its symbols stand for.

    >>> is_contiguous(torch.empty(2, 3)), is_contiguous(torch.empty(2, 3).t())
    (True, False)
    """
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_equal(size, 1):
            if not statically_equal(stride, step):
                return False
            step = step * size
    return True


def _runs(value: Tensor) -> list[int]:
    """How many elements lie evenly spaced, one after another, from the last dims to the first."""
    runs: list[int] = []
    reach = None
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size == 1:
            continue
        if stride == reach:
            runs[-1] *= size
        else:
            runs.append(size)
        reach = size * stride
    return runs


def _is_cut_within(runs: list[int], shape: list[int]) -> bool:
    """Whether each size of a shape lies within one run."""
    sizes = list(shape)
    for run in runs:
        taken = 1
        while taken < run:
            taken *= sizes.pop()
        if taken != run:
            return False
    return not sizes


def spelled_sizes(value: Tensor) -> list[int] | None:
    """A tensor's sizes for `view`: numbers, and -1 for the one that is symbolic; None where that does not say all.

    >>> spelled_sizes(torch.empty(2, 3))
    [2, 3]
    """
    known = map(size_expression, value.shape)
    sizes = [int(size) if size.is_Integer else -1 for size in known]
    ambiguous = sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes)
    return None if ambiguous else sizes


def _sizes(match: Match) -> Any:
    """The sizes to write: numbers where all are known, those given where not."""
    sizes = spelled_sizes(match.root.meta["val"])
    symbolic = sizes is None or -1 in sizes
    return match["size"] if symbolic and "size" in match.bound else sizes


def _as_view(match: Match) -> Any:
    return match.splice(_aten.view.default, match["x"], _sizes(match))


def _reason_against_view(match: Match) -> str | None:
    source, result = match["x"].meta["val"], match.root.meta["val"]
    if _sizes(match) is None:
        return "several of its sizes are symbolic"
    return None if is_view(source, result.shape) else "it is not provably free of a copy"


def _as_permute(match: Match) -> Any:
    return match.splice(_aten.permute.default, match["x"], permutation_of(match.root))


def _reason_against_permute(match: Match) -> str | None:
    if match["x"].meta["val"].dim() < 2:
        return "it orders no dims"
    return None


def _views_with_inferred_sizes(most_dims: int = 5) -> Iterator[str]:
    """Patterns of `view` with a -1 anywhere."""
    for rank in range(1, most_dims + 1):
        for place in range(rank):
            sizes = ", ".join("-1" if dim == place else "_" for dim in range(rank))
            yield f"aten.view(x, [{sizes}])"


def _reason_against_numbers(match: Match) -> str | None:
    known = all(isinstance(size, int) for size in match.root.meta["val"].shape)
    return None if known else "its sizes are symbolic"


def _rules() -> Iterator[Rule]:
    for name, pattern in (
        ("unsafe-view", "aten._unsafe_view(x, size)"),
        ("reshape", "aten.reshape(x, size)"),
        ("reshape", "(aten.view_as | aten.reshape_as)(x, _)"),
        ("reshape", "aten._reshape_alias(x, size, _)"),
        ("flatten", "aten.flatten.using_ints(x, _, _)"),
        ("unflatten", "aten.unflatten.int(x, _, _)"),
        ("squeeze", "aten.squeeze(x)"),
        ("squeeze", "(aten.squeeze.dim | aten.squeeze.dims)(x, _)"),
        ("unsqueeze", "aten.unsqueeze(x, _)"),
    ):
        yield Rule(name, pattern, _as_view, _reason_against_view)
    for pattern in _views_with_inferred_sizes():
        yield Rule("inferred-size", pattern, _as_view, _reason_against_numbers)
    for pattern in REORDERINGS[1:]:
        yield Rule("transpose", pattern.format("x"), _as_permute, _reason_against_permute)


_RULES = tuple(_rules())
