"""The numbers that an optimizer computes with: inputs of a captured step, so that changing them captures nothing.

Learning rates, betas, momentum, weight decay: what a parameter group says as a float, a user or a scheduler may change
at any time. What the optimizer counts itself, in Python, is written back after each step. Code that asks about a number
(`if weight_decay != 0`) is captured for one answer; a `Branch` remembers the question, and whoever runs the step asks
it again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from crossfade.errors import OptimizerError
from crossfade.graph.private import branches_since, number_expression, python_text, symbolic_number

OF_SCHEDULERS = frozenset({"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers keep in parameter groups: that they are there changes nothing."""

Place = tuple[str, Any, Any]
"""Where a number is: ("group", index, (key, element or None)), ("state", parameter, key), ("attribute", "", name)."""


@dataclass(frozen=True, eq=False)
class Number:
    """A number of an optimizer, by the name of the program's input."""

    name: str
    optimizer: Optimizer
    place: Place
    initial: Any = None
    """What it is before the optimizer's first step has put it there."""

    def read(self) -> Any:
        """Its value now, or its initial one. Of a tensor of one element, that element."""
        kind, where, key = self.place
        if kind == "group":
            value = self.optimizer.param_groups[where].get(key[0])
            value = value if key[1] is None or value is None else value[key[1]]
        elif kind == "state":
            value = self.optimizer.state.get(where, {}).get(key, self.initial)
        else:
            value = vars(self.optimizer).get(key)
        return value.item() if isinstance(value, Tensor) else value

    def write(self, value: Any) -> None:
        """Give it another value, in place if it is a tensor."""
        kind, _, key = self.place
        holder = {"group": self._group, "state": self._state, "attribute": lambda: vars(self.optimizer)}[kind]()
        name, element = key if kind == "group" else (key, None)
        if element is not None:
            holder[name] = type(holder[name])(value if i == element else v for i, v in enumerate(holder[name]))
        elif isinstance(holder.get(name), Tensor):
            holder[name].fill_(value)
        else:
            holder[name] = value

    def _group(self) -> Any:
        return self.optimizer.param_groups[self.place[1]]

    def _state(self) -> Any:
        return self.optimizer.state[self.place[1]]


@dataclass(frozen=True)
class Formula:
    """A function of numbers, by its text.

    >>> Formula("x + 2*y", ("x", "y"))(1, 0.5)
    2.0
    """

    text: str
    symbols: tuple[str, ...]

    def __call__(self, *values: Any) -> Any:
        """Its value."""
        return self._function(*values)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = eval(
            f"lambda {', '.join(self.symbols)}: {self.text}", {"math": math, "torch": torch}
        )
        return function


@dataclass(frozen=True)
class Branch:
    """What captured code asked about some numbers; it runs as captured only while the answer is yes."""

    text: str
    numbers: tuple[Number, ...]
    function: Formula

    def holds(self) -> bool:
        """Whether the answer is yes now."""
        values = [number.read() for number in self.numbers]
        return None not in values and bool(self.function(*values))


@dataclass(frozen=True)
class NumberUpdate:
    """A number that the optimizer's step changes: its new value as a function of numbers."""

    number: Number
    sources: tuple[Number, ...]
    function: Formula

    def new_value(self) -> Any:
        """What the next step finds."""
        return self.function(*(source.read() for source in self.sources))


@dataclass
class Learned:
    """What captures so far have shown about an optimizer; it decides what later ones depend on."""

    branches: dict[str, Branch] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    """Integers of groups, and attributes, that the step itself changes; others are baked in."""
    starts_from_gradients: bool = False
    """Whether the first step does something else than later ones on a state that is known before it."""
    not_begun: set[str] = field(default_factory=set)
    """With that, parameters whose state was made for a first step that has not been taken."""

    def answers(self) -> tuple[bool, ...]:
        """Of all branches known."""
        return tuple(branch.holds() for branch in self.branches.values())


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one captured step."""

    inputs: Mapping[str, Number] = field(default_factory=dict)
    """Those that the program takes, by the names of its inputs."""
    updates: tuple[NumberUpdate, ...] = ()
    """Those that the step changes."""

    def advance(self) -> None:
        """Write back what the optimizer's own step would have left."""
        new = [(update.number, update.new_value()) for update in self.updates]
        for number, value in new:
            number.write(value)


def is_plain_number(value: Any) -> bool:
    """Whether a value is an int or a finite float, and no bool.

    >>> [is_plain_number(value) for value in (1, 0.5, True, float("inf"), "1")]
    [True, True, False, False, False]
    """
    return type(value) is int or (type(value) is float and math.isfinite(value))


def numbers_of(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    states: Mapping[str, Mapping[str, Any]],
    changing: Collection[str] = (),
) -> dict[str, Number]:
    """The numbers that are inputs of a step: floats of groups, all numbers of states, and those that are `changing`.

    `states` has for each parameter that is stepped what its state is at first.

    >>> layer = torch.nn.Linear(1, 1)
    >>> adam = torch.optim.Adam(layer.parameters(), lr=0.5)
    >>> {name: number.read() for name, number in numbers_of(adam, {}, {}).items()}
    {'lr.0': 0.5, 'betas[0].0': 0.9, 'betas[1].0': 0.999, 'eps.0': 1e-08}
    """
    found = [
        Number(f"{key}.{index}" if element is None else f"{key}[{element}].{index}", optimizer, place)
        for index, group in enumerate(optimizer.param_groups)
        for key, element, value in _values(group)
        if (place := ("group", index, (key, element)))
        if _is_rate(value) or (is_plain_number(value) and f"{key}.{index}" in changing)
    ]
    for parameter, name in names.items():
        if name in states:
            found += [
                Number(f"{name}:{key}", optimizer, ("state", parameter, key), value)
                for key, value in {**states[name], **optimizer.state.get(parameter, {})}.items()
                if is_plain_number(value)
            ]
    found += [
        Number(f"optimizer.{key}", optimizer, ("attribute", "", key))
        for key, value in own_attributes(optimizer).items()
        if is_plain_number(value) and f"optimizer.{key}" in changing
    ]
    return {number.name: number for number in found}


def _is_rate(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1) or (type(value) is float and is_plain_number(value))


def _values(group: Mapping[str, Any]) -> Iterable[tuple[str, int | None, Any]]:
    """The options of a group, those of tuples and lists one by one."""
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if type(value) in (tuple, list):
            yield from ((key, index, element) for index, element in enumerate(value))
        else:
            yield key, None, value


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has beside what every optimizer of torch has."""
    of_torch = type(optimizer).__module__.startswith("torch.")
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _common_attributes() and not (of_torch and key.startswith("_"))
    }


@functools.cache
def _common_attributes() -> frozenset[str]:
    """What every optimizer of torch has, or those with kernels; the last two are put there by schedulers."""
    of_kernels = {"_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"}
    of_warnings = {"_warned_capturable_if_run_uncaptured"}
    common = vars(torch.optim.SGD([torch.zeros(0)]))
    return frozenset({*common, *of_kernels, *of_warnings, "step", "_opt_called"})


def options_key(optimizer: Optimizer, learned: Learned | None = None) -> tuple[Any, ...]:
    """Everything about an optimizer that is baked into a captured step: a change of it needs a new capture.

    Of numbers that are inputs, their types, and the answers to what captured code asked about them.
    """
    changing = learned.changing if learned is not None else set()

    def said(name: str, value: Any, *, in_group: bool = True) -> str:
        is_input = (in_group and _is_rate(value)) or (name in changing and is_plain_number(value))
        return type(value).__name__ if is_input else str(value)

    groups = tuple(
        tuple((key, said(f"{key}.{index}", value)) for key, _, value in _values(group) if key not in OF_SCHEDULERS)
        + tuple(id(parameter) for parameter in group["params"])
        for index, group in enumerate(optimizer.param_groups)
    )
    attributes = tuple(
        (key, said(f"optimizer.{key}", value, in_group=False)) for key, value in own_attributes(optimizer).items()
    )
    return (groups, attributes, learned.answers() if learned is not None else ())


class SymbolicNumbers:
    """Numbers as symbols for one trace: what traced code asks about them, and what it leaves in their places."""

    def __init__(self, env: Any, numbers: Mapping[str, Number], attempt: int = 0) -> None:
        self._env, self.numbers = env, dict(numbers)
        self._asked_before = len(branches_since(env, 0))
        self.symbols = {
            name: symbolic_number(env, f"{name}#{attempt}", number.read()) for name, number in numbers.items()
        }
        self._by_symbol = {str(number_expression(self.symbols[name])): numbers[name] for name in numbers}

    def branches(self) -> list[Branch]:
        """What was asked so far."""
        found = []
        for asked in branches_since(self._env, self._asked_before):
            symbols = sorted(str(symbol) for symbol in asked.free_symbols)
            if symbols and all(symbol in self._by_symbol for symbol in symbols):
                numbers = tuple(self._by_symbol[symbol] for symbol in symbols)
                text = str(asked.xreplace({s: type(s)(self._by_symbol[str(s)].name) for s in asked.free_symbols}))
                found.append(Branch(text, numbers, Formula(python_text(asked), tuple(symbols))))
        return found

    def updates(self, left: Mapping[Number, Any]) -> tuple[NumberUpdate, ...]:
        """The numbers that were changed, given what traced code has left in the place of each."""
        found = []
        for number, value in left.items():
            before = self.symbols.get(number.name)
            expression = number_expression(value)
            if before is not None and expression == number_expression(before):
                continue
            symbols = sorted(str(symbol) for symbol in expression.free_symbols)
            if not all(symbol in self._by_symbol for symbol in symbols):
                raise OptimizerError(
                    f"{number.name} is a Python number that the optimizer computes from tensors",
                    expected="numbers computed from numbers, or tensors",
                    remedy="keep a tensor of one element there instead, and leave out .item()",
                )
            sources = tuple(self._by_symbol[symbol] for symbol in symbols)
            found.append(NumberUpdate(number, sources, Formula(python_text(expression), tuple(symbols))))
        return tuple(found)
