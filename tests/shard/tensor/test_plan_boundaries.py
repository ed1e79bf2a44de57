"""What a plan says modules take and return: acted on where values enter and leave them, or said to have no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, SequenceParallel

from crossfade.errors import PlanError
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.lockstep import run_ranks

PAIR = {"up": "colwise", "down": "rowwise"}


class Pick(nn.Module):
    """Returns whole numbers, which no layout is for."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


class Table(nn.Module):
    """Takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self) -> Tensor:
        return self.weight * 2


class Net(nn.Module):
    """A norm that is called twice, before and after a pair of projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.norm(x + self.down(self.up(x).relu()))


class Picked(Net):
    """The same on rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.pick, self.table = Pick(), Table()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table()[self.pick(x)])


def local(entries: dict[str, Any], shape: tuple[int, ...] = (3, 4, 8), kind: type[Net] = Net) -> LocalProgram:
    """The program of two ranks, which computes what one device does."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    exported = torch.export.export(model, (x,))
    before = str(exported.graph)
    made = localize(exported, Plan(entries).resolve(exported, 2), 2, "tp", Request())
    assert str(exported.graph) == before, "the given program is left as it is"
    for (found,) in run_ranks(made, dict(model.state_dict()), [x]):
        torch.testing.assert_close(found, model(x).detach())
    return made


def called(made: LocalProgram) -> list[str]:
    """What a forward communicates or splits, and its norms with the sizes that they compute on."""
    found = []
    for node in made.exported.graph.nodes:
        name = str(node.target).split(".")[-2] if node.op == "call_function" else ""
        if name == "layer_norm" or (name.startswith("tp_") and name != "tp_enter"):
            found.append(f"{name} {list(node.meta['val'].shape)}" if name == "layer_norm" else name)
    return found


def test_what_a_module_takes_is_brought_to_the_layout_asked_for() -> None:
    plain = called(local(PAIR))
    assert plain == ["layer_norm [3, 4, 8]", "tp_reduce", "layer_norm [3, 4, 8]"]
    split = called(local({**PAIR, "norm": SequenceParallel()}))
    assert split == [
        "tp_split",
        "layer_norm [3, 2, 8]",
        "tp_gather_enter",
        "tp_scatter",
        "layer_norm [3, 2, 8]",
        "tp_gather",
    ]


def test_an_input_alone_can_be_asked_for() -> None:
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    made = local({**PAIR, "norm": prepared}, shape=(2, 4, 8))
    assert called(made)[:2] == ["tp_split", "layer_norm [1, 4, 8]"]


def test_a_layout_that_does_not_fit_the_value_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"what norm takes has the shape \(3, 5, 8\) and cannot be shard\(1\) over 2 ranks"
    ):
        local({**PAIR, "norm": SequenceParallel()}, shape=(3, 5, 8))
    with pytest.raises(PlanError, match=r"what norm takes has 3 dims and cannot be shard\(3\): expected a dim it has"):
        local({**PAIR, "norm": SequenceParallel(sequence_dim=3)})
    returned = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    with pytest.raises(PlanError, match=r"what down returns has the shape \(3, 4, 8\) and cannot be shard\(0\)"):
        local({"up": "colwise", "down.weight": Shard(1), "down": returned})


def test_boundaries_that_nothing_crosses_are_told() -> None:
    boundary = {"style": "boundary", "input": "shard(1)", "output": "replicate"}
    made = local({**PAIR, "pick": boundary, "table": boundary}, kind=Picked)
    why = "the plan's boundary has nothing to act on"
    said = [(verdict.subject, verdict.detail) for verdict in made.verdicts if verdict.reason == why]
    assert said == [
        ("table", "no value of the program that table takes could be placed"),
        ("pick", "no value of the program that pick returns could be placed"),
    ]
    returned = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(4))
    made = local({**PAIR, "norm": returned})
    assert {verdict.reason for verdict in made.verdicts} >= {"it has no such dim", why}


def test_split_weights_say_themselves_what_enters() -> None:
    with pytest.raises(PlanError, match=r"the input layout 'shard\(1\)' of a style 'colwise'"):
        Plan({"up": {"style": "colwise", "input": "shard(1)"}})
