"""Operators without a rule, rules of one's own, and parameters that cannot be used as they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade.errors import PlanError
from crossfade.shard.tensor import rules
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.placements import REPLICATE, Shard
from crossfade.shard.tensor.plan_resolved import ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.rules import register_rule
from tests.shard.tensor.lockstep import run_ranks


@torch.library.custom_op("crossfade_tests::swish", mutates_args=())
def swish(x: Tensor, scale: Tensor) -> Tensor:
    """A kernel of one's own."""
    return x * torch.sigmoid(x * scale)


@swish.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def same_rules_after() -> Iterator[None]:
    before = dict(rules._RULES)
    yield
    rules._RULES.clear()
    rules._RULES.update(before)


class Model(nn.Module):
    """A projection, the kernel, a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.crossfade_tests.swish(self.up(x), self.scale))


def localized(model: nn.Module, splits: dict[str, int], x: Tensor, **request: Any) -> LocalProgram:
    """The program of two ranks, which gives every rank what one device gets."""
    exported = torch.export.export(model, (x,))
    parameters = {
        name: ParameterSharding(name, splits.get(name), shape=tuple(value.shape), ranks=2)
        for name, value in model.named_parameters()
    }
    local = localize(exported, ResolvedPlan(parameters, {}, ranks=2), 2, "tp", Request(**request))
    for (found,) in run_ranks(local, exported.state_dict, [x]):
        torch.testing.assert_close(found, model(x))
    return local


SPLITS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def called(local: LocalProgram) -> list[str]:
    return [str(node.target) for node in local.exported.graph.nodes if "crossfade.tp_" in str(node.target)]


def test_an_operator_without_a_rule_is_replicated_and_reported():
    local = localized(Model(), SPLITS, torch.rand(4, 8))
    said = [(verdict.subject, verdict.reason) for verdict in local.verdicts]
    assert ("swish", "there is no rule for this operator") in said
    assert any("tp_gather" in name for name in called(local))


@pytest.mark.parametrize(
    "operator",
    [swish, torch.ops.crossfade_tests.swish, torch.ops.crossfade_tests.swish.default, "crossfade_tests::swish"],
    ids=["custom_op", "packet", "overload", "name"],
)
def test_a_rule_of_ones_own_keeps_it_split(operator: Any):
    register_rule(operator, "... d, d -> ... d")
    local = localized(Model(), SPLITS | {"scale": 0}, torch.rand(4, 8))
    assert [name for name in called(local) if "gather" in name] == []
    assert not any("no rule" in verdict.reason for verdict in local.verdicts)


@pytest.mark.parametrize("text", ["d", "d -> d -> d", "d d -> d", "a.b -> a", "... ... -> ...", "d, $ -> d"])
def test_factors_that_do_not_read_are_refused(text: str):
    with pytest.raises(PlanError, match="names of dims, each once in an operand"):
        register_rule("mylib::op", text)


@pytest.mark.parametrize("operator", ["swish", "torch.ops.mylib.swish", 3, "a::b::c"])
def test_what_is_no_operator_is_refused(operator: Any):
    with pytest.raises(PlanError, match=r"Remedy: pass torch\.ops"):
        register_rule(operator, "d -> d")


@pytest.mark.parametrize("text", ["... d -> ... d", "d, d -> d", "... d, d -> d", "... d, d -> ... d, d"])
def test_a_rule_that_does_not_fit_the_call_is_refused(text: str):
    register_rule(swish, text)
    with pytest.raises(PlanError, match="register a rule that fits the operator"):
        localized(Model(), SPLITS, torch.rand(4, 8))


class Normalized(nn.Module):
    """A norm over what a projection puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_parameter_that_cannot_be_used_as_it_lies_is_named_with_its_use():
    with pytest.raises(PlanError) as caught:
        localized(Normalized(), {"norm.weight": 0}, torch.rand(4, 8))
    said = str(caught.value)
    assert "the parameter norm.weight is split on dim 0" in said
    assert "layer_norm: it needs that dim whole" in said
    assert "Remedy: change its plan entry, or pass allow_weight_gather=True" in said


def test_it_is_gathered_if_that_is_allowed():
    local = localized(Normalized(), {"norm.weight": 0}, torch.rand(4, 8), allow_weight_gather=True)
    assert called(local) == ["crossfade.tp_gather.default"]
    assert local.parameters["norm.weight"] == Shard(0) and local.parameters["norm.bias"] == REPLICATE


class Viewed(nn.Module):
    """A parameter of which a part is taken that no rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[1:5].T


def test_a_view_of_a_parameter_is_the_parameter():
    with pytest.raises(PlanError, match=r"the parameter weight is split on dim 0, .*it takes a part of the split dim"):
        localized(Viewed(), {"weight": 0}, torch.rand(4, 8))
    assert called(localized(Viewed(), {"weight": 0}, torch.rand(4, 8), allow_weight_gather=True))
