"""Whatever a capture has read of a model is seen to have changed at the next step."""

from __future__ import annotations

import enum
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

from tests.capture.changed_models import Case, Holder, Settings, check, compiled, eager


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


@pytest.mark.parametrize("make", ON_MODELS.values(), ids=ON_MODELS)
def test_a_change_of_the_model_is_seen(make: Callable[[], Case]) -> None:
    check(make)


def test_a_class_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Case:
        return Holder(None, lambda it, x: x), F.mse_loss, lambda: monkeypatch.setattr(Holder, "flavour", 3.0)

    torch.manual_seed(0)
    step, found = compiled(make())
    monkeypatch.undo()
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(make()))
    assert step.captures == 2


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
def test_an_attribute_that_is_not_always_written_before_it_is_read_is_seen(kind: type[Sometimes]) -> None:
    def make() -> Case:
        model = kind()
        owner: Any = model if kind is Sometimes else model.other
        return model, F.mse_loss, lambda: setattr(owner, "scale", 3.0)

    check(make)
