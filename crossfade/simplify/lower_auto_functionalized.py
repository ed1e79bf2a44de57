"""Operators that write their arguments, out of the wrapper that made values of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.private import OpOverload, schema_of, statically_equal, views_of_bases
from crossfade.graph.program import Program
from crossfade.graph.splice import splice
from crossfade.simplify.lowering import lower_wrappers

_CLONE = torch.ops.aten.clone.default
_BASES = "_all_bases"
_WRAPPERS = ("auto_functionalized", "auto_functionalized_v2")


@dataclass(frozen=True)
class LowerAutoFunctionalized(Pass):
    """Call what `auto_functionalized` wraps on clones of what it writes, or on the values themselves.

    torch wraps operators that write their arguments so that graphs stay functional. A clone is needless where nothing
    reads the value afterwards, and its memory is neither an input's nor a result's.

    Not in a default pipeline: torch runs the wrapper itself, and the graph is no longer functional. For a graph that is
    run as it is: `simplification() + [LowerAutoFunctionalized()]`.

    Also known as: Inductor's `decompose_auto_functionalized`.

    Before:
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        a: (None, f32[4]) = higher_order.auto_functionalized(symm_mem.nvshmem_get, tensor=n, peer=1)
        r: f32[4] = a[1]
        e: f32[4] = aten.exp(r)
        return output("e", e)

    After:
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        nvshmem_get: None = symm_mem.nvshmem_get(n, 1)
        e: f32[4] = aten.exp(n)
        return output("e", e)
    """

    name = "lower-auto-functionalized"
    numerics = Numerics.BITWISE
    nested = True

    def run(self, program: Program) -> PassResult:
        """Lower each wrapper of an operator that writes known memory."""
        return lower_wrappers(program, _WRAPPERS, "it is called by itself", _reason_against, _lower)


def _reason_against(program: Program, node: fx.Node) -> str | None:
    called, given = node.args[0], node.kwargs
    if not isinstance(called, OpOverload):
        return "it calls something that is no operator"
    if str(node.target) == "auto_functionalized_v2" and not given.get(_BASES):
        return "it writes memory that it makes itself"
    if not all(user.target is operator.getitem for user in node.users):
        return "its results are used as a whole"
    by_strides = any(name.endswith("_storage_offset") for name in given)
    for base in _bases(node):
        value = base.meta["val"]
        with program.fake_mode:
            again = value.clone()
        if not statically_equal(again.stride(), value.stride()):
            return "what it writes has gaps or overlaps, which a clone would not keep"
        if by_strides and not statically_equal(value.storage_offset(), 0):
            return "a view that it writes is counted from the beginning of other memory"
    return None


def _bases(node: fx.Node) -> list[fx.Node]:
    """The values that the wrapped operator writes."""
    called: Any = node.args[0]
    written = [
        item.name for item in schema_of(called).arguments if item.alias_info is not None and item.alias_info.is_write
    ]
    places = [node.kwargs.get(name) for name in written]
    found: list[fx.Node] = []
    fx.map_arg(places if str(node.target) == "auto_functionalized" else node.kwargs[_BASES], found.append)
    return found


def _lower(program: Program, node: fx.Node) -> list[fx.Node]:
    """Put clones and the wrapped call in the wrapper's place; return the clones."""
    called: Any = node.args[0]
    first = str(node.target) == "auto_functionalized"
    bases = set(_bases(node))
    before = node.prev
    results = splice(program, _on_clones if first else _on_bases, called, dict(node.kwargs), before=node, like=node)
    for user in list(node.users):
        _give(user, results[user.args[1]])  # type: ignore[index]
    made = []
    while (before := before.next) is not node:
        made.append(before)
    program.graph.erase_node(node)
    return [new for new in made if new.target is _CLONE and new.args[0] in bases]


def _on_clones(called: Any, given: dict[str, Any]) -> list[Any]:
    """What the first wrapper does: the operator's results, then the new value of each argument it writes."""
    written = [
        item.name for item in schema_of(called).arguments if item.alias_info is not None and item.alias_info.is_write
    ]
    new = {name: _cloned(given.get(name)) for name in written}
    return [*_as_list(called(**{**given, **new})), *new.values()]


def _on_bases(called: Any, given: dict[str, Any]) -> list[Any]:
    """What the second wrapper does: the arguments written are views of bases, whose new values it returns."""
    given = dict(given)
    bases = _cloned(given.pop(_BASES))
    new = views_of_bases(called, given, bases)
    return [*_as_list(called(**{**given, **new})), *bases]


def _cloned(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_cloned(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _give(user: fx.Node, value: Any) -> None:
    """Let an element's users read a value; a list's elements one by one."""
    if isinstance(value, list):
        for element in list(user.users):
            _give(element, value[element.args[1]])  # type: ignore[index]
    elif isinstance(value, fx.Node):
        user.replace_all_uses_with(value)
    if not user.users:
        user.graph.erase_node(user)
