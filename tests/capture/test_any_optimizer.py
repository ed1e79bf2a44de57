"""Any optimizer in a compiled step: its own eager run on one device is the reference, over several steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import crossfade as cf
from crossfade.capture.elementwise import reason_against_parts
from crossfade.capture.optimizer import parameter_names
from crossfade.errors import CrossfadeError
from tests.capture.written_optimizers import WRITTEN, Counting, Lamb, Lion, Noisy, Rooted, Shrinking, Slow, WrittenRAdam

STEPS = 7


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(8, 5), torch.randn(8, 3)) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def eager(
    model: nn.Module, optimizer: Optimizer, data: list[Any], after: Callable[[int], None] = lambda _: None
) -> None:
    for index, (inputs, target) in enumerate(data):
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
        after(index)
    optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and state, by name."""
    found: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert type(ours[name]) is type(value), name
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def compare(
    make: Callable[[nn.Module], Optimizer], *, tolerance: float = 1e-6, captures: int | None = 1, steps: int = STEPS
) -> cf.Step:
    data = batches(steps)
    reference, model = model_of(), model_of()
    expected, optimizer = make(reference), make(model)
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected), tolerance)
    assert captures is None or step.captures == captures
    return step


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


OF_TORCH: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5, maximize=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "rmsprop-centered": lambda m: torch.optim.RMSprop(
        m.parameters(), lr=0.01, centered=True, momentum=0.9, weight_decay=0.1
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5, weight_decay=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, weight_decay=0.1),
    "nadam-decoupled": lambda m: torch.optim.NAdam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "radam-decoupled": lambda m: torch.optim.RAdam(
        m.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01, weight_decay=0.1),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1, t0=3, lambd=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_L2_optimizers_of_torch_train_as_in_eager(name: str) -> None:
    compare(OF_TORCH[name])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_trains_matrices_as_in_eager() -> None:
    data = batches()
    reference, model = model_of(), model_of()
    for each in (reference, model):
        for parameter in each.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    expected, optimizer = (torch.optim.Muon(matrices(each), lr=0.02) for each in (reference, model))
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected))


def test_a_first_dampened_step_is_captured_by_itself() -> None:
    compare(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5), captures=2)


@pytest.mark.parametrize("name", WRITTEN)
def test_L2_optimizers_that_users_write_train_as_in_eager(name: str) -> None:
    make, captures = WRITTEN[name]
    compare(make, captures=captures)


def test_a_branch_on_a_count_captures_once_for_each_side() -> None:
    step = compare(lambda m: WrittenRAdam(m.parameters()), captures=None, steps=12)
    assert step.captures == 2


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]


def mixed(model: nn.Sequential, **second: Any) -> list[dict[str, Any]]:
    first, other = groups_of(model)
    return [first, {**other, **second}]


OPTIONS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "groups-of-adamw": lambda m: torch.optim.AdamW(
        mixed(m, lr=0.1, weight_decay=0.0, betas=(0.5, 0.8), amsgrad=True, maximize=True), lr=0.01
    ),
    "groups-of-sgd": lambda m: torch.optim.SGD(mixed(m, momentum=0.9, weight_decay=0.1, nesterov=True), lr=0.05),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "fused-adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, fused=True),
    "foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "no-foreach": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, foreach=False),
    "tensor-rate": lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.9),
    "tensor-rate-of-adam": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_in_eager(name: str) -> None:
    compare(OPTIONS[name])


def test_capturable_is_accepted_where_eager_torch_would_not_run_it() -> None:
    data, reference, model = batches(), model_of(), model_of()
    expected = torch.optim.RAdam(reference.parameters(), lr=0.01)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01, capturable=True)
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected))


def one_cycle(optimizer: Optimizer) -> Callable[[int], None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    return lambda index: scheduler.step()


def cyclic(optimizer: Optimizer) -> Callable[[int], None]:
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2)
    return lambda index: scheduler.step()


def decay_by_hand(optimizer: Optimizer) -> Callable[[int], None]:
    def change(index: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 / (index + 1)
        optimizer.param_groups[0]["eps"] = 1e-8 * (index + 2)

    return change


SCHEDULES: dict[str, tuple[Callable[[nn.Module], Optimizer], Callable[[Optimizer], Callable[[int], None]], int]] = {
    "one-cycle-adam": (OF_TORCH["adam"], one_cycle, 1),
    "one-cycle-sgd": (OF_TORCH["sgd-nesterov"], one_cycle, 1),
    "cyclic": (OF_TORCH["sgd-nesterov"], cyclic, 1),
    "by-hand": (OF_TORCH["adamw"], decay_by_hand, 1),
    "by-hand-from-zero": (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.0), decay_by_hand, 2),
    "written": (WRITTEN["lion"][0], lambda o: lambda i: o.param_groups[0].update(betas=(0.9 - i / 50, 0.99)), 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_L2_numbers_that_change_between_steps_capture_once(name: str) -> None:
    make, schedule, captures = SCHEDULES[name]
    data, reference, model = batches(), model_of(), model_of()
    expected, optimizer = make(reference), make(model)
    eager(reference, expected, data, schedule(expected))
    after = schedule(optimizer)
    step = cf.compile_step(model, loss_of, optimizer)
    for index, (inputs, target) in enumerate(data):
        step(inputs, target)
        after(index)
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected))
    assert step.captures == captures


def test_what_counts_in_python_is_left_as_eager_leaves_it() -> None:
    data, reference, model = batches(), model_of(), model_of()
    expected, optimizer = Counting(reference.parameters()), Counting(model.parameters())
    eager(reference, expected, data)
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data:
        step(inputs, target)
    assert (optimizer.calls, optimizer.param_groups[0]["seen"]) == (expected.calls, expected.param_groups[0]["seen"])
    assert step.captures <= 4  # for each answer to `step % 3 == 0`, and once more where a capture asks something new
    before = step.captures
    for inputs, target in data:
        step(inputs, target)
    assert step.captures == before


def test_a_step_goes_on_from_eager_steps_and_eager_from_a_step() -> None:
    make = OF_TORCH["asgd"]
    data, reference, model = batches(9), model_of(), model_of()
    expected, optimizer = make(reference), make(model)
    eager(reference, expected, data)
    eager(model, optimizer, data[:3])
    step = cf.compile_step(model, loss_of, optimizer)
    for inputs, target in data[3:6]:
        step(inputs, target)
    eager(model, optimizer, data[6:])
    assert_same(tensors_of(model, optimizer), tensors_of(reference, expected))


def test_noise_is_drawn_anew_at_each_step_and_again_from_the_same_seed() -> None:
    """Not in eager torch's order: parameters are updated as their gradients become ready."""

    def noise(seed: int) -> list[Tensor]:
        model = model_of()
        step = cf.compile_step(model, loss_of, Noisy(model.parameters(), lr=1.0)).prepare(*batches()[0])
        plain = model_of()
        eager(plain, torch.optim.SGD(plain.parameters(), lr=1.0), batches()[:1])
        torch.manual_seed(seed)
        step(*batches_drawn[0])
        return [(ours - theirs).detach() for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)]

    batches_drawn = batches()
    first, again, other = noise(3), noise(3), noise(4)
    for drawn, same, different in zip(first, again, other, strict=True):
        assert torch.equal(drawn, same) and not torch.allclose(drawn, different)
        assert 0 < drawn.std() < 0.03


@pytest.mark.parametrize("name", ["rprop", "adagrad", "asgd", "adafactor", "counting"])
def test_unusual_state_is_saved_and_resumed(name: str, tmp_path: Any) -> None:
    make = OF_TORCH.get(name) or WRITTEN[name][0]
    data, reference = batches(), model_of()
    expected = make(reference)
    eager(reference, expected, data)
    model = model_of()
    step = cf.compile_step(model, loss_of, make(model))
    for inputs, target in data[:4]:
        step(inputs, target)
    step.save(tmp_path / "saved")
    other = model_of(seed=1)
    resumed = cf.compile_step(other, loss_of, make(other))
    resumed.load(tmp_path / "saved")
    for inputs, target in data[4:]:
        resumed(inputs, target)
    assert_same(tensors_of(other, resumed.optimizer), tensors_of(reference, expected))


def test_a_tensor_rate_is_saved_and_resumed(tmp_path: Any) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    step = cf.compile_step(model, loss_of, optimizer)
    step(*batches()[0])
    step.save(tmp_path / "saved")
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.5)
    step.load(tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25


class KeepsTensors(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.total = torch.zeros(())


class Wraps(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)


class KeepsLists(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad)


class Branches(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad.sum() > 0:
                p.sub_(p.grad)


class CountsFromTensors(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["norm"] = self.state[p].get("norm", 0.0) + p.grad.norm().item()
            p.sub_(p.grad)


class Remembers(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(len(self.seen))
        super().step(closure)


class PutsAttributes(Lion):
    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)


class DrawsInPython(Lion):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=random.random())


REFUSED: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "differentiable": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True),
        "differentiable=True in parameter group 0",
    ),
    "closure": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS calls the loss from within its step"),
    "tensors": (lambda m: KeepsTensors(m.parameters()), "KeepsTensors keeps tensors in its attribute total"),
    "wraps": (lambda m: Wraps(list(m.parameters())), "Wraps wraps another optimizer, in its attribute inner"),
    "lists": (lambda m: KeepsLists(m.parameters()), "KeepsLists keeps a list in its state, under 'history'"),
    "branches": (lambda m: Branches(m.parameters()), "control flow depends on tensor values in the step of Branches"),
    "counts": (lambda m: CountsFromTensors(m.parameters()), "is a Python number that the optimizer computes from"),
    "attributes": (lambda m: PutsAttributes(m.parameters()), "the step of PutsAttributes changes optimizer.count"),
    "draws": (lambda m: DrawsInPython(m.parameters()), "the step of DrawsInPython draws numbers of Python's random"),
    "remembers": (lambda m: Remembers(m.parameters()), "the step of Remembers changes optimizer.seen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_and_nothing_is_changed(name: str) -> None:
    make, found = REFUSED[name]
    model = model_of()
    optimizer = make(model)
    with pytest.raises(CrossfadeError) as caught:
        cf.compile_step(model, loss_of, optimizer)(*batches()[0])
    assert found in caught.value.found and caught.value.remedy
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_of().parameters(), strict=True))
    assert not optimizer.state


PARTS: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "lion": (lambda m: Lion(m.parameters()), ""),
    "counting": (lambda m: Counting(m.parameters()), ""),
    "subclass": (lambda m: Shrinking(m.parameters()), ""),
    "slow": (lambda m: Slow(m.parameters()), ""),
    "rprop": (OF_TORCH["rprop"], ""),
    "asgd": (OF_TORCH["asgd"], ""),
    "radam": (OF_TORCH["radam"], ""),
    "lamb": (lambda m: Lamb(m.parameters()), "of more than one element"),
    "noisy": (lambda m: Noisy(m.parameters()), "of random numbers"),
    "rooted": (lambda m: Rooted(m.parameters()), "with a part's shape as if it were the whole's"),
    "adafactor": (OF_TORCH["adafactor"], "has another shape"),
}


@pytest.mark.parametrize("name", PARTS)
def test_only_what_works_element_by_element_may_update_parts(name: str) -> None:
    make, reason = PARTS[name]
    model = model_of()
    weight = model[0].weight
    found = reason_against_parts(make(model), parameter_names(model), weight, ((6, 5), (3, 5)))
    assert reason in found if reason else not found


def test_a_changed_attribute_of_an_optimizer_is_captured_again() -> None:
    class Scaled(torch.optim.SGD):
        factor = 0.5

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=self.factor)

    model = model_of()
    optimizer = Scaled(model.parameters(), lr=0.1)
    optimizer.factor = 0.25
    step = cf.compile_step(model, loss_of, optimizer)
    [first, second] = batches(2)
    step(*first)
    before = model[0].weight.detach().clone()
    optimizer.factor = 0.0
    step(*second)
    assert torch.equal(before, model[0].weight) and step.captures == 2
