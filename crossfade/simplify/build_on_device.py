"""Tensors built on the CPU for an accelerator are built there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.aliasing import Aliasing
from crossfade.graph.effects import is_pure, is_random
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program

_aten = torch.ops.aten
_ARANGES = frozenset({_aten.arange.default, _aten.arange.start, _aten.arange.start_step})
_CONSTRUCTORS = _ARANGES | {
    *(_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default),
    *(_aten.empty.memory_format, _aten.eye.default, _aten.eye.m),
}
_COPIES = frozenset({_aten._to_copy.default, _aten.copy.default, _aten.copy_.default})
_INDEXED = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default})
# fmt: off
_SAME_BITS = frozenset({
    "abs", "add", "alias", "bitwise_and", "bitwise_not", "bitwise_or", "cat", "clone", "detach", "eq", "expand", "flip",
    "full_like", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "ne",
    "neg", "ones_like", "permute", "repeat", "reshape", "select", "slice", "squeeze", "stack", "sub", "t", "transpose",
    "tril", "triu", "unsqueeze", "view", "where", "zeros_like", "_to_copy", "_unsafe_view",
})
# fmt: on
"""Operators that move values, or round at most once: they give the same bits on every device."""

_WRITTEN = "its memory is written to"
_RESULT = "it is a result of the program, on the CPU"
_COMMUNICATED = "ranks exchange it as the CPU has it"
_HOST = "the host reads its values"
_SCALAR = "the device takes a CPU scalar without a copy"
_DRAWN = "draws would come from another generator"
_LAST_BITS = "its last bits may be others on the device"
_CPU_USES = "the CPU computes with it"
_DEVICES = "several devices use it"


@dataclass(frozen=True)
class BuildOnDevice(Pass):
    """Build on the accelerator what constructors make on the CPU and only the accelerator uses: it waits for no copy.

    What is computed from constructors alone moves with them, if it gives the same bits there. Values that meet in one
    user move together or not at all. Random draws stay, since each device has its own generator.

    Not in a default pipeline: only models that make masks or positions on the CPU for an accelerator need it:
    `simplification().before("fold-constants", BuildOnDevice())`.

    Also known as: Inductor's `ConstructorMoverPass` (`move_constructors_to_gpu`).

    Before:
        x: f32[4] = input("x")
        c: f32[4] = aten._to_copy(x, device=device("cuda:0"))
        a: i64[4] = aten.arange(4)
        b: i64[4] = aten.mul.Tensor(a, 2)
        d: i64[4] = aten._to_copy(b, device=device("cuda:0"))
        y: f32[4] = aten.add.Tensor(c, d)
        return output("y", y)

    After:
        x: f32[4] = input("x")
        c: f32[4] = aten._to_copy(x, device=device("cuda:0"))
        a: i64[4] = aten.arange(4, device=device("cuda:0"))
        b: i64[4] = aten.mul.Tensor(a, 2)
        y: f32[4] = aten.add.Tensor(c, b)
        return output("y", y)
    """

    name = "build-on-device"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """Find the families of values built on the CPU, look at all their users, and move those that may move."""
        aliasing = Aliasing(program)
        moved, verdicts = 0, []
        for family in _families(program, aliasing):
            if not family.devices:
                continue  # nothing but the CPU uses it
            reason = family.reason or (_DEVICES if len(family.devices) > 1 else None)
            if reason is not None:
                verdicts += [Verdict.of(node, Outcome.LEFT, reason) for node in family.constructors]
                continue
            device = next(iter(family.devices))
            verdicts += [Verdict.of(n, Outcome.MOVED, "only the device uses it") for n in family.constructors]
            moved += len(family.constructors)
            _move(program, family, device, aliasing)
        left = sum(verdict.outcome is Outcome.LEFT for verdict in verdicts)
        return PassResult(bool(moved), {"moved": moved, "left": left}, tuple(verdicts))


@dataclass
class _Family:
    """Values that move together: `members` in the order of the graph, who uses them where, and what is against it."""

    members: list[fx.Node] = field(default_factory=list)
    copies: list[fx.Node] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    reason: str | None = None

    @property
    def constructors(self) -> list[fx.Node]:
        """The members that are made of nothing."""
        return [node for node in self.members if node.target in _CONSTRUCTORS]


def _families(program: Program, aliasing: Aliasing) -> list[_Family]:
    """All values made of CPU constructors alone, by family, with what their users mean for them."""
    sets = _Sets()
    members: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if _is_member(node, members):
            members[node] = None
            sets.join(node, node.all_input_nodes)
    for node in members:
        for user in node.users:
            if user not in members and user.op != "output":
                sets.join(node, [source for source in user.all_input_nodes if source in members])
    families: dict[fx.Node, _Family] = {}
    for node in members:
        family = families.setdefault(sets.find(node), _Family())
        family.members.append(node)
        if aliasing.is_written(node):
            family.reason = family.reason or _WRITTEN
        if node.target in _ARANGES and not _is_whole_arange(node):
            family.reason = family.reason or _LAST_BITS
        for user in node.users:
            if user not in members:
                _ask(family, node, user)
    return list(families.values())


def _is_member(node: fx.Node, members: dict[fx.Node, None]) -> bool:
    if node.op != "call_function" or not _is_on_cpu(node):
        return False
    tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    if node.target in _CONSTRUCTORS:
        return not tensors
    if not tensors or not all(source in members for source in tensors):
        return False
    return is_pure(node.target) and _gives_same_bits(node)


def _is_on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided


def _is_whole_arange(node: fx.Node) -> bool:
    """Whether an arange counts in whole numbers: devices compute fractions in precisions of their own."""
    given = arguments(node)
    numbers = [given.get(name, default) for name, default in (("start", 0), ("end", 0), ("step", 1))]
    if not node.meta["val"].dtype.is_floating_point:
        return True
    return all(isinstance(number, (int, float)) and number == int(number) and abs(number) < 256 for number in numbers)


def _gives_same_bits(node: fx.Node) -> bool:
    name, value = _name(node.target), node.meta["val"]
    if name not in _SAME_BITS or value.dtype.is_complex or arguments(node).get("alpha", 1) != 1:
        return False
    sources = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    from_float = any(source.dtype.is_floating_point for source in sources)
    return name != "_to_copy" or not from_float or value.dtype.is_floating_point


def _ask(family: _Family, node: fx.Node, user: fx.Node) -> None:
    """Note what a user outside the family means for a member: its device, or why it may not move."""
    reason = _reason_against(node, user)
    if reason is not None:
        family.reason = family.reason or reason
    if _devices(user):
        family.devices |= _devices(user)
        if user.target is _aten._to_copy.default:
            family.copies.append(user)


def _reason_against(node: fx.Node, user: fx.Node) -> str | None:
    if user.op == "output":
        return _RESULT
    if collectives.communicates(user.target):
        return _COMMUNICATED
    if is_random(user):
        return _DRAWN
    if _devices(user):
        return None if user.target in _COPIES or user.target in _INDEXED else _SCALAR
    if _flat_tensors(user.meta.get("val")) == []:
        return _HOST
    inputs = [source for source in user.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    alone = all(_is_on_cpu(source) for source in inputs) and is_pure(user.target)
    return _LAST_BITS if alone and len(inputs) == 1 else _CPU_USES


def _devices(node: fx.Node) -> set[torch.device]:
    """The devices that a node's results are on, the CPU left out."""
    return {value.device for value in _flat_tensors(node.meta.get("val")) if value.device.type != "cpu"}


def _flat_tensors(value: Any) -> list[Tensor]:
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def _move(program: Program, family: _Family, device: torch.device, aliasing: Aliasing) -> None:
    """Name the device in every constructor, update all metadata, and drop the copies that only changed the device."""
    for node in family.members:
        if node.target in _CONSTRUCTORS or node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
        if node.kwargs.get("pin_memory"):
            node.update_kwarg("pin_memory", False)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with program.fake_mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    for copy in family.copies:
        source = arguments(copy)["self"]
        if aliasing.may_replace(copy, source) is None:
            aliasing.replaced(copy, source)
            copy.replace_all_uses_with(source)
            program.graph.erase_node(copy)


@remembered
def _name(target: Any) -> str:
    schema = schema_of(target)
    return schema.name.removeprefix("aten::") if schema is not None else ""


class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        """The node that represents a node's set."""
        while (above := self.parent.setdefault(node, node)) is not node:
            self.parent[node] = self.parent[above]
            node = above
        return node

    def join(self, node: fx.Node, others: Iterable[fx.Node]) -> None:
        """Put nodes into one set; what is no tensor joins nothing."""
        for other in others:
            if isinstance(other.meta.get("val"), Tensor):
                self.parent[self.find(other)] = self.find(node)
