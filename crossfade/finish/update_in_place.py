"""Functional updates carried out in the memory they replace: what makes a functional step as lean as an eager one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph import collectives
from crossfade.graph.in_place import NEVER, ByteRange, MemoryUse, in_place_form, update_chain
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import InputKind, OutputKind, Program, tensor_bytes
from crossfade.graph.splice import insert_call


@dataclass(frozen=True)
class UpdateInPlace(Pass):
    """Write new values of inputs into the inputs, and let ops overwrite arguments that nothing reads again.

    The program then returns no updates: running it has changed its inputs. An update whose computation cannot go in
    place is copied in as soon as the old value is no longer read. A result that would come to live in memory which
    changes at this run or the next one (an updated input, a workspace) is cloned: what the caller holds stays.

    Also known as: reinplacing (Inductor), buffer donation with input/output aliasing (XLA).

    Before:
        p: f32[4] = parameter("p")
        g: f32[4] = input("g")
        neg: f32[4] = aten.neg(g)
        exp: f32[4] = aten.exp(neg)
        add: f32[4] = aten.add.Tensor(p, exp)
        return update("p", add)

    After:
        p: f32[4] = parameter("p")
        g: f32[4] = input("g")
        neg: f32[4] = aten.neg(g)
        exp: f32[4] = aten.exp_(neg)
        add: f32[4] = aten.add_.Tensor(p, exp)
        return
    """

    name = "update-in-place"
    numerics = Numerics.BITWISE
    provides = frozenset({"in-place"})

    def run(self, program: Program) -> PassResult:
        """Plan the updates of inputs, then walk once and overwrite what is dead."""
        memory = MemoryUse(program)
        workspaces = {node for item, node in program.named_inputs() if item.kind is InputKind.WORKSPACE}
        chains = _update_chains(program, memory)
        overwritten = sum(_overwrite(memory, node, chains, workspaces) for node in memory.nodes)
        cloned = _clone_results(program, memory, workspaces)
        copied = _copy_the_rest(program, memory, chains)
        kept = [(out, value) for out, value in program.named_results() if out.kind is not OutputKind.UPDATE]
        dropped = len(program.outputs) - len(kept)
        program.set_results([value for _, value in kept], tuple(out for out, _ in kept))
        counts = {"updates": dropped, "overwritten": overwritten, "copied": cloned + len(copied)}
        why = "its new value cannot be computed in its own memory: copied in"
        verdicts = tuple(Verdict.of(node, Outcome.LEFT, why, bytes=tensor_bytes(node.meta["val"])) for node in copied)
        return PassResult(bool(dropped or overwritten or cloned), counts, verdicts)


def _update_chains(program: Program, memory: MemoryUse) -> dict[fx.Node, fx.Node]:
    """For each node that computes (a step towards) an input's new value in place, that input's placeholder."""
    chains: dict[fx.Node, fx.Node] = {}
    placeholders = program.input_nodes()
    for out, value in program.named_results():
        if out.kind is OutputKind.UPDATE:
            placeholder = placeholders[out.name]
            chain = update_chain(value, placeholder)
            own = all(node not in chains and memory.region[node].root is node for node in chain)
            if chain and own and _old_values_unread(chain, placeholder, memory):
                chains.update(dict.fromkeys(chain, placeholder))
    return chains


def _old_values_unread(chain: list[fx.Node], placeholder: fx.Node, memory: MemoryUse) -> bool:
    """Whether each value of the chain, the input first, is read for the last time by the next op, and there once."""
    for old, new in zip([placeholder, *chain], chain, strict=False):
        if memory.last_read(memory.region[old], ignoring=(new,)) > memory.position[new] or memory.reads_twice(new, old):
            return False
    return True


def _overwrite(memory: MemoryUse, node: fx.Node, chains: dict[fx.Node, fx.Node], workspaces: set[fx.Node]) -> bool:
    """Make one op write into its first argument's memory, if nothing needs that any more."""
    target = in_place_form(node)
    if (
        target is None
        or memory.region[node].root is not node
        or (node not in chains and not _is_free(memory, node, workspaces))
    ):
        return False
    source: Any = node.args[0]
    node.target = target
    memory.merge(node, memory.region[source])
    return True


def _is_free(memory: MemoryUse, node: fx.Node, workspaces: set[fx.Node]) -> bool:
    """Whether the first argument's memory was made inside the program, and is read for the last time here."""
    source: Any = node.args[0]
    region = memory.region[source]
    if collectives.is_collective(node):
        region = ByteRange(region.root)
    made_here = region.root.op == "call_function" or region.root in workspaces
    return (
        made_here
        and not memory.reads_twice(node, source)
        and memory.last_read(region, ignoring=(node,)) < memory.position[node]
    )


def _clone_results(program: Program, memory: MemoryUse, workspaces: set[fx.Node]) -> int:
    """Give each result that lives in memory which this run or the next one changes, memory of its own."""
    placeholders = program.input_nodes()
    changing = {placeholders[out.name] for out in program.outputs if out.kind is OutputKind.UPDATE} | workspaces
    clones: dict[fx.Node, fx.Node] = {}
    results = []
    for out, value in program.named_results():
        if out.kind is not OutputKind.UPDATE and isinstance(value, fx.Node) and memory.region[value].root in changing:
            if value not in clones:
                clones[value] = _clone_at_end(program, value)
            value = clones[value]
        results.append(value)
    program.set_results(results)
    return len(clones)


def _copy_the_rest(program: Program, memory: MemoryUse, chains: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy in each update that did not go in place, once the old value is no longer read; return those inputs."""
    placeholders = program.input_nodes()
    updates = [(placeholders[o.name], v) for o, v in program.named_results() if o.kind is OutputKind.UPDATE]
    rest = [(old, new) for old, new in updates if chains.get(new) is not old and new is not old]
    ends = {old: memory.last_read(memory.region[old]) for old, _ in rest}
    late = [(old, new) for old, new in rest if ends[old] == NEVER]
    last_input = max((memory.position[node] for node in placeholders.values()), default=0)
    for old, new in rest:
        if ends[old] != NEVER:
            last = int(max(ends[old], memory.position[new], last_input))
            _copy(program, old, new, before=memory.nodes[last].next)
    # What is copied over at the end may itself be the new value of another input.
    kept = [_clone_at_end(program, v) if memory.region[v].root in dict(late) else v for _, v in late]
    for (old, _), new in zip(late, kept, strict=True):
        _copy(program, old, new, before=program.output_node)
    return [old for old, _ in rest]


def _copy(program: Program, old: fx.Node, new: fx.Node, *, before: fx.Node) -> None:
    insert_call(program, torch.ops.aten.copy_.default, old, new, before=before, like=new)


def _clone_at_end(program: Program, value: fx.Node) -> fx.Node:
    return insert_call(program, torch.ops.aten.clone.default, value, before=program.output_node, like=value)
