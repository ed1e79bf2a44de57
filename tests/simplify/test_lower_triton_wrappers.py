"""Wrapped Triton kernels are called by themselves, on clones only where something would see what they write."""

from __future__ import annotations

import operator
import textwrap
from typing import Any

import pytest
import torch
from torch import fx

from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.simplify.lower_triton_wrappers import LowerTritonWrappers


def wrapped(text: str, out: str, device: str = "cpu", kernel: int = 0, constants: int = 0) -> Program:
    """A program with a call of a kernel that writes `out` and reads x, before its node `after`."""
    program = parse(textwrap.dedent(text))
    nodes = {node.name: node for node in program.graph.nodes}
    target = torch.ops.higher_order.triton_kernel_wrapper_functional
    given: dict[str, Any] = {
        "kernel_idx": kernel,
        "constant_args_idx": constants,
        "grid": [(1, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"x": nodes["x"], "out": nodes[out]},
        "tensors_to_clone": ["out"],
    }
    with program.graph.inserting_before(nodes["after"]):
        call = program.graph.call_function(target, (), given)
        element = program.graph.call_function(operator.getitem, (call, "out"))
    with program.fake_mode:
        element.meta["val"] = nodes[out].meta["val"].clone()
    call.meta["val"] = {"out": element.meta["val"]}
    nodes["after"].replace_input_with(nodes["stand_in"], element)
    program.graph.erase_node(nodes["stand_in"])
    return program


TEXT = """
    x: f32[4] = input("x")
    n: f32[4] = aten.neg(x)
    stand_in: f32[4] = aten.clone(x)
    after: f32[4] = aten.exp(stand_in)
    {last}
"""


def calls(program: Program) -> list[fx.Node]:
    target = torch.ops.higher_order.triton_kernel_wrapper_mutation
    return list(program.graph.find_nodes(op="call_function", target=target))


CASES = {
    "what dies is written itself": ('return output("after", after)', "n", "n", {"clones": 0, "dropped": 1}),
    "an input is cloned": ('return output("after", after)', "x", "clone", {"clones": 1, "dropped": 0}),
    "a result is cloned": ('return output("after", after), output("n", n)', "n", "clone", {"clones": 1, "dropped": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_lowered(name: str) -> None:
    last, out, written, counts = CASES[name]
    program = wrapped(TEXT.replace("{last}", last), out)
    result = LowerTritonWrappers().run(program)
    program.graph.lint()
    (call,) = calls(program)
    assert call.kwargs["kwargs"]["out"].name == written  # type: ignore[index,union-attr,call-overload]
    assert "tensors_to_clone" not in call.kwargs and call.meta["val"] is None
    after = next(node for node in program.graph.nodes if node.name == "after")
    assert after.args[0].name == written
    assert dict(result.counts) == {"lowered": 1, "left": 0, **counts}


def test_declined() -> None:
    text = TEXT.replace("{last}", 'return output("after", after)')
    program = wrapped(text, "n")
    call = next(node for node in program.graph.nodes if "functional" in node.name)
    given = dict(call.kwargs)

    def reason() -> str:
        return LowerTritonWrappers().run(program).verdicts[0].reason

    call.kwargs = {**given, "kwargs": {"x": call.all_input_nodes[0], "out": 3}}
    assert reason() == "what its kernel writes is not all known tensors"
    call.kwargs = given
    program.output_node.args = ((call,),)
    assert reason() == "its results are used as a whole"
    program = wrapped(text.replace("n: f32[4] = aten.neg(x)", "n: f32[4] = aten.expand(f, [4])").replace(
        "x: f32[4] =", 'f: f32[1] = input("f")\n    x: f32[4] =', 1), "n")  # fmt: skip
    assert reason() == "what its kernel writes has gaps or overlaps, which a clone would not keep"


@pytest.mark.gpu
def test_kernels_write_the_same() -> None:
    """The wrapped and the lowered call of one kernel, run."""
    import triton
    import triton.language as tl
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    @triton.jit
    def add_into(x, out, size: tl.constexpr):
        place = tl.arange(0, size)
        tl.store(out + place, tl.load(out + place) + tl.load(x + place))

    kernel = kernel_side_table.add_kernel(add_into)
    constants = kernel_side_table.add_constant_args({"size": 4})
    for last, out, *_ in CASES.values():
        text = TEXT.replace("{last}", last)
        before, after = (wrapped(text, out, kernel=kernel, constants=constants) for _ in range(2))
        LowerTritonWrappers().run(after)
        x = torch.randn(4, device="cuda")
        wrapped_results, lowered = before.module()(x.clone()), after.module()(x.clone())
        for expected, actual in zip(wrapped_results, lowered, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
