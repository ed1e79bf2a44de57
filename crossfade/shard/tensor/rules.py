"""What each operator does to placements: the table, the user's own entries, and what happens without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import PlanError
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.private import name_of_packet, registered_operator, schema_of
from crossfade.shard.tensor.factors import Decision, Factors, Operand, decide, parse_factors, read_factors, replicated
from crossfade.shard.tensor.placements import Placement

RuleFunction = Callable[["PlacedCall"], Decision]

_RULES: dict[str, RuleFunction] = {}
REGISTERED: dict[str, str] = {}
"""The rules that users have registered, by operator."""


@dataclass
class PlacedCall:
    """One call of an operator: its arguments by name, its tensor operands in order, its results' descriptions."""

    node: fx.Node
    operands: Sequence[Operand]
    sources: Sequence[fx.Node]
    ranks: int

    @cached_property
    def args(self) -> dict[Any, Any]:
        """All arguments by name, defaults included."""
        return arguments(self.node)

    @property
    def name(self) -> str:
        """The operator's name, without its overload."""
        target: Any = self.node.target
        return str(schema_of(target).name)

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

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dim argument, counted from the front."""
        rank = len(self.shapes[0]) if rank is None else rank
        return int(self.args[name]) % max(rank, 1)

    def decide(self, factors: Factors) -> Decision:
        """What the factors say for these operands."""
        return decide(factors, self.operands, self.ranks)

    def by_text(self, text: str, **more: Any) -> Decision:
        """What a rule's text says for these operands."""
        return self.decide(parse_factors(text, tuple(map(len, self.shapes)), **more))

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
    """Say how an operator of your own may be split: by its overload, or by name, then for all its overloads.

    One name for each dim of each tensor, in the order of the schema: dims of the same name are split alike, `...` are
    any number of dims in front, `!k` must stay whole, and over a name that the results lack the operator must sum.

    >>> register_rule("mylib::low_rank", "... i, r i, o r -> ... o")
    """
    read_factors(factors)
    REGISTERED[_name_of(operator)] = factors
    _RULES[_name_of(operator)] = lambda call: _checked(call, call.by_text(factors), factors)


def _name_of(operator: Any) -> str:
    schema = schema_of(registered_operator(operator))
    if schema is not None:
        return f"{schema.name}.{schema.overload_name}".rstrip(".")
    name = name_of_packet(operator)
    if not isinstance(name, str) or not re.fullmatch(r"\w+::\w+(\.\w+)?", name):
        raise PlanError(
            f"{operator!r} names no operator",
            expected="'library::name', or an operator",
            remedy="pass torch.ops.library.name",
        )
    return name


def _checked(call: PlacedCall, decision: Decision, factors: str) -> Decision:
    """The decision, if the rule speaks of as many results, of as many dims, as there are."""
    named = [len(part) for part in parse_factors(factors, tuple(map(len, call.shapes))).outputs]
    found = [value.dim() if isinstance(value, Tensor) else 0 for value in call.results]
    if named != found:
        dims = ", ".join(map(str, found))
        raise PlanError(
            f"the factors {factors!r} do not fit {call.node.target}, whose results have {dims} dims",
            expected="a name for every dim of every result",
            remedy="register a rule that fits the operator",
        )
    return decision


def rule_of(target: Any) -> RuleFunction | None:
    """The rule of an operator; None if there is none."""
    schema = schema_of(target)
    if schema is None:
        return None
    return _RULES.get(f"{schema.name}.{schema.overload_name}") or _RULES.get(schema.name) or _pointwise_rule(target)


@remembered
def _pointwise_rule(target: Any) -> RuleFunction | None:
    return pointwise if torch.Tag.pointwise in target.tags else None


def pointwise(call: PlacedCall, linear: tuple[frozenset[int], ...] = ()) -> Decision:
    """Dims aligned from the right, as broadcasting does."""
    described = next((value for value in call.results if isinstance(value, Tensor)), None)
    if described is None:
        return call.replicated("it makes no tensor")
    names = tuple(f"d{dim}" for dim in range(described.dim()))
    inputs = tuple(names[len(names) - len(shape) :] if shape else () for shape in call.shapes)
    return call.decide(Factors(inputs, (names,) * len(call.results), linear=linear))
