"""Real architectures at a share of the memory that their steps hold by themselves: the same numbers, within it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade.compile.fit_memory import live_bytes
from crossfade.compile.step import Step
from crossfade.compile.training import compile_step
from tests.models.zoo import architecture

SHARE = 0.6
"""Of what forward and backward make; weights and the optimizer's state cannot be computed again."""


NAMES = ("llama", "gpt2", "bert", "qwen2", "mistral", "phi", "gpt_neox", "olmo2", "granite", "starcoder2")


def trained(name: str, **options: Any) -> tuple[Step, list[Tensor]]:
    family = architecture(name)
    torch.manual_seed(0)
    model = family.build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = family.inputs(batch=16, seq=64)
    step = compile_step(model, None, optimizer, **options)
    losses = [step(**inputs, labels=inputs["input_ids"]) for _ in range(2)]
    return step, [*losses, *(value.detach().clone() for value in model.state_dict().values())]


@pytest.mark.models
@pytest.mark.parametrize("name", NAMES)
def test_models_train_the_same_in_less_memory(name: str) -> None:
    plain, expected = trained(name, memory="1TB")
    held = sum(plain.memory.held.values())
    budget = held + int(SHARE * (plain.memory.peak - held))
    step, found = trained(name, memory=budget)
    assert max(live_bytes(step.program)) == step.memory.peak <= budget
    assert step.memory.again
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
