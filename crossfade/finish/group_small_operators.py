"""The same operator on many small tensors, called once for all of them: what an optimizer does to most parameters."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.effects import written_inputs
from crossfade.graph.in_place import ByteRange, MemoryUse
from crossfade.graph.lasting import only_looks
from crossfade.graph.order import reorder
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import insert_call

_aten = torch.ops.aten
_WITH_NUMBER = {
    _aten.add_.Tensor: _aten._foreach_add_,
    _aten.div_.Tensor: _aten._foreach_div_,
    _aten.mul_.Tensor: _aten._foreach_mul_,
    _aten.sub_.Tensor: _aten._foreach_sub_,
}
"""Operators on a tensor and a number."""
_WITH_TENSORS = {
    _aten.lerp_.Scalar: (_aten._foreach_lerp_, 2, "weight"),
    _aten.addcmul_.default: (_aten._foreach_addcmul_, 3, "value"),
    _aten.addcdiv_.default: (_aten._foreach_addcdiv_, 3, "value"),
}
"""Operators on so many tensors and a number, with that number's name."""
_SCALARS = (_aten._local_scalar_dense.default, _aten.item.default)

_MOST_BYTES = {"cpu": 2**21, "cuda": 2**28}
"""What the operators of one window make or change at most: on a CPU, what a common second-level cache holds until it is
used again; on a GPU, so that what they make (an eighth of that, with Adam) takes little memory together."""
_LARGEST_ON_CUDA = 2**24
"""Up to so many bytes a GPU takes no longer for an operator than the host for its launch."""
_MOST_NODES = 512


@dataclass(frozen=True)
class GroupSmallOperators(Pass):
    """Call an operator once for all small tensors that it is called on side by side.

    Nodes move within stretches that neither communicate nor do anything large, by the order that data and memory ask
    for. Each tensor gets exactly what it got, but most of what a small operator costs is its call: on a CPU up to
    `largest_kb`, on a GPU up to 16 MB. Quotients by a number stay single on a GPU: alone it multiplies by the
    reciprocal, for several it divides.

    Also known as: foreach optimizers (torch), multi-tensor apply (Apex), horizontal loop fusion (XLA).

    Before:
        a: f32[2] = parameter("a")
        b: f32[3] = parameter("b")
        g: f32[2] = input("g")
        h: f32[3] = input("h")
        m: f32[2] = aten.mul_.Tensor(a, 2.0)
        u: f32[2] = aten.addcmul_(m, g, g, value=0.5)
        n: f32[3] = aten.mul_.Tensor(b, 3.0)
        v: f32[3] = aten.addcmul_(n, h, h, value=0.5)
        return output("h", h)

    After:
        a: f32[2] = parameter("a")
        b: f32[3] = parameter("b")
        g: f32[2] = input("g")
        h: f32[3] = input("h")
        _foreach_mul_: None = aten._foreach_mul_.ScalarList([a, b], [2.0, 3.0])
        _foreach_addcmul_: None = aten._foreach_addcmul_.Scalar([a, b], [g, h], [g, h], 0.5)
        return output("h", h)
    """

    name = "group-small-operators"
    numerics = Numerics.BITWISE

    largest_kb: float = 256.0

    def run(self, program: Program) -> PassResult:
        """Find the stretches, put each in order of levels, and make one call of what is alike on a level."""
        memory = MemoryUse(program)
        windows = list(_windows(program))
        order: list[fx.Node] = []
        groups: list[list[fx.Node]] = []
        for window in windows:
            levels = _levels(window, memory)
            found = self._groups(window, levels)
            groups += found
            order += sorted(window, key=levels.__getitem__) if found else window
        reorder(program.graph, _in_places_of(program, windows, order))
        for group in groups:
            _call_once(program, group)
        counts = {"calls": len(groups), "grouped": sum(map(len, groups))}
        return PassResult(bool(groups), counts)

    def _largest(self, device: torch.device) -> float:
        return self.largest_kb * 1024 if device.type == "cpu" else _LARGEST_ON_CUDA

    def _groups(self, window: Sequence[fx.Node], levels: dict[fx.Node, int]) -> list[list[fx.Node]]:
        alike: dict[Any, list[fx.Node]] = {}
        for node in window:
            call = small_call(node)
            if call is not None and not call.stays and tensor_bytes(node.meta["val"]) <= self._largest(call.device):
                alike.setdefault((levels[node], call.kind), []).append(node)
        return [nodes for nodes in alike.values() if len(nodes) > 1]


@dataclass(frozen=True)
class _SmallCall:
    """One call of a small operator: what is called for several, the tensors that each has, and its number if any."""

    node: fx.Node
    several: Any
    tensors: tuple[fx.Node, ...]
    number: Any = None

    @property
    def device(self) -> torch.device:
        """Where all of its tensors are."""
        return self.node.meta["val"].device  # type: ignore[no-any-return]

    @property
    def stays(self) -> bool:
        """Whether it gives other bits when called for several."""
        return self.device.type == "cuda" and self.node.target is _aten.div_.Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls that go together have in common."""
        return self.several, self.number is None, self.node.meta["val"].dtype, self.device


def small_call(node: fx.Node) -> _SmallCall | None:
    """A node as a call that can be made for several at once, on tensors of one shape and dtype; None of others."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or value.device.type not in _MOST_BYTES:
        return None
    if not value.is_floating_point() or any(isinstance(size, torch.SymInt) for size in value.shape):
        return None
    call = _read(node)
    if call is None or not all(_is_like(tensor, value) for tensor in call.tensors):
        return None
    return call


def _read(node: fx.Node) -> _SmallCall | None:
    args: tuple[Any, ...] = node.args
    if node.target in _WITH_NUMBER and len(args) == 2 and not node.kwargs and is_number(args[1]):
        return _SmallCall(node, _WITH_NUMBER[node.target], args[:1], args[1])  # type: ignore[index]
    if node.target in _WITH_TENSORS:
        several, count, name = _WITH_TENSORS[node.target]  # type: ignore[index]
        number = args[count] if len(args) > count else node.kwargs.get(name, 1)
        return _SmallCall(node, several, args[:count], number)
    if node.target is _aten.sqrt.default:
        return _SmallCall(node, _aten._foreach_sqrt, args)
    if node.target is _aten.copy_.default and len(args) == 2 and not node.kwargs:
        return _SmallCall(node, _aten._foreach_copy_, args)
    return None


def _is_like(given: Any, value: Tensor) -> bool:
    if not isinstance(given, fx.Node) or not isinstance(other := given.meta.get("val"), Tensor):
        return False
    return other.shape == value.shape and other.dtype == value.dtype and other.device == value.device


def is_number(value: Any) -> bool:
    """Whether an argument is a number, known before or when the program runs."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return isinstance(value, (int, float, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)


def _windows(program: Program) -> Iterator[list[fx.Node]]:
    """Stretches of nodes that may change places: small operators, views, and arithmetic on numbers between them."""
    window: list[fx.Node] = []
    touched: Counter[str] = Counter()
    for node in program.graph.nodes:
        call = small_call(node)
        device = call.device.type if call is not None else "cpu"
        size = tensor_bytes(node.meta["val"]) if call is not None else 0
        full = touched[device] + size > _MOST_BYTES[device] or len(window) == _MOST_NODES
        if full or not (call or is_light(node)):
            yield from [window] if window else []
            window, touched = [], Counter()
        if call or is_light(node):
            window.append(node)
            touched[device] += size
    yield from [window] if window else []


def is_light(node: fx.Node) -> bool:
    """Whether a node computes nothing on tensors: a view, or arithmetic on numbers."""
    if node.op != "call_function":
        return False
    arithmetic = getattr(node.target, "__module__", "") in ("_operator", "math")
    return only_looks(node.target) or arithmetic or node.target in _SCALARS


def _levels(window: Sequence[fx.Node], memory: MemoryUse) -> dict[fx.Node, int]:
    """For each node one more than the highest of those it must follow: its arguments, and what it would overwrite or
    read too soon. Nodes of one level do not depend on each other."""
    levels: dict[fx.Node, int] = {}
    touched: dict[fx.Node, list[tuple[ByteRange, bool, int]]] = {}
    for node in window:
        read, written = memory.touched(node)
        above = [levels[source] for source in node.all_input_nodes if source in levels]
        for region in (*written, *read):
            above += [
                level
                for other, writes, level in touched.get(region.root, ())
                if (writes or region in written) and other.overlaps(region)
            ]
        levels[node] = 1 + max(above, default=0)
        for region in (*written, *read):
            touched.setdefault(region.root, []).append((region, region in written, levels[node]))
    return levels


def _in_places_of(program: Program, windows: Sequence[Sequence[fx.Node]], order: Sequence[fx.Node]) -> list[fx.Node]:
    """All nodes, those of the windows in another order."""
    moved = {node for window in windows for node in window}
    following = iter(order)
    return [next(following) if node in moved else node for node in program.graph.nodes]


def _call_once(program: Program, nodes: Sequence[fx.Node]) -> None:
    """Replace the calls of a group by one, where the first stands."""
    group = [call for node in nodes if (call := _read(node)) is not None]  # now: arguments may have been grouped before
    first = group[0]
    lists = [[call.tensors[index] for call in group] for index in range(len(first.tensors))]
    numbers = [call.number for call in group]
    overload, number = "default", []
    if first.number is not None:
        same_number = all(other is numbers[0] or _equal(other, numbers[0]) for other in numbers)
        overload, number = ("Scalar", numbers[:1]) if same_number else ("ScalarList", [numbers])
    target = getattr(first.several, overload)
    together = insert_call(program, target, *lists, *number, before=first.node, like=first.node)
    for index, call in enumerate(group):
        in_place = bool(written_inputs(call.node))
        result = call.tensors[0] if in_place else _element(program, together, index, call.node)
        call.node.replace_all_uses_with(result)
        program.graph.erase_node(call.node)


def _equal(number: Any, other: Any) -> bool:
    plain = (int, float)
    return isinstance(number, plain) and isinstance(other, plain) and type(number) is type(other) and number == other


def _element(program: Program, together: fx.Node, index: int, like: fx.Node) -> fx.Node:
    return insert_call(program, operator.getitem, together, index, before=like, like=like)
