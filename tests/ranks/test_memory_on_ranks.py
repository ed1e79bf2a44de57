"""A memory budget on ranks: the parameters of a step without one, bit for bit, in every mode; one error everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade as cf
from crossfade.compile.fit_memory import live_bytes
from crossfade.compile.training_phases import TRAINING, StepCompilation
from crossfade.errors import CrossfadeError, MemoryLimitError
from tests.models.choice import some

WIDTH = 32


def nothing_measured(step: StepCompilation) -> None:
    """By what is measured operators are spelled out, which rounds differently, and order and buckets are chosen, so
    that plans would differ between the steps that are compared, and with them the least budget."""
    step.measured = {}


PHASES = TRAINING.without("spell-out").replace("measure", nothing_measured)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks with dropout and batch norm, one of them in autocast, between tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:2]:
            x = block(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[2](x)
        return nn.functional.linear(x.float(), self.embed.weight)


def trained(mode: str, rows: int = 1024, **options: Any) -> tuple[cf.Step, list[Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = cf.compile_step(
        model, nn.functional.mse_loss, optimizer, {"dp": dist.get_world_size()},
        data_parallel=mode, phases=PHASES, timeout=60.0, **options,
    )  # fmt: skip
    batch = torch.randn(rows, WIDTH)
    losses = [step(batch, batch) for _ in range(2)]
    with step.gathered():
        values = [value.detach().clone() for value in model.state_dict().values()]
    return step, [*losses, *values]


def within_budgets(mode: str, shares: tuple[float, ...] = (0.0, 0.5), **options: Any) -> list[str]:
    """What is wrong with a step in the least budget, and in one half way up from there."""
    plain, expected = trained(mode, **options)
    natural, wrong = max(live_bytes(plain.program)), []
    with pytest.raises(MemoryLimitError) as refused:
        trained(mode, memory=2, **options)
    least = refused.value.least
    for budget in (least + int(share * (natural - least)) for share in shares):
        step, found = trained(mode, memory=budget, **options)
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            wrong.append(f"other numbers within {budget}")
        if not (step.memory.peak == max(live_bytes(step.program)) <= budget and step.memory.again):
            wrong.append(f"{step.memory.peak} of {budget}, {len(step.memory.again)} values computed again")
    return [*wrong, f"{least / natural:.2f}"]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", some(["replicate", "zero1", "zero2", "zero3"], often=["replicate", "zero3"]))
def test_steps_within_budgets_train_the_same(ranks: Any, mode: str) -> None:
    for found in ranks(2).run(within_budgets, mode, timeout=400.0):
        *wrong, share = found
        assert wrong == []
        assert float(share) < 0.8


@pytest.mark.ranks
@pytest.mark.models
def test_steps_within_budgets_train_the_same_on_four_ranks(ranks: Any) -> None:
    for found in ranks(4).run(within_budgets, "zero2", (0.5,), timeout=400.0):
        assert found[:-1] == []


def with_machine() -> list[str]:
    return within_budgets("replicate", (0.5,), machine="loopback-gloo", accumulate=2)


@pytest.mark.ranks
def test_planned_steps_of_micro_batches_within_budgets_train_the_same(ranks: Any) -> None:
    for found in ranks(2).run(with_machine, timeout=400.0):
        assert found[:-1] == []


def refused() -> list[str]:
    found = []
    options: list[dict[str, Any]] = [
        {"memory": 1000},
        {"memory": "much"},
        {"memory": "1MB", "recompute": {"blocks.0": "nver"}},
        {"memory": 10**6 + dist.get_rank()},
    ]
    for given in options:
        with pytest.raises(CrossfadeError) as error:
            trained("replicate", **given)
        found.append(str(error.value))
    return found


@pytest.mark.ranks
def test_every_rank_is_told_what_is_wrong_with_a_budget(ranks: Any) -> None:
    for small, words, rule, others in ranks(2).run(refused):
        assert "a step needs" in small and "Remedy: pass at least memory=" in small
        assert "memory='much': expected bytes" in words
        assert "did you mean 'never'?" in rule
        assert "memory = 1000000.0" in others and "memory = 1000001.0" in others


def moved(mode: str) -> list[str]:
    plain, expected = trained(mode)
    wrong = []
    for options in ({"offload": True}, {"offload": {"blocks.0": "full"}, "recompute": {"blocks.1": "full"}}):
        step, found = trained(mode, **options)
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            wrong.append(f"other numbers with {options}")
        if not step.memory.moved or max(live_bytes(step.program)) >= max(live_bytes(plain.program)):
            wrong.append(f"{len(step.memory.moved)} values moved with {options}: {step.memory.peak}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_steps_that_move_values_to_the_host_train_the_same(ranks: Any, mode: str) -> None:
    assert ranks(2).run(moved, mode, timeout=200.0) == [[], []]
