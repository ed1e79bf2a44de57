"""A machine fitted to measurements: of collectives, and of steps that a program of ours forecasts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from crossfade.cost.machine import Machine
from crossfade.cost.network import Route
from crossfade.errors import MachineError
from crossfade.graph.collectives import Kind

_ROBUST = 0.1
"""Deviations beyond this share pull no harder, so that a few odd measurements do not bend a machine."""
_WEIGHT_OF_COLLECTIVES = 0.3
_WEIGHT_OF_START = 0.1
_ROUNDS = 14


@dataclass(frozen=True)
class CollectiveTime:
    """A collective measured among ranks of one node."""

    kind: Kind
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """A step measured, and what says how long it takes on a machine."""

    name: str
    seconds: float
    on: Callable[[Machine], float]


@dataclass(frozen=True)
class Constant:
    """One number of a machine that is fitted: where it is, and by which share it may differ from where it starts."""

    path: str
    spread: float


CONSTANTS = (
    Constant("flops", 0.06),
    Constant("memory_bandwidth", 0.1),
    Constant("overhead", 0.7),
    Constant("launching.seconds", 0.5),
    Constant("launching.spread", 0.5),
    Constant("network.inside.bandwidth", 0.1),
    Constant("network.inside.latency", 0.5),
    Constant("network.between.bandwidth", 0.2),
    Constant("network.start", 0.5),
    Constant("network.copy", 0.3),
    Constant("products.smaller", 0.1),
    Constant("products.unaligned", 0.3),
)
"""What is fitted unless something else is asked for."""


@dataclass(frozen=True)
class Fitted:
    """A fitted machine, and by which share each measurement is missed (predicted over measured, less one)."""

    machine: Machine
    constants: Mapping[str, float]
    steps: Mapping[str, float]
    collectives: Sequence[float] = field(default_factory=tuple)

    def __str__(self) -> str:
        lines = [f"{self.machine.name}: {len(self.steps)} steps, {len(self.collectives)} collectives"]
        for name, errors in (("steps", list(self.steps.values())), ("collectives", list(self.collectives))):
            if errors:
                sizes = [abs(error) for error in errors]
                bias = sum(errors) / len(errors)
                lines.append(
                    f"{name}: mean error {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}, bias {bias:+.1%}"
                )
        lines += [f"{path} = {value:.4g}" for path, value in self.constants.items()]
        return "\n".join(lines)


def fit(
    machine: Machine,
    collectives: Sequence[CollectiveTime] = (),
    steps: Sequence[StepTime] = (),
    constants: Sequence[Constant] = CONSTANTS,
) -> Fitted:
    """The machine that explains measurements best, starting from one, near which its constants stay.

    Deviations count by the ratio of predicted to measured seconds, large ones less than in proportion; each constant is
    drawn to where it started, by its spread, so that what no measurement speaks of stays as it was.

        >>> from crossfade.cost.presets import preset
        >>> start = preset("a100-cluster")
        >>> faster = set_constant(start, "network.inside.bandwidth", 300e9)
        >>> measured = [CollectiveTime(Kind.ALL_REDUCE, 8, size, _collective(faster, Kind.ALL_REDUCE, 8, size))
        ...             for size in (2**20, 2**24, 2**28, 2**30)]
        >>> found = fit(start, measured, constants=[Constant("network.inside.bandwidth", 0.5)])
        >>> 290 < found.constants["network.inside.bandwidth"] / 1e9 < 305
        True
    """
    _check(machine, collectives, steps)
    start = numpy.log([get_constant(machine, constant.path) for constant in constants])
    spreads = numpy.array([constant.spread for constant in constants])

    def residuals(at: numpy.ndarray) -> numpy.ndarray:
        made = _with(machine, constants, at)
        found = [math.log(step.on(made) / step.seconds) for step in steps]
        for each in collectives:
            predicted = _collective(made, each.kind, each.ranks, each.bytes)
            found.append(_WEIGHT_OF_COLLECTIVES * math.log(predicted / each.seconds))
        return numpy.array([*found, *(_WEIGHT_OF_START * (at - start) / spreads)])

    best = _least(residuals, start)
    made = _with(machine, constants, best)
    return Fitted(
        made,
        {constant.path: get_constant(made, constant.path) for constant in constants},
        {step.name: step.on(made) / step.seconds - 1 for step in steps},
        tuple(_collective(made, each.kind, each.ranks, each.bytes) / each.seconds - 1 for each in collectives),
    )


def get_constant(machine: Machine, path: str) -> float:
    """A number of a machine by its path; of `flops`, that of half precision."""
    if path == "flops":
        return machine.flops.get("float16", machine.flops["float32"])
    value: Any = machine
    for name in path.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, (int, float)):
        raise MachineError(f"{machine.name} has no {path}", expected="a number to start from",
                           remedy="fit a machine that has a network and products, such as a100-cluster")  # fmt: skip
    return float(value)


def set_constant(machine: Machine, path: str, value: float) -> Machine:
    """The machine with another number at a path; all of `flops` change by the same factor."""
    if path == "flops":
        factor = value / get_constant(machine, path)
        return dataclasses.replace(machine, flops={dtype: rate * factor for dtype, rate in machine.flops.items()})
    return _replaced(machine, path.split("."), value)  # type: ignore[no-any-return]


def _replaced(value: Any, names: Sequence[str], new: float) -> Any:
    inner = new if len(names) == 1 else _replaced(getattr(value, names[0]), names[1:], new)
    return dataclasses.replace(value, **{names[0]: inner})


def _with(machine: Machine, constants: Sequence[Constant], logs: numpy.ndarray) -> Machine:
    for constant, value in zip(constants, numpy.exp(logs).tolist(), strict=True):
        machine = set_constant(machine, constant.path, value)
    return machine


def _collective(machine: Machine, kind: Kind, ranks: int, size: int) -> float:
    if machine.network is None:
        return machine.collective_seconds(kind, size, ranks)
    return machine.network.seconds(kind, size, ranks, Route(ranks, 1))


def _least(residuals: Callable[[numpy.ndarray], numpy.ndarray], at: numpy.ndarray) -> numpy.ndarray:
    """Where a robust sum of squares is least, by damped Gauss-Newton steps."""
    damping, found = 1e-2, residuals(at)
    for _ in range(_ROUNDS):
        moved = [residuals(at + 1e-3 * unit) for unit in numpy.eye(len(at))]
        slope = numpy.array([(each - found) / 1e-3 for each in moved]).T
        weights = 1 / numpy.maximum(1, numpy.abs(found) / _ROBUST)
        square, pull = (slope.T * weights) @ slope, (slope.T * weights) @ found
        while damping < 1e6:
            step = numpy.clip(-numpy.linalg.solve(square + damping * numpy.eye(len(at)), pull), -0.4, 0.4)
            tried = residuals(at + step)
            if _size(tried) < _size(found):
                break
            damping *= 4
        else:
            return at
        gained = _size(found) - _size(tried)
        at, found, damping = at + step, tried, max(damping / 3, 1e-6)
        if gained < 1e-4 * _size(found):
            return at
    return at


def _size(residuals: numpy.ndarray) -> float:
    small = numpy.abs(residuals)
    return float(numpy.where(small < _ROBUST, small**2, 2 * _ROBUST * small - _ROBUST**2).sum())


def _check(machine: Machine, collectives: Sequence[CollectiveTime], steps: Sequence[StepTime]) -> None:
    for name, seconds in [(str(each), each.seconds) for each in collectives] + [(s.name, s.seconds) for s in steps]:
        if not math.isfinite(seconds) or seconds <= 0:
            raise MachineError(f"{name} was measured to take {seconds} s", expected="a time of more than 0",
                               remedy="leave this measurement out, or correct it")  # fmt: skip
    if not collectives and not steps:
        raise MachineError("nothing was measured", expected="times of collectives or steps",
                           remedy="pass collectives=[CollectiveTime(...)] or steps=[StepTime(...)]")  # fmt: skip
