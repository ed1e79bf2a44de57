"""Checks and profiler marks: nodes that compute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.graph.operators import arguments, remembered
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program

_aten = torch.ops.aten
_METADATA = {_aten._assert_tensor_metadata.default}
_VALUES = {_aten._assert_async.default, _aten._assert_async.msg, _aten._assert_scalar.default}
_SIZES = {_aten.sym_constrain_range.default, _aten.sym_constrain_range_for_size.default}


@dataclass(frozen=True)
class RemoveAsserts(Pass):
    """Remove checks that the program's own metadata answers, and profiler marks.

    A check of a tensor's dtype, device, layout or sizes goes if the metadata, which every pass relies on, says the
    same. A check of values protects what cannot be known before: data, and sizes read from data, whose range torch
    learned from that very check, so that nothing else proves it. Those stay, unless `values` asks for less: then a
    program that would have stopped goes on, with numbers that mean nothing or an error elsewhere. Ranges of such sizes
    are also what torch needs to trace the program again; `sizes` removes them too.

    Also known as: Inductor's `remove_assert_ops` and `remove_profiler_ops`.

    Before:
        x: f32[4] = input("x")
        _assert_tensor_metadata: None = aten._assert_tensor_metadata(x, None, None, f32)
        neg: f32[4] = aten.neg(x)
        return output("y", neg)

    After:
        x: f32[4] = input("x")
        neg: f32[4] = aten.neg(x)
        return output("y", neg)
    """

    name = "remove-asserts"
    numerics = Numerics.BITWISE
    nested = True

    values: bool = False
    sizes: bool = False
    marks: bool = True

    def run(self, program: Program) -> PassResult:
        """One walk from the end, so that a mark's end goes before its beginning."""
        removed = {"checks": 0, "marks": 0}
        verdicts = []
        for node in reversed(list(program.graph.nodes)):
            kind = _kind(node.target) if node.op == "call_function" else ""
            if not kind:
                continue
            if (reason := self._why_stay(node)) is not None:
                verdicts.append(Verdict.of(node, Outcome.LEFT, reason, remedy=_REMEDIES.get(reason, "")))
                continue
            program.graph.erase_node(node)
            removed[kind] += 1
        return PassResult(any(removed.values()), removed, tuple(reversed(verdicts)))

    def _why_stay(self, node: fx.Node) -> str | None:
        if node.users:
            return "something uses its result"
        if _kind(node.target) == "marks":
            return None if self.marks else _KEEPS_MARKS
        if node.target in _METADATA:
            return None if _holds(node) else "metadata does not say that it holds"
        if node.target in _SIZES:
            return None if self.sizes else _CHECKS_SIZES
        return None if self.values or node.args[0] is True else _CHECKS_VALUES


_CHECKS_VALUES = "it checks values, which nothing else does"
_CHECKS_SIZES = "it says what sizes read from data can be"
_KEEPS_MARKS = "marks are kept"
_REMEDIES = {
    _CHECKS_VALUES: "RemoveAsserts(values=True) removes it",
    _CHECKS_SIZES: "RemoveAsserts(sizes=True) removes it",
    _KEEPS_MARKS: "RemoveAsserts(marks=True) removes them",
}


@remembered
def _kind(target: Any) -> str:
    """What an operator is for if it computes nothing: a mark begins or ends a range of the profiler."""
    if getattr(target, "namespace", "") == "profiler":
        return "marks"
    return "checks" if target in _METADATA | _VALUES | _SIZES else ""


def _holds(node: fx.Node) -> bool:
    """Whether a tensor's metadata says all that a check asks."""
    given = arguments(node)
    value = given["a"].meta.get("val") if isinstance(given["a"], fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    sizes, strides = _known(given["size"]), _known(given["stride"])
    return (
        (sizes is None or statically_equal(list(value.shape), sizes))
        and (strides is None or (value.layout is torch.strided and statically_equal(list(value.stride()), strides)))
        and all(given[name] in (None, getattr(value, name)) for name in ("dtype", "device", "layout"))
    )


def _known(sizes: Any) -> list[Any] | None:
    """Sizes in an argument, the symbolic ones by their nodes' metadata."""
    return None if sizes is None else [size.meta.get("val") if isinstance(size, fx.Node) else size for size in sizes]
