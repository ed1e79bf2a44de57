"""Parameters that every rank keeps whole where the others are split: named, or chosen at the first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch.distributed.tensor import DTensor

import crossfade as cf
from crossfade import training
from crossfade.errors import CrossfadeError
from tests.ranks.cases import Trained, batches, start, train_eager, trained
from tests.ranks.test_training import TOLERANCE, differences

CHOSEN = ["0.weight", "0.bias"]
"""What a choice would be that does not hang on how fast this machine is."""


def kept_whole(mode: str, keep_whole: Any) -> tuple[Trained, list[str]]:
    """Training with some parameters whole on every rank, and their names."""
    case, model, optimizer = start("wide", "")
    options = {"data_parallel": mode, "keep_whole": keep_whole, "clip_grad_norm": 0.1}
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, timeout=30.0, **options)
    with mock.patch.object(training, "parameters_to_keep_whole", lambda *_: CHOSEN):
        losses = [float(step(*batch)) for batch in batches(case, 10)]
    found = trained(losses, model, optimizer, captures=step.captures)
    return found, [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]


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
        assert differences(eager, found, *TOLERANCE["default"]) == []
        assert whole == expected
        assert found.extra["captures"] == 1


REFUSED: dict[str, dict[str, Any]] = {
    "found keep_whole=['0.weight'] with data_parallel='zero1'": {"data_parallel": "zero1", "keep_whole": ["0.weight"]},
    "found keep_whole='0.*'; expected \"auto\", or a list": {"data_parallel": "zero2", "keep_whole": "0.*"},
    "found no parameter '0.wieght' to keep whole": {"data_parallel": "zero2", "keep_whole": ["0.wieght"]},
    "found keep_whole=\"auto\" with data_parallel='zero3'": {"data_parallel": "zero3", "keep_whole": "auto"},
    'found keep_whole="auto" within a memory limit': {
        "data_parallel": "zero2", "keep_whole": "auto", "memory_limit": 10**9,
    },
    'found keep_whole="auto" without a machine to plan for': {
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
    split = "found parameter 0.weight as a DTensor; expected whole parameters, of which some are to stay whole"
    for messages in ranks(2).run(refused):
        for message, start_of_it in zip(messages, [*REFUSED, split, split], strict=True):
            assert message.startswith(start_of_it)
