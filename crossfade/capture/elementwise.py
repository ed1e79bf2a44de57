"""Whether an optimizer updates each element by itself: only then may a rank that has a part of a parameter update it.

What is looked at is the traced update of one parameter, on the whole and on a part of it. Every operator must work
element by element on tensors of the parameter's shape, and on numbers that come from no tensor of that shape; and both
traces must be the same, so that no number depends on how large the part is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from crossfade.capture.numbers import Learned
from crossfade.capture.optimizer import trace_optimizer
from crossfade.capture.optimizer_state import ELEMENTWISE
from crossfade.errors import CaptureError, OptimizerError
from crossfade.graph.effects import is_random
from crossfade.graph.private import FakeTensorMode, symbolic_shapes
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, source_line

_aten = torch.ops.aten
_COPIES = {
    _aten._to_copy.default,
    _aten.copy.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
    _aten.where.ScalarSelf,
    _aten.where.ScalarOther,
    _aten.where.Scalar,
}
_FILLED = {
    _aten.full,
    _aten.full_like,
    _aten.zeros,
    _aten.zeros_like,
    _aten.ones,
    _aten.ones_like,
    _aten.empty,
    _aten.empty_like,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.new_empty,
    _aten.scalar_tensor,
    _aten.fill,
}
_GRADIENT = "gradient"

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a whole parameter, and of the part that a rank has."""


def check_elementwise(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    shapes: Mapping[str, Shapes],
    *,
    learned: Learned | None = None,
    begins: Collection[str] = (),
    where: str = "",
) -> None:
    """Refuse an optimizer that needs whole parameters where `shapes` says that ranks have parts of them.

    `where` is what splits them. Parameters alike in shape and group are looked at once.
    """
    if type(optimizer) in ELEMENTWISE:
        return
    seen = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            signature = index, shapes.get(name), parameter.dtype, name in begins
            if name not in shapes or signature in seen:
                continue
            seen.add(signature)
            if reason := reason_against_parts(optimizer, names, parameter, shapes[name], learned, begins):
                raise OptimizerError(
                    f"{type(optimizer).__name__} cannot update a part of {name}: {reason}",
                    expected=f"an update of each element by itself where ranks have parts of parameters ({where})",
                    remedy='use data_parallel="replicate" with this optimizer, or one that works element by element',
                )


def reason_against_parts(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    parameter: Tensor,
    shapes: Shapes,
    learned: Learned | None = None,
    begins: Collection[str] = (),
) -> str:
    """Why a part of a parameter cannot be updated by itself; nothing if it can."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            return f"its state {key} has another shape, {tuple(value.shape)}"

    def traced(shape: tuple[int, ...]) -> Program:
        known = Learned(changing=set(learned.changing)) if learned is not None else Learned()
        program = _with_gradient(names[parameter], shape, parameter)
        own = frozenset(begins) & {names[parameter]}
        program = trace_optimizer(program, optimizer, names, learned=known, begins=own, alone=True).program
        program.graph.eliminate_dead_code()
        return program

    whole = traced(shapes[0])
    if reason := _reason_in(whole, shapes[0]):
        return reason
    try:
        part = traced(shapes[1])
    except CaptureError as error:
        return f"its step cannot be traced on a part alone ({error.found})"
    return _reason_in(part, shapes[1]) or _difference(whole, part)


def _with_gradient(name: str, shape: tuple[int, ...], like: Tensor) -> Program:
    """A program that is given a parameter and its gradient."""
    mode = FakeTensorMode(shape_env=symbolic_shapes(), allow_non_fake_inputs=True)
    graph = fx.Graph()
    with mode:
        value = torch.empty(shape, dtype=like.dtype, device=like.device)
    nodes = [graph.placeholder(given) for given in ("parameter", _GRADIENT)]
    for node in nodes:
        node.meta["val"] = value
    graph.output((nodes[1],))
    inputs = (Input(InputKind.PARAMETER, name), Input(InputKind.INPUT, _GRADIENT))
    return Program(graph, inputs, (Output(OutputKind.GRADIENT, name),))


def _reason_in(program: Program, shape: tuple[int, ...]) -> str:
    """The first node that does more than work element by element."""
    own: set[fx.Node] = set()
    for item, node in program.named_inputs():
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.dim():
            if tuple(value.shape) != shape:
                return f"its state {item.name} has another shape, {tuple(value.shape)}"
            own.add(node)
    for node in program.graph.nodes:
        if node.op == "call_function":
            sources = [source for source in node.all_input_nodes if source in own]
            if reason := _reason_against(node, bool(sources), shape):
                line = source_line(node)
                return f"it computes {node.target} {reason}{f' ({line})' if line else ''}"
            if sources and node.target not in _SHAPES_ONLY:
                own.add(node)
        elif node.op == "get_attr" and program.constants[str(node.target)].dim():
            return "it computes with a tensor that it makes itself"
    return ""


def _reason_against(node: fx.Node, reads_own: bool, shape: tuple[int, ...]) -> str:
    value = node.meta.get("val")
    if is_random(node):
        return "of random numbers"
    if not isinstance(value, Tensor):
        plain = not isinstance(value, tuple | list) and not reads_own
        return "" if plain else "of all its elements"
    if _is_filled(node):
        return "" if not value.dim() or tuple(value.shape) == shape else f"of shape {tuple(value.shape)}"
    known = torch.Tag.pointwise in node.target.tags or node.target in _COPIES or _is_masked(node)  # type: ignore[union-attr]
    if not known and not reads_own and all(_is_single(source) for source in node.all_input_nodes):
        return "" if not value.dim() else f"of shape {tuple(value.shape)}"
    if not known:
        return "of more than one element"
    if value.dim() and tuple(value.shape) != shape:
        return f"of shape {tuple(value.shape)}"
    if reads_own and tuple(value.shape) != shape:
        return "of all its elements"
    return ""


def _is_filled(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _FILLED


def _is_masked(node: fx.Node) -> bool:
    """Whether a node puts a number where a mask of the same shape is true."""
    if node.target is not _aten.index_put.default or len(node.args) < 3:
        return False
    given, indices, put = (cast(Any, argument) for argument in node.args[:3])
    if not isinstance(indices, tuple | list) or len(indices) != 1 or not isinstance(given, fx.Node):
        return False
    mask, value = indices[0].meta["val"], put.meta["val"] if isinstance(put, fx.Node) else None
    same = mask.dtype == torch.bool and mask.shape == given.meta["val"].shape
    return bool(same and value is not None and not value.dim())


def _is_single(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return not isinstance(value, Tensor) or not value.dim()


_SHAPES_ONLY = {
    overload
    for packet in _FILLED
    if packet is not _aten.fill
    for overload in (getattr(packet, name) for name in packet.overloads())
}
"""Operators that take a tensor's shape, and nothing of its values."""


def _difference(whole: Program, part: Program) -> str:
    """Where two traces differ in more than shapes."""
    nodes, others = list(whole.graph.nodes), list(part.graph.nodes)
    if len(nodes) != len(others):
        return "it does something else on a part than on the whole"
    place = {node: index for index, node in enumerate(nodes)} | {node: index for index, node in enumerate(others)}
    for node, other in zip(nodes, others, strict=True):
        same_call = node.op == other.op and (node.op != "call_function" or node.target is other.target)
        if not same_call or _said(node, place) != _said(other, place):
            line = source_line(other)
            return f"it computes with a part's shape as if it were the whole's{f' ({line})' if line else ''}"
    return ""


def _said(node: fx.Node, place: Mapping[fx.Node, int]) -> Any:
    """What a node is given: others by place, no shapes of what is filled."""
    given = node.args, dict(node.kwargs)
    if node.target is not operator.getitem and _is_filled(node):
        given = tuple(arg for arg in node.args if not isinstance(arg, tuple | list)), dict(node.kwargs)
    return fx.map_arg(given, lambda n: f"node {place[n]}")
