"""Random numbers drawn for the whole batch on every rank, so that dropout means the same on any number of ranks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.errors import RewriteError
from crossfade.graph.effects import is_random
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, source_line
from crossfade.graph.splice import erase_if_dead, insert_call
from crossfade.shard.batch_dims import batch_dims
from crossfade.shard.own_rows import own_rows

_aten = torch.ops.aten
_LIKE_FIRST_ARGUMENT = {
    _aten.bernoulli.p,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.uniform.default,
    _aten.normal_functional.default,
    _aten.exponential.default,
}
_SIZE_ARGUMENT: dict[Any, int] = {
    _aten.rand.default: 0,
    _aten.randn.default: 0,
    _aten.randint.default: 1,
    _aten.randint.low: 2,
}
"""Ops that are told the shape to draw: the position of that argument."""


@dataclass(frozen=True)
class DrawGlobally(Pass):
    """Draw random values at the size of the whole batch, from the same stream on every rank, and keep one's part.

    Results then equal those of one device with the same seed, at the price of drawing `ranks` times as many numbers.
    Values that do not depend on the batch are already the same on every rank.

    Before:
        x: f32[4] = input("x")
        bernoulli: f32[4] = aten.bernoulli.p(x, 0.5)
        return output("y", bernoulli)

    After:
        x: f32[4] = input("x")
        rank: int = scalar("rank")
        new_empty: f32[8] = aten.new_empty(x, [8])
        bernoulli_1: f32[8] = aten.bernoulli.p(new_empty, 0.5)
        mul: int = operator.mul(rank, 4)
        add: int = operator.add(mul, 4)
        slice_1: f32[4] = aten.slice.Tensor(bernoulli_1, 0, mul, add)
        return output("y", slice_1)
    """

    name = "draw-globally"
    numerics = Numerics.BITWISE

    ranks: int = 2

    def run(self, program: Program) -> PassResult:
        """Widen each draw whose shape grows with the batch."""
        verdicts = []
        for node in list(program.graph.nodes):
            if node.op != "call_function" or not is_random(node):
                continue
            reason = self._reason_against(node)
            if reason is None:
                self._widen(program, node)
                cost = f"drawn for all {self.ranks} ranks on each, so that results do not depend on their number"
                remedy = 'semantics="per-rank" draws only this rank\'s, as DDP does'
                verdicts.append(Verdict.of(node, Outcome.REPLACED, cost, remedy=remedy))
            else:
                verdicts.append(Verdict.of(node, Outcome.LEFT, reason))
        count = sum(v.outcome is Outcome.REPLACED for v in verdicts)
        return PassResult(bool(count), {"widened": count}, tuple(verdicts))

    def _reason_against(self, node: fx.Node) -> str | None:
        drawn = _drawn_dims(node)
        if not drawn:
            return "its shape does not depend on the batch: the same on every rank"
        if node.target is _aten.native_dropout.default and node.args[2] is False:
            return "it draws nothing outside training"
        if node.target not in {*_LIKE_FIRST_ARGUMENT, *_SIZE_ARGUMENT, _aten.native_dropout.default}:
            raise self._cannot(node, "whose numbers cannot be drawn for the whole batch and divided")
        if len(drawn) > 1:
            raise self._cannot(node, f"whose dims {drawn} all grow with the batch, so that no one part is a rank's")
        return None

    def _cannot(self, node: fx.Node, why: str) -> RewriteError:
        line = f" [{source_line(node)}]" if source_line(node) else ""
        return RewriteError(
            f"{node.name}, a draw by {node.target}{line}, {why}",
            expected="draws that mean the same on any number of ranks",
            remedy='pass semantics="per-rank", which draws on each rank for itself, as DDP does',
        )

    def _widen(self, program: Program, node: fx.Node) -> None:
        (dim,) = _drawn_dims(node)
        value = _drawn_value(node)
        whole = [size * self.ranks if d == dim else size for d, size in enumerate(value.shape)]

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return insert_call(program, target, *args, before=node, like=node, **kwargs)

        first: Any = node.args[0]
        if (position := _SIZE_ARGUMENT.get(node.target)) is not None:
            drawn = call(node.target, *node.args[:position], whole, *node.args[position + 1 :], **node.kwargs)
        else:
            if value.is_contiguous():
                empty = call(_aten.new_empty.default, first, whole)
            else:  # numbers are drawn in the order of memory
                empty = call(_aten.new_empty_strided.default, first, whole, _dense_strides(whole, value))
            drawn = call(node.target, empty, *node.args[1:], **node.kwargs)
        if node.target is _aten.native_dropout.default:
            mask = self._part(program, call(operator.getitem, drawn, 1), dim, node)
            kept = 1.0 - float(node.args[1])  # type: ignore[arg-type]
            scaled = call(_aten.mul.Tensor, call(_aten.mul.Tensor, first, mask), 1.0 / kept if kept else 0.0)
            for part in list(node.users):
                part.replace_all_uses_with(scaled if part.args[1] == 0 else mask)
        else:
            node.replace_all_uses_with(self._part(program, drawn, dim, node))
        _erase(node)

    def _part(self, program: Program, whole: fx.Node, dim: int, node: fx.Node) -> fx.Node:
        """The rows of `whole` that belong to this rank, laid out as what was drawn before."""
        value = _drawn_value(node)
        part = own_rows(program, whole, value.shape[dim], dim, before=node)
        if part.meta["val"].stride() == value.stride():
            return part
        return insert_call(program, _aten.clone.default, part, before=node, like=node)


def _dense_strides(shape: list[int], like: torch.Tensor) -> list[int]:
    """Strides for a shape without gaps, its dims in memory in the order of another tensor's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like.stride(d), -d)):
        strides[dim], step = step, step * shape[dim]
    return strides


def _erase(node: fx.Node) -> None:
    """Erase a draw that nothing uses any more; being random does not keep it, its numbers are drawn elsewhere now."""
    for part in list(node.users):
        node.graph.erase_node(part)
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for one in inputs:
        erase_if_dead(one)


def _drawn_dims(node: fx.Node) -> tuple[int, ...]:
    if dims := batch_dims(node):
        return dims
    return next((batch_dims(part) for part in node.users if part.target is operator.getitem), ())


def _drawn_value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value
