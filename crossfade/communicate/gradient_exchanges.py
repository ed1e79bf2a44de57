"""Where a program exchanges its gradients: the sums and averages between a gradient and what it was computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.program import OutputKind, Program

_aten = torch.ops.aten
_BETWEEN = (_aten._to_copy.default, _aten.view.default, _aten.slice.Tensor)
"""What may stand between two exchanges of one gradient, such as those of HSDP."""
_SUMS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


@dataclass(frozen=True)
class GradientExchange:
    """One reduction of a gradient along one group; `name` is the parameter's."""

    name: str
    collective: Collective

    def reason_against(self) -> str | None:
        """Why it cannot be sent in fewer bytes, whatever the form."""
        collective, sent = self.collective, self.collective.inputs[0].meta["val"]
        if not collective.plain:
            return "it is already coalesced or in place"
        if collective.reduce_op not in ("sum", "avg"):
            return "it is neither a sum nor an average"
        if not sent.dim():
            return "a single number is nothing to save on"
        if not sent.is_floating_point():
            return "complex numbers and integers have no narrower form here"
        return None

    def left(self, reason: str) -> Verdict:
        """The verdict of one that stays as it is."""
        return Verdict.of(self.collective.node, Outcome.LEFT, reason, bytes=self.collective.bytes)


def gradient_exchanges(program: Program, group: str) -> list[GradientExchange]:
    """The sums and averages of gradients along a group, in the order of the results.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... s: f32[4] = c10d.all_reduce(x, "avg", "dp")
    ... w: f32[4] = c10d.wait_tensor(s)
    ... return gradient("weight", w), output("x", x)
    ... ''', groups={"dp": 2})
    >>> [(exchange.name, exchange.collective.node) for exchange in gradient_exchanges(program, "dp")]
    [('weight', s)]
    """
    found: dict[fx.Node, GradientExchange] = {}
    for out, value in program.named_results():
        node: Any = value if out.kind is OutputKind.GRADIENT else None
        while isinstance(node, fx.Node) and (collectives.is_wait(node) or node.target in _BETWEEN):
            start = collectives.started_by(node) if collectives.is_wait(node) else None
            collective = collectives.view(start) if start is not None else None
            if collective is not None and collective.kind in _SUMS and collective.group == group:
                found.setdefault(collective.node, GradientExchange(out.name, collective))
            node = node.args[0] if collective is None else collective.inputs[0]
    return list(found.values())


def described_as(program: Program, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The description of a tensor of another dtype."""
    with program.fake_mode:
        return like.to(dtype)
