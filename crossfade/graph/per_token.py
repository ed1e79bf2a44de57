"""What operators make of a part of the tokens: which compute each token by itself, and how to call them on a part.

A value is *in parts* along a dim if each rank has its own part there. `split` says, for one call with arguments in
parts, along which dim its results are then in parts, which of its other arguments have to be cut, and which of its size
arguments change; or why the call needs all tokens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.effects import is_pure
from crossfade.graph.operators import argument_names, arguments
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program

_aten = torch.ops.aten

SUMMED = -1
"""Stands for a dim where a result is this rank's part of a sum over all tokens."""

MIXES = "it mixes tokens"
UNKNOWN = "it is not known to compute each token by itself"
DIFFERENT_DIMS = "its operands are in parts along different dims"
SIZES = "its sizes are not known before it runs"
LAYOUT = "it views what does not lie in order"
VIEW_MIXES = "the view does not keep the parts together"

Place = int | tuple[int, ...]
"""The dim along which a value is in parts, `SUMMED`, or one of these for each of several results."""


@dataclass(frozen=True)
class Split:
    """How one call works on a part: `place` of what it makes, `cut` the dim of each argument that must be in parts,
    `sizes` the arguments, by name, that are other numbers for a part."""

    place: Place
    cut: Mapping[fx.Node, int]
    sizes: Mapping[str, Any] = field(default_factory=dict)


Places = Mapping[fx.Node, int]


def split(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """How a call works on parts, given the dims of the arguments that are in parts; else why it does not.

    >>> from crossfade.graph.text import parse
    >>> x, w, y, z, out = parse('''
    ... x: f32[4, 6] = input("x")
    ... w: f32[6] = input("w")
    ... y: f32[4, 6] = aten.mul.Tensor(x, w)
    ... z: f32[6] = aten.amax(x, [0])
    ... return output("y", y)
    ... ''').graph.nodes
    >>> split(y, {x: 0}, ranks=2)
    Split(place=0, cut={x: 0}, sizes={})
    >>> split(z, {x: 0}, ranks=2)
    'it mixes tokens'
    """
    if not _is_static(node.meta.get("val")):
        return SIZES
    rule = _RULES.get(node.target) or (_pointwise if is_pointwise(node.target) else None)
    return rule(node, places, ranks) if rule is not None else UNKNOWN


def work_on_part(program: Program, node: fx.Node, how: Split) -> None:
    """Give a call, whose arguments are parts by now, its other sizes, and describe again what it makes."""
    names = argument_names(node.target)
    for name, value in how.sizes.items():
        if names.index(name) < len(node.args):
            node.update_arg(names.index(name), value)
        else:
            node.update_kwarg(name, value)
    describe_again(program, node)


def describe_again(program: Program, node: fx.Node) -> None:
    """Describe what a call makes of its arguments as they are described now; also the elements of several results."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with program.fake_mode, torch.no_grad():
        _describe(node, node.target(*args, **kwargs))  # type: ignore[operator]
    for element in elements(node):
        _describe(element, node.meta["val"][element.args[1]])


def elements(node: fx.Node) -> list[fx.Node]:
    """The nodes that take one of several results each."""
    return [user for user in node.users if user.target is operator.getitem]


def _describe(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value
    node.meta.pop("tensor_meta", None)  # torch's tracer says there what was


def is_pointwise(target: Any) -> bool:
    """Whether an operator makes each element of one new tensor of the elements in the same place, and draws nothing."""
    schema = schema_of(target)
    if schema is None or len(schema.returns) != 1 or not is_pure(target) or target in _NOT_POINTWISE:
        return False
    return torch.Tag.pointwise in target.tags or target in _UNTAGGED


def is_view(target: Any) -> bool:
    """Whether an operator only looks at its input in another shape or order."""
    return target in _VIEWS


_NOT_POINTWISE = {_aten.as_strided.default}
_UNTAGGED = {
    *(_aten._to_copy.default, _aten.to.dtype, _aten.alias.default, _aten.detach.default, _aten.contiguous.default),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.lift_fresh_copy.default),
    *(_aten.elu_backward.default, _aten.hardtanh_backward.default, _aten.leaky_relu_backward.default),
    *(_aten.softplus_backward.default, _aten.hardswish_backward.default, _aten.mish_backward.default),
}
"""Pointwise operators that torch does not tag as such."""


def _is_static(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return all(isinstance(size, int) for tensor in values if isinstance(tensor, Tensor) for size in tensor.shape)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]


def _pointwise(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """Dims are counted from the last, as they broadcast."""
    found = {places[source] - source.meta["val"].dim() for source in places}
    if len(found) > 1:
        return DIFFERENT_DIMS
    (dim,) = found
    cut = {}
    for source in _tensors(node):
        shape = source.meta["val"].shape
        if len(shape) >= -dim and shape[dim] != 1:
            cut[source] = len(shape) + dim
    return Split(node.meta["val"].dim() + dim, cut)


def _reduction(node: fx.Node, places: Places, ranks: int) -> Split | str:
    given = arguments(node)
    dims = given.get("dim")
    source = given["self"]
    number, place = source.meta["val"].dim(), places[source]
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {dim % number for dim in dims} if dims else set(range(number))
    cut = {source: place}
    if place in reduced:
        return Split(SUMMED, cut) if node.target in _SUMS else MIXES
    kept = place if given.get("keepdim") else place - sum(dim < place for dim in reduced)
    results = len(schema_of(node.target).returns)
    return Split(kept if results == 1 else (kept,) * results, cut)


def _along_dim(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """Operators that mix along one dim of operands of one shape."""
    given = arguments(node)
    if len(set(places.values())) > 1:
        return DIFFERENT_DIMS
    place = next(iter(places.values()))
    value: Tensor = node.meta["val"]
    if given["dim"] % value.dim() == place:
        return MIXES
    sources = _tensors(node)
    if any(source.meta["val"].dim() != value.dim() for source in sources):
        return UNKNOWN
    return Split(place, dict.fromkeys(sources, place))


def _norm(node: fx.Node, places: Places, ranks: int) -> Split | str:
    given = arguments(node)
    source = given["input"]
    if set(places) != {source}:
        return MIXES
    place = places[source]
    if place >= source.meta["val"].dim() - len(given["normalized_shape"]):
        return MIXES
    results = len(schema_of(node.target).returns)
    return Split(place if results == 1 else (place,) * results, {source: place})


def _norm_backward(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """The gradient of the input token by token; those of weight and bias are sums over all tokens."""
    given = arguments(node)
    by_token = [given[name] for name in ("grad_out", "input", "mean", "rstd") if name in given]
    number = given["input"].meta["val"].dim()
    if len(found := set(places.values())) > 1:
        return DIFFERENT_DIMS
    (place,) = found
    if place >= number - len(given["normalized_shape"]) or not set(places) <= set(by_token):
        return MIXES
    if any(source.meta["val"].dim() != number for source in by_token):
        return UNKNOWN
    results = len(schema_of(node.target).returns)
    return Split((place, *[SUMMED] * (results - 1)), dict.fromkeys(by_token, place))


def _view(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """A dim that as much lies before is cut at the same places, whatever it took in of the dims after it, or shed."""
    (source,) = places
    before, after = source.meta["val"], node.meta["val"]
    if not before.is_contiguous():
        return LAYOUT
    place = places[source]
    outer = math.prod(before.shape[:place])
    for dim, size in enumerate(after.shape):
        if math.prod(after.shape[:dim]) == outer and size > 1:
            if size % ranks:
                return VIEW_MIXES
            sizes = [*after.shape[:dim], size // ranks, *after.shape[dim + 1 :]]
            name = "shape" if node.target is _aten.reshape.default else "size"
            return Split(dim, {source: place}, {name: sizes})
    return VIEW_MIXES


def _permute(node: fx.Node, places: Places, ranks: int) -> Split | str:
    (source,) = places
    number = source.meta["val"].dim()
    given = arguments(node)
    order = list(range(number))
    if node.target is _aten.permute.default:
        order = [dim % number for dim in given["dims"]]
    elif number > 1:
        first, second = (given.get("dim0", 0) % number, given.get("dim1", 1) % number)
        order[first], order[second] = order[second], order[first]
    return Split(order.index(places[source]), dict(places))


def _unsqueeze(node: fx.Node, places: Places, ranks: int) -> Split | str:
    (source,) = places
    place = places[source]
    dim = arguments(node)["dim"] % node.meta["val"].dim()
    return Split(place + (dim <= place), dict(places))


def _squeeze(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """One part of a dim may have size 1 where the whole has not, so the dim itself must not be among those named."""
    (source,) = places
    shape, place = source.meta["val"].shape, places[source]
    dims = arguments(node)["dim"]
    gone = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    if place in gone:
        return VIEW_MIXES
    return Split(place - sum(dim < place and shape[dim] == 1 for dim in gone), dict(places))


def _expand(node: fx.Node, places: Places, ranks: int) -> Split | str:
    (source,) = places
    shape = node.meta["val"].shape
    place = places[source] + len(shape) - source.meta["val"].dim()
    sizes = [*shape[:place], shape[place] // ranks, *shape[place + 1 :]]
    return Split(place, dict(places), {"size": sizes})


def _of_one_dim(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """Slices, selections and splits of another dim than the one in parts."""
    (source,) = places
    place = places[source]
    given = arguments(node)
    dim = given["dim"] % source.meta["val"].dim()
    if dim == place:
        return MIXES
    kept = place - (node.target in (_aten.select.int, _aten.unbind.int) and dim < place)
    value = node.meta["val"]
    return Split((kept,) * len(value) if isinstance(value, (tuple, list)) else kept, dict(places))


def _slice_backward(node: fx.Node, places: Places, ranks: int) -> Split | str:
    """The gradient of what a slice was taken of, where that is another dim than the one in parts."""
    how = _of_one_dim(node, places, ranks)
    if isinstance(how, str) or not isinstance(how.place, int):
        return how
    sizes = list(node.meta["val"].shape)
    sizes[how.place] //= ranks
    return Split(how.place, how.cut, {"input_sizes": sizes})


def _cat(node: fx.Node, places: Places, ranks: int) -> Split | str:
    if len(found := set(places.values())) > 1:
        return DIFFERENT_DIMS
    (place,) = found
    value: Tensor = node.meta["val"]
    sources = _tensors(node)
    if arguments(node)["dim"] % value.dim() == place:
        return MIXES
    if any(source.meta["val"].dim() != value.dim() for source in sources):  # torch lets flat empty ones take part
        return UNKNOWN
    return Split(place, dict.fromkeys(sources, place))


_SUMS = {_aten.sum.dim_IntList, _aten.sum.default}
_VIEWS = {
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default),
    *(_aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
}

Rule = Callable[[fx.Node, Places, int], Split | str]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default), _view),
    **dict.fromkeys((_aten.permute.default, _aten.transpose.int, _aten.t.default), _permute),
    _aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((_aten.squeeze.dim, _aten.squeeze.dims), _squeeze),
    _aten.expand.default: _expand,
    **dict.fromkeys((_aten.slice.Tensor, _aten.select.int, _aten.unbind.int), _of_one_dim),
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default), _of_one_dim),
    _aten.slice_backward.default: _slice_backward,
    _aten.cat.default: _cat,
    **dict.fromkeys((*_SUMS, _aten.mean.dim, _aten.amax.default, _aten.amin.default), _reduction),
    **dict.fromkeys((_aten.var.correction, _aten.var_mean.correction, _aten.logsumexp.default), _reduction),
    _aten.linalg_vector_norm.default: _reduction,
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default, _aten.softmax.int), _along_dim),
    **dict.fromkeys((_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default), _along_dim),
    **dict.fromkeys((_aten.log_softmax.int, _aten.cumsum.default), _along_dim),
    **dict.fromkeys((_aten.native_layer_norm.default, _aten.layer_norm.default, _aten.rms_norm.default), _norm),
    _aten.native_layer_norm_backward.default: _norm_backward,
}
if hasattr(_aten, "_fused_rms_norm"):
    _RULES[_aten._fused_rms_norm.default] = _norm
if hasattr(_aten, "_fused_rms_norm_backward"):
    _RULES[_aten._fused_rms_norm_backward.default] = _norm_backward
