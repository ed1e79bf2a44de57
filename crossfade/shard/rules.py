"""What each operator does to placements: the table, the user's own entries, and what happens without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import arguments, remembered
from crossfade.shard.factors import Decision, Factors, Operand, decide, parse_factors, replicated
from crossfade.shard.placements import Placement

RuleFunction = Callable[["Call"], Decision]

_RULES: dict[str, RuleFunction] = {}


@dataclass
class Call:
    """One call of an operator: its arguments by name, its tensor operands in order, its results' descriptions."""

    node: fx.Node
    operands: Sequence[Operand]
    sources: Sequence[fx.Node]
    ranks: int

    @cached_property
    def args(self) -> dict[Any, Any]:
        """All arguments by name, defaults included."""
        return arguments(self.node)

    @cached_property
    def results(self) -> tuple[Any, ...]:
        """The descriptions of the results: one, or those of a list."""
        value = self.node.meta.get("val")
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where the operands lie."""
        return tuple(operand.placement for operand in self.operands)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The operands' global sizes."""
        return [operand.shape for operand in self.operands]

    def position(self, name: str) -> int | None:
        """Which operand the argument of this name is, if it is a tensor."""
        value = self.args.get(name)
        return self.sources.index(value) if isinstance(value, fx.Node) and value in self.sources else None

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dim argument, counted from the front."""
        rank = len(self.shapes[0]) if rank is None else rank
        return int(self.args[name]) % max(rank, 1)

    def decide(self, factors: Factors) -> Decision:
        """What the factors say for these operands."""
        return decide(factors, self.operands, self.ranks)

    def by_text(self, text: str, **more: Any) -> Decision:
        """What a rule's text says for these operands."""
        return self.decide(parse_factors(text, [len(shape) for shape in self.shapes], **more))

    def replicated(self, why: str = "") -> Decision:
        """Everything whole."""
        return replicated(len(self.operands), len(self.results), why)


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of operators, by schema name, with or without overload."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            _RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def register_rule(operator: Any, factors: str) -> None:
    """Say how an operator of your own may be split, in one line.

    >>> register_rule("mylib::low_rank", "... i, r i, o r -> ... o")
    """
    name = operator if isinstance(operator, str) else operator._schema.name
    parse_factors(factors, [part.split().__len__() for part in factors.partition("->")[0].split(",")])
    _RULES[re.sub(r"\.", "::", name, count=1) if "::" not in name else name] = lambda call: call.by_text(factors)


def rule_of(target: Any) -> RuleFunction | None:
    """The rule of an operator; None if there is none."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    full = f"{schema.name}.{schema.overload_name}"
    found = _RULES.get(full) or _RULES.get(schema.name)
    return found if found is not None else (_pointwise_rule(target))


@remembered
def _pointwise_rule(target: Any) -> RuleFunction | None:
    return pointwise if torch.Tag.pointwise in target.tags else None


def pointwise(call: Call, linear: tuple[frozenset[int], ...] = ()) -> Decision:
    """Dims aligned from the right, as broadcasting does."""
    described = next((value for value in call.results if isinstance(value, Tensor)), None)
    if described is None:
        return call.replicated("it makes no tensor")
    names = tuple(f"d{dim}" for dim in range(described.dim()))
    inputs = tuple(names[len(names) - len(shape) :] if shape else () for shape in call.shapes)
    return call.decide(Factors(inputs, (names,) * len(call.results), linear=linear))
