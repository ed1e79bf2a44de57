"""Pointwise calls on gathered values are made on the parts, before they are gathered."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.per_token import is_pointwise
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program
from crossfade.graph.splice import insert_call
from crossfade.graph.text import render_type

_aten = torch.ops.aten
_RELAYOUTS = {
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default),
    *(_aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.clone.default, _aten.alias.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor, _aten.view.dtype),
}
"""What may stand between a gather and a call that is made before it: elements change places, not values."""
_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default}


@dataclass(frozen=True)
class ComputeBeforeGathering(Pass):
    """Make a pointwise call on the part of each rank rather than on what all have gathered: 1/ranks of the work.

    So it is with activations, conversions to a dtype that is no larger, and products with numbers, if the gathered
    value has no other use, whatever puts its parts together along their dim. Fewer bytes travel if the dtype becomes
    smaller, and a matmul that reads the result can be fused with the gather.

    Before:
        x: f32[4, 6] = input("x")
        s: f32[8, 6] = c10d.all_gather_into_tensor(x, 2, "dp")
        w: f32[8, 6] = c10d.wait_tensor(s)
        g: f32[8, 6] = aten.gelu(w)
        h: bf16[8, 6] = aten._to_copy(g, dtype=bf16)
        return output("h", h)

    After:
        x: f32[4, 6] = input("x")
        gelu: f32[4, 6] = aten.gelu(x)
        _to_copy: bf16[4, 6] = aten._to_copy(gelu, dtype=bf16)
        s: bf16[8, 6] = c10d.all_gather_into_tensor(_to_copy, 2, "dp")
        w: bf16[8, 6] = c10d.wait_tensor(s)
        return output("h", w)
    """

    name = "compute-before-gathering"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """Look at what is made of each gather's result, call after call."""
        aliasing = Aliasing(program)
        verdicts: list[Verdict] = []
        for gather in collectives.find(program.graph):
            if gather.kind is Kind.ALL_GATHER:
                verdicts += _settle(program, gather, aliasing)
        return PassResult.of(verdicts, Outcome.MOVED, done="moved", left="left")


def _settle(program: Program, gather: Collective, aliasing: Aliasing) -> Iterator[Verdict]:
    """Move one call after the other; stop at the first that stays."""
    while gather.plain and len(gather.waits) == 1:
        between = _relayout(gather.waits[0])
        end = between[-1] if between else gather.waits[0]
        calls = [user for user in end.users if _is_unary(user, end)]
        if not calls:
            return
        call = calls[0]
        if (found := _reason_against(gather, call, aliasing)) is None:
            fresh = _described(program, gather, between, call)
            found = _difference(fresh[end], call.meta["val"])
        if found is not None:
            reason, detail = found
            yield Verdict.of(call, Outcome.LEFT, reason, detail=detail, bytes=gather.bytes)
            return
        before = gather.bytes
        gather = _move(program, gather, call, fresh, aliasing)
        detail = f"{before} bytes gathered become {gather.bytes}"
        yield Verdict(call.name, Outcome.MOVED, "each rank makes it on its part", detail=detail, bytes=before)


def _relayout(wait: fx.Node) -> list[fx.Node]:
    """The calls that only lay out what was gathered, as long as each is all that is read of the one before."""
    found: list[fx.Node] = []
    end = wait
    while len(end.users) == 1:
        (user,) = end.users
        if user.target in _RELAYOUTS and user.all_input_nodes == [end]:
            step = [user]
        elif user.target in _SPLITS and user.all_input_nodes == [end]:
            step = _joined(user)
        else:
            break
        if not step:
            break
        found += step
        end = step[-1]
    return found


def _joined(split: fx.Node) -> list[fx.Node]:
    """A split, its elements, and the call that joins them all again; nothing if they are not."""
    elements = list(split.users)
    readers = {user for element in elements for user in element.users}
    if len(readers) != 1 or not all(element.target is operator.getitem for element in elements):
        return []
    (joining,) = readers
    if joining.target is not _aten.cat.default or set(joining.all_input_nodes) != set(elements):
        return []
    return [split, *elements, joining]


def _is_unary(call: fx.Node, end: fx.Node) -> bool:
    """Whether a call makes something of one value, element by element, and of numbers that are known."""
    if call.op != "call_function" or call.all_input_nodes != [end] or call.target in _RELAYOUTS:
        return False
    return is_pointwise(call.target) and call.target not in _SHAPE_ONLY


_SHAPE_ONLY = {_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.detach.default}


def _reason_against(gather: Collective, call: fx.Node, aliasing: Aliasing) -> tuple[str, str] | None:
    """The first reason to make a call on the whole, with its numbers."""
    end = call.all_input_nodes[0]
    old, new = end.meta["val"], call.meta["val"]
    if len(end.users) > 1:
        return "the gathered value has another use", f"{len(end.users)} uses"
    if old.dtype != gather.dtype:
        return "what travels is of another dtype", f"{gather.dtype}, read as {old.dtype}"
    if new.element_size() > old.element_size():
        size = gather.bytes // old.element_size() * new.element_size()
        return "more bytes would travel", f"{gather.bytes} would become {size}"
    if any(aliasing.is_written(node) for node in (gather.inputs[0], gather.waits[0], end, call)):
        return "memory that it reads or makes is written in place", ""
    return None


def _described(program: Program, gather: Collective, between: list[fx.Node], call: fx.Node) -> dict[fx.Node, Any]:
    """What the gather and the calls that lay it out make of the part once the call is made on it."""
    part = gather.inputs[0]
    values: dict[fx.Node, Any] = {}
    with program.fake_mode, torch.no_grad():
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda _: part.meta["val"])
        values[part] = call.target(*args, **kwargs)  # type: ignore[operator]
        for node in (gather.node, gather.waits[0], *between):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values


def _difference(made: Tensor, wanted: Tensor) -> tuple[str, str] | None:
    """What a reader could tell the gathered results from the call's by."""
    if (made.dtype, made.device) != (wanted.dtype, wanted.device) or not statically_equal(made.shape, wanted.shape):
        return "it would make something else of a part", f"{render_type(made)} instead of {render_type(wanted)}"
    if not statically_equal(made.stride(), wanted.stride()):
        detail = f"strides {list(wanted.stride())} would become {list(made.stride())}"
        return "its layout in memory would change", detail
    return None


def _move(
    program: Program, gather: Collective, call: fx.Node, fresh: dict[fx.Node, Any], aliasing: Aliasing
) -> Collective:
    """Make the call on the part; the gather and what lays it out stay, and get new metadata."""
    part, end = gather.inputs[0], call.all_input_nodes[0]
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda _: part)
    made = insert_call(program, call.target, *args, before=gather.node, like=call, **kwargs)
    gather.node.replace_input_with(part, made)
    for node, value in fresh.items():
        if node is not part:
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)  # torch's tracer says there what was
    aliasing.replaced(call, end)
    call.replace_all_uses_with(end)
    program.graph.erase_node(call)
    found = collectives.view(gather.node)
    assert found is not None
    return found
