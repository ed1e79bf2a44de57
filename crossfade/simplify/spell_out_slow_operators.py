"""Operators that take longer than their parts: what a library has no good kernel for on some processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.cost.keys import Keys
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program
from crossfade.graph.splice import splice

_WORTH_IT = 0.5
"""Parts must take at most this share of the operator's time: so much that no noise decides what bits a run has."""
_PRECISE = {torch.float32, torch.float64}


@dataclass(frozen=True)
class SpellOutSlowOperators(Pass):
    """Write an operator as its parts where these were measured to take half of its time or less.

    Torch's exact gradient of gelu takes three times as long on an aarch64 CPU as the pointwise operators that it
    consists of. `measured` has the seconds of operators by key (`crossfade.cost.keys`); what is not in it
    stays. None spells everything out that the pass knows: a program to measure the parts in. `chosen` names the nodes
    to spell out instead: what a plan file says. Only what is computed in single or double precision anyway.

    Also known as: operator decomposition (`torch.export`'s and Inductor's decomposition tables), here by measured time.

    Before:
        g: f32[8] = input("g")
        x: f32[8] = input("x")
        gelu_backward: f32[8] = aten.gelu_backward(g, x)
        return output("y", gelu_backward)

    After:
        g: f32[8] = input("g")
        x: f32[8] = input("x")
        mul: f32[8] = aten.mul.Tensor(x, 0.7071067811865476)
        erf: f32[8] = aten.erf(mul)
        add: f32[8] = aten.add.Tensor(erf, 1.0)
        mul_1: f32[8] = aten.mul.Tensor(add, 0.5)
        mul_2: f32[8] = aten.mul.Tensor(x, x)
        mul_3: f32[8] = aten.mul.Tensor(mul_2, -0.5)
        exp: f32[8] = aten.exp(mul_3)
        mul_4: f32[8] = aten.mul.Tensor(exp, 0.3989422804014327)
        mul_5: f32[8] = aten.mul.Tensor(mul_4, x)
        add_1: f32[8] = aten.add.Tensor(mul_5, mul_1)
        mul_6: f32[8] = aten.mul.Tensor(add_1, g)
        return output("y", mul_6)
    """

    name = "spell-out-slow-operators"
    numerics = Numerics.REASSOCIATES

    measured: Mapping[str, float] | None = from_context()
    chosen: tuple[str, ...] | None = None

    def run(self, program: Program) -> PassResult:
        """Try each candidate: put its parts before it, and keep one of the two."""
        keys, seconds = Keys(), self.measured if self.chosen is None else None
        verdicts: list[Verdict] = []
        for node in _candidates(program):
            if self.chosen is not None and node.name not in self.chosen:
                verdicts.append(Verdict.of(node, Outcome.LEFT, "it is not among those chosen"))
                continue
            if not _is_precise(node):
                verdicts.append(Verdict.of(node, Outcome.LEFT, "it is not computed in single or double precision"))
                continue
            parts = _Parts(program, node)
            against, detail = parts.judged(keys, seconds)
            outcome = Outcome.LEFT if against else Outcome.REPLACED
            verdicts.append(Verdict.of(node, outcome, against or _WHY, detail=detail))
            parts.take_back() if against else parts.replace()
        chosen = tuple(verdict.subject for verdict in verdicts if verdict.outcome is Outcome.REPLACED)
        decided = replace(self, chosen=chosen)
        return replace(PassResult.of(verdicts, Outcome.REPLACED, done="spelled out"), decided=decided)


_WHY = "its parts take half of its time or less"


def slow_operators(program: Program) -> list[fx.Node]:
    """The operators of a program that may take longer than their parts.

    >>> from crossfade.graph.text import parse
    >>> slow_operators(parse('''
    ... x: f32[8] = input("x")
    ... y: f32[8] = aten.gelu_backward(x, x)
    ... return output("y", y)
    ... '''))
    [y]
    """
    return [node for node in _candidates(program) if _is_precise(node)]


def _candidates(program: Program) -> list[fx.Node]:
    """The operators, in a form that is known, whatever they are computed in."""
    found = [node for target in _PARTS for node in program.graph.find_nodes(op="call_function", target=target)]
    return [node for node in found if _PARTS[node.target](node) is not None]


def _is_precise(node: fx.Node) -> bool:
    dtypes = {value.meta["val"].dtype for value in (node, *node.all_input_nodes)}
    return len(dtypes) == 1 and dtypes <= _PRECISE


class _Parts:
    """What an operator consists of, put before it for a try."""

    def __init__(self, program: Program, node: fx.Node) -> None:
        self.program, self.node = program, node
        above = node.prev
        function, inputs = _PARTS[node.target](node)
        self.result = splice(program, function, *inputs, before=node, like=node)
        self.nodes: list[fx.Node] = []
        while (above := above.next) is not node:
            self.nodes.append(above)

    def judged(self, keys: Keys, seconds: Mapping[str, float] | None) -> tuple[str, str]:
        """Why not, if so; and the numbers."""
        if self.result.meta["val"].stride() != self.node.meta["val"].stride():
            return "its parts would lay the result out in another way", ""
        if seconds is None:
            return "", f"{len(self.nodes)} parts"
        whole, parts = seconds.get(keys.of(self.node)), [seconds.get(keys.of(part)) for part in self.nodes]
        known = [time for time in parts if time is not None]
        if whole is None or len(known) < len(parts):
            return "it or its parts were not measured", ""
        detail = f"{1e6 * whole:.1f} -> {1e6 * sum(known):.1f} us"
        return "" if sum(known) <= _WORTH_IT * whole else "its parts would not save half of its time", detail

    def replace(self) -> None:
        self.node.replace_all_uses_with(self.result)
        self.program.graph.erase_node(self.node)

    def take_back(self) -> None:
        for part in reversed(self.nodes):
            self.program.graph.erase_node(part)


def _exact_gelu_backward(node: fx.Node) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
    given = arguments(node)
    return (_gelu_gradient, (given["grad_output"], given["self"])) if given["approximate"] == "none" else None


def _gelu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The normal distribution, and its density times x; written so that most of it can go in place."""
    below = ((x * math.sqrt(0.5)).erf() + 1.0) * 0.5
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return (density * x + below) * gradient


_PARTS: dict[Any, Callable[[fx.Node], Any]] = {torch.ops.aten.gelu_backward.default: _exact_gelu_backward}
"""How an operator is spelled out: a function and its inputs, or None of a form that is not known."""
