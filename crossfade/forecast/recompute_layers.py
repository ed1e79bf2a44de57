"""Activation checkpointing of whole layers: their forward is computed again when the backward needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, fx

from crossfade.forecast.repeat import BACKWARD, FORWARD, LAYER, layer_of
from crossfade.graph import collectives
from crossfade.graph.order import with_ancestors
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import schema_of
from crossfade.graph.program import OutputKind, Program, tensor_bytes

Keep = Literal["nothing", "products"]
KEPT = "kept"
"""In a node's metadata: it was chosen to be kept, whether the backward reads it or not."""


@dataclass(frozen=True)
class RecomputeLayers(Pass):
    """Compute what the backward of a layer uses of its forward again, from what the layer was given.

    Layers are those that capture found; a program without is one layer, whose forward is what the loss depends on.
    With `keep="products"`, attention, collectives and every second matrix product are kept, and only what is cheap or
    half of the products is computed again.

    Also known as: activation checkpointing, full or selective; Megatron's `--recompute-granularity`.

    Before:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        sum_1: f32[] = aten.sum(exp)
        mul: f32[4] = aten.mul.Tensor(exp, 2.0)
        return loss("loss", sum_1), gradient("x", mul)

    After:
        x: f32[4] = input("x")
        exp: f32[4] = aten.exp(x)
        sum_1: f32[] = aten.sum(exp)
        exp_1: f32[4] = aten.exp(x)
        mul: f32[4] = aten.mul.Tensor(exp_1, 2.0)
        return loss("loss", sum_1), gradient("x", mul)
    """

    name = "recompute-layers"
    numerics = Numerics.BITWISE

    keep: Keep = "nothing"

    def run(self, program: Program) -> PassResult:
        """Copy each layer's forward in front of its backward, as far as that needs it."""
        phases: dict[tuple[int, str], list[fx.Node]] = {}
        for node in program.graph.nodes:
            place = layer_of(node)
            if place is not None:
                phases.setdefault(place, []).append(node)
        phases = phases or _of_whole(program)
        verdicts = []
        for (number, phase), backward in phases.items():
            if phase == BACKWARD and (number, FORWARD) in phases:
                forward = phases[number, FORWARD]
                kept = self._kept(forward)
                for node in kept:
                    node.meta[KEPT] = True
                verdicts.append(_again(program, forward, backward, kept))
        return PassResult(bool(verdicts), {"layers": len(verdicts)}, tuple(verdicts))

    def _kept(self, forward: list[fx.Node]) -> set[fx.Node]:
        if self.keep == "nothing":
            return set()
        products = [node for node in forward if _operator(node) in ("mm", "addmm", "bmm")]
        kept = {node for node in forward if "attention" in _operator(node)} | set(products[::2])
        kept |= {node for node in forward if collectives.is_wait(node) or collectives.is_collective(node)}
        return kept | {node for node in forward if node.all_input_nodes and node.all_input_nodes[0] in kept
                       and "getitem" in str(node.target)}  # fmt: skip


def _of_whole(program: Program) -> dict[tuple[int, str], list[fx.Node]]:
    """A program as one layer: what the loss depends on, and the rest."""
    losses = [value for out, value in program.named_results() if out.kind is OutputKind.LOSS]
    needed = set(with_ancestors(*losses))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    forward, backward = ([node for node in nodes if (node in needed) is inside] for inside in (True, False))
    return {(0, FORWARD): forward, (0, BACKWARD): backward} if losses and backward else {}


def _again(program: Program, forward: list[fx.Node], backward: list[fx.Node], kept: set[fx.Node]) -> Verdict:
    inside, later = set(forward), set(backward)
    needed = {node for node in forward if node not in kept and any(user in later for user in node.users)}
    for node in reversed(forward):
        if node in needed:
            needed |= {source for source in node.all_input_nodes if source in inside and source not in kept}
    copies: dict[fx.Node, fx.Node] = {}
    freed = 0
    with program.graph.inserting_before(backward[0]):
        for node in forward:
            if node in needed:
                copy = program.graph.node_copy(node, lambda source: copies.get(source, source))
                place = layer_of(node)
                copy.meta = {**node.meta, LAYER: (place[0], BACKWARD) if place is not None else None}
                copies[node] = copy
    for node in backward:
        for source in list(node.all_input_nodes):
            if source in copies:
                node.replace_input_with(source, copies[source])
                value = source.meta.get("val")
                freed += tensor_bytes(value) if isinstance(value, Tensor) else 0
    return Verdict.of(backward[0], Outcome.INSERTED, "computes its layer's forward again", bytes=freed)


def _operator(node: fx.Node) -> str:
    schema = schema_of(node.target) if node.op == "call_function" else None
    return schema.name.split("::")[1] if schema is not None else str(node.target)
