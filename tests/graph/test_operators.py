"""Answers about operators are remembered, and what runs a region is not kept for them."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import pytest
import torch

from crossfade.execute.compile_regions import EagerRegion
from crossfade.execute.executable import Executable
from crossfade.graph.operators import remembered
from crossfade.graph.program import Program
from crossfade.graph.text import parse

_aten = torch.ops.aten

PROGRAM = """
x: f32[4] = input("x")
a: f32[4] = aten.neg(x)
return output("a", a)
"""


@pytest.mark.parametrize("target", [_aten.add.Tensor, operator.getitem, len, "weight"])
def test_a_question_is_asked_once(target: Any) -> None:
    asked = []

    @remembered
    def answer(target: Any) -> str:
        asked.append(target)
        return str(target)

    assert [answer(target), answer(target)] == [str(target)] * 2
    assert asked == [target]


def test_what_ends_is_forgotten_and_its_place_free() -> None:
    class Call:
        def __call__(self) -> None: ...

    @remembered
    def number_of(target: Any) -> int:
        return int(target.number)

    for number in range(100):  # memory is used again, so that ids come back
        call = Call()
        call.number = number
        assert number_of(call) == number
        del call


def called_by_a_program() -> tuple[Program, weakref.ref[Any]]:
    """A program whose one node calls an object."""
    inner, program = parse(PROGRAM), parse(PROGRAM)
    call = EagerRegion(inner)
    [node] = [node for node in program.graph.nodes if node.op == "call_function"]
    with program.graph.inserting_before(node):
        region = program.graph.call_function(call, tuple(node.args))
        element = program.graph.call_function(operator.getitem, (region, 0))
    element.meta = dict(node.meta)
    node.replace_all_uses_with(element)
    program.graph.erase_node(node)
    return program, weakref.ref(call)


def test_what_runs_a_region_ends_with_its_program() -> None:
    program, call = called_by_a_program()
    assert torch.equal(Executable(program, {})([torch.ones(2 * 2)])[0], -torch.ones(4))
    del program
    gc.collect()
    assert call() is None
