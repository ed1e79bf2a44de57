"""What may be overwritten: where each value lives, when that memory is read for the last time, by which op to write it.

A value is a range of bytes of a piece of memory, so that parts of a buffer that do not overlap live and die apart.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, memory_behind, written_inputs
from crossfade.graph.lasting import only_looks
from crossfade.graph.operators import remembered
from crossfade.graph.private import OpOverload, has_schema, memory_id, schema_of, statically_equal
from crossfade.graph.program import Program

NEVER = float("inf")
"""The end of what is read for ever."""

_ALL = 2**62
"""The end of a region that covers its whole memory, whatever that has."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of one piece of memory."""

    root: fx.Node
    start: int = 0
    end: int = _ALL

    def overlaps(self, other: ByteRange) -> bool:
        """Whether two regions have a byte in common."""
        return self.root is other.root and self.start < other.end and other.start < self.end

    def moved(self, old: ByteRange, new: ByteRange) -> ByteRange:
        """Where this region of the memory `old` lies once that is the region `new`."""
        if self.end >= _ALL or new.end >= _ALL:
            return ByteRange(new.root)
        shift = new.start - old.start
        return ByteRange(new.root, self.start + shift, self.end + shift)


class MemoryUse:
    """Where each value lives and when that memory is read last, kept up to date while ops go in place.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(a)
    ... return output("b", b)
    ... ''')
    >>> x, a, b, out = program.graph.nodes
    >>> memory = MemoryUse(program)
    >>> memory.last_read(memory.region[a]) == memory.position[b], memory.last_read(memory.region[b])
    (True, inf)
    """

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        roots = alias_roots(self.nodes)
        self.region = _regions(self.nodes, roots)
        self.aliases: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            for root in dict.fromkeys(memory_behind(node, roots)):
                self.aliases.setdefault(root, []).append(node)
        self._latest: dict[fx.Node, dict[ByteRange, tuple[float, fx.Node | None]]] = {}

    def last_read(self, region: ByteRange, *, ignoring: Container[fx.Node] = ()) -> float:
        """The position of the last node that reads memory overlapping the region; an output reads for ever.

        What is in flight counts with all of its memory, as it does to `verify`.
        """
        known = self._latest.setdefault(region.root, {})
        if region not in known:
            known[region] = self._last_reader(region, ())
        last, reader = known[region]
        return self._last_reader(region, ignoring)[0] if reader in ignoring else last

    def _last_reader(self, region: ByteRange, ignoring: Container[fx.Node]) -> tuple[float, fx.Node | None]:
        last: tuple[float, fx.Node | None] = (-1, None)
        for alias in self.aliases[region.root]:
            place = self.region[alias]
            overlaps = place.root is not region.root or place.overlaps(region)  # a list reads its elements whole
            for user in alias.users:
                if user not in ignoring and (overlaps or collectives.is_collective(user)):
                    last = max(last, (self._read_ends(user), user), key=lambda entry: entry[0])
        return last

    def _read_ends(self, user: fx.Node) -> float:
        """When a user has read its input for good: a collective goes on reading until it is waited for."""
        if user.op == "output" or not (has_schema(user.target) or user.target is operator.getitem):
            return NEVER  # what an operator without a schema keeps is not known
        ends = (user, *self._waits_after(user))
        return max(self.position.get(node, NEVER) for node in ends)  # what was added since stands at the end

    def _waits_after(self, user: fx.Node) -> tuple[fx.Node, ...]:
        """The waits that end what a user begins; an element of a coalesced collective may be written at every one."""
        start = user.args[0] if user.target is operator.getitem else user
        started = collectives.view(start)  # type: ignore[arg-type]
        return started.waits if started is not None else ()

    def touched(self, node: fx.Node) -> tuple[set[ByteRange], set[ByteRange]]:
        """The regions that an operator reads, and those that it writes; a view touches none."""
        written = {self.region[source] for source in written_inputs(node)}
        read = set() if only_looks(node.target) else {self.region[source] for source in node.all_input_nodes}
        return read - written, written

    def merge(self, node: fx.Node, into: ByteRange) -> None:
        """Note that `node`'s own memory is now the region `into`, whose values so far are read no more."""
        old = self.region[node]
        moved = self.aliases.pop(old.root)
        for alias in moved:
            self.region[alias] = self.region[alias].moved(old, into)
        apart = [alias for alias in self.aliases[into.root] if not self.region[alias].overlaps(into)]
        self.aliases[into.root] = apart + moved
        self._latest.pop(into.root, None)

    def add(self, node: fx.Node, like: fx.Node, region: ByteRange) -> None:
        """Note a new node that names memory of a region, standing where `like` stands."""
        self.position[node], self.region[node] = self.position[like], region
        self.aliases[region.root].append(node)
        self._latest.pop(region.root, None)

    def covers_its_storage(self, node: fx.Node) -> bool:
        """Whether a value provably is all there is of its memory."""
        whole, value = self.region[node].root.meta.get("val"), node.meta["val"]
        if not isinstance(whole, Tensor) or whole.layout is not torch.strided:
            return False
        return statically_equal(value.numel() * value.element_size(), whole.untyped_storage().nbytes())

    def reads_twice(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether another argument shares memory with `source`: overwriting one would change the other.

        The source itself may come again if the op works element by element.
        """
        read: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), read.append)
        read.remove(source)
        if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            read = [other for other in read if other is not source]
        return any(self._may_overlap(other, self.region[source]) for other in read)

    def _may_overlap(self, node: fx.Node, region: ByteRange) -> bool:
        place = self.region[node]
        return place.overlaps(region) or (place.root is not region.root and node in self.aliases[region.root])


def _regions(nodes: list[fx.Node], roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, ByteRange]:
    """The bytes of its root's memory that each value occupies: all of them where metadata cannot tell.

    Views carry the storage of what they view. A wait or an op already in place may carry one of its own: it is the
    argument that it looks like.
    """
    regions: dict[fx.Node, ByteRange] = {}
    begins: dict[tuple[fx.Node, int], int] = {}
    for node in nodes:
        root, value = roots[node], node.meta.get("val")
        regions[node] = ByteRange(root)
        if not isinstance(value, Tensor) or value.layout is not torch.strided or _is_symbolic(value):
            continue
        storage = root, memory_id(value)
        first = int(value.storage_offset()) * value.element_size()
        if root is node:
            begins[storage] = 0
        elif storage not in begins:
            twins = [s for s in node.all_input_nodes if roots[s] is root and has_layout_of(s.meta.get("val"), value)]
            if not twins or regions[twins[0]].end >= _ALL:
                continue
            begins[storage] = regions[twins[0]].start - first
        start = begins[storage] + first
        regions[node] = ByteRange(root, start, start + _span(value))
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


def in_place_form(node: fx.Node) -> Any:
    """The operator that computes the same into its first argument, if there is one and the result fits there."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or not has_layout_of(source.meta.get("val"), node.meta.get("val")):
        return None
    if (collective := collectives.in_place_form(node)) is not None:
        return collective if source.meta["val"].is_contiguous() else None
    return in_place_twin(node.target)


def update_chain(value: Any, placeholder: fx.Node) -> list[fx.Node]:
    """The ops from an input to its new value, each the first argument of the next and able to work in place; empty if
    there is no such path.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... p: f32[4] = parameter("p")
        ... mul: f32[4] = aten.mul.Tensor(p, 0.5)
        ... add: f32[4] = aten.add.Tensor(mul, 1.0)
        ... return update("p", add)
        ... ''')
        >>> p, _, add, _ = program.graph.nodes
        >>> update_chain(add, p)
        [mul, add]
    """
    chain: list[fx.Node] = []
    node = value
    while node is not placeholder:
        if not isinstance(node, fx.Node) or in_place_form(node) is None:
            return []
        chain.append(node)
        node = node.args[0]
    return chain[::-1]


@remembered
def in_place_twin(target: Any) -> Any:
    """The operator of the same arguments that writes its first one and returns it; None if there is none.

    >>> in_place_twin(torch.ops.aten.add.Tensor), in_place_twin(torch.ops.aten.mm.default)
    (<OpOverload(op='aten.add_', overload='Tensor')>, None)
    """
    if not isinstance(target, OpOverload):
        return None
    schema = schema_of(target)
    namespace, name = schema.name.split("::")
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns) or name == "set":
        return None  # `set_` would share the memory of its second argument, not write its first's
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    twin = getattr(packet, schema.overload_name or "default", None) if packet is not None else None
    if twin is None or len(schema_of(twin).returns) != 1 or len(schema.returns) != 1:
        return None
    writes = [item.alias_info is not None and item.alias_info.is_write for item in schema_of(twin).arguments]
    same = [item.name for item in schema_of(twin).arguments] == [item.name for item in schema.arguments]
    return twin if same and writes[0] and not any(writes[1:]) else None


def has_layout_of(old: Any, new: Any) -> bool:
    """Whether a value can lie where another does: the same type, strides and bits, each element in a place of its own.

    >>> has_layout_of(torch.empty(4, 2), torch.empty(4, 2)), has_layout_of(torch.empty(4, 2), torch.empty(2, 4).t())
    (True, False)
    """
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return False
    if old.layout is not torch.strided or new.layout is not torch.strided:
        return False
    if (old.dtype, old.device, old.is_conj(), old.is_neg()) != (new.dtype, new.device, new.is_conj(), new.is_neg()):
        return False
    return statically_equal((*old.shape, *old.stride()), (*new.shape, *new.stride())) and _is_dense(old)


def _is_dense(value: Tensor) -> bool:
    """Whether each element provably has a place of its own: no expanded dims, no strides that meet."""
    if _is_symbolic(value):
        step: Any = 1
        for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
            if not statically_equal(stride, step):
                return False
            step = step * size
        return True
    end = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= end:
            return False
        end += max(size - 1, 0) * stride
    return True
