"""Sharding rules by factors: which dims of an operator's inputs and outputs are the same thing.

`"... i, o i, o -> ... o"` says of a linear layer: the leading dims pass through, `o` may be split in weight, bias and
result alike, and `i`, which the result lacks, is summed over: split, it leaves a partial sum. `!k` is a factor that
must not be split (a softmax's own dim). A dim of size 1 that broadcasts carries no factor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crossfade.errors import PlanError
from crossfade.shard.placements import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard, divides

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Factors:
    """The factors of each operand's and each result's dims.

    `fixed` may not be split. `summed` says whether the operator adds up over the factors that its results lack.
    `linear` lists sets of operands in which it is linear together: if all of one set are partial sums and nothing else
    is split, so is the result. `added` are operands that are added to the rest (a bias).
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    fixed: frozenset[str] = frozenset()
    summed: bool = True
    linear: tuple[frozenset[int], ...] = ()
    added: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Decision:
    """How one operator runs on local parts: the placements it wants of its operands and those its results have.

    `divide` names list or scalar arguments that are sizes along the split dim, to be divided by the number of ranks
    (argument, index in it; None for all of it). `emit` builds something else than the operator itself.
    `why` says what forced a wanted placement to differ from the one given.
    """

    wants: tuple[Placement, ...]
    results: tuple[Placement, ...]
    divide: tuple[tuple[str, int | None], ...] = ()
    emit: Any = None
    why: str = ""
    extra: dict[str, Any] = field(default_factory=dict, compare=False)


def replicated(operands: int, results: int, why: str = "") -> Decision:
    """Everything whole on every rank."""
    return Decision((REPLICATE,) * operands, (REPLICATE,) * results, why=why)


def parse_factors(text: str, ranks_of: Sequence[int], **more: Any) -> Factors:
    """Factors from their text, for operands of so many dims; `...` are as many dims as are left.

    >>> parse_factors("... i, o i -> ... o", [3, 2]).inputs
    (('...1', '...0', 'i'), ('o', 'i'))
    """
    left, _, right = text.partition("->")
    fixed = frozenset(re.findall(r"!(\w+)", text))
    parts = [part.replace("!", "").split() for part in left.split(",")][: len(ranks_of)]
    leading = max(
        (rank - len(part) + 1 for part, rank in zip(parts, ranks_of, strict=True) if "..." in part), default=0
    )
    inputs = tuple(_expand(part, rank - len(part) + 1) for part, rank in zip(parts, ranks_of, strict=True))
    outputs = tuple(_expand(part.replace("!", "").split(), leading) for part in right.split(","))
    return Factors(inputs, outputs, fixed, **more)


def _expand(part: list[str], leading: int) -> Dims:
    dims: list[str] = []
    for name in part:
        dims += [f"...{index}" for index in reversed(range(leading))] if name == "..." else [name]
    return tuple(dims)


def without_broadcasts(factors: Factors, shapes: Sequence[Sequence[Any]]) -> Factors:
    """Factors in which a dim of size 1 carries none, if the same factor is wider elsewhere."""
    wide = {
        name
        for dims, shape in zip(factors.inputs, shapes, strict=True)
        for name, size in zip(dims, shape, strict=True)
        if not _is_one(size)
    }
    inputs = tuple(
        tuple(None if name in wide and _is_one(size) else name for name, size in zip(dims, shape, strict=True))
        for dims, shape in zip(factors.inputs, shapes, strict=True)
    )
    return Factors(inputs, factors.outputs, factors.fixed, factors.summed, factors.linear, factors.added)


def _is_one(size: Any) -> bool:
    """Symbols of an exported program are never 1."""
    return isinstance(size, int) and size == 1


@dataclass(frozen=True)
class Operand:
    """One tensor operand: where it lies, its global sizes, and whether it is a split parameter (or a view of one),
    and whether it depends on no activation."""

    placement: Placement
    shape: tuple[Any, ...]
    bytes: int = 0
    is_weight: bool = False
    is_constant: bool = False
    name: str = ""


def decide(factors: Factors, operands: Sequence[Operand], ranks: int) -> Decision:
    """Split the factor that the operands' placements ask for, if the operator allows it.

    Weights decide before activations, and a larger operand before a smaller one. What has the chosen factor and is
    whole is split where it is; what is split otherwise is put together first.
    """
    factors = without_broadcasts(factors, [operand.shape for operand in operands])
    results = len(factors.outputs)
    partial = frozenset(i for i, operand in enumerate(operands) if isinstance(operand.placement, Partial))
    votes = _votes(factors, operands)
    why = ""
    for index, name, shard in votes:
        problem = _problem(factors, operands, name, shard, ranks)
        if problem is None:
            return _split(factors, operands, name, shard, why)
        why = why or problem
        if operands[index].is_weight:
            raise WeightStuck(index, problem)
    if partial and not votes and any(partial == group for group in factors.linear):
        return Decision(tuple(o.placement for o in operands), (PARTIAL,) * results)
    shared = _shared_weights(factors, operands, partial)
    if shared is not None and not votes:
        return Decision(shared, (PARTIAL,) * results)
    return replicated(len(operands), results, why or ("it is not linear in the partial sum" if partial else ""))


class WeightStuck(Exception):
    """A split weight that the operator cannot use as it is."""

    def __init__(self, operand: int, why: str) -> None:
        super().__init__(why)
        self.operand, self.why = operand, why


def _votes(factors: Factors, operands: Sequence[Operand]) -> list[tuple[int, str, Shard]]:
    found = []
    for index, operand in enumerate(operands):
        if isinstance(operand.placement, Shard):
            name = factors.inputs[index][operand.placement.dim]
            if name is not None:
                found.append((index, name, operand.placement))
    return sorted(found, key=lambda vote: (not operands[vote[0]].is_weight, -operands[vote[0]].bytes))


def _problem(factors: Factors, operands: Sequence[Operand], name: str, shard: Shard, ranks: int) -> str | None:
    if name in factors.fixed:
        return "it needs that dim whole"
    if not factors.summed and not any(name in dims for dims in factors.outputs):
        return "it reduces over that dim by other than a sum"
    for dims, operand in zip(factors.inputs, operands, strict=True):
        if name in dims and not divides(shard, operand.shape[dims.index(name)], ranks):
            return f"its {operand.shape[dims.index(name)]} do not divide by {ranks} ranks"
    return None


def _split(factors: Factors, operands: Sequence[Operand], name: str, shard: Shard, why: str) -> Decision:
    wants: list[Placement] = []
    summed = not any(name in dims for dims in factors.outputs)
    for index, dims in enumerate(factors.inputs):
        whole = PARTIAL if summed and index in factors.added else REPLICATE
        wants.append(shard.on(dims.index(name)) if name in dims else whole)
    results = [shard.on(dims.index(name)) if name in dims else PARTIAL for dims in factors.outputs]
    return Decision(tuple(wants), tuple(results), why=why)


def _shared_weights(
    factors: Factors, operands: Sequence[Operand], partial: frozenset[int]
) -> tuple[Placement, ...] | None:
    """Placements under which replicated parameters are added to partial sums as shares: a bias is cheap to divide."""
    if not partial:
        return None
    for group in factors.linear:
        others = group - partial
        if len(group) > 1 and partial < group and all(operands[index].is_constant for index in others):
            return tuple(PARTIAL if i in group else o.placement for i, o in enumerate(operands))
    return None


def is_replicated(placement: Placement) -> bool:
    """Whether a value is whole on every rank."""
    return isinstance(placement, Replicate)


def refuse(operand: str, placement: Placement, why: str) -> PlanError:
    """The error for a parameter that would have to be gathered."""
    return PlanError(
        f"the parameter {operand}, {placement}, where {why}",
        expected="every split parameter used as it lies",
        remedy="change its plan entry, or pass allow_weight_gather=True to gather it at every run",
    )
