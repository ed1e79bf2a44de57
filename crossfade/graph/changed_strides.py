"""Values that come to lie in memory differently, and what that does to those who read them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph.effects import written_inputs
from crossfade.graph.private import schema_of, statically_equal, tree_flatten
from crossfade.graph.program import Program

_MOST = 64
"""Other strides usually end at the first op that computes something: more readers of each value are not looked at."""

_MATMULS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear"))
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "abs", "add", "ceil", "clone", "div", "eq", "floor", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne",
        "neg", "relu", "sub", "where",
    )
)  # fmt: skip
"""Elementwise operators of which every result is the exact one, rounded once."""

_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
        "sym_numel", "sym_size", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
    )
)  # fmt: skip

_COPYING = frozenset(("aten::slice_scatter", "aten::select_scatter"))
"""Operators that compute nothing: they put the elements of one value into another's."""

_BY_STRIDES = ("strid", "storage", "resize", "is_contiguous", "is_non_overlapping")
"""Words in the names of operators whose results depend on how their argument lies in memory."""


class Strides:
    """Plans values of other strides in the place of some nodes', one set after another, before the graph is changed.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... a: f32[4, 2] = aten.neg(x)
    ... b: f32[4, 2] = aten.exp(a)
    ... return output("b", b)
    ... ''')
    >>> x, a, b, out = program.graph.nodes
    >>> with program.fake_mode:
    ...     wide, _ = torch.empty(4, 4).split(2, dim=1)
    >>> print(Strides(program).take({a: wide}))
    None
    >>> Strides(program).take({b: wide})
    'a result of the program would have other strides'
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._taken: dict[fx.Node, Any] = {}

    def take(self, values: Mapping[fx.Node, Tensor]) -> str | None:
        """Plan some values; or plan none and say which reader could not take them.

        Views of such a value have other strides too, or cannot be taken; what is computed from it mostly has not.
        """
        found = _followed(self.program, values, self._taken)
        if isinstance(found, str):
            return found
        self._taken |= found | dict(values)
        return None


def replace_strided(program: Program, others: Mapping[fx.Node, fx.Node]) -> None:
    """Give the users of some nodes others of equal values and other strides, and update the users' metadata."""
    found = _followed(program, {node: other.meta["val"] for node, other in others.items()}, {})
    if isinstance(found, str):
        raise RewriteError(f"values laid out differently, though {found}", remedy="plan them with Strides first")
    for user, value in found.items():
        user.meta["val"] = value
    for node, other in others.items():
        node.replace_all_uses_with(other)


def same_bits_below(program: Program, node: fx.Node, value: Any) -> dict[fx.Node, Any] | str:
    """The nodes below with their new values if `node` had this one, of other strides; or why a bit could change.

    Exact operators that work element by element do not care for strides, and matmuls not for gaps between rows.
    Everything else may round in another way, or add up in another order.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 2] = input("x")
    ... a: f32[4, 2] = aten.neg(x)
    ... b: f32[4, 2] = aten.neg(a)
    ... c: f32[2] = aten.sum.dim_IntList(a, [0])
    ... return output("b", b), output("c", c)
    ... ''')
    >>> x, a, b, c, out = program.graph.nodes
    >>> with program.fake_mode:
    ...     wide, _ = torch.empty(4, 4).split(2, dim=1)
    >>> same_bits_below(program, a, wide), same_bits_below(program, x, wide)
    ('its strides would change, and c may then round in another way', {})
    """
    return _followed(program, {node: value}, {}, _against_order) if isinstance(value, Tensor) else {}


def _followed(
    program: Program,
    values: Mapping[fx.Node, Tensor],
    taken: Mapping[fx.Node, Any],
    against: Callable[[fx.Node, Mapping[fx.Node, Any]], str | None] = lambda user, changed: None,
) -> dict[fx.Node, Any] | str:
    """The values of all nodes below that change their strides with the given ones, or why one of them cannot.

    `taken` are values that others have changed before; `against` says what else a reader of those changed may not be.
    """
    changed: dict[fx.Node, Any] = {
        node: value for node, value in values.items() if not _is_laid_out_as(node.meta["val"], value)
    }
    waiting = [user for node in changed for user in node.users]
    heapq.heapify(waiting)  # nodes compare by their place in the graph
    seen: set[fx.Node] = set()
    while waiting:
        user = heapq.heappop(waiting)
        if user in seen:
            continue
        seen.add(user)
        if len(seen) > _MOST * len(values):
            return "too many ops would read it by other strides"
        if (reason := _against_reader(user) or against(user, changed)) is not None:
            return reason
        try:
            new = _described(program, user, lambda source: changed.get(source, taken.get(source, source.meta["val"])))
        except (RuntimeError, ValueError):
            return "a view of it could not be taken"
        if not _is_laid_out_as(taken.get(user, user.meta["val"]), new):
            changed[user] = new
            for below in user.users:
                heapq.heappush(waiting, below)
    return {node: value for node, value in changed.items() if node not in values}


def _described(program: Program, user: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = fx.map_arg((user.args, user.kwargs), value_of)
    with torch.no_grad(), program.fake_mode:
        return user.target(*args, **kwargs)  # type: ignore[operator]


def _against_reader(user: fx.Node) -> str | None:
    if user.op == "output":
        return "a result of the program would have other strides"
    schema = schema_of(user.target)
    name = schema.name if schema is not None else f"aten::{getattr(user.target, '__name__', '')}"
    if collectives.is_collective(user) or collectives.is_wait(user) or written_inputs(user):
        return "something communicates or writes it"
    is_known = schema is not None or getattr(user.target, "__module__", "") == "_operator"
    if not is_known or not name.startswith("aten::"):
        return "an op of another library would read it by other strides"
    return "something goes by its strides" if any(word in name for word in _BY_STRIDES) else None


def _against_order(user: fx.Node, changed: Mapping[fx.Node, Any]) -> str | None:
    """Why a reader of other strides might compute other bits."""
    schema = schema_of(user.target)
    if schema is None or schema.name in _VIEWS | _COPYING or _is_elementwise_alike(user, schema.name):
        return None
    read = [source.meta["val"] for source in user.all_input_nodes]
    read += [changed[source] for source in user.all_input_nodes if source in changed]
    if schema.name in _MATMULS and all(map(_has_dense_rows, read)):
        return None
    return f"its strides would change, and {user.name} may then round in another way"


def _is_elementwise_alike(user: fx.Node, name: str) -> bool:
    """Whether an operator makes each element of its own, by the same bits wherever it lies.

    On CPUs, elements in a row are computed by other instructions than single ones: those of exact operators and of
    whole numbers agree, exponentials and the zeros of complex numbers do not.
    """
    tags = getattr(user.target, "tags", ())
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return False
    values = [value for node in (user, *user.all_input_nodes) for value in tree_flatten(node.meta.get("val"))[0]]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if all(tensor.is_cuda or not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors):
        return True
    scaled = len(user.args) > 2 or "alpha" in user.kwargs
    is_exact = name in _EXACT and not (scaled and name in ("aten::add", "aten::sub"))
    return is_exact and not any(tensor.is_complex() for tensor in tensors)


def _has_dense_rows(value: Any) -> bool:
    """Whether a tensor is a stack of matrices, rows apart from one another by some gap, stored in their order."""
    if not isinstance(value, Tensor) or value.dim() < 2 or not statically_equal(value.stride(-1), 1):
        return False
    sizes = (*value.shape, *value.stride())
    if not all(isinstance(size, int) for size in sizes):
        return False
    pairs = zip(value.stride(), value.stride()[1:], value.shape[1:], strict=False)
    return all(outer >= inner * size for outer, inner, size in pairs)


def _is_laid_out_as(old: Any, new: Any) -> bool:
    """Whether two values have the same shape and strides."""
    before, after = tree_flatten(old)[0], tree_flatten(new)[0]
    return len(before) == len(after) and all(map(_is_alike, before, after))


def _is_alike(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor):
        return isinstance(old, (int, torch.SymInt)) and statically_equal(old, new)
    if old.layout is not torch.strided:
        return True
    return statically_equal((*old.shape, *old.stride()), (*new.shape, *new.stride()))
