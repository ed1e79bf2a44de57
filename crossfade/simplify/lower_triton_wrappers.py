"""Calls of the user's Triton kernels, out of the wrapper that made values of what they write."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.private import statically_equal
from crossfade.graph.program import Program
from crossfade.graph.splice import insert_call
from crossfade.simplify.lowering import lower_wrappers

_FUNCTIONAL = "triton_kernel_wrapper_functional"


@dataclass(frozen=True)
class LowerTritonWrappers(Pass):
    """Call the user's Triton kernels on clones of what they write, or on the values themselves.

    A clone is needless where nothing reads the value afterwards, and its memory is neither an input's nor a result's.

    Not in a default pipeline: torch runs the wrapper itself, and the graph is no longer functional. For a graph that is
    run as it is: `simplification() + [LowerTritonWrappers()]`.

    Also known as: Inductor's `decompose_triton_kernel_wrapper_functional`.

    Before:
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        t: dict = higher_order.triton_kernel_wrapper_functional(kernel_idx=0, constant_args_idx=0, grid=[(1, 1, 1)], \
tma_descriptor_metadata={}, kwargs={"out": n, "x": x}, tensors_to_clone=["out"])
        o: f32[4] = t["out"]
        e: f32[4] = aten.exp(o)
        return output("e", e)

    After:
        x: f32[4] = input("x")
        n: f32[4] = aten.neg(x)
        triton_kernel_wrapper_mutation: None = higher_order.triton_kernel_wrapper_mutation(kernel_idx=0, \
constant_args_idx=0, grid=[(1, 1, 1)], tma_descriptor_metadata={}, kwargs={"out": n, "x": x})
        e: f32[4] = aten.exp(n)
        return output("e", e)
    """

    name = "lower-triton-wrappers"
    numerics = Numerics.BITWISE
    nested = True

    def run(self, program: Program) -> PassResult:
        """Lower each wrapper whose kernel writes known tensors."""
        return lower_wrappers(program, (_FUNCTIONAL,), "its kernel is called by itself", _reason_against, _lower)


def _reason_against(program: Program, node: fx.Node) -> str | None:
    given: dict[str, Any] = dict(node.kwargs)
    written = [given["kwargs"].get(name) for name in given["tensors_to_clone"]]
    if node.args or not all(
        isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor) for value in written
    ):
        return "what its kernel writes is not all known tensors"
    if not all(user.target is operator.getitem for user in node.users):
        return "its results are used as a whole"
    for value in written:
        with program.fake_mode:
            again = value.meta["val"].clone()
        if not statically_equal(again.stride(), value.meta["val"].stride()):
            return "what its kernel writes has gaps or overlaps, which a clone would not keep"
    return None


def _lower(program: Program, node: fx.Node) -> list[fx.Node]:
    """Put clones and the call in the wrapper's place; return the clones."""
    given: dict[str, Any] = dict(node.kwargs)
    names = given.pop("tensors_to_clone")
    clone = torch.ops.aten.clone.default
    new = {name: insert_call(program, clone, given["kwargs"][name], before=node, like=node) for name in names}
    given["kwargs"] = {**given["kwargs"], **new}
    with program.graph.inserting_before(node):
        call = program.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, (), given)
    call.meta = {**node.meta, "val": None}
    for user in list(node.users):
        user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]
        program.graph.erase_node(user)
    program.graph.erase_node(node)
    return list(new.values())
