"""Functional ops carried out in the memory of what they are the last to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.in_place import NEVER, MemoryUse, has_layout_of, in_place_form, in_place_twin
from crossfade.graph.operators import arguments
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import is_erased
from crossfade.graph.program import Program
from crossfade.graph.splice import insert_call

_aten = torch.ops.aten
_SCATTERS: dict[Any, tuple[Any, tuple[str, ...]]] = {
    _aten.slice_scatter.default: (_aten.slice.Tensor, ("dim", "start", "end", "step")),
    _aten.select_scatter.default: (_aten.select.int, ("dim", "index")),
    _aten.diagonal_scatter.default: (_aten.diagonal.default, ("offset", "dim1", "dim2")),
}
"""Ops that copy a value with a part replaced: the view of that part, and the arguments that say which it is."""


@dataclass(frozen=True)
class OverwriteDeadValues(Pass):
    """Let ops write into their first argument where nothing reads that again, and scatters into their base.

    What the program is given is never written, except where it ends in a copy into an input of a value computed from
    that input step by step: then each step is done there, and the copy goes. Results of the program stay whole pieces
    of memory of their own. The graph is not functional afterwards: this pass is for the end of a pipeline. Inputs are
    taken not to share memory with one another.

    Not in a default pipeline: the graph is no longer functional, and a compiled step ends in `update-in-place` instead.
    For a graph that is run as it is: `optimization() + [OverwriteDeadValues()]`.

    Also known as: Inductor's `reinplace_inplaceable_ops`; XLA's buffer assignment, which reuses dead operands.

    Before:
        x: f32[4] = input("x")
        y: f32[2] = input("y")
        neg: f32[4] = aten.neg(x)
        exp: f32[4] = aten.exp(neg)
        scatter: f32[4] = aten.slice_scatter(exp, y, 0, 0, 2)
        return output("y", scatter)

    After:
        x: f32[4] = input("x")
        y: f32[2] = input("y")
        neg: f32[4] = aten.neg(x)
        exp: f32[4] = aten.exp_(neg)
        slice_1: f32[2] = aten.slice.Tensor(exp, 0, 0, 2, 1)
        copy_: f32[2] = aten.copy_(slice_1, y)
        return output("y", exp)
    """

    name = "overwrite-dead-values"
    numerics = Numerics.BITWISE
    provides = frozenset({"in-place"})

    def run(self, program: Program) -> PassResult:
        """Inputs that are copied into first, then one walk."""
        memory = MemoryUse(program)
        verdicts: list[Verdict] = []
        inputs = sum(_update_input(program, memory, node, verdicts) for node in _copies_into_inputs(program))
        overwritten = scattered = 0
        for node in memory.nodes:
            if is_erased(node) or not _is_candidate(node):
                continue
            if (reason := _against(memory, node)) is not None:
                verdicts.append(Verdict.of(node, Outcome.LEFT, reason))
            elif node.target in _SCATTERS:
                _scatter(program, memory, node)
                scattered += 1
            else:
                _overwrite(memory, node)
                overwritten += 1
        counts = {"overwritten": overwritten, "scattered": scattered, "inputs": inputs}
        return PassResult(any(counts.values()), counts, tuple(verdicts))


def _is_candidate(node: fx.Node) -> bool:
    """Whether an op could write into a value of the graph, were that dead; collectives are the executor's."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target in _SCATTERS or (in_place_twin(node.target) is not None and not collectives.is_collective(node))


def _against(memory: MemoryUse, node: fx.Node) -> str | None:
    """Why an op may not write into its first argument."""
    source: Any = node.args[0]
    region = memory.region[source]
    if not has_layout_of(source.meta.get("val"), node.meta.get("val")):
        return "its result does not fit where its argument lies"
    if region.root.op != "call_function":
        return "its argument is given to the program"
    if memory.last_read(region, ignoring=(node,)) >= memory.position[node]:
        return "its argument is read again"
    if memory.reads_twice(node, source):
        return "another argument shares memory with the one to write"
    if memory.last_read(memory.region[node]) == NEVER and not memory.covers_its_storage(source):
        return "a result of the program would be a part of something larger"
    return None


def _overwrite(memory: MemoryUse, node: fx.Node) -> None:
    source: Any = node.args[0]
    node.target = in_place_form(node)
    memory.merge(node, memory.region[source])


def _scatter(program: Program, memory: MemoryUse, node: fx.Node) -> None:
    """Copy into a view of the base, which then is the result."""
    view, names = _SCATTERS[node.target]
    given = arguments(node)
    base = given["self"]
    part = insert_call(program, view, base, *(given[name] for name in names), before=node, like=node)
    copied = insert_call(program, _aten.copy_.default, part, given["src"], before=node, like=node)
    region = memory.region[base]
    memory.merge(node, region)
    node.replace_all_uses_with(base)
    program.graph.erase_node(node)
    for value in (base, part, copied):
        memory.add(value, node if value is not base else base, region)


# -------------------------------------------------------------------------------------------- inputs that are updated


def _copies_into_inputs(program: Program) -> list[fx.Node]:
    copies = program.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return [node for node in copies if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"]


def _update_input(program: Program, memory: MemoryUse, copy: fx.Node, verdicts: list[Verdict]) -> bool:
    """Compute an input's new value in the input itself, if that is to be copied there anyway."""
    given: Any = copy.args[0]
    steps = _steps(memory, given, arguments(copy)["src"])
    reason = "its new value is not computed from it step by step" if not steps else None
    if (reason := reason or _against_update(memory, copy, given, steps)) is not None:
        verdicts.append(Verdict.of(copy, Outcome.LEFT, reason))
        return False
    program.graph.erase_node(copy)
    for step in steps:
        _overwrite(memory, step)
    return True


def _steps(memory: MemoryUse, given: fx.Node, value: Any) -> list[fx.Node]:
    """The ops from an input to its new value, each the first argument of the next; empty if there is no such path."""
    steps: list[fx.Node] = []
    while value is not given:
        own = isinstance(value, fx.Node) and memory.region[value].root is value
        if not own or collectives.is_collective(value) or in_place_form(value) is None:
            return []
        steps.append(value)
        value = value.args[0]
    return steps[::-1]


def _against_update(memory: MemoryUse, copy: fx.Node, given: fx.Node, steps: list[fx.Node]) -> str | None:
    if copy.users:
        return "the copy's result is used"
    if memory.last_read(memory.region[steps[-1]], ignoring=(copy,)) == NEVER:
        return "its new value is a result of the program"
    for old, step in zip([given, *steps], steps, strict=False):
        if memory.last_read(memory.region[old], ignoring=(step, copy)) >= memory.position[step]:
            return "its old value is read again"
        if memory.reads_twice(step, old):
            return "another argument shares memory with the one to write"
    return None
