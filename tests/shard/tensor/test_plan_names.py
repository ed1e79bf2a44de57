"""What of a program a plan can name, and how each parameter is used: read off the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan_names import ProgramNames, matches, names_of, owner, starred


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.turned = nn.Parameter(torch.ones(4, 6))
        self.conv = nn.Conv1d(6, 8, 1)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), self.conv((x @ self.turned).transpose(1, 2))


@pytest.fixture(scope="module")
def names() -> ProgramNames:
    return names_of(torch.export.export(Model(), (torch.zeros(2, 3, dtype=torch.long),)))


def roles(names: ProgramNames, name: str) -> list[tuple[str, str, int | None, int | None]]:
    return [(use.module, use.role, use.out_dim, use.in_dim) for use in names.uses[names.canonical[name]]]


def test_dims_put_out_and_contracted_over(names: ProgramNames):
    assert roles(names, "layers.0.weight") == [("layers.0", "linear", 0, 1)]
    assert roles(names, "layers.1.bias") == [("layers.1", "bias", 0, None)]
    assert roles(names, "turned") == [("", "linear", 1, 0)]
    assert roles(names, "conv.weight") == [("conv", "linear", 0, 1)]


def test_tied_tensors_have_the_uses_of_both_names(names: ProgramNames):
    assert names.canonical["head.weight"] == names.canonical["embed.weight"]
    assert sorted(roles(names, "head.weight")) == [("embed", "embedding", 1, 0), ("head", "linear", 0, 1)]
    assert [use.role for use in (names.role("embed.weight"), names.role("head.weight")) if use] == [
        "embedding",
        "linear",
    ]


def test_uses_that_disagree_are_an_error():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + x @ self.weight.t()

    found = names_of(torch.export.export(Both(), (torch.ones(2, 4),)))
    with pytest.raises(PlanError, match=r"weight is used in several ways \(linear in the model, linear in the model\)"):
        found.role("weight")


def test_modules_have_their_own_tensors(names: ProgramNames):
    assert names.modules["layers.1"] == ("layers.1.weight", "layers.1.bias")
    assert names.modules[""] == ("turned",)
    assert "layers" in names.parents and "layers.1" not in names.parents


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.[1-9]", ["layers.1"]),
        ("**.bias", ["layers.0.bias", "layers.1.bias", "conv.bias"]),
        ("layers.0", ["layers.0"]),
        ("layer.0", []),
        ("*.*.*", ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]),
    ],
)
def test_patterns(names: ProgramNames, pattern: str, found: list[str]):
    assert names.matching(pattern) == found


def test_names_that_end_alike_are_the_nearest(names: ProgramNames):
    assert names.nearest("model.layers.7.bias")[0] == "layers.*.bias"
    assert names.nearest("hed")[0] == "head"


def test_small_words():
    assert owner("layers.0.weight") == "layers.0" and owner("turned") == ""
    assert starred("a.10.b2.3") == "a.*.b2.*"
    assert matches("a.?", ["a.b", "a.bc", "a.b.c"]) == ["a.b"]
