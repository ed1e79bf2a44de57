"""Steps within a memory budget: the same numbers, no more bytes than allowed, one clear error where that cannot be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crossfade.compile.fit_memory import IN_REGIONS, live_bytes
from crossfade.compile.step import Step
from crossfade.compile.training import compile_step
from crossfade.errors import CrossfadeError, MemoryLimitError
from crossfade.execute import compile_regions
from crossfade.execute.compile_regions import EagerRegion
from crossfade.execute.inductor import Inductor
from crossfade.graph.memory import memory_curve
from tests.live_bytes import LiveBytes

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
        super().__init__(*layers, nn.Linear(WIDTH, WIDTH))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.block = nn.Linear(WIDTH, WIDTH, bias=False), Block()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.block(torch.tanh(self.down(x))), self.down.weight)


class Autocast(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


Trained = tuple[Step, list[Tensor]]


def trained(make: Callable[[], nn.Module], rows: int = 512, steps: int = 3, **options: Any) -> Trained:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(model, nn.functional.mse_loss, optimizer, **options)
    batch = torch.randn(rows, WIDTH)
    losses = [step(batch, batch) for _ in range(steps)]
    return step, [*losses, *(value.detach().clone() for value in model.state_dict().values())]


@functools.cache
def plainly(make: Callable[[], nn.Module]) -> Trained:
    """Trained without a budget."""
    return trained(make)


@functools.cache
def least(make: Callable[[], nn.Module], *never: str) -> int:
    """The least budget that works."""
    with pytest.raises(MemoryLimitError) as refused:
        trained(make, steps=1, memory=2, recompute=dict.fromkeys(never, "never") or None)
    return refused.value.least


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """Of plain operators: torch's own keeps memory of the size of its inputs behind the loss."""
    return ((x - y) ** 2).mean()


def peak(step: Step) -> int:
    return max(live_bytes(step.program))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [Blocks, Checkpointed, Normalised, Tied, Autocast])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_within_a_budget_trains_the_same(make: Callable[[], nn.Module], share: float):
    """Within the least budget there is, and one half way between that and what it holds without."""
    plain, expected = plainly(make)
    budget = least(make) + int(share * (peak(plain) - least(make)))
    step, found = trained(make, memory=budget)
    assert equal(found, expected)
    assert peak(step) <= budget
    assert step.memory.peak == peak(step)
    assert step.memory.again


@pytest.mark.skipif(bool(Inductor.missing("cpu")), reason="no C++ compiler")
def test_a_compiled_step_within_a_budget_computes_again_and_says_how_it_counts():
    plain, expected = plainly(Blocks)
    budget = int(0.85 * max(IN_REGIONS.live(plain.program)))
    step, found = trained(Blocks, memory=budget, execute="compiled")
    assert step.memory.again
    assert step.memory.peak == max(IN_REGIONS.live(step.program)) <= budget
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-4, atol=0.0)  # the losses
    assert "until it ends" in step.report.facts["memory of compiled regions"]


def run_eagerly(calls: Any, parts: Any, shared: Any) -> dict[Any, EagerRegion]:
    """Instead of what pays when it is compiled: none of it."""
    return {region: EagerRegion(part) for region, part in parts.items()}


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_what_a_step_in_regions_holds_is_predicted(monkeypatch: pytest.MonkeyPatch, share: float):
    """Each region runs operator by operator, so that they are seen, with the borders of a compiled one."""
    monkeypatch.setattr(Inductor, "missing", staticmethod(lambda device: ""))
    monkeypatch.setattr(Inductor, "compile", lambda self, region, alike=False: None)
    monkeypatch.setattr(compile_regions, "_those_that_pay", run_eagerly)
    natural = max(IN_REGIONS.live(plainly(Blocks)[0].program))
    step, most = measured(memory=int(share * natural), execute="compiled")
    made = step.memory.peak - sum(step.memory.held.values())
    assert most == pytest.approx(made, rel=0.03)
    assert sum(size for _, size in step.memory.at_peak) == made
    assert max(size for _, size in step.report.memory) == made
    assert made > max(memory_curve(step.program).during)


def test_the_least_budget_that_is_told_works_and_one_byte_less_does_not():
    enough = least(Blocks)
    assert trained(Blocks, memory=enough)[0].memory.peak <= enough
    with pytest.raises(MemoryLimitError, match=f"needs {enough:,} bytes .* parameters.*Remedy: pass at least"):
        trained(Blocks, memory=enough - 1)


def test_nothing_changes_without_a_budget_or_with_a_large_one():
    plain, expected = plainly(Blocks)
    for options in ({"memory": "1GB"}, {"memory": peak(plain)}, {"memory": 0.9}, {"recompute": {"head": "never"}}):
        step, found = trained(Blocks, **options)
        assert str(step.program) == str(plain.program)
        assert equal(found, expected)
        assert step.memory.again == ()
    with pytest.raises(CrossfadeError, match="memory of a step without a budget"):
        _ = plain.memory


def test_more_memory_never_makes_the_predicted_step_slower():
    natural, leanest = peak(plainly(Blocks)[0]), least(Blocks)
    budgets = [leanest + (natural - leanest) * rung // 4 for rung in range(5)]
    seconds = [trained(Blocks, steps=1, memory=budget)[0].memory.seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0 < seconds[0]


class Running(LiveBytes):
    """The most bytes that a run holds at any time, beside what it is given."""

    most = 0

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def counts(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self.given

    def seen(self, operator: str) -> None:
        self.most = max(self.most, self.live)


def measured(counting: type[Running] = Running, **options: Any) -> tuple[Step, int]:
    """A step, and the most bytes that one run of it makes and holds."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(model, mean_square, optimizer, **options)
    batch = torch.randn(512, WIDTH), torch.randn(512, WIDTH)
    step(*batch)
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    with counting([*batch, *model.parameters(), *state]) as running:
        step(*batch)
    return step, running.most


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_what_runs_holds_what_was_predicted(share: float):
    step, most = measured(memory=int(share * peak(plainly(Blocks)[0])))
    made = step.memory.peak - sum(step.memory.held.values())
    assert most == pytest.approx(made, rel=0.03)


def test_a_rule_computes_a_module_again_and_keeps_another():
    plain, expected = plainly(Blocks)
    step, found = trained(Blocks, recompute={"blocks.*": "full"})
    assert equal(found, expected)
    assert peak(step) < 0.8 * peak(plain)
    modules = {each.module.split(".")[1] for each in step.memory.again if each.module.startswith("forward blocks.")}
    assert modules == {"0", "1", "2"}
    assert not any("head" in each.module for each in step.memory.again)
    rules = {"blocks.0": "never", "blocks.*": "full"}
    step, found = trained(Blocks, recompute=rules)
    assert equal(found, expected)
    assert not any("blocks.0" in each.module for each in step.memory.again)
    assert any("blocks.1" in each.module for each in step.memory.again)


def test_what_is_never_to_be_computed_again_is_kept_also_within_a_budget():
    plain, expected = plainly(Blocks)
    rules = {"blocks.0": "never", "blocks.1": "never"}
    budget = least(Blocks, *rules)
    step, found = trained(Blocks, memory=budget, recompute=rules)
    assert equal(found, expected)
    assert not any(name in each.module for each in step.memory.again for name in ("blocks.0", "blocks.1"))
    assert least(Blocks) < budget < peak(plain)


def test_the_models_own_checkpoints_stay_unless_they_are_to_be_chosen():
    plain, expected = plainly(Blocks)
    marked, _ = plainly(Checkpointed)
    assert peak(marked) < peak(plain)
    kept, found = trained(Checkpointed, memory=peak(plain))
    assert equal(found, expected)
    assert str(kept.program) == str(marked.program)
    chosen, found = trained(Checkpointed, memory=peak(plain), recompute="auto")
    assert equal(found, expected)
    assert len(chosen.program.graph.nodes) == len(plain.program.graph.nodes)
    within, found = trained(Checkpointed, memory=int(0.7 * peak(plain)), recompute="auto")
    assert equal(found, expected)
    assert len(plain.program.graph.nodes) < len(within.program.graph.nodes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "70 gigs"}, "memory='70 gigs': expected bytes"),
        ({"memory": -1}, "memory=-1: expected bytes"),
        ({"recompute": "auto"}, "without a budget.*Remedy: pass memory="),
        ({"recompute": {"block.*": "full"}}, "'block.*', which matches no module.*Remedy: did you mean 'blocks"),
        ({"recompute": {"blocks.*": "ful"}}, "expected \"full\".*Remedy: did you mean 'full'"),
        ({"recompute": "full"}, 'expected "auto", or modules'),
    ],
)
def test_a_budget_or_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(CrossfadeError, match=message):
        trained(Blocks, **options)


def test_it_is_told_what_is_computed_again_and_what_more_memory_would_save():
    natural = peak(plainly(Blocks)[0])
    step, _ = trained(Blocks, memory=int(0.7 * natural))
    memory = step.memory
    assert memory.peak_before == natural
    assert memory.held["parameters"] == sum(4 * p.numel() for p in step.model.parameters())
    assert sum(size for _, size in memory.at_peak) == memory.peak - sum(memory.held.values())
    more, saved = memory.next
    faster = trained(Blocks, memory=memory.peak + more)[0].memory
    assert faster.seconds == pytest.approx(memory.seconds - saved)
    record = next(record for record in step.report.records if record.name == "recompute-values")
    assert {verdict.subject for verdict in record.verdicts} == {each.name for each in memory.again}
    assert sum(verdict.bytes for verdict in record.verdicts) == sum(each.bytes for each in memory.again)
    assert "without a budget" in step.report.facts["memory"]
    assert step.report.tables[-1].title == "Computed again, not kept"
    assert max(size for _, size in step.report.memory) + sum(memory.held.values()) == memory.peak
    assert copy.copy(memory) == memory
