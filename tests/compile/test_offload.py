"""Steps that move values to the host: the same numbers, the bytes that were foreseen, rules, and what is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade.compile import training_phases
from crossfade.compile.fit_memory import IN_GRAPHS, IN_REGIONS, live_bytes
from crossfade.compile.training import compile_step
from crossfade.cost.machine_parts import HostLink
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError, MachineError
from crossfade.execute import compile_regions
from crossfade.execute.inductor import Inductor
from crossfade.graph import offload
from crossfade.graph.passes import Outcome
from tests.compile.test_fit_memory import (
    WIDTH,
    Autocast,
    Blocks,
    Normalised,
    Running,
    equal,
    least,
    measured,
    peak,
    plainly,
    run_eagerly,
    trained,
)


@pytest.mark.parametrize("make", [Blocks, Normalised, Autocast])
def test_a_step_that_moves_what_it_keeps_trains_the_same(make: Callable[[], nn.Module]):
    plain, expected = plainly(make)
    step, found = trained(make, offload=True)
    assert equal(found, expected)
    assert step.memory.peak == peak(step) < 0.9 * peak(plain)
    assert step.memory.moved
    assert step.memory.on_host == sum(each.bytes for each in step.memory.moved)  # all are there at the turn


class Convolutions(nn.Module):
    """Of other shapes than those of blocks: images, maxima with their places, a residual, a mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head((x + torch.sigmoid(self.second(x))).mean((2, 3)))


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"offload": "auto", "memory": 0.85}])
def test_a_convolutional_network_with_momentum_equals_eager_torch(options: dict[str, Any]):
    def train(compiled: bool, **options: Any) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model, batch, target = Convolutions(), torch.randn(6, 3, 12, 12), torch.randint(0, 5, (6,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        loss_fn = nn.functional.cross_entropy
        step = compile_step(model, loss_fn, optimizer, **options) if compiled else None
        for _ in range(2):
            if step is not None:
                step(batch, target)
            else:
                optimizer.zero_grad()
                loss_fn(model(batch), target).backward()
                optimizer.step()
        return step, list(model.state_dict().values())

    if "memory" in options:
        options = {**options, "memory": int(options["memory"] * max(live_bytes(train(True)[0].program)))}
    step, found = train(True, **options)
    assert equal(found, train(False)[1])
    if "memory" in options:
        assert peak(step) <= options["memory"]
    else:
        assert offload.has(step.program.graph) == bool(options)


class OnDevice(Running):
    """The most bytes that a run holds, without the host's."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__(given)
        self.on_host = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is offload.TO_HOST:
            host = func(*args, **(kwargs or {}))
            self.on_host.add(host.untyped_storage().data_ptr())
            return host
        if func is offload.FROM_HOST:
            self.on_host.discard(args[0].untyped_storage().data_ptr())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def counts(self, tensor: Tensor) -> bool:
        return super().counts(tensor) and tensor.untyped_storage().data_ptr() not in self.on_host


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_runs_holds_what_was_predicted(share: float):
    natural = peak(plainly(Blocks)[0])
    given: dict[str, Any] = {"offload": True} if share == 1.0 else {"offload": "auto", "memory": int(share * natural)}
    step, most = measured(OnDevice, **given)
    assert most == pytest.approx(step.memory.peak - sum(step.memory.held.values()), rel=0.03)
    assert step.memory.moved


def test_beside_computation_a_link_hides_what_it_can_carry(monkeypatch: pytest.MonkeyPatch):
    """With a link of its own for copies: what moves is hidden, the rest left; a wider link moves more."""
    left, peaks = [], []
    for bandwidth in (2e9, 2e10):
        machine = replace(preset("loopback-gloo"), host=HostLink(0.0, bandwidth))
        monkeypatch.setattr(training_phases, "usual_machine", lambda device, machine=machine: machine)
        step, found = trained(Blocks, offload=True)
        assert equal(found, plainly(Blocks)[1])
        record = next(record for record in step.report.records if record.name == "offload-values")
        outcomes = Counter(verdict.outcome for verdict in record.verdicts)
        assert outcomes == {Outcome.HIDDEN: len(step.memory.moved), Outcome.LEFT: sum(dict(step.memory.left).values())}
        assert "hidden" in step.report.facts["moved to the host"]
        left.append(dict(step.memory.left)["the link is busy meanwhile"])
        peaks.append(step.memory.peak)
    assert left[0] > left[1]
    assert peak(plainly(Blocks)[0]) > peaks[0] > peaks[1]


def test_regions_and_copies_run_together(monkeypatch: pytest.MonkeyPatch):
    """Each region runs operator by operator, which keeps every bit, with the borders of a compiled one."""
    monkeypatch.setattr(Inductor, "missing", staticmethod(lambda device: ""))
    monkeypatch.setattr(Inductor, "compile", lambda self, region, alike=False: None)
    monkeypatch.setattr(compile_regions, "_those_that_pay", run_eagerly)
    step, found = trained(Blocks, offload={"blocks.0": "full"}, execute="compiled")
    assert equal(found, plainly(Blocks)[1])
    assert step.memory.moved
    assert step.memory.peak == max(IN_REGIONS.live(step.program))


def test_within_a_budget_that_computing_again_cannot_keep_values_move():
    budget = least(Blocks)
    with pytest.raises(CrossfadeError):
        trained(Blocks, steps=1, memory=budget - 1)
    step, found = trained(Blocks, memory=budget - 1, offload="auto")
    assert equal(found, plainly(Blocks)[1])
    assert peak(step) == step.memory.peak < budget
    assert step.memory.moved
    assert step.memory.again


def test_rules_say_of_modules_what_moves_and_what_stays():
    step, found = trained(Blocks, offload={"blocks.1": "full"})
    assert equal(found, plainly(Blocks)[1])
    assert {each.module.rpartition(".")[0] for each in step.memory.moved} == {"forward blocks.1"}
    rules = {"blocks.0": "never", "blocks.1": "never", "blocks.2": "never"}
    step, found = trained(Blocks, memory=int(0.8 * peak(plainly(Blocks)[0])), offload=rules)
    assert equal(found, plainly(Blocks)[1])
    assert not any("blocks" in each.module for each in step.memory.moved)


def test_it_is_told_what_moves_and_how_long_that_is_waited_for():
    step, _ = trained(Blocks, steps=1, offload=True)
    record = next(record for record in step.report.records if record.name == "offload-values")
    assert {verdict.subject for verdict in record.verdicts} == {each.name for each in step.memory.moved}
    assert all("exposed for" in verdict.detail for verdict in record.verdicts)  # a CPU copies by itself
    assert "exposed for" in step.report.facts["moved to the host"]
    assert step.report.tables[-1].title == "Moved to the host"
    assert len(step.report.tables[-1].rows) == len(step.memory.moved)
    assert step.memory.seconds == pytest.approx(sum(each.milliseconds for each in step.memory.moved) / 1e3)
    assert trained(Blocks, steps=1, memory="1GB", offload="auto")[0].memory.moved == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload": "auto"}, CrossfadeError, "without a budget.*Remedy: pass memory="),
        ({"offload": "yes"}, CrossfadeError, "expected True, "),
        ({"offload": {"block.0": "full"}}, CrossfadeError, r"offload names 'block.0'.*did you mean 'blocks.0'"),
        ({"offload": {"blocks.0": "always"}}, CrossfadeError, 'expected "full"'),
        ({"offload": True, "memory": 10}, CrossfadeError, "a step needs"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        trained(Blocks, steps=1, **options)


def test_cuda_graphs_keep_copies_of_the_batch_unless_values_move():
    plain, _ = plainly(Blocks)
    moves, _ = trained(Blocks, steps=1, offload={"blocks.0": "full"})
    batch = 2 * 512 * WIDTH * 4
    assert max(IN_GRAPHS.live(plain.program)) == max(IN_REGIONS.live(plain.program)) + batch
    assert IN_GRAPHS.held(plain.program)["copies for CUDA graphs"] == batch
    assert IN_GRAPHS.live(moves.program) == IN_REGIONS.live(moves.program)


def test_a_machine_that_says_nothing_of_the_host_is_refused():
    with pytest.raises(MachineError, match=r"does not say what copies to the host's memory cost.*Remedy: add them"):
        replace(preset("loopback-gloo"), host=None).host_link()


def test_a_plan_file_holds_what_moves(tmp_path: Path):
    step, found = trained(Blocks, offload=True)
    step.save_plan(tmp_path / "plan.json")
    again, repeated = trained(Blocks, plan=str(tmp_path / "plan.json"))
    assert equal(repeated, found)
    assert str(again.program) == str(step.program)
