"""Parameters that every rank keeps whole where the others are split: named, or chosen at the first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import crossfade as cf
from crossfade.compile import training_phases
from crossfade.errors import CrossfadeError
from tests.ranks.cases import PLANNED, Trained, batches, start, train_eager, trained
from tests.ranks.test_training_on_ranks import differences

CHOSEN = ["0.weight", "0.bias"]
"""What a choice would be that does not hang on how fast this machine is."""


def kept_whole(mode: str, keep_whole: Any) -> tuple[Trained, list[str]]:
    """Training with some parameters whole on every rank, and their names."""
    case, model, optimizer = start("wide", "")
    options = {"data_parallel": mode, "keep_whole": keep_whole, "clip_grad_norm": 0.1}
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, timeout=30.0, **options)
    with mock.patch.object(training_phases, "parameters_to_keep_whole", lambda *_: CHOSEN):
        losses = [float(step(*batch)) for batch in batches(case, 10)]
    found = trained(losses, model, optimizer, captures=step.captures, said=step.report.facts["kept whole"])
    return found, [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "keep_whole", "expected"),
    [
        ("zero2", ["0.*", "2.bias"], ["0.weight", "0.bias", "2.bias"]),
        ("zero3", ["4.weight"], ["4.weight"]),
        ("zero2", "auto", CHOSEN),
    ],
    ids=["zero2", "zero3", "auto"],
)
def test_parameters_kept_whole_are_trained_alike(ranks: Any, mode: str, keep_whole: Any, expected: list[str]) -> None:
    eager = train_eager("wide", clip=0.1)
    for found, whole in ranks(2).run(kept_whole, mode, keep_whole):
        assert differences(eager, found, *PLANNED) == []
        assert whole == expected
        assert found.extra["captures"] == 1
        assert found.extra["said"] == f"{len(expected)} parameters"


REFUSED: dict[str, dict[str, Any]] = {
    "keep_whole=['0.weight'] with data_parallel='zero1'": {"data_parallel": "zero1", "keep_whole": ["0.weight"]},
    "keep_whole='0.*': expected \"auto\", or a list": {"data_parallel": "zero2", "keep_whole": "0.*"},
    "no parameter '0.wieght' to keep whole": {"data_parallel": "zero2", "keep_whole": ["0.wieght"]},
    "keep_whole=\"auto\" with data_parallel='zero3'": {"data_parallel": "zero3", "keep_whole": "auto"},
    'keep_whole="auto" within a memory limit': {
        "data_parallel": "zero2", "keep_whole": "auto", "memory_limit": 10**9,
    },
    'keep_whole="auto" without a machine to plan for': {
        "data_parallel": "zero2", "keep_whole": "auto", "passes": [],
    },
}  # fmt: skip


def refused() -> list[str]:
    case, model, optimizer = start("mlp", "")
    messages = []
    for options in REFUSED.values():
        with pytest.raises(CrossfadeError) as caught:
            cf.compile_step(model, case.loss, optimizer, {"dp": 2}, timeout=20, **options)
        messages.append(str(caught.value))
    cf.compile_step(model, case.loss, optimizer, {"dp": 2}, data_parallel="zero2", timeout=20)
    for keep_whole in (["0.weight"], "auto"):
        with pytest.raises(CrossfadeError) as caught:
            cf.compile_step(
                model, case.loss, optimizer, {"dp": 2}, data_parallel="zero2", keep_whole=keep_whole, timeout=20
            )
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_what_cannot_be_kept_whole_is_refused(ranks: Any) -> None:
    split = "parameter 0.weight as a DTensor: expected whole parameters, of which some are to stay whole"
    for messages in ranks(2).run(refused):
        for message, start_of_it in zip(messages, [*REFUSED, split, split], strict=True):
            assert message.startswith(start_of_it)


class Turned(nn.Module):
    """A parameter that does not lie row by row, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(16, 8).t())
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x * self.turned.t().reshape(-1)[:16]))


def turned(keep_whole: Any) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = Turned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"data_parallel": "zero2", "keep_whole": keep_whole, "timeout": 20.0}
    step = cf.compile_step(model, nn.functional.mse_loss, optimizer, {"dp": 2}, **options)
    with mock.patch.object(training_phases, "parameters_to_keep_whole", lambda *_: ["inner.bias"]):
        losses = [float(step(torch.ones(4, 16), torch.zeros(4, 16))) for _ in range(3)]
    return losses, [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.ranks
def test_a_choice_is_made_before_parameters_lie_in_parts(ranks: Any) -> None:
    """Programs are captured of parameters as they are then: parts lie row by row."""
    expected, _ = ranks(2).run(turned, [])[0]
    assert ranks(2).run(turned, "auto") == [(expected, ["inner.bias"])] * 2


@pytest.mark.ranks
def test_any_name_of_a_parameter_will_do_in_any_collection(ranks: Any) -> None:
    for _, whole in ranks(2).run(turned, {"outer.weight"}):
        assert whole == ["inner.weight"]


def replaced_too_early() -> str:
    case, model, optimizer = start("mlp", "")
    options = {"data_parallel": "zero2", "keep_whole": "auto", "timeout": 20.0}
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, **options)
    model[0].bias = nn.Parameter(torch.ones(32))
    with pytest.raises(CrossfadeError) as caught:
        step(*batches(case, 1)[0])
    return str(caught.value)


@pytest.mark.ranks
def test_parameters_that_wait_to_be_split_are_not_replaced(ranks: Any) -> None:
    for message in ranks(2).run(replaced_too_early):
        assert message.startswith("parameter 0.bias was replaced before it was split")


def asked_otherwise() -> str:
    case, model, optimizer = start("mlp", "")
    options = {"data_parallel": "zero2", "keep_whole": [["0.weight"], "auto"][dist.get_rank()], "timeout": 20.0}
    with pytest.raises(CrossfadeError) as caught:
        cf.compile_step(model, case.loss, optimizer, {"dp": 2}, **options)
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_ask_for_other_parameters_hear_of_it(ranks: Any) -> None:
    for message in ranks(2).run(asked_otherwise):
        assert "rank 0 has `keep_whole = ['0.weight']`, rank 1 has `keep_whole = auto`" in message


def comes_back() -> tuple[str, float]:
    """A first step that fails on one rank, then one that does not."""
    case, model, optimizer = start("mlp", "")
    options = {"data_parallel": "zero2", "keep_whole": "auto", "timeout": 8.0}
    fails = [dist.get_rank() == 1]

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("not yet")
        return case.loss(output, targets)

    step = cf.compile_step(model, loss, optimizer, {"dp": 2}, **options)
    inputs, targets = batches(case, 1)[0]
    with pytest.raises(Exception) as caught:  # the loss's on one rank, ours on the other
        step(inputs, targets)
    fails[0] = False
    return type(caught.value).__name__, float(step(inputs, targets))


@pytest.mark.ranks
def test_after_a_first_step_that_failed_on_one_rank_all_go_on(ranks: Any) -> None:
    case, model, _ = start("mlp", "")
    inputs, targets = batches(case, 1)[0]
    (first, loss), (second, same) = ranks(2).run(comes_back)
    assert first == "RankFailedError" != second
    assert loss == same == pytest.approx(float(case.loss(model(inputs), targets).detach()), rel=1e-5)
