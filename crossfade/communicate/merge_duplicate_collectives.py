"""Collectives that do the same to the same value become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.effects import alias_roots, written_owners
from crossfade.graph.own_results import return_copies
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead
from crossfade.graph.value_numbering import ValueNumbers


@dataclass(frozen=True)
class MergeDuplicateCollectives(Pass):
    """Let a collective take the result of an earlier one of the same kind, group and arguments on the same value.

    Values are the same if the same pure operators made them of the same values. Operators that take numbers to choose a
    part or to scale by do not count, since another rank's numbers may differ. A gather is merged only if at most `near`
    launches of its group lie between: a parameter gathered again for its backward is not to be held until then, unless
    `hold` is set. Results that the program returns are copied, since no two may share memory.

    Also known as: XLA's all-gather-cse, for gathers.

    Before:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        b: f32[4] = aten.neg(x)
        s2: f32[4] = c10d.all_reduce(b, "sum", "dp")
        w2: f32[4] = c10d.wait_tensor(s2)
        add: f32[4] = aten.add.Tensor(w, w2)
        return output("y", add)

    After:
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        w2: f32[4] = c10d.wait_tensor(s)
        add: f32[4] = aten.add.Tensor(w, w2)
        return output("y", add)
    """

    name = "merge-duplicate-collectives"
    numerics = Numerics.BITWISE

    hold: bool = False
    near: int = 4

    def run(self, program: Program) -> PassResult:
        """One walk that numbers values; equal collectives meet under one key."""
        nodes = list(program.graph.nodes)
        roots = alias_roots(nodes)
        written = written_owners(nodes, roots)
        values = ValueNumbers(roots, on_all_ranks=True)
        first: dict[int, Collective] = {}
        merged: dict[fx.Node, fx.Node] = {}
        verdicts = []
        launches: Counter[str] = Counter()
        turn: dict[fx.Node, int] = {}
        for node in nodes:
            number = values.number(node)
            later = collectives.view(node)
            if later is not None:
                turn[node] = launches[later.group]
                launches[later.group] += 1
            if later is None or not later.plain:
                continue
            earlier = first.setdefault(number, later)
            if earlier is later:
                continue
            if (verdict := self._verdict_against(earlier, later, written, turn)) is not None:
                first[number] = later
                verdicts.append(verdict)
                continue
            verdicts.append(_verdict(earlier, later))
            turn[earlier.node] = turn[later.node]  # in use until here, now
            merged[later.node] = earlier.node
        _merge(program, merged)
        _unshare_results(program, roots, merged)
        counts = {"merged": len(merged), "left": len(verdicts) - len(merged)}
        return PassResult(bool(merged), counts, tuple(verdicts))

    def _verdict_against(
        self, earlier: Collective, later: Collective, written: set[fx.Node], turn: Mapping[fx.Node, int]
    ) -> Verdict | None:
        if earlier.node in written or later.node in written:
            return Verdict.of(later.node, Outcome.LEFT, "a result is written in place", bytes=later.bytes)
        far = turn[later.node] - turn[earlier.node] - 1 > self.near
        if later.kind is Kind.ALL_GATHER and far and not self.hold:
            reason, remedy = "it would be held in memory between its uses", "hold=True merges it"
            return Verdict.of(later.node, Outcome.LEFT, reason, remedy=remedy, bytes=later.bytes)
        return None


def _verdict(earlier: Collective, later: Collective) -> Verdict:
    reason, detail = "an equal one has the result already", f"that of {earlier.node.name}"
    return Verdict.of(later.node, Outcome.REMOVED, reason, detail=detail, bytes=later.bytes)


def _merge(program: Program, merged: dict[fx.Node, fx.Node]) -> None:
    """Let the waits of each later collective wait for the earlier one; what only the later one needed goes."""
    for later, earlier in merged.items():
        inputs = later.all_input_nodes
        later.replace_all_uses_with(earlier)
        program.graph.erase_node(later)
        for source in inputs:
            erase_if_dead(source)


def _unshare_results(program: Program, roots: dict[fx.Node, fx.Node], merged: dict[fx.Node, fx.Node]) -> None:
    """Copy what would be returned beside another collective's result in the same memory."""
    returned_by: dict[fx.Node, fx.Node] = {}
    apart = set()
    for value in program.results:
        root = roots[value] if isinstance(value, fx.Node) else None
        if root is not None and returned_by.setdefault(merged.get(root, root), root) is not root:
            apart.add(root)
    waits = (node for node in program.graph.nodes if collectives.is_wait(node)) if apart else ()
    return_copies(program, {wait: roots[wait] for wait in waits if roots[wait] in apart})
