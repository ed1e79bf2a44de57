"""All-gathers for backends that cannot be trusted with torch's usual ones."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.communicate.pieces import Megabytes, check_pieces, finish_at_its_wait, number_of_pieces, ranks_of
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, insert_call, splice


@dataclass(frozen=True)
class LowerAllGathers(Pass):
    """Gather into memory that the program provides, one tensor at a time, for the groups named (gloo).

    Gloo's all-gathers of lists corrupt memory now and then, and torch gathers single tensors as lists of one, unless it
    is told where to: processes abort within some thousand small calls while other groups communicate too (seen on torch
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
        verdicts = []
        replaced = Replacements(program)
        for node in list(program.graph.nodes):
            one = collectives.view(node)  # only now: its input may be another one's result, replaced before
            if one is None or one.kind is not Kind.ALL_GATHER:
                continue
            if (reason := self._reason_against(one)) is not None:
                verdicts.append(Verdict.of(one.node, Outcome.LEFT, reason, bytes=one.bytes))
                continue
            reason = "its group's backend is safe only with memory that it is given"
            detail = self._lower(program, one, replaced)
            verdicts.append(Verdict.of(one.node, Outcome.REPLACED, reason, detail=detail, bytes=one.bytes))
        replaced.finish()
        lowered = sum(verdict.outcome is Outcome.REPLACED for verdict in verdicts)
        return PassResult(bool(lowered), {"lowered": lowered, "left": len(verdicts) - lowered}, tuple(verdicts))

    def _lower(self, program: Program, one: Collective, replaced: Replacements) -> str:
        """Lower one, and say into what if that is more than one."""
        if one.coalesced:
            detail = _detail(one)
            _take_apart(program, one)
            return detail
        count = number_of_pieces(one, self.groups, self.piece_mb)
        if count > 1:
            return f"{_cut(program, one, count, replaced)} pieces"
        _tell_where(program, one)
        return ""

    def _reason_against(self, one: Collective) -> str | None:
        if one.group not in self.groups:
            return "its group's backend gathers safely"
        if one.out is not None:
            return "it is told where to gather already"
        if not one.coalesced and one.dtype.is_complex:
            return "complex numbers are gathered as lists only"
        return None


def _tell_where(program: Program, one: Collective) -> None:
    """Gather into new memory; the node stays what it was called, for those who look it up in the plan's verdicts."""
    memory, source = _prepared(program, one, one.inputs[0])
    one.node.target = collectives.GATHER_INTO
    one.node.args, one.node.kwargs = (source, one.group_size, one.group), {"out": memory}


def _cut(program: Program, one: Collective, count: int, replaced: Replacements) -> int:
    """Start pieces where the start stood, put them together where its first wait stood; return how many there are."""
    ranks, shape = ranks_of(one), list(one.node.meta["val"].shape)

    def cut(value: Tensor) -> tuple[Tensor, ...]:
        return value.contiguous().view(value.numel()).chunk(count)

    def put_together(*started: Tensor) -> Tensor:
        return torch.cat([collectives.wait(piece).view(ranks, -1) for piece in started], 1).view(shape)

    pieces = splice(program, cut, one.inputs[0], before=one.node, like=one.node)
    started = [_started(program, one, piece) for piece in pieces]
    finish_at_its_wait(program, one, started, put_together, replaced)
    return len(started)


def _take_apart(program: Program, one: Collective) -> None:
    """Gather each tensor of a list by itself, all started together."""
    started = [_started(program, one, value) for value in one.inputs]
    for element in one.results:
        element.replace_all_uses_with(started[element.args[1]])  # type: ignore[index]
        program.graph.erase_node(element)
    program.graph.erase_node(one.node)


def _detail(one: Collective) -> str:
    lists = sum(value.meta["val"].is_complex() for value in one.inputs)
    return f"{len(one.inputs)} single ones" + (f", {lists} of complex numbers still as lists" if lists else "")


def _started(program: Program, one: Collective, value: fx.Node) -> fx.Node:
    if value.meta["val"].is_complex():
        return _call(program, one, collectives.GATHER, value, one.group_size, one.group)
    memory, source = _prepared(program, one, value)
    return _call(program, one, collectives.GATHER_INTO, source, one.group_size, one.group, out=memory)


def _prepared(program: Program, one: Collective, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Memory for what is gathered, and what to gather, one element behind the other."""
    like = value.meta["val"]
    kind = {"dtype": like.dtype, "device": like.device}
    memory = _call(program, one, torch.ops.aten.empty.memory_format, _gathered_sizes(program, one, value), **kind)
    if like.is_contiguous():
        return memory, value
    return memory, splice(program, Tensor.contiguous, value, before=one.node, like=one.node)


def _gathered_sizes(program: Program, one: Collective, value: fx.Node) -> list[Any]:
    """Numbers, or nodes where sizes are not known before it runs. Else nothing but the gather uses `value`, as is asked
    for of what is packed into memory kept from step to step."""
    sizes: list[Any] = [
        _call(program, one, torch.ops.aten.sym_size.int, value, dim) if isinstance(size, torch.SymInt) else size
        for dim, size in enumerate(value.meta["val"].shape)
    ]
    rows, *others = sizes
    ranks = one.group_size
    return [_call(program, one, operator.mul, rows, ranks) if isinstance(rows, fx.Node) else rows * ranks, *others]


def _call(program: Program, one: Collective, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return insert_call(program, target, *args, before=one.node, like=one.node, **kwargs)
