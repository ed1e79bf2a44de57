"""What the passes that form collective matmuls share: where one may stand, whether it pays, which form it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from crossfade.cost.collective_matmul import CHUNKS, Forecast, Forecasts
from crossfade.cost.estimate import estimate
from crossfade.cost.hidden import Overlap
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import PassError
from crossfade.graph import collective_matmul
from crossfade.graph.collectives import Collective
from crossfade.graph.effects import is_pure
from crossfade.graph.layouts import same, same_shape
from crossfade.graph.matmuls import Product
from crossfade.graph.order import Order
from crossfade.graph.passes import Outcome, Pass, Verdict, from_context
from crossfade.graph.program import Program, size_hint
from crossfade.graph.splice import Replacements

CYCLE = "the matmul's other operand is computed from what is gathered"
LATER = "the matmul's other operand is made later, and cannot be made sooner"
WRITTEN = "memory that it reads is written to"
HIDDEN = "computation beside it hides it already"
SLOWER = "no collective matmul is predicted to be faster by enough"
TOO_SMALL = "there are too few rows to cut"
IN_PIECES = "travels in pieces, each computed on while the next is on its way"

LEAST_GAIN = 0.05
"""The part of the plain time that a collective matmul must save: forecasts are not more exact than that."""

_PIECE_SECONDS = 5e-5
"""What a piece costs beside what is forecast: the host's work to cut, start and await it (45 to 57 us measured)."""

_LEAST_SECONDS = {"cpu": (3e-4, 2e-4), "cuda": (0.0, _PIECE_SECONDS)}
"""What each must save at least, and for each piece, by device. On a CPU the threads that carry a piece are woken,
and take time from those that compute (gloo on loopback, 2026-11-16: 0.5 ms for one piece, 0.2 to 0.8 for each more)."""

_MOST = 0.9
"""The part of its travel that overlap must hide to be counted in full, half otherwise: nodes are not cut to fit what is
left of a travel, and what one covers in part it may be needed for elsewhere."""

_MOST_RAISED = 32
"""Nodes that a collective matmul may raise above itself: transposed, converted and reshaped operands are a handful."""


def least_saved(machine: Machine, plain: float, pieces: int) -> float:
    """The seconds that something in pieces must save, of so many seconds that it takes plainly.

    >>> from crossfade.cost.presets import preset
    >>> round(least_saved(preset("ethernet-1gbit"), 0.1, pieces=2), 6)
    0.0057
    """
    fixed, each = _LEAST_SECONDS.get(machine.device, _LEAST_SECONDS["cuda"])
    return LEAST_GAIN * plain + fixed + each * pieces


def counted_as_hidden(hides: float, travel: float) -> float:
    """The seconds of a travel that count as hidden by other computation, of those that it could hide.

    >>> counted_as_hidden(0.5, 1.0), counted_as_hidden(0.95, 1.0)
    (0.25, 0.95)
    """
    return hides if hides >= _MOST * travel else hides / 2


@dataclass(frozen=True)
class Choice:
    """How a collective matmul runs, and what is predicted of it (nothing, where the form was given)."""

    form: str
    chunks: int
    forecast: Forecast | None = None
    hidden: float = 0.0
    """Seconds that computation beside it would have hidden anyway."""

    def __str__(self) -> str:
        pieces = f"{self.form} in {self.chunks} piece{'' if self.chunks == 1 else 's'}"
        if self.forecast is None:
            return f"{pieces}, as asked for"
        return f"{pieces}, {_ms(self.forecast.saved - self.hidden)} of {_ms(self.forecast.plain)} saved"


class Gate:
    """Says of each candidate whether it pays on a machine; where form and pieces are given, it asks nothing."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        forms: Mapping[str, Sequence[str]],
        measured: Mapping[str, float],
        form: str,
        chunks: int | None,
    ) -> None:
        self.forms, self.form, self.chunks = forms, form, chunks
        self.machine = machine
        self.costs = estimate(program, machine, measured)
        self._overlap = Overlap(program, self.costs) if form == "auto" else None

    def forms_of(self, group: str) -> tuple[str, ...]:
        """The forms that a group can run."""
        return tuple(self.forms.get(group, collective_matmul.ANYWHERE)) if self.form == "auto" else (self.form,)

    @property
    def pieces(self) -> Sequence[int]:
        """The numbers of pieces to try."""
        return CHUNKS if self.chunks is None else (self.chunks,)

    def judge(self, collective: Collective, found: Forecasts) -> Choice | tuple[str, str]:
        """The best way to run a candidate, or the reason against it and its numbers."""
        if self.form != "auto" and self.chunks is not None:
            return Choice(self.form, self.chunks)
        if not found.considered:
            return TOO_SMALL, f"{min(self.pieces)} pieces asked for"
        best = min(found.considered, key=lambda forecast: forecast.seconds + _PIECE_SECONDS * forecast.chunks)
        if self.form != "auto":
            return Choice(best.form, best.chunks, best)
        assert self._overlap is not None
        hides, travel = self._overlap.hidden(collective.node), self.costs.travel[collective.node]
        counted = counted_as_hidden(hides, travel)
        least = least_saved(self.machine, best.plain, best.chunks)
        if best.saved < least:
            return SLOWER, str(best)
        if best.saved - counted < least:
            detail = f"{_ms(hides)} of {_ms(travel)} hidden, a collective matmul would save {_ms(best.saved)}"
            return HIDDEN, detail
        return Choice(best.form, best.chunks, best, counted)

    def take(self, collective: Collective, matmuls: Iterable[fx.Node]) -> None:
        """Let the collective matmul of a collective have these matmuls: they hide nothing else."""
        if self._overlap is not None:
            self._overlap.take(collective.node, matmuls)


@dataclass(frozen=True)
class CollectiveMatmulPass(Pass):
    """What both passes share: their options, which `FuseGathersIntoMatmuls` explains."""

    machine: Machine | None = from_context()
    form: str = "auto"
    chunks: int | None = None
    forms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    measured: Mapping[str, float] | None = from_context()

    def __post_init__(self) -> None:
        if self.form not in ("auto", *collective_matmul.FORMS):
            raise PassError(
                f"{self.name}(form={self.form!r})",
                expected=" or ".join(map(repr, ("auto", *collective_matmul.FORMS))),
                remedy="pass one of those",
            )
        if self.chunks is not None and self.chunks < 1:
            raise PassError(
                f"{self.name}(chunks={self.chunks})",
                expected="at least 1, or None to choose",
                remedy="pass a number, or leave it out",
            )

    def gate(self, program: Program) -> Gate:
        """What says whether a candidate of a program pays."""
        machine = self.machine if self.machine is not None else preset("ethernet-1gbit")
        return Gate(program, machine, dict(self.forms), dict(self.measured or {}), self.form, self.chunks)


def raised(order: Order, needed: Iterable[fx.Node], place: fx.Node, written: set[fx.Node]) -> list[fx.Node] | str:
    """The nodes at or below `place` that values are made from, in order; or why they cannot stand above it."""
    above, found, stack = order.position[place], set[fx.Node](), list(needed)
    while stack:
        node = stack.pop()
        if node in found or order.position[node] < above:
            continue
        found.add(node)
        if len(found) > _MOST_RAISED or node.op not in ("call_function", "get_attr"):
            return LATER
        if node.op == "call_function" and not is_pure(node.target):
            return LATER
        if node in written:
            return WRITTEN
        stack.extend(node.all_input_nodes)
    nodes = sorted(found, key=order.position.__getitem__)
    if any(order.may_rise_above(node, place, found) is not None for node in nodes):
        return LATER
    return nodes


def raise_above(place: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Put nodes above another, those that are not there already."""
    for node in nodes:
        if not node < place:
            place.prepend(node)


def shaped(product: Product, given: Sequence[Tensor | None]) -> list[Any]:
    """The other operand, the bias and the scales in the shapes that the equation has for them."""
    shapes = (product.other_shape, product.bias_shape, *(product.scale_shapes or (None, None)))
    return [
        value if value is None or shape is None else value.reshape(shape)
        for value, shape in zip(given, shapes, strict=True)
    ]


def spelled_product(product: Product) -> str:
    """A product as the operators take it."""
    if product.scales is None:
        return product.equation
    return collective_matmul.spelled(product.equation, product.dtype, fast=product.fast_accumulation)


def viewed(value: Tensor, node: fx.Node) -> Tensor:
    """A contiguous value in the shape and the layout in memory that a node has."""
    like: Tensor = node.meta["val"]
    return laid_out(value if same_shape(like.shape, value.shape) else value.view(like.shape), like)


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A contiguous value with its dims in memory in the order of another's, which readers may count on.

    >>> import torch
    >>> laid_out(torch.zeros(2, 3), torch.zeros(3, 2).t()).stride()
    (1, 2)
    """
    order = sorted(range(like.dim()), key=lambda dim: (-size_hint(like.stride(dim)), same(like.shape[dim], 1)))
    stepped = [dim for dim in order if not same(like.shape[dim], 1)]
    if stepped == sorted(stepped):
        return value
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def current(replaced: Replacements, node: fx.Node) -> fx.Node:
    """What stands for a value now that others have become collective matmuls."""
    while node in replaced.new:
        node = replaced.new[node]
    return node


def left(collective: Collective, reason: str, detail: str = "") -> Verdict:
    """A verdict on a collective that stays as it is."""
    return Verdict.of(collective.node, Outcome.LEFT, reason, detail=detail, bytes=collective.bytes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
