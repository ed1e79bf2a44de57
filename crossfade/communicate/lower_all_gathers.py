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
    2.13; it has been doubted since pytorch/pytorch#65231). Complex numbers can be gathered as lists only. Numbers of
    eight bits (float8), for which gloo has no type, travel as bytes.

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

        def lower(gather: Collective, replaced: Replacements) -> tuple[str, str]:
            reason = "its group's backend is safe only with memory that it is given"
            return reason, self._lower(program, gather, replaced)

        return lower_each(program, Kind.ALL_GATHER, self._reason_against, lower)

    def _lower(self, program: Program, gather: Collective, replaced: Replacements) -> str:
        """Lower an all-gather, and say into what if that is several."""
        if gather.coalesced:
            detail = _detail(gather)
            _take_apart(program, gather)
            return detail
        count = number_of_pieces(gather, self.groups, self.piece_mb)
        if _is_float8(gather.inputs[0]):
            return f"{_cut(program, gather, count, replaced)} of bytes"
        if count > 1:
            return f"{_cut(program, gather, count, replaced)} pieces"
        _give_memory(program, gather)
        return ""

    def _reason_against(self, gather: Collective) -> str | None:
        if gather.group not in self.groups:
            return "its group's backend gathers safely"
        if gather.by_copy_engines:
            return "copy engines gather it, not its group's backend"
        if gather.out is not None:
            return "it is given memory to gather into already"
        if not gather.coalesced and gather.dtype.is_complex:
            return "complex numbers are gathered as lists only"
        return None


def _give_memory(program: Program, gather: Collective) -> None:
    """Gather into new memory; the node stays what it was called, for those who look it up in the plan's verdicts."""
    memory, source = _prepared(program, gather, gather.inputs[0])
    gather.node.target = collectives.GATHER_INTO
    gather.node.args, gather.node.kwargs = (source, gather.group_size, gather.group), {"out": memory}


def _cut(program: Program, gather: Collective, count: int, replaced: Replacements) -> int:
    """Start pieces where the start stood, put them together where its first wait stood; return how many there are."""
    ranks, shape = ranks_of(gather), list(gather.node.meta["val"].shape)
    as_bytes, dtype = _is_float8(gather.inputs[0]), gather.dtype

    def cut(value: Tensor) -> tuple[Tensor, ...]:
        flat = value.contiguous().view(value.numel())
        return (flat.view(torch.uint8) if as_bytes else flat).chunk(count)

    def put_together(*started: Tensor) -> Tensor:
        if count == 1:
            whole = collectives.wait(started[0])
        else:
            whole = torch.cat([collectives.wait(piece).view(ranks, -1) for piece in started], 1)
        return (whole.view(dtype) if as_bytes else whole).view(shape)

    pieces = splice(program, cut, gather.inputs[0], before=gather.node, like=gather.node)
    started = [_started(program, gather, piece) for piece in pieces]
    finish_at_its_wait(program, gather, started, put_together, replaced)
    return len(started)


def _is_float8(value: fx.Node) -> bool:
    dtype = value.meta["val"].dtype
    return bool(dtype.is_floating_point) and dtype.itemsize == 1


def _take_apart(program: Program, gather: Collective) -> None:
    """Gather each tensor of a list by itself, all started together."""
    started = [_started(program, gather, value) for value in gather.inputs]
    for element in gather.results:
        element.replace_all_uses_with(started[element.args[1]])  # type: ignore[index]
        program.graph.erase_node(element)
    program.graph.erase_node(gather.node)


def _detail(gather: Collective) -> str:
    lists = sum(value.meta["val"].is_complex() for value in gather.inputs)
    return f"{len(gather.inputs)} single ones" + (f", {lists} of complex numbers still as lists" if lists else "")


def _started(program: Program, gather: Collective, value: fx.Node) -> fx.Node:
    if value.meta["val"].is_complex():
        return _call(program, gather, collectives.GATHER, value, gather.group_size, gather.group)
    memory, source = _prepared(program, gather, value)
    return _call(program, gather, collectives.GATHER_INTO, source, gather.group_size, gather.group, out=memory)


def _prepared(program: Program, gather: Collective, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Memory for what is gathered, and what to gather, one element behind the other."""
    like = value.meta["val"]
    kind = {"dtype": like.dtype, "device": like.device}
    memory = _call(program, gather, torch.ops.aten.empty.memory_format, _gathered_sizes(program, gather, value), **kind)
    if like.is_contiguous():
        return memory, value
    return memory, splice(program, Tensor.contiguous, value, before=gather.node, like=gather.node)


def _gathered_sizes(program: Program, gather: Collective, value: fx.Node) -> list[Any]:
    """Numbers, or nodes where sizes are not known before it runs. Else nothing but the gather uses `value`, as is asked
    for of what is packed into memory kept from step to step."""
    sizes: list[Any] = [
        _call(program, gather, torch.ops.aten.sym_size.int, value, dim) if isinstance(size, torch.SymInt) else size
        for dim, size in enumerate(value.meta["val"].shape)
    ]
    rows, *others = sizes
    ranks = gather.group_size
    whole = _call(program, gather, operator.mul, rows, ranks) if isinstance(rows, fx.Node) else rows * ranks
    return [whole, *others]


def _call(program: Program, gather: Collective, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return insert_call(program, target, *args, before=gather.node, like=gather.node, **kwargs)
