"""Random numbers that are not torch's: a capture would keep those that it draws for ever, so it refuses to draw any."""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from crossfade.errors import CaptureError, OptimizerError

T = TypeVar("T")
_OF_LIBRARIES = ("mask_time_prob", "mask_feature_prob", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""What configs of models call the chances that they draw for in the forward."""


def is_generator(value: Any) -> bool:
    """Whether something draws numbers from a state that can be read.

    >>> is_generator(random.Random(0)), is_generator(np.random.default_rng(0)), is_generator(random.SystemRandom())
    (True, True, False)
    """
    kinds = random.Random, np.random.Generator, np.random.RandomState
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def capture_without_draws(capture: Callable[[], T], model: nn.Module, generators: Mapping[str, Any]) -> T:
    """What a capture returns, unless it draws numbers of Python's or numpy's generators, or of other `generators`.

    Code that seeds them before it draws gets the same numbers in every step, and may. Who does is seen when it is
    captured again from other states, where also the line is found. Afterwards the generators are as they were.

        >>> capture_without_draws(lambda: random.Random(0).random() > 0.5, nn.ReLU(), {})
        True
        >>> capture_without_draws(random.random, nn.ReLU(), {})
        Traceback (most recent call last):
        crossfade.errors.CaptureError: numbers of Python's random generator are drawn...
    """
    watched = [*_own_of_libraries(), *(_Generator(path, value) for path, value in generators.items())]
    before = [generator.state() for generator in watched]
    try:
        captured = capture()
        after = [generator.state() for generator in watched]
        drawn = [at for at, state in enumerate(after) if _comparable(state) != _comparable(before[at])]
        if not drawn:
            return captured
        for at in drawn:
            watched[at].move()
        with _noting_lines([watched[at] for at in drawn]) as lines:
            again = _runs(capture)
        drawn = [at for at in drawn if not again or _comparable(watched[at].state()) != _comparable(after[at])]
        if not drawn:
            return captured
    finally:
        for generator, state in zip(watched, before, strict=True):
            generator.put(state)
    raise CaptureError(
        f"numbers of {' and of '.join(watched[at].name for at in drawn)} are drawn in the forward or the loss"
        f"{lines[0] if lines else ''}",
        expected="numbers that every step draws for itself: these would stay those of the capture",
        remedy="draw them with torch (torch.rand and torch.where in place of an if), or pass them with the batch, "
        f"as tensors{or_switched_off(model)}",
    )


@contextlib.contextmanager
def refuse_draws(what: str) -> Iterator[None]:
    """Refuse code of an optimizer's that draws numbers of Python's or numpy's generators; put these back.

    >>> with refuse_draws("the step of Noisy"):
    ...     _ = random.random()
    Traceback (most recent call last):
    crossfade.errors.OptimizerError: the step of Noisy draws numbers of Python's random generator...
    """
    watched = _own_of_libraries()
    before = [generator.state() for generator in watched]
    try:
        yield
        changed = zip(watched, before, strict=True)
        drawn = [each.name for each, state in changed if _comparable(each.state()) != _comparable(state)]
    finally:
        for generator, state in zip(watched, before, strict=True):
            generator.put(state)
    if drawn:
        raise OptimizerError(
            f"{what} draws numbers of {' and of '.join(drawn)}",
            expected="numbers that every step draws for itself: these would stay those of the capture",
            remedy="draw them between steps and keep them as a number in optimizer.param_groups",
        )


def or_switched_off(model: nn.Module, among: str = "") -> str:
    """The rest of a remedy: which chances of the model's configs to set to 0, of those with a word in their names.

    >>> from types import SimpleNamespace
    >>> model = nn.ReLU()
    >>> model.config = SimpleNamespace(layerdrop=0.1, mask_time_prob=0.05, mask_feature_prob=0.0)
    >>> or_switched_off(model)
    "; or switch off what the library draws for: mask_time_prob=0, layerdrop=0 in the model's config"
    >>> or_switched_off(model, "layerdrop")
    "; or switch off what the library draws for: layerdrop=0 in the model's config"
    """
    configs = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    on = [
        name
        for name in _OF_LIBRARIES
        if among in name and any(_is_on(config, name) for config in configs)
    ]  # fmt: skip
    settings = ", ".join(f"{name}=0" for name in on)
    return f"; or switch off what the library draws for: {settings} in the model's config" if on else ""


def _is_on(config: Any, name: str) -> bool:
    chance = getattr(config, name, None)
    masks = not name.startswith("mask_") or getattr(config, "apply_spec_augment", True)
    return isinstance(chance, int | float) and chance > 0 and bool(masks)


@dataclass(frozen=True)
class _Generator:
    """One that draws numbers, and where it is."""

    name: str
    value: Any

    def state(self) -> Any:
        match self.value:
            case random.Random():
                return self.value.getstate()
            case np.random.RandomState():
                return self.value.get_state(legacy=False)
        return self.value.bit_generator.state

    def put(self, state: Any) -> None:
        match self.value:
            case random.Random():
                self.value.setstate(state)
            case np.random.RandomState():
                self.value.set_state(state)
            case _:
                self.value.bit_generator.state = state

    def move(self) -> None:
        """To another state."""
        match self.value:
            case random.Random():
                self.value.seed(self.value.random())
            case np.random.RandomState():
                self.value.seed(self.value.randint(1 << 31))
            case _:
                self.value.random()


def _own_of_libraries() -> list[_Generator]:
    return [
        _Generator("Python's random generator", random.random.__self__),  # type: ignore[attr-defined]
        _Generator("numpy's random generator", np.random.rand.__self__),  # type: ignore[attr-defined]
    ]


def _comparable(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return state.tobytes()
    return {key: _comparable(value) for key, value in state.items()} if isinstance(state, dict) else state


def _runs(capture: Callable[[], Any]) -> bool:
    """Whether a capture works from other numbers too: they may decide which way it goes."""
    try:
        capture()
    except Exception:  # whatever it met there
        return False
    return True


@contextlib.contextmanager
def _noting_lines(generators: list[_Generator]) -> Iterator[list[str]]:
    """The first line of the user's after which one of these has drawn. Calls of compiled code cannot be heard of."""
    lines: list[str] = []
    last = ""
    before = [_comparable(generator.state()) for generator in generators]

    def note(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if lines or (event == "call" and not _is_users(frame.f_code.co_filename)):
            return None
        if [_comparable(generator.state()) for generator in generators] != before:
            lines.append(last)
        elif event == "line":
            last = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            last += f": `{line}`" if line else ""
        return note

    tracing = sys.gettrace()
    sys.settrace(note)
    try:
        yield lines
    finally:
        sys.settrace(tracing)


def _is_users(filename: str) -> bool:
    not_users = "/torch/", "/crossfade/capture/", "/crossfade/compile/", "/numpy/", "<frozen"
    return filename != random.__file__ and not any(part in filename for part in not_users)
