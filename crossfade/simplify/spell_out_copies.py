"""Copies into another value, as what they make of the one that is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from crossfade.graph.passes import Numerics
from crossfade.graph.rewrite import Match, Rule
from crossfade.graph.rule_pass import RulePass
from crossfade.graph.strides import laid_out


@dataclass(frozen=True)
class SpellOutCopies(RulePass):
    """Write a copy into a value's shape, dtype and layout as a conversion and a view: these have a derivative.

    What lay in a part of a value may lie by itself then, where no result changes. Writes in place become such copies
    where a program is made functional, and torch differentiates it no more.

    Not in a default pipeline: only programs that autograd differentiates later need it, as `cf.shard` makes them where
    experts are spread. Add it with `simplification().before("simplify-nodes", SpellOutCopies())`.

    Before:
        into: f32[4, 6] = input("into")
        x: bf16[4, 6] = input("x")
        copy: f32[4, 6] = aten.copy(into, x)
        exp: f32[4, 6] = aten.exp(copy)
        return output("y", exp)

    After:
        into: f32[4, 6] = input("into")
        x: bf16[4, 6] = input("x")
        _to_copy: f32[4, 6] = aten._to_copy(x, dtype=f32)
        exp: f32[4, 6] = aten.exp(_to_copy)
        return output("y", exp)
    """

    name = "spell-out-copies"
    numerics = Numerics.BITWISE

    def rules(self) -> Sequence[Rule]:
        """One."""
        return [Rule("copy", "aten.copy(_, x, _)", _spelled_out, _reason_against, other_strides=True)]


def _spelled_out(match: Match) -> object:
    made: Tensor = match.root.meta["val"]

    def copied(x: Tensor) -> Tensor:
        x = x.to(made.dtype)
        return laid_out(x if x.shape == made.shape else x.expand(made.shape), made.stride())

    return match.splice(copied, match["x"])


def _reason_against(match: Match) -> str | None:
    made: Tensor = match.root.meta["val"]
    copied: Tensor = match["x"].meta["val"]
    return None if copied.device == made.device else "it moves the value to another device"
