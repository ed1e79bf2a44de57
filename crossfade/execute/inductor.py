"""Regions compiled by Inductor: each distinct one once, whichever layers it stands for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from crossfade.errors import CrossfadeError
from crossfade.execute.number_operators import OPERATORS
from crossfade.graph.passes import fingerprint
from crossfade.graph.private import FakeTensorMode, compile_graph, missing_compiler
from crossfade.graph.program import Program

_aten = torch.ops.aten

EXACT = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
"""What Inductor offers to round as eager torch does: half precision after each operator, true division."""

ALIKE = {"deterministic": True, "triton.autotune_pointwise": False}
"""What keeps Inductor from choosing kernels by the clock: each rank tries them for itself, and two kernels for one sum
of products may round differently."""


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


SCATTERED = {"optimize_scatter_upon_const_tensor": False}
"""What keeps Inductor of torch 2.11 from making a scattered number a comparison, whose result is in float32."""

_SCATTERS = (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default, _aten.scatter.value)


@dataclass(frozen=True, eq=False)
class CompiledRegion:
    """What runs a region."""

    function: Callable[..., Sequence[Tensor]] = field(repr=False)
    seconds: float
    """What compiling took."""
    layouts: Sequence[Layout] = ()
    """What the program says of its results."""

    __name__ = "region"
    takes_staged = True

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Run on the region's tensors, and the tensor of its numbers if it takes some.

        Inductor keeps the order of an output's strides, not always the strides: of a product that it pads for speed it
        returns a slice; of a sum that keeps its dimension, made in one kernel with a norm's gradients, one without it.
        What comes after was compiled for the program's layouts.
        """
        found = self.function(*inputs)
        pairs = zip(found, self.layouts, strict=True)
        if all(value.stride() == layout.strides and value.dtype == layout.dtype for value, layout in pairs):
            return found
        return [_laid_out(value, layout) for value, layout in zip(found, self.layouts, strict=True)]


class Inductor:
    """Compiles regions, equal ones once."""

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.device, self.exact = device, exact
        self.compiled: dict[str, CompiledRegion] = {}

    @staticmethod
    def missing(device: str) -> str:
        """What Inductor lacks to compile for a device, in words; empty if nothing."""
        return missing_compiler(device)

    def compile(self, region: Program, *, alike: bool = False) -> CompiledRegion:
        """A function over the region's tensors and, if it takes numbers, one tensor of them all.

        With `alike` all ranks get the same kernels.

        >>> from crossfade.graph.text import parse
        >>> region = parse('''
        ... x: f32[2] = input("x")
        ... a: f32[2] = aten.neg(x)
        ... b: f32[2] = aten.exp(a)
        ... return output("b", b)
        ... ''')
        >>> inductor = Inductor(torch.device("cpu"))
        >>> inductor.compile(region) is inductor.compile(region.copy())  # doctest: +SKIP
        True
        """
        key = f"{_key(region)} {alike}"
        if key not in self.compiled:
            options = {**(EXACT if self.exact else {}), **(ALIKE if alike else {})}
            if any(node.target in _SCATTERS for node in region.results):
                options |= SCATTERED
            self.compiled[key] = self._compile(region, options)
        return self.compiled[key]

    def _compile(self, region: Program, options: dict[str, Any]) -> CompiledRegion:
        start = time.perf_counter()
        graph, examples = _for_inductor(region, self.device)
        try:
            function = compile_graph(graph, examples, options)
        except Exception as error:
            raise CrossfadeError(
                f"Inductor cannot compile a region of {len(region.graph.nodes)} nodes: {type(error).__name__}: {error}",
                remedy='pass execute="eager"',
            ) from error
        layouts = [Layout(tuple(value.shape), value.stride(), value.dtype) for value in map(_value, region.results)]
        return CompiledRegion(function, time.perf_counter() - start, layouts)


def _laid_out(value: Tensor, layout: Layout) -> Tensor:
    """A tensor with this layout: itself, a view or a copy.

    >>> _laid_out(torch.ones(2, 4)[:, :3], Layout((2, 3), (3, 1), torch.float32)).stride()
    (3, 1)
    >>> _laid_out(torch.ones(4), Layout((1, 4), (4, 1), torch.float32)).shape
    torch.Size([1, 4])
    """
    shape, strides, dtype = layout
    if value.shape != shape:
        value = value.reshape(shape)
    same = all(size == 1 or own == wanted for size, own, wanted in zip(shape, value.stride(), strides, strict=True))
    if same and value.dtype == dtype:
        return value
    return torch.empty_strided(shape, strides, dtype=dtype, device=value.device).copy_(value)


def _key(region: Program) -> str:
    """Equal for regions that one compiled function serves: names of inputs do not count, their strides do."""
    strides = [(tuple(value.stride()), value.device) for value in map(_value, region.placeholders) if _is_tensor(value)]
    numbered = tuple(type(item)(item.kind, str(index)) for index, item in enumerate(region.inputs))
    anonymous = Program(region.graph, numbered, region.outputs, constants=_used_constants(region))
    return f"{fingerprint(anonymous)} {strides}"


def _used_constants(region: Program) -> dict[str, Any]:
    return {str(node.target): region.constants[str(node.target)] for node in region.graph.find_nodes(op="get_attr")}


def _for_inductor(region: Program, device: torch.device) -> tuple[fx.GraphModule, list[Tensor]]:
    """The region's graph with tensors in place of numbers, and what describes its inputs."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    tensors = [node for node in region.placeholders if _is_tensor(_value(node))]
    numbers = [node for node in region.placeholders if node not in tensors]
    for node in tensors:
        known[node] = graph.placeholder(node.name)
    if numbers:
        together = graph.placeholder("numbers")
        for index, node in enumerate(numbers):
            known[node] = graph.call_function(_aten.select.int, (together, 0, index))
    for node in region.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], known.__getitem__))
        elif node.op != "placeholder":
            copied = graph.node_copy(node, known.__getitem__)
            if not set(node.all_input_nodes).isdisjoint(numbers):
                copied.target = OPERATORS[node.target]
            copied.meta = {}
            known[node] = copied
    with FakeTensorMode():
        examples = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in map(_value, tensors)
        ]
        examples += [torch.empty(len(numbers), dtype=torch.float64, device=device)] if numbers else []
    return fx.GraphModule(_used_constants(region), graph), examples


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
