"""Whatever names and values a program has, its text parses back to a program that prints the same."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx

from crossfade.capture.exported import capture_exported
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.text import parse, render
from crossfade.graph.words import ALL_DTYPES, LAYOUTS

DTYPES = sorted(set(ALL_DTYPES.values()), key=str)
TENSORS = [one for one in DTYPES if not str(one).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))]
ODD = [
    'a "b"',
    "it's",
    "a[0]",
    "\\",
    "\\n",
    "two\nlines",
    "\r",
    "\x85",
    "\u2028",
    "ü",
    "\ud800",
    "f32[] = ",
    "# no",
    "{x}",
    "f32",
]
NAMES = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(ODD)
NUMBERS = (
    st.floats()
    | st.complex_numbers()
    | st.integers(-(2**63), 2**64)
    | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-310, complex(-0.0, math.nan), True, None, ...])
)
DEVICES = st.sampled_from(["cpu", "meta", "cuda", "cuda:3"]).map(torch.device)
PLAIN = NAMES | NUMBERS | DEVICES | st.sampled_from(DTYPES) | st.sampled_from(list(LAYOUTS.values()))
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=8
)


def program_of(names: list[str], value: object, dtype: torch.dtype) -> Program:
    graph = fx.Graph()
    inputs = []
    for _ in names:
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(2, 3, dtype=dtype, device="meta")
        inputs.append(node)
    graph.output((*inputs, value))
    kinds = [InputKind.INPUT, InputKind.PARAMETER, InputKind.BUFFER]
    signature = tuple(Input(kinds[index % 3], name) for index, name in enumerate(names))
    results = (*(Output(OutputKind.OUTPUT, name) for name in names), Output(OutputKind.OUTPUT, "value"))
    return Program(graph, signature, results)


def is_utf8(text: str) -> bool:
    """Operators take no other strings."""
    return text.isascii() or text.encode("utf-8", "replace").decode() == text


def same(one: object, other: object) -> bool:
    """Equality that knows NaN, the sign of zero, and types."""
    return type(one) is type(other) and repr(one) == repr(other)


@given(st.lists(NAMES, max_size=3), VALUES, st.sampled_from(TENSORS))
@example(['quoted "x" [0]\n'], [complex(-0.0, math.inf), (1e-310,), -0.0], torch.float8_e4m3fn)
def test_printing_and_parsing_are_a_fixed_point(names: list[str], value: object, dtype: torch.dtype) -> None:
    program = program_of(names, value, dtype)
    text = render(program)
    again = parse(text)
    assert render(again) == text
    assert again.inputs == program.inputs and again.outputs == program.outputs
    assert same(again.results[-1], program.results[-1])
    assert all(node.meta["val"].dtype is dtype for node in again.placeholders)


@given(NAMES.filter(is_utf8), st.floats(), st.sampled_from(["preserve_format", "contiguous_format"]))
def test_arguments_come_back_as_they_were(message: str, number: float, layout: str) -> None:
    program = parse('x: f32[4] = input("x")\nok = aten.all(x)\ny = aten.clone(x)\nreturn output("y", y)')
    nodes = {node.name: node for node in program.graph.nodes}
    nodes["y"].kwargs = {"memory_format": LAYOUTS[layout]}
    with program.graph.inserting_before(program.output_node):
        check = program.graph.call_function(torch.ops.aten._assert_async.msg, (nodes["ok"], message))
        low = program.graph.call_function(torch.ops.aten.clamp.default, (nodes["y"], number))
    check.meta["val"], low.meta["val"] = None, nodes["y"].meta["val"]
    again = parse(render(program))
    assert render(again) == render(program)
    values = {node.name: node for node in again.graph.nodes}
    assert values[check.name].args[1] == message and same(values[low.name].args[1], number)
    assert values["y"].kwargs == {"memory_format": LAYOUTS[layout]}


def test_names_that_are_words_of_the_text() -> None:
    graph = fx.Graph()
    node = graph.placeholder("f32")
    node.meta["val"] = torch.empty(2)
    copied = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float32})
    copied.meta["val"] = torch.empty(2)
    graph.output((copied,))
    program = Program(graph, (Input(InputKind.INPUT, "f32"),), (Output(OutputKind.OUTPUT, "y"),))
    text = render(program)
    assert text.startswith('f32_: f32[2] = input("f32")\n') and render(parse(text)) == text


def test_symbolic_sizes() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y]).view(-1, 2).sum(1) + 1

    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(
        Model(), (torch.ones(6, 4), torch.ones(6, 4)), dynamic_shapes={"x": {0: rows}, "y": {0: rows}}
    )
    text = render(capture_exported(exported))
    assert "[2*s" in text or "*s" in text
    assert render(parse(text)) == text
