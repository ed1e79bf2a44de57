"""Functional updates carried out in the memory they replace: what makes a functional step as lean as an eager one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import InputKind, OutputKind, Program, tensor_bytes
from crossfade.graph.splice import insert_call

_NEVER = float("inf")
_ALL = 2**62
"""The end of a region that covers its whole memory, whatever that has."""


@dataclass(frozen=True)
class UpdateInPlace(Pass):
    """Write new values of inputs into the inputs, and let ops overwrite arguments that nothing reads again.

    The program then returns no updates: running it has changed its inputs. An update whose computation cannot go in
    place is copied in as soon as the old value is no longer read. A result that would come to live in memory which
    changes at this run or the next one (an updated input, a workspace) is cloned: what the caller holds stays.

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
        memory = _Memory(program)
        chains = _update_chains(program, memory)
        overwritten = sum(_overwrite(memory, node, chains) for node in memory.nodes)
        cloned = _clone_results(program, memory)
        copied = _copy_the_rest(program, memory, chains)
        kept = [(out, value) for out, value in program.named_results() if out.kind is not OutputKind.UPDATE]
        dropped = len(program.outputs) - len(kept)
        program.set_results([value for _, value in kept], tuple(out for out, _ in kept))
        counts = {"updates": dropped, "overwritten": overwritten, "copied": cloned + len(copied)}
        why = "its new value cannot be computed in its own memory: copied in"
        verdicts = tuple(Verdict.of(node, Outcome.LEFT, why, bytes=tensor_bytes(node.meta["val"])) for node in copied)
        return PassResult(bool(dropped or overwritten or cloned), counts, verdicts)


@dataclass(frozen=True, slots=True)
class _Region:
    """A range of bytes of one piece of memory."""

    root: fx.Node
    start: int = 0
    end: int = _ALL

    def overlaps(self, other: _Region) -> bool:
        return self.root is other.root and self.start < other.end and other.start < self.end

    def moved(self, old: _Region, new: _Region) -> _Region:
        """Where this region of the memory `old` lies once that is the region `new`."""
        if self.end >= _ALL or new.end >= _ALL:
            return _Region(new.root)
        shift = new.start - old.start
        return _Region(new.root, self.start + shift, self.end + shift)


class _Memory:
    """Where each value lives and when that memory is read last, kept up to date while ops go in place."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        roots = alias_roots(self.nodes)
        self.region = _regions(self.nodes, roots)
        self.workspaces = {node for item, node in program.named_inputs() if item.kind is InputKind.WORKSPACE}
        self.aliases: dict[fx.Node, list[fx.Node]] = {}
        for node, root in roots.items():
            self.aliases.setdefault(root, []).append(node)

    def last_read(self, region: _Region, *, ignoring: fx.Node | None = None) -> float:
        """The position of the last node that reads memory overlapping the region; an output reads for ever.

        What is in flight counts with all of its memory, as it does to `verify`.
        """
        last: float = -1
        for alias in self.aliases[region.root]:
            overlaps = self.region[alias].overlaps(region)
            for user in alias.users:
                if user is not ignoring and (overlaps or collectives.is_collective(user)):
                    last = max(last, self._read_ends(user))
        return last

    def _read_ends(self, user: fx.Node) -> float:
        """When a user has read its input for good: a collective goes on reading until it is waited for."""
        if user.op == "output":
            return _NEVER
        started = collectives.view(user)
        ends = (user, *(started.waits if started else ()))
        return max(self.position.get(node, _NEVER) for node in ends)  # what was added since stands at the end

    def merge(self, node: fx.Node, into: _Region) -> None:
        """Note that `node`'s own memory is now the region `into`."""
        old = self.region[node]
        for alias in self.aliases.pop(old.root):
            self.region[alias] = self.region[alias].moved(old, into)
            self.aliases[into.root].append(alias)


def _regions(nodes: list[fx.Node], roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, _Region]:
    """The bytes of its root's memory that each value occupies: all of them where metadata cannot tell.

    Views carry the storage of what they view. A wait or an op already in place may carry one of its own: it is the
    argument that it looks like.
    """
    regions: dict[fx.Node, _Region] = {}
    begins: dict[tuple[fx.Node, int], int] = {}
    for node in nodes:
        root, value = roots[node], node.meta.get("val")
        regions[node] = _Region(root)
        if not isinstance(value, Tensor) or _is_symbolic(value):
            continue
        storage = root, value.untyped_storage()._cdata
        first = int(value.storage_offset()) * value.element_size()
        if root is node:
            begins[storage] = 0
        elif storage not in begins:
            twins = [s for s in node.all_input_nodes if roots[s] is root and _same_layout(s.meta.get("val"), value)]
            if not twins or regions[twins[0]].end >= _ALL:
                continue
            begins[storage] = regions[twins[0]].start - first
        start = begins[storage] + first
        regions[node] = _Region(root, start, start + _span(value))
    return regions


def _span(value: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + last) * value.element_size()


def _is_symbolic(value: Tensor) -> bool:
    """Whether its place depends on sizes that are known only by a hint, which must not decide what is overwritten."""
    return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _update_chains(program: Program, memory: _Memory) -> dict[fx.Node, fx.Node]:
    """For each node that computes (a step towards) an input's new value in place, that input's placeholder."""
    chains: dict[fx.Node, fx.Node] = {}
    placeholders = program.input_nodes()
    for out, value in program.named_results():
        if out.kind is OutputKind.UPDATE:
            placeholder = placeholders[out.name]
            chain = _chain(value, placeholder, memory)
            if chain and not any(node in chains for node in chain) and _old_values_unread(chain, placeholder, memory):
                chains.update(dict.fromkeys(chain, placeholder))
    return chains


def _chain(value: fx.Node, placeholder: fx.Node, memory: _Memory) -> list[fx.Node]:
    """The ops from an input to its new value, each the first argument of the next; empty if there is no such path."""
    chain: list[fx.Node] = []
    node: Any = value
    while node is not placeholder:
        if not isinstance(node, fx.Node) or _in_place_target(node) is None or memory.region[node].root is not node:
            return []
        chain.append(node)
        node = node.args[0]
    return chain[::-1]


def _old_values_unread(chain: list[fx.Node], placeholder: fx.Node, memory: _Memory) -> bool:
    """Whether each value of the chain, the input first, is read for the last time by the next op, and there once."""
    for old, new in zip([placeholder, *chain], chain, strict=False):
        if memory.last_read(memory.region[old], ignoring=new) > memory.position[new] or _reads_twice(memory, new):
            return False
    return True


def _reads_twice(memory: _Memory, node: fx.Node) -> bool:
    """Whether another argument shares memory with the first: overwriting one would change the other.

    The first argument itself may come again if the op works element by element.
    """
    source: Any = node.args[0]
    others: list[fx.Node] = []
    fx.map_arg((node.args[1:], node.kwargs), others.append)
    if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        others = [other for other in others if other is not source]
    return any(memory.region[other].overlaps(memory.region[source]) for other in others)


def _overwrite(memory: _Memory, node: fx.Node, chains: dict[fx.Node, fx.Node]) -> bool:
    """Make one op write into its first argument's memory, if nothing needs that any more."""
    target = _in_place_target(node)
    if target is None or memory.region[node].root is not node or (node not in chains and not _is_free(memory, node)):
        return False
    source: Any = node.args[0]
    node.target = target
    memory.merge(node, memory.region[source])
    return True


def _is_free(memory: _Memory, node: fx.Node) -> bool:
    """Whether the first argument's memory was made inside the program, and is read for the last time here."""
    source: Any = node.args[0]
    region = memory.region[source]
    if collectives.is_collective(node):
        region = _Region(region.root)
    made_here = region.root.op == "call_function" or region.root in memory.workspaces
    return (
        made_here and not _reads_twice(memory, node) and memory.last_read(region, ignoring=node) < memory.position[node]
    )


def _clone_results(program: Program, memory: _Memory) -> int:
    """Give each result that lives in memory which this run or the next one changes, memory of its own."""
    placeholders = program.input_nodes()
    changing = {placeholders[out.name] for out in program.outputs if out.kind is OutputKind.UPDATE} | memory.workspaces
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


def _copy_the_rest(program: Program, memory: _Memory, chains: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy in each update that did not go in place, once the old value is no longer read; return those inputs."""
    placeholders = program.input_nodes()
    updates = [(placeholders[o.name], v) for o, v in program.named_results() if o.kind is OutputKind.UPDATE]
    rest = [(old, new) for old, new in updates if chains.get(new) is not old and new is not old]
    ends = {old: memory.last_read(memory.region[old]) for old, _ in rest}
    late = [(old, new) for old, new in rest if ends[old] == _NEVER]
    last_input = max((memory.position[node] for node in placeholders.values()), default=0)
    for old, new in rest:
        if ends[old] != _NEVER:
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


def _in_place_target(node: fx.Node) -> Any:
    """The op that computes the same into its first argument, if there is one and the result fits."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or not _same_layout(source.meta.get("val"), node.meta.get("val")):
        return None
    if (collective := collectives.in_place_form(node)) is not None:
        return collective if source.meta["val"].is_contiguous() else None
    schema = node.target._schema
    if schema.is_mutable or any(item.alias_info is not None for item in schema.returns):
        return None
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, node.target._overloadname, None) if packet is not None else None


def _same_layout(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return False
    same = (
        old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype and old.device == new.device
    )
    return same and _is_dense(old)


def _is_dense(value: Tensor) -> bool:
    """Whether each element has a place of its own: no expanded dims."""
    return all(stride or size == 1 for size, stride in zip(value.shape, value.stride(), strict=True))
