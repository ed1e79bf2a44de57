"""The optimizer's step as a part of a program: the numbers of `optimizer.step()`, its state, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from crossfade.capture.numbers import Learned, numbers_of, options_key
from crossfade.capture.optimizer import append_optimizer, check_optimizer, parameter_names
from crossfade.capture.optimizer_state import first_states, initial_state
from crossfade.errors import OptimizerError
from crossfade.graph import collectives
from crossfade.graph.program import Program
from crossfade.graph.text import parse

GRADIENTS = """
    weight: f32[2, 3] = parameter("weight")
    bias: f32[2] = parameter("bias")
    late: f32[2] = aten.mul.Tensor(bias, 3)
    later: f32[2, 3] = aten.mul.Tensor(weight, 2)
    return gradient("weight", later), gradient("bias", late)
"""


def model_of() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def appended(model: nn.Linear, optimizer: Optimizer, **options: object) -> Program:
    return append_optimizer(parse(GRADIENTS, groups={"tp": 2}), optimizer, parameter_names(model), **options)  # type: ignore[arg-type]


def run(program: Program, model: nn.Linear, optimizer: Optimizer) -> dict[str, Tensor]:
    """What the program returns, by name, given the model's parameters, an initial state and the optimizer's numbers."""
    names = parameter_names(model)
    values = {name: parameter.detach().clone() for parameter, name in names.items()}
    for name, state in initial_state(optimizer, names, names.values()).items():
        values |= {f"{name}:{key}": value for key, value in state.items()}
    values |= {name: number.read() for name, number in numbers_of(optimizer, names, {}).items()}
    results = program.module()(*(values[item.name] for item in program.inputs))
    return dict(zip([out.name for out in program.outputs], results, strict=True))


OPTIMIZERS = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.75)),
    "foreach": lambda model: AdamW(model.parameters(), lr=0.1, foreach=True),
    "groups": lambda model: SGD([{"params": [model.bias], "lr": 1.0}, {"params": [model.weight]}], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer(name: str) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](model)
    found = run(appended(model, optimizer), model, optimizer)
    model.weight.grad, model.bias.grad = 2 * model.weight.detach(), 3 * model.bias.detach()
    optimizer.step()
    expected = {"weight": model.weight.detach(), "bias": model.bias.detach()}
    for parameter, parameter_name in parameter_names(model).items():
        state = optimizer.state[parameter].items()
        expected |= {f"{parameter_name}:{key}": value for key, value in state if isinstance(value, Tensor)}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-7)


def test_what_is_ready_first_is_updated_first() -> None:
    model = model_of()
    program = appended(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert [(str(item.kind), item.name) for item in program.inputs] == [
        ("parameter", "weight"),
        ("parameter", "bias"),
        ("optimizer_state", "bias:momentum_buffer"),
        ("optimizer_state", "weight:momentum_buffer"),
        ("scalar", "lr.0"),
        ("scalar", "momentum.0"),
    ]
    assert [f"{out.kind} {out.name}" for out in program.outputs] == [
        "update bias",
        "update weight",
        "update bias:momentum_buffer",
        "update weight:momentum_buffer",
    ]
    assert "optimizer" in program.facts


def test_gradients_are_clipped_by_their_common_norm() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=1.0)
    found = run(appended(model, optimizer, clip_grad_norm=0.5), model, optimizer)
    model.weight.grad, model.bias.grad = 2 * model.weight.detach(), 3 * model.bias.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close((found["grad_norm"], found["weight"]), (norm, model.weight.detach()))


def test_the_norm_of_split_gradients_is_summed_over_their_group() -> None:
    model = model_of()
    program = appended(model, SGD(model.parameters(), lr=1.0), clip_grad_norm=0.5, split_over={"weight": ("tp",)})
    (reduction,) = collectives.find(program.graph)
    assert (reduction.kind.value, reduction.reduce_op, reduction.group, reduction.bytes) == (
        "all_reduce",
        "sum",
        "tp",
        4,
    )


def test_a_new_number_is_no_new_capture_unless_code_asks_about_it() -> None:
    model = model_of()
    optimizer, learned = SGD(model.parameters(), lr=0.1, momentum=0.9), Learned()
    appended(model, optimizer, learned=learned)
    before = options_key(optimizer, learned)
    assert list(learned.branches) == ["Ne(momentum.0, 0.0)"]
    group = optimizer.param_groups[0]
    for change, same in [({"lr": 0.2}, True), ({"momentum": 0.5}, True), ({"momentum": 0.0}, False)]:
        group.update(change)
        assert (options_key(optimizer, learned) == before) is same
    group.update(momentum=0.5, nesterov=True)
    assert options_key(optimizer, learned) != before


def test_a_part_has_a_state_of_its_size() -> None:
    model = model_of()
    optimizer = Adam(model.parameters(), amsgrad=True)
    state = initial_state(optimizer, parameter_names(model), ["weight"], {"weight": torch.empty(1, 3)})
    assert {key: tuple(value.shape) for key, value in state["weight"].items()} == {
        "step": (),
        "exp_avg": (1, 3),
        "exp_avg_sq": (1, 3),
        "max_exp_avg_sq": (1, 3),
    }
    assert state.keys() == {"weight"}


REFUSED = {
    "differentiable=True in parameter group 0": lambda model: SGD(model.parameters(), lr=0.1, differentiable=True),
    "a parameter of shape (5,) in group 0 is not the model's": lambda model: SGD([nn.Parameter(torch.ones(5))], lr=0.1),
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_cannot_be_captured_is_refused(found: str) -> None:
    model = model_of()
    with pytest.raises(OptimizerError) as caught:
        check_optimizer(REFUSED[found](model), parameter_names(model))
    assert caught.value.found == found


def test_hooks_around_the_step_are_refused() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="the optimizer has hooks around its step"):
        check_optimizer(optimizer, parameter_names(model))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_only_a_dampened_first_step_differs_from_later_ones(dampening: float) -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
    first = first_states(optimizer, parameter_names(model), ["weight"])["weight"]
    assert first.from_gradient is bool(dampening)
    assert list(first.entries) == ["momentum_buffer"]
