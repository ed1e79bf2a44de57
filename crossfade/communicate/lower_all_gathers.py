"""All-gathers for backends that cannot be trusted with torch's usual ones."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.pieces import (
    Megabytes,
    check_pieces,
    finish_at_its_wait,
    lower_each,
    number_of_pieces,
    ranks_of,
)
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, insert_call, splice


@dataclass(frozen=True)
class LowerAllGathers(Pass):
    """Gather into memory that the program provides, one tensor at a time, for the groups named (gloo).

    Gloo's all-gathers of lists corrupt memory now and then, and torch gathers single tensors as lists of one, unless it
    is given memory: processes abort within some thousand small calls while other groups communicate too (seen on torch
    2.13; it has been doubted since pytorch/pytorch#65231). Complex numbers can be gathered as lists only.

    Over a network large gathers are slower than small ones started together: what is larger than `piece_mb` by half
    travels in equal pieces of about that, and is put together where it is first waited for; give one number for all
    groups, or one for each.

    Before:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        both: (f32[4], f32[6]) = c10d.all_gather_into_tensor_coalesced([a, b], 2, "dp")
        first: f32[4] = both[0]
        second: f32[6] = both[1]
        w: f32[4] = c10d.wait_tensor(first)
        v: f32[6] = c10d.wait_tensor(second)
        return output("a", w), output("b", v)

    After:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        empty: f32[4] = aten.empty.memory_format([4], dtype=f32, device=device("cpu"))
        all_gather_into_tensor_out: f32[4] = c10d.all_gather_into_tensor_out(a, 2, "dp", out=empty)
        empty_1: f32[6] = aten.empty.memory_format([6], dtype=f32, device=device("cpu"))
        all_gather_into_tensor_out_1: f32[6] = c10d.all_gather_into_tensor_out(b, 2, "dp", out=empty_1)
        w: f32[4] = c10d.wait_tensor(all_gather_into_tensor_out)
        v: f32[6] = c10d.wait_tensor(all_gather_into_tensor_out_1)
        return output("a", w), output("b", v)
    """

    name = "lower-all-gathers"
    numerics = Numerics.BITWISE

    groups: tuple[str, ...] = ("dp",)
    piece_mb: Megabytes = math.inf

    def __post_init__(self) -> None:
        check_pieces(self.name, self.groups, self.piece_mb)

    def run(self, program: Program) -> PassResult:
        """Lower each all-gather of the groups named."""

        def lower(collective: Collective, replaced: Replacements) -> tuple[str, str]:
            reason = "its group's backend is safe only with memory that it is given"
            return reason, self._lower(program, collective, replaced)

        return lower_each(program, Kind.ALL_GATHER, self._reason_against, lower)

    def _lower(self, program: Program, collective: Collective, replaced: Replacements) -> str:
        """Lower an all-gather, and say into what if that is several."""
        if collective.coalesced:
            detail = _detail(collective)
            _take_apart(program, collective)
            return detail
        count = number_of_pieces(collective, self.groups, self.piece_mb)
        if count > 1:
            return f"{_cut(program, collective, count, replaced)} pieces"
        _give_memory(program, collective)
        return ""

    def _reason_against(self, collective: Collective) -> str | None:
        if collective.group not in self.groups:
            return "its group's backend gathers safely"
        if collective.out is not None:
            return "it is given memory to gather into already"
        if not collective.coalesced and collective.dtype.is_complex:
            return "complex numbers are gathered as lists only"
        return None


def _give_memory(program: Program, collective: Collective) -> None:
    """Gather into new memory; the node stays what it was called, for those who look it up in the plan's verdicts."""
    memory, source = _prepared(program, collective, collective.inputs[0])
    collective.node.target = collectives.GATHER_INTO
    collective.node.args, collective.node.kwargs = (source, collective.group_size, collective.group), {"out": memory}


def _cut(program: Program, collective: Collective, count: int, replaced: Replacements) -> int:
    """Start pieces where the start stood, put them together where its first wait stood; return how many there are."""
    ranks, shape = ranks_of(collective), list(collective.node.meta["val"].shape)

    def cut(value: Tensor) -> tuple[Tensor, ...]:
        return value.contiguous().view(value.numel()).chunk(count)

    def put_together(*started: Tensor) -> Tensor:
        return torch.cat([collectives.wait(piece).view(ranks, -1) for piece in started], 1).view(shape)

    pieces = splice(program, cut, collective.inputs[0], before=collective.node, like=collective.node)
    started = [_started(program, collective, piece) for piece in pieces]
    finish_at_its_wait(program, collective, started, put_together, replaced)
    return len(started)


def _take_apart(program: Program, collective: Collective) -> None:
    """Gather each tensor of a list by itself, all started together."""
    started = [_started(program, collective, value) for value in collective.inputs]
    for element in collective.results:
        element.replace_all_uses_with(started[element.args[1]])  # type: ignore[index]
        program.graph.erase_node(element)
    program.graph.erase_node(collective.node)


def _detail(collective: Collective) -> str:
    lists = sum(value.meta["val"].is_complex() for value in collective.inputs)
    return f"{len(collective.inputs)} single ones" + (f", {lists} of complex numbers still as lists" if lists else "")


def _started(program: Program, collective: Collective, value: fx.Node) -> fx.Node:
    if value.meta["val"].is_complex():
        return _call(program, collective, collectives.GATHER, value, collective.group_size, collective.group)
    memory, source = _prepared(program, collective, value)
    return _call(
        program, collective, collectives.GATHER_INTO, source, collective.group_size, collective.group, out=memory
    )


def _prepared(program: Program, collective: Collective, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Memory for what is gathered, and what to gather, one element behind the other."""
    like = value.meta["val"]
    kind = {"dtype": like.dtype, "device": like.device}
    memory = _call(
        program, collective, torch.ops.aten.empty.memory_format, _gathered_sizes(program, collective, value), **kind
    )
    if like.is_contiguous():
        return memory, value
    return memory, splice(program, Tensor.contiguous, value, before=collective.node, like=collective.node)


def _gathered_sizes(program: Program, collective: Collective, value: fx.Node) -> list[Any]:
    """Numbers, or nodes where sizes are not known before it runs. Else nothing but the gather uses `value`, as is asked
    for of what is packed into memory kept from step to step."""
    sizes: list[Any] = [
        _call(program, collective, torch.ops.aten.sym_size.int, value, dim) if isinstance(size, torch.SymInt) else size
        for dim, size in enumerate(value.meta["val"].shape)
    ]
    rows, *others = sizes
    ranks = collective.group_size
    return [
        _call(program, collective, operator.mul, rows, ranks) if isinstance(rows, fx.Node) else rows * ranks,
        *others,
    ]


def _call(program: Program, collective: Collective, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return insert_call(program, target, *args, before=collective.node, like=collective.node, **kwargs)
