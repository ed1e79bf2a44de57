"""Exported programs keep the roles of their inputs and outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossfade.capture.exported import capture_exported
from crossfade.graph.verify import verify


class Counting(nn.Module):
    """A buffer is changed by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x) * self.calls


def test_roles_come_from_the_signature() -> None:
    exported = torch.export.export(Counting(), (torch.ones(4, 2),)).run_decompositions({})
    program = capture_exported(exported)
    verify(program)
    assert [f"{i.kind} {i.name}" for i in program.inputs] == [
        "parameter linear.weight",
        "parameter linear.bias",
        "buffer calls",
        "input x",
    ]
    assert [f"{o.kind} {o.name}" for o in program.outputs] == ["update calls", "output mul"]


def test_the_program_computes_what_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.GELU())
    x = torch.randn(4, 2)
    program = capture_exported(torch.export.export(model, (x,)))
    (result,) = program.module()(*model.parameters(), x)
    assert torch.equal(result, model(x))


def test_dynamic_sizes_stay_dynamic() -> None:
    batch = torch.export.Dim("batch")
    exported = torch.export.export(nn.Linear(2, 3), (torch.ones(4, 2),), dynamic_shapes=({0: batch},))
    program = capture_exported(exported)
    assert isinstance(program.placeholders[-1].meta["val"].shape[0], torch.SymInt)
