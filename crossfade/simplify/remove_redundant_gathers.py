"""Collectives whose results the ranks have already, or can have with one fewer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import is_erased, statically_equal
from crossfade.graph.program import Input, InputKind, Program
from crossfade.graph.splice import erase_if_dead, splice

_aten = torch.ops.aten
_RANK = Input(InputKind.SCALAR, "rank")
_ALIKE_AFTER = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)
"""Collectives that leave the same value on all ranks of their group."""

_PAIRS = (
    (Kind.REDUCE_SCATTER, Kind.ALL_GATHER),
    (Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
    (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL),
)
"""What undoes, or begins, what stands before it."""

_NOT_PLAIN = "the collective before it is coalesced or writes into memory that it is given"
_UNKNOWN_SIZE = "the size of its group is not known"
_NO_COPIES = "what many times the same value reduces to is not a product with their number"
_USED_TOO = "the scattered value is used too"
_NOT_INVERSE = "the second exchange is not known to undo the first on all ranks"


@dataclass(frozen=True)
class RemoveRedundantGathers(Pass):
    """Drop collectives that the graph of one rank shows to be needless.

    - A reduce-scatter gathered again is an all-reduce: as many bytes, one launch fewer.
    - What an all-reduce, an all-gather or a broadcast left is the same on all ranks: reduced again it is itself or
      its multiple, broadcast again itself, gathered again its copies.
    - A gathered value reduce-scattered is this rank's part as it was, or its multiple.
    - The part of a gathered value at the program's input `rank` is what this rank gave.
    - An exchange that undoes another one leaves what was there; that it does so on all ranks is shown by the sizes if
      there are two, and promised by `alike`, which says that all ranks have this very program.

    Ranks agree since their programs have the same operators. Not shown by one rank's graph, and left: a slice at a
    number, which may be another rank's part; a reduce-scatter of what is the same everywhere, whose part depends
    on the rank alone; anything over two groups, whose members the graph does not name; pairs with anything but a wait
    between them.

    `optimize` runs it, on graphs that others sharded; what this package shards has no such collectives.

    Also known as: XLA's `AllReduceSimplifier` and `AllGatherDynamicSliceSimplifier`.

    Before:
        x: f32[4] = input("x")
        s: f32[2] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        w: f32[2] = c10d.wait_tensor(s)
        g: f32[4] = c10d.all_gather_into_tensor(w, 2, "dp")
        v: f32[4] = c10d.wait_tensor(g)
        y: f32[4] = aten.neg(v)
        return output("y", y)

    After:
        x: f32[4] = input("x")
        all_reduce: f32[4] = c10d.all_reduce(x, "sum", "dp")
        v: f32[4] = c10d.wait_tensor(all_reduce)
        y: f32[4] = aten.neg(v)
        return output("y", y)
    """

    name = "remove-redundant-gathers"
    numerics = Numerics.REASSOCIATES

    alike: bool = False

    def run(self, program: Program) -> PassResult:
        """One walk: each collective is compared with the one whose result it takes."""
        remover = _Remover(program, self.alike)
        for node in list(program.graph.nodes):
            collective = None if is_erased(node) else collectives.view(node)
            if collective is not None and collective.plain and not collective.coalesced:
                remover.look_at(collective)
        for node in list(program.graph.nodes):
            if not is_erased(node):
                remover.look_at_part(node)
        return remover.result()


class _Remover:
    """What was removed and left, and what may replace what."""

    def __init__(self, program: Program, alike: bool) -> None:
        self.program, self.alike = program, alike
        self.aliasing = Aliasing(program)
        self.rank = program.input_nodes()[_RANK.name] if _RANK in program.inputs and len(program.groups) == 1 else None
        self.verdicts: list[Verdict] = []

    def result(self) -> PassResult:
        """Count the verdicts."""
        left = sum(verdict.outcome is Outcome.LEFT for verdict in self.verdicts)
        counts = {"removed": len(self.verdicts) - left, "left": left}
        return PassResult(bool(counts["removed"]), counts, tuple(self.verdicts))

    def look_at(self, outer: Collective) -> None:
        """Find the collective behind a collective's input, and the rule that fits the two."""
        source = outer.inputs[0]
        start = collectives.started_by(source) if collectives.is_wait(source) else None
        inner = collectives.view(start) if start is not None else None
        if inner is None or inner.group != outer.group:
            return
        kinds = (inner.kind, outer.kind)
        if kinds not in _PAIRS and not (inner.kind in _ALIKE_AFTER and outer.kind in _ALIKE_AFTER):
            return
        if inner.coalesced or inner.in_place or inner.out is not None:
            self._leave(outer, _NOT_PLAIN)
        elif kinds == (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
            self._reduce_at_once(inner, outer)
        elif kinds == (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            self._copies(outer, inner.inputs[0], inner, "it adds up copies of what this rank gave")
        elif kinds == (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL):
            self._undone(inner, outer)
        elif inner.kind in _ALIKE_AFTER and outer.kind in (Kind.ALL_REDUCE, Kind.BROADCAST):
            self._copies(outer, source, inner, "all ranks have the same value already")
        elif inner.kind in _ALIKE_AFTER and outer.kind is Kind.ALL_GATHER:
            self._repeated(outer, source, inner)

    def _reduce_at_once(self, inner: Collective, outer: Collective) -> None:
        value = inner.inputs[0]
        old, new = outer.node.meta["val"], value.meta["val"]
        if len(inner.waits) != 1 or list(inner.waits[0].users) != [outer.node]:
            return self._leave(outer, _USED_TOO)
        if inner.group_size != outer.group_size or not statically_equal(old.stride(), new.stride()):
            return self._leave(outer, "its result would be laid out differently in memory")

        def reduce(tensor: Tensor) -> Tensor:
            return collectives.all_reduce(tensor, str(inner.reduce_op), inner.group)

        start = splice(self.program, reduce, value, before=inner.node, like=outer.node)
        self._account(outer, Outcome.REPLACED, "it gathers what was scattered just before")
        for wait in outer.waits:
            wait.replace_input_with(outer.node, start)
        for node in (outer.node, *inner.waits, inner.node):
            self.program.graph.erase_node(node)
        return None

    def _copies(self, outer: Collective, value: fx.Node, inner: Collective, why: str) -> None:
        """Reduce `ranks` copies of a value without communicating."""
        ranks = self.program.groups.get(outer.group)
        summed = outer.reduce_op == "sum"
        if summed and not ranks:
            return self._leave(outer, _UNKNOWN_SIZE)
        if outer.kind is not Kind.BROADCAST and outer.reduce_op not in ("sum", "avg", "max", "min"):
            return self._leave(outer, _NO_COPIES)
        if summed and value.meta["val"].dtype == torch.bool:
            return self._leave(outer, _NO_COPIES)
        return self._take(outer, value, inner, (lambda tensor: tensor * ranks) if summed else None, why)

    def _repeated(self, outer: Collective, value: fx.Node, inner: Collective) -> None:
        ranks = outer.group_size or 0
        self._take(outer, value, inner, lambda tensor: torch.cat([tensor] * ranks), "all ranks give the same value")

    def _undone(self, inner: Collective, outer: Collective) -> None:
        if any(collectives.counts_rows_as_it_runs(exchange.node) for exchange in (inner, outer)):
            return self._leave(outer, _NOT_INVERSE)
        to, back = collectives.settings(inner.node), collectives.settings(outer.node)
        ranks = self.program.groups.get(outer.group) or 0
        inverse = _same_sizes(to[0], back[1]) and _same_sizes(to[1], back[0])
        if not inverse or (ranks != 2 and not self.alike):
            return self._leave(outer, _NOT_INVERSE)
        return self._take(outer, inner.inputs[0], inner, None, "it undoes the exchange before it")

    def _take(
        self, outer: Collective, value: fx.Node, inner: Collective, function: Callable[..., Any] | None, why: str
    ) -> None:
        """Let what is made of a value replace a collective's result; the collective before it goes if unused."""
        if self.aliasing.is_written(value) or self.aliasing.is_written(outer.node):
            return self._leave(outer, "its memory is written to")
        new = value if function is None else splice(self.program, function, value, before=outer.node, like=outer.node)
        reason = self.aliasing.may_replace(outer.node, new)
        if reason is None and sum(user.op == "output" for wait in outer.waits for user in wait.users) > 1:
            reason = "two results of the program would be one tensor"
        if reason is not None:
            if function is not None:
                erase_if_dead(new)
            return self._leave(outer, reason)
        self._account(outer, Outcome.REMOVED, why)
        self.aliasing.replaced(outer.node, new)
        for wait in outer.waits:
            wait.replace_all_uses_with(new)
        for node in (*outer.waits, outer.node):
            self.program.graph.erase_node(node)
        self._drop_if_unused(inner)
        return None

    def _drop_if_unused(self, inner: Collective) -> None:
        waits = [user for user in inner.node.users if collectives.is_wait(user) and not user.users]
        if len(waits) != len(inner.node.users):
            return
        self._account(inner, Outcome.REMOVED, "only what is gone now used its result")
        for node in (*waits, inner.node):
            self.program.graph.erase_node(node)

    def look_at_part(self, node: fx.Node) -> None:
        """Let what this rank gave replace its part of the gathered value."""
        source = _part_at_rank(node, self.rank) if self.rank is not None else None
        start = collectives.started_by(source) if source is not None and collectives.is_wait(source) else None
        gather = collectives.view(start) if start is not None else None
        if gather is None or gather.kind is not Kind.ALL_GATHER:
            return
        if gather.coalesced or gather.out is not None:
            self.verdicts.append(Verdict.of(node, Outcome.LEFT, _NOT_PLAIN))
            return
        value = gather.inputs[0]
        if not statically_equal(node.meta["val"].shape, value.meta["val"].shape):
            return
        reason = self.aliasing.may_replace(node, value)
        if reason is not None:
            self.verdicts.append(Verdict.of(node, Outcome.LEFT, reason))
            return
        self.verdicts.append(Verdict.of(node, Outcome.REMOVED, "it is the part that this rank gave"))
        self.aliasing.replaced(node, value)
        node.replace_all_uses_with(value)
        erase_if_dead(node)
        self._drop_if_unused(gather)

    def _account(self, collective: Collective, outcome: Outcome, reason: str) -> None:
        self.verdicts.append(Verdict.of(collective.node, outcome, reason, bytes=collective.bytes))

    def _leave(self, collective: Collective, reason: str) -> None:
        remedy = "alike=True promises it" if reason == _NOT_INVERSE else ""
        self.verdicts.append(Verdict.of(collective.node, Outcome.LEFT, reason, remedy=remedy, bytes=collective.bytes))


def _same_sizes(sizes: Any, other: Any) -> bool:
    """Whether two lists of split sizes are the same numbers or nodes."""
    return len(sizes) == len(other) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(sizes, other, strict=True)
    )


def _part_at_rank(node: fx.Node, rank: fx.Node) -> fx.Node | None:
    """The tensor of which a node takes rows from `rank` times their number on, or None."""
    if node.target not in (_aten.slice.Tensor, _aten.narrow.default):
        return None
    given = arguments(node)
    rows = node.meta["val"].shape[0] if node.meta["val"].dim() else None
    begin = given["start"]
    if given["dim"] != 0 or given.get("step", 1) != 1 or not isinstance(rows, int):
        return None
    if not _is_call(begin, operator.mul, rank, rows):
        return None
    if node.target is _aten.slice.Tensor and not _is_call(given["end"], operator.add, begin, rows):
        return None
    return given.get("self", given.get("input"))


def _is_call(node: Any, target: Any, operand: fx.Node, number: int) -> bool:
    """Whether a node is `target(operand, number)`, either way round."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return False
    return node.args in ((operand, number), (number, operand))
