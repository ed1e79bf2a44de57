"""Sharding rules by factors: which dims of an operator's inputs and outputs are the same thing.

`"... i, o i, o -> ... o"` says of a linear layer: the leading dims pass through, `o` may be split in weight, bias and
result alike, and `i`, which the result lacks, is summed over: split, it leaves a partial sum. `!k` is a factor that
must not be split (a softmax's own dim). Operands of fewer dims are aligned from the right, and a dim of size 1 that
broadcasts carries no factor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfade.errors import PlanError
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard, divides

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
    `why` says what forced a wanted placement to differ from the one given. `blank` are operands whose padding has to
    be zero, since it is added up.
    """

    wants: tuple[Placement, ...]
    results: tuple[Placement, ...]
    divide: tuple[tuple[str, int | None], ...] = ()
    emit: Any = None
    why: str = ""
    blank: tuple[int, ...] = ()


def replicated(operands: int, results: int, why: str = "") -> Decision:
    """Everything whole on every rank."""
    return Decision((REPLICATE,) * operands, (REPLICATE,) * results, why=why)


@functools.cache
def parse_factors(text: str, ranks_of: tuple[int, ...], **more: Any) -> Factors:
    """Factors from their text, for operands of so many dims; `...` are as many dims as are left.

    >>> parse_factors("... i, o i, o -> ... o", (3, 2)).inputs
    (('...1', '...0', 'i'), ('o', 'i'))
    >>> parse_factors("m n, m k, k n -> m n", (1, 2, 2)).inputs
    (('n',), ('m', 'k'), ('k', 'n'))
    """
    left, right = read_factors(text)
    used = list(zip(left, ranks_of, strict=False))  # operands behind may be left out
    if len(used) < len(ranks_of) or any(rank > len(part) and "..." not in part for part, rank in used):
        raise PlanError(
            f"the factors {text!r} do not fit operands of {', '.join(map(str, ranks_of))} dims",
            expected="a name for every dim of every operand",
            remedy="register a rule that fits the operator",
        )
    leading = max((rank - len(part) + 1 for part, rank in used if "..." in part), default=0)
    inputs = tuple(_expand(part, rank - len(part) + 1)[-rank:] if rank else () for part, rank in used)
    outputs = tuple(_expand(part, leading) for part in right)
    return Factors(inputs, outputs, frozenset(re.findall(r"!(\w+)", text)), **more)


def read_factors(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The names of every operand's and every result's dims; PlanError if the text is not of that form.

    >>> read_factors("... !k, k -> ...")
    ([['...', 'k'], ['k']], [['...']])
    """
    sides = [[part.replace("!", "").split() for part in side.split(",")] for side in text.split("->")]
    names = [part for side in sides for part in side]
    twice = any(len(set(part)) < len(part) for part in names)
    if len(sides) != 2 or twice or not all(re.fullmatch(r"\w+|\.\.\.", name) for part in names for name in part):
        raise PlanError(
            f"the factors {text!r} cannot be read",
            expected="names of dims, each once in an operand, like '... i, o i -> ... o'",
            remedy="write one group of names for every operand, '->', and one for every result",
        )
    return sides[0], sides[1]


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
    return replace(factors, inputs=inputs)


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
    group = _linear_group(factors, operands, partial)
    if group and not votes:
        wants = tuple(PARTIAL if index in group else REPLICATE for index in range(len(operands)))
        return Decision(wants, (PARTIAL,) * results)
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
    pairs = zip(factors.inputs, operands, strict=True)
    sizes = [operand.shape[dims.index(name)] for dims, operand in pairs if name in dims]
    uneven = [size for size in sizes if not divides(shard, size, ranks)]
    return f"its {uneven[0]} do not divide by {ranks} ranks" if uneven else None


def _split(factors: Factors, operands: Sequence[Operand], name: str, shard: Shard, why: str) -> Decision:
    wants: list[Placement] = []
    summed = not any(name in dims for dims in factors.outputs)
    for index, dims in enumerate(factors.inputs):
        whole = PARTIAL if summed and index in factors.added else REPLICATE
        wants.append(shard.on(dims.index(name)) if name in dims else whole)
    results = [shard.on(dims.index(name)) if name in dims else PARTIAL for dims in factors.outputs]
    blank = _blank(factors, operands, name) if summed and shard.units else ()
    return Decision(tuple(wants), tuple(results), why=why, blank=blank)


def _blank(factors: Factors, operands: Sequence[Operand], name: str) -> tuple[int, ...]:
    """Of the operands that are multiplied and added up over a padded dim, one whose padding is made zero.

    An activation: the gradient of the weight's padding is then zero too, and the optimizer leaves it alone.
    """
    having = [index for index, dims in enumerate(factors.inputs) if name in dims]
    return tuple(sorted(having, key=lambda index: operands[index].is_weight)[:1])


def _linear_group(factors: Factors, operands: Sequence[Operand], partial: frozenset[int]) -> frozenset[int]:
    """The operands that may be partial sums together: all of them are, or else constants, which one rank can add."""
    for group in factors.linear:
        rest = group - partial
        if partial and partial <= group and max(group) < len(operands) and all(operands[i].is_constant for i in rest):
            return group
    return frozenset()


def refuse(operand: str, placement: Placement, why: str) -> PlanError:
    """The error for a parameter that would have to be gathered."""
    return PlanError(
        f"the parameter {operand} is {placement}, but {why}",
        expected="every split parameter used as it lies",
        remedy="change its plan entry, or pass allow_weight_gather=True to gather it at every run",
    )
