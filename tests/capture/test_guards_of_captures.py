"""Whatever a capture has read is seen to have changed at the next step: the numbers are those of eager training."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from crossfade import Step, compile_step
from crossfade.capture.baked_in import EVERY, BakedIn, ambient
from crossfade.errors import CaptureError, ModelError
from crossfade.graph.private import global_module_hooks

X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.arange(8.0).reshape(4, 2) / 8

Change = Callable[[], Any]
Case = tuple[nn.Module, Any, Change]
"""A model, a loss function, and what the user changes after the first steps."""

SCALE = 1.0
TABLE = {"scale": {"now": 1.0}}


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Holder(nn.Module):
    """Computes with something that it holds in a plain attribute."""

    flavour = 1.0

    def __init__(self, held: Any, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.held, self.linear(x)) * self.flavour


class Weighted(nn.Module):
    """A loss with an attribute, a buffer, and a config object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        self.config = types.SimpleNamespace(power=2)
        self.register_buffer("rows", torch.tensor([1.0, 1.0]))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return ((y - target).abs().pow(self.config.power) * self.rows).mean() * self.weight

    def doubled(self, y: Tensor, target: Tensor) -> Tensor:
        return 2 * self(y, target)


def weighted_loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return F.mse_loss(y, target) * weight


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: Any = None


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Renamed:
    """Gives its attributes under other names, as the configs of some libraries do."""

    def __init__(self) -> None:
        self.n_scale = 1.0

    def __getattr__(self, name: str) -> Any:
        if name == "scale":
            return self.n_scale
        raise AttributeError(name)


class Behind:
    """Keeps what it computes with behind a property and a method."""

    def __init__(self) -> None:
        self._scale = 1.0

    @property
    def scale(self) -> float:
        return self.times(1.0)

    def times(self, factor: float) -> float:
        return self._scale * factor


class Kind(enum.Enum):
    SMALL = 1.0
    LARGE = 3.0


class Pair(NamedTuple):
    scale: float
    shift: float


def held(value: Any, read: Callable[[Any, Tensor], Tensor], change: Callable[[Holder], Any]) -> Callable[[], Case]:
    """A model that holds a value; `value` is made again for each model."""

    def case() -> Case:
        model = Holder(value(), read)
        return model, F.mse_loss, lambda: change(model)

    return case


def on_model(change: Callable[[nn.Sequential], Any]) -> Callable[[], Case]:
    """A model of torch's own modules."""

    def case() -> Case:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        return model, F.mse_loss, lambda: change(model)

    return case


def on_loss(
    change: Callable[[Weighted], Any], use: Callable[[Weighted], Any] = lambda loss: loss
) -> Callable[[], Case]:
    def case() -> Case:
        loss = Weighted()
        return nn.Linear(3, 2), use(loss), lambda: change(loss)

    return case


def _partial() -> Case:
    loss = functools.partial(weighted_loss, weight=1.0)
    return nn.Linear(3, 2), loss, lambda: loss.keywords.update(weight=3.0)


def _defaults() -> Case:
    def loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
        return F.mse_loss(y, target) * weight

    return nn.Linear(3, 2), loss, lambda: setattr(loss, "__defaults__", (3.0,))


def _free_variable() -> Case:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 3.0

    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y, target) * weight, change


def _free_list() -> Case:
    weights = [1.0]
    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y, target) * weights[0], lambda: weights.insert(0, 3.0)


def _free_tensor() -> Case:
    weight = torch.tensor([1.0, 2.0])
    return nn.Linear(3, 2), lambda y, target: F.mse_loss(y * weight, target), lambda: weight.mul_(3.0)


def _function_attribute() -> Case:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target) * loss.weight  # type: ignore[attr-defined]

    loss.weight = 1.0  # type: ignore[attr-defined]
    return nn.Linear(3, 2), loss, lambda: setattr(loss, "weight", 3.0)


def _swapped_submodule() -> Case:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    return model, F.mse_loss, lambda: model.__setitem__(1, nn.Sigmoid())


def _shared() -> Case:
    shared = Settings()
    first, second = (Holder(shared, lambda it, x: x * it.scale) for _ in range(2))
    second.linear = nn.Linear(2, 2)
    return nn.Sequential(first, second), F.mse_loss, lambda: setattr(shared, "scale", 3.0)


def _double_forward(model: Holder) -> None:
    plain = model.forward
    model.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


ON_MODELS: dict[str, Callable[[], Case]] = {
    "a plain tensor replaced": held(
        lambda: torch.tensor(1.0), lambda it, x: x * it, lambda m: setattr(m, "held", torch.tensor(3.0))
    ),
    "a plain tensor changed in place": held(
        lambda: torch.ones(2), lambda it, x: x * it, lambda m: m.held.mul_(torch.tensor([3.0, 1.0]))
    ),
    "a plain tensor changed by .data": held(
        lambda: torch.ones(2), lambda it, x: x * it, lambda m: m.held.data.mul_(3.0)
    ),
    "a plain tensor's memory replaced": held(
        lambda: torch.ones(2), lambda it, x: x * it, lambda m: setattr(m.held, "data", torch.tensor([3.0, 1.0]))
    ),
    "a value in a dict": held(lambda: {"a": 1.0}, lambda it, x: x * it["a"], lambda m: m.held.update(a=3.0)),
    "a key in a dict": held(dict, lambda it, x: x * it.get("a", 1.0), lambda m: m.held.update(a=3.0)),
    "a value in a list": held(lambda: [1.0], lambda it, x: x * it[0], lambda m: m.held.__setitem__(0, 3.0)),
    "a longer list": held(lambda: [2.0], lambda it, x: x * sum(it), lambda m: m.held.append(3.0)),
    "another tuple": held(lambda: (1.0, 2), lambda it, x: x * it[0], lambda m: setattr(m, "held", (3.0, 2))),
    "a list in a tuple": held(
        lambda: ([1.0],), lambda it, x: x * it[0][0], lambda m: m.held[0].append(m.held[0].pop() + 2)
    ),
    "nested containers": held(
        lambda: {"a": [{"b": 1.0}]}, lambda it, x: x * it["a"][0]["b"], lambda m: m.held["a"][0].update(b=3.0)
    ),
    "a set": held(lambda: {"plain"}, lambda it, x: x * (3.0 if "loud" in it else 1.0), lambda m: m.held.add("loud")),
    "an ordered dict": held(
        lambda: OrderedDict(a=1.0, b=2.0), lambda it, x: x * next(iter(it.values())), lambda m: m.held.move_to_end("a")
    ),
    "a dataclass": held(Settings, lambda it, x: x * it.scale, lambda m: setattr(m.held, "scale", 3.0)),
    "a dataclass in a dataclass": held(
        lambda: Settings(inner=Settings()),
        lambda it, x: x * it.inner.scale,
        lambda m: setattr(m.held.inner, "scale", 3.0),
    ),
    "a namespace": held(
        lambda: types.SimpleNamespace(scale=1.0), lambda it, x: x * it.scale, lambda m: setattr(m.held, "scale", 3.0)
    ),
    "slots": held(Slotted, lambda it, x: x * it.scale, lambda m: setattr(m.held, "scale", 3.0)),
    "attributes under other names": held(
        Renamed, lambda it, x: x * it.scale, lambda m: setattr(m.held, "n_scale", 3.0)
    ),
    "behind a property": held(Behind, lambda it, x: x * it.scale, lambda m: setattr(m.held, "_scale", 3.0)),
    "a name made of parts": held(
        Settings, lambda it, x: x * getattr(it, "".join(["sc", "ale"])), lambda m: setattr(m.held, "scale", 3.0)
    ),
    "a numpy scalar": held(
        lambda: np.float64(1.0), lambda it, x: x * it, lambda m: setattr(m, "held", np.float64(3.0))
    ),
    "a numpy array": held(lambda: np.ones(2), lambda it, x: x * float(it[0]), lambda m: m.held.__setitem__(0, 3.0)),
    "none that becomes a number": held(
        lambda: None, lambda it, x: x if it is None else x * it, lambda m: setattr(m, "held", 3.0)
    ),
    "none that becomes an object": held(
        lambda: None, lambda it, x: x if it is None else x * it.scale, lambda m: setattr(m, "held", Settings(3.0))
    ),
    "none that becomes a tensor": held(
        lambda: None, lambda it, x: x if it is None else x * it, lambda m: setattr(m, "held", torch.tensor(3.0))
    ),
    "a function": held(lambda: torch.tanh, lambda it, x: it(x), lambda m: setattr(m, "held", torch.sigmoid)),
    "a lambda": held(lambda: lambda x: 2 * x, lambda it, x: it(x), lambda m: setattr(m, "held", lambda x: 3 * x)),
    "an enum": held(lambda: Kind.SMALL, lambda it, x: x * it.value, lambda m: setattr(m, "held", Kind.LARGE)),
    "a dtype": held(
        lambda: torch.float32, lambda it, x: x.to(it).float(), lambda m: setattr(m, "held", torch.bfloat16)
    ),
    "a size": held(
        lambda: torch.Size([2, 1]),
        lambda it, x: x * sum(it),
        lambda m: setattr(m, "held", torch.Size([2, 3])),
    ),
    "a named tuple": held(
        lambda: Pair(1.0, 0.0), lambda it, x: x * it.scale + it.shift, lambda m: setattr(m, "held", Pair(3.0, 1.0))
    ),
    "another type of number": held(
        lambda: 2, lambda it, x: x * (1.0 if type(it) is int else 3.0), lambda m: setattr(m, "held", 2.0)
    ),
    "minus zero": held(lambda: 0.0, lambda it, x: x * float(np.copysign(1.0, it)), lambda m: setattr(m, "held", -0.0)),
    "an unregistered module": held(
        lambda: [nn.Dropout(0.0)], lambda it, x: it[0](x), lambda m: setattr(m.held[0], "p", 1.0)
    ),
    "a cycle": held(
        lambda: (lambda it: it.update(me=it) or it)({"a": 1.0}),
        lambda it, x: x * it["me"]["me"]["a"],
        lambda m: m.held.update(a=3.0),
    ),
    "a replaced function attribute": held(
        lambda: None, lambda it, x: x, lambda m: setattr(m, "read", lambda it, x: 3 * x)
    ),
    "a replaced forward": held(lambda: None, lambda it, x: x, _double_forward),
    "an attribute that hides the class's": held(lambda: None, lambda it, x: x, lambda m: setattr(m, "flavour", 3.0)),
    "a submodule": _swapped_submodule,
    "an object of two modules": _shared,
    "a forward hook": on_model(lambda m: m[0].register_forward_hook(lambda module, args, out: 2 * out)),
    "a forward pre-hook": on_model(lambda m: m[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))),
    "a parametrization": on_model(
        lambda m: parametrize.register_parametrization(m[3], "weight", Doubled(), unsafe=True)
    ),
    "momentum": on_model(lambda m: setattr(m[1], "momentum", 0.5)),
    "frozen": on_model(lambda m: m[0].weight.requires_grad_(False)),
}

ON_LOSSES: dict[str, Callable[[], Case]] = {
    "an attribute": on_loss(lambda loss: setattr(loss, "weight", 3.0)),
    "a buffer replaced": on_loss(lambda loss: setattr(loss, "rows", torch.tensor([3.0, 1.0]))),
    "a buffer changed in place": on_loss(lambda loss: loss.rows.mul_(3.0)),
    "a config": on_loss(lambda loss: setattr(loss.config, "power", 3)),
    "a hook": on_loss(lambda loss: loss.register_forward_hook(lambda module, args, out: 3 * out)),
    "an attribute behind a bound method": on_loss(lambda loss: setattr(loss, "weight", 3.0), lambda loss: loss.doubled),
    "an attribute behind a lambda": on_loss(
        lambda loss: setattr(loss, "weight", 3.0), lambda loss: lambda y, target: loss(y, target)
    ),
    "an attribute behind a partial": on_loss(
        lambda loss: setattr(loss, "weight", 3.0), lambda loss: functools.partial(loss)
    ),
    "a keyword of a partial": _partial,
    "a default": _defaults,
    "a free variable": _free_variable,
    "a list in a free variable": _free_list,
    "a tensor in a free variable": _free_tensor,
    "an attribute of a function": _function_attribute,
}


class Global(nn.Module):
    """Reads a global, one inside of a container, and one by way of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.linear(x)) * TABLE["scale"]["now"] * settings.scale


settings = types.ModuleType("settings_of_a_user")
settings.scale = 1.0  # type: ignore[attr-defined]
STANDING: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a global that a function reads": lambda patch: patch.setitem(globals(), "SCALE", 3.0),
    "a function": lambda patch: patch.setitem(globals(), "helper", torch.tanh),
    "a value in a global container": lambda patch: patch.setitem(TABLE["scale"], "now", 3.0),
    "a global of another module": lambda patch: patch.setattr(settings, "scale", 3.0),
    "a method": lambda patch: patch.setattr(Global, "forward", lambda self, x: 3 * self.linear(x)),
    "a method of torch's": lambda patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T),
    "a hook on all modules": lambda patch: patch.setitem(
        global_module_hooks()["forward_hooks"], 0, lambda module, args, out: 2 * out
    ),  # not by torch's own function: a test must not leave it behind
}


@pytest.mark.parametrize("change", STANDING.values(), ids=STANDING)
def test_a_change_beyond_the_model_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Case:
        return Global(), weighted_loss, lambda: change(monkeypatch)

    torch.manual_seed(0)
    step, found = compiled(make())
    monkeypatch.undo()
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2


def test_a_class_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Case:
        return Holder(None, lambda it, x: x), F.mse_loss, lambda: monkeypatch.setattr(Holder, "flavour", 3.0)

    torch.manual_seed(0)
    step, found = compiled(make())
    monkeypatch.undo()
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2


def trained(case: Case, step: Callable[[], Any]) -> list[Tensor]:
    model, _, change = case
    for _ in range(2):
        step()
    change()
    for _ in range(2):
        step()
    return [p.detach().clone() for p in model.parameters()]


def compiled(case: Case) -> tuple[Step, list[Tensor]]:
    model, loss, _ = case
    step = compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return step, trained(case, lambda: step(X, Y))


def eager(case: Case) -> list[Tensor]:
    model, loss, _ = case
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        optimizer.step()

    return trained(case, step)


def check(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    step, found = compiled(make())
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2


@pytest.mark.parametrize("make", ON_MODELS.values(), ids=ON_MODELS)
def test_a_change_of_the_model_is_seen(make: Callable[[], Case]) -> None:
    check(make)


@pytest.mark.parametrize("make", ON_LOSSES.values(), ids=ON_LOSSES)
def test_a_change_of_the_loss_is_seen(make: Callable[[], Case]) -> None:
    check(make)


class Collected(nn.Module):
    """Reads its parameter from a list, which no module swaps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.all = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.all[0].sum()


class Writing(nn.Module):
    """Changes a plain tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(3, 2), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.mean


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * self.temperature, target)


def _penalised() -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    weight = model.weight
    return model, lambda y, target: F.mse_loss(y, target) + weight.square().sum()


REFUSED: dict[str, tuple[str, Callable[[], tuple[nn.Module, Any]]]] = {
    "a parameter in a list": (
        r"parameter linear.weight is read from model.all\[0\]",
        lambda: (Collected(), F.mse_loss),
    ),
    "a parameter in a closure": (r"parameter weight is read from loss_fn.weight: .* read model.weight", _penalised),
    "a plain tensor that is written": (
        r"shape \(2,\), neither parameter nor buffer, is changed in place by aten.mul_.Tensor at .*self.mean",
        lambda: (Writing(), F.mse_loss),
    ),
    "a parameter of the loss": (
        r"loss_fn.temperature requires a gradient .* Remedy: make it a part of the model",
        lambda: (nn.Linear(3, 2), Tempered()),
    ),
}


@pytest.mark.parametrize(("message", "make"), REFUSED.values(), ids=REFUSED)
def test_constants_that_eager_training_would_change_are_refused(message: str, make: Any) -> None:
    model, loss = make()
    step = compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [value.clone() for value in model.state_dict().values()], getattr(model, "mean", torch.zeros(2)).clone()
    with pytest.raises(CaptureError, match=message):
        step(X, Y)
    after = list(model.state_dict().values()), getattr(model, "mean", torch.zeros(2))
    torch.testing.assert_close(after, before)


def test_a_frozen_parameter_of_the_loss_is_watched() -> None:
    def make() -> Case:
        loss = Tempered().requires_grad_(False)
        return nn.Linear(3, 2), loss, lambda: loss.temperature.fill_(3.0)

    check(make)


def test_a_gradient_hook_that_comes_later_is_refused() -> None:
    model = nn.Linear(3, 2)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(X, Y)
    handle = model.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ModelError, match="parameter weight has a gradient hook"):
        step(X, Y)
    handle.remove()
    step(X, Y)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ModelError, match="parameter weight has a gradient hook"):
        step(X, Y)


class Busy(nn.Module):
    """Keeps much that it does not compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls, self.epoch, self.last, self.seen, self.average = 0, 0, None, [], {"weight": torch.zeros(2, 3)}
        self.trainer = types.SimpleNamespace(model=self, steps=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.linear(x)
        self.seen.append(self.last)
        return self.last

    def log(self) -> str:
        return f"{self.epoch}, {self.trainer.steps}, {self.average}"


def test_what_the_program_does_not_read_captures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Busy()
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(5):
        with caplog.at_level(logging.WARNING, logger="crossfade"):
            step(X, Y)
        model.epoch = model.trainer.steps = number
        model.average["weight"].add_(model.linear.weight.detach())
        model.best = float(number)
        model.last = torch.zeros(number + 1)
    assert step.captures == 1
    assert (model.calls, model.seen) == (0, [])
    assert "calls of the Busy is changed by the forward (from 0 to 1)" in caplog.text


def test_a_value_that_changes_at_each_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Holder(1.0, lambda it, x: x * it))
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="crossfade"):
        for number in range(4):
            model[0].held = float(number + 1)
            step.prepare(X, Y)
    assert "capturing again: model.0.held changed from 1.0 to 2.0" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("model.0.held has been the cause of 3 captures")
    assert step.report.facts["captured again"] == "model.0.held changed from 3.0 to 4.0"
    assert "values watched at every step" in step.report.facts["guards"]


def test_a_return_to_an_earlier_state_captures_nothing() -> None:
    model = Holder({"a": [1.0, Settings()]}, lambda it, x: x * it["a"][0] * it["a"][1].scale)
    baked_in = BakedIn([model])
    first = baked_in.number()
    model.held["a"][1].scale = 2.0
    assert baked_in.number() != first
    model.held = {"a": [1.0, Settings()]}  # equal, and another
    assert baked_in.number() == first
    model.held["a"][1].scale = 2.0
    assert baked_in.number() != first


LARGE: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "an array": ("1 larger arrays", lambda: np.zeros(1000), lambda it: it.__setitem__(999, 1.0)),
    "a tensor, past torch": ("1 larger tensors on cpu", lambda: torch.zeros(1000), lambda it: it.data.fill_(1.0)),
    "a dict": ("1 large dicts", lambda: dict.fromkeys(range(5000), 1), lambda it: it.update({4000: 2})),
    "a list": ("1 large lists", lambda: [1] * 5000, lambda it: it.__setitem__(4000, 2)),
}


@pytest.mark.parametrize(("words", "make", "change"), LARGE.values(), ids=LARGE)
def test_what_is_large_is_compared_every_so_often(words: str, make: Any, change: Any) -> None:
    model = Holder(make(), lambda it, x: x * float(it[999]))
    baked_in = BakedIn([model])
    first = baked_in.number()
    assert f"compared every {EVERY} steps: {words}" in baked_in.watched()
    change(model.held)
    assert baked_in.number() == first
    assert {baked_in.number() for _ in range(EVERY)} == {first, first + 1}


def test_what_is_not_looked_into_is_said() -> None:
    model = Holder(np.random.default_rng(0), lambda it, x: x * it.random())
    baked_in = BakedIn([model])
    baked_in.number()
    assert "seen only when replaced: 1 Generator" in baked_in.watched()


def test_more_than_can_be_looked_at_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfade.capture.reading.LOOKED_AT", 100)
    chain: Any = None
    for _ in range(5000):
        chain = Settings(inner=chain)
    model = Holder(chain, lambda it, x: x * it.scale * it.inner.scale)
    baked_in = BakedIn([model])
    first = baked_in.number()
    model.held.inner.scale = 2.0
    assert baked_in.number() != first and "1 Settings" in baked_in.watched()


def test_torch_settings_are_seen() -> None:
    before = ambient()
    with torch.device("meta"):
        assert ambient() != before
    torch.use_deterministic_algorithms(True)
    try:
        assert ambient() != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert ambient() == before


class Sometimes(nn.Module):
    """Reads what it has written, but not in every case."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.other, self.warm = nn.Linear(3, 2), 1.0, types.SimpleNamespace(scale=1.0), True

    def forward(self, x: Tensor) -> Tensor:
        if not self.warm:
            self.scale = 2.0
        return self.linear(x) * self.scale


class Others(Sometimes):
    """Writes an attribute of its own and reads one of the same name."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 2.0
        return self.linear(x) * self.scale * self.other.scale


@pytest.mark.parametrize("kind", [Sometimes, Others])
def test_what_is_written_before_it_is_read_is_told_from_what_is_not(kind: type[Sometimes]) -> None:
    def make() -> Case:
        model = kind()
        owner: Any = model if kind is Sometimes else model.other
        return model, F.mse_loss, lambda: setattr(owner, "scale", 3.0)

    check(make)
