"""What nodes say of themselves: where they come from, and how many bytes they hold."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from crossfade.graph.metadata import MADE_FOR, complete_metadata, source_line, tensor_bytes
from crossfade.graph.text import parse

USER = 'File "/home/me/model.py", line 12, in forward\n    y = self.linear(x)'
TORCH = 'File "/lib/torch/nn/linear.py", line 5, in forward\n    return F.linear(x)'


@pytest.mark.parametrize(
    ("meta", "line"),
    [
        ({}, ""),
        ({"stack_trace": f"{USER}\n{TORCH}"}, "model.py:12"),
        ({"stack_trace": TORCH}, "linear.py:5"),
        ({"stack_trace": USER, MADE_FOR: "layers.0.weight"}, "layers.0.weight"),
    ],
)
def test_the_source_of_a_node(meta: dict[str, str], line: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    assert source_line(node) == line


def test_bytes_of_lists_and_symbolic_sizes() -> None:
    program = parse('x: bf16[s0, 2] = input("x")\nreturn output("x", x)')
    value = program.placeholders[0].meta["val"]
    assert tensor_bytes(value) == int(value.shape[0].node.hint) * 2 * 2
    assert tensor_bytes([torch.empty(3), (torch.empty(2, dtype=torch.int8), None)]) == 14


def test_results_that_were_not_asked_for_are_described() -> None:
    graph = fx.Graph()
    pair = graph.placeholder("pair")
    pair.meta["val"] = (torch.empty(2), None)
    absent = graph.call_function(operator.getitem, (pair, 1))
    complete_metadata(graph)
    assert "val" in absent.meta and absent.meta["val"] is None
