"""Modules of nodes: by the parameters that they read, through views, phases, and names that an earlier form had."""

from __future__ import annotations

import torch
from torch import nn

import crossfade as cf
from crossfade.graph.memory import alive_at_peak, memory_curve
from crossfade.graph.modules import by_module
from crossfade.graph.text import parse

TWO_LAYERS = """
w: f32[8, 8] = parameter("blocks.0.up.weight")
v: f32[8, 8] = parameter("blocks.1.up.weight")
x: f32[4, 8] = input("x")
t: f32[8, 8] = aten.permute(w, [1, 0])
a: f32[4, 8] = aten.mm(x, t)
b: f32[4, 8] = aten.relu(a)
c: f32[4, 8] = aten.mm(b, v)
both: f32[8, 8] = aten.add.Tensor(w, v)
return output("c", c), output("both", both)
"""


def test_nodes_belong_to_the_module_whose_parameter_they_read() -> None:
    assert by_module(parse(TWO_LAYERS)) == {
        "t": "blocks.0.up",
        "a": "blocks.0.up",
        "b": "blocks.0.up",
        "c": "blocks.1.up",
        "both": "blocks",
    }


def test_names_that_an_earlier_form_had_keep_their_module() -> None:
    assert by_module(parse(TWO_LAYERS), {"b": "blocks.7"})["b"] == "blocks.7"


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_a_training_step_has_phases_and_every_layer_in_its_order() -> None:
    model = Tower()
    step = cf.compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
    step.prepare(torch.randn(4, 8), torch.randn(4, 8))
    found = [place for node in step.program.graph.nodes if (place := by_module(step.program).get(node.name))]
    forward = [place for place in found if place.startswith("forward") and "layers" in place]
    backward = [place for place in found if place.startswith("backward") and "layers" in place]
    assert list(dict.fromkeys(forward)) == [f"forward layers.{i}.{j}" for i in range(3) for j in range(2)]
    first, last = backward.index("backward layers.2.1"), backward.index("backward layers.0.1")
    assert first < last
    assert any(place.startswith("update") for place in found)


def test_what_is_alive_at_the_peak_makes_up_the_peak() -> None:
    model = Tower()
    step = cf.compile_step(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
    step.prepare(torch.randn(4, 8), torch.randn(4, 8))
    alive = alive_at_peak(step.program)
    assert sum(size for _, size in alive) == memory_curve(step.program).peak
    assert [size for _, size in alive] == sorted((size for _, size in alive), reverse=True)
