"""What a capture bakes into a graph: when any of it changes, the program is captured again."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch import nn

from crossfade.capture.constants import TAKEN_IN
from crossfade.capture.reading import Reading
from crossfade.capture.side_effects import position_of
from crossfade.capture.tokens import ObjectToken, Serials, Token, shown

log = logging.getLogger("crossfade")

EVERY = 100
"""Steps after which everything is read again, where not all of it is watched at every step."""
_KEPT = 32
"""States that are known again when they come back."""
_OFTEN = 3
"""Captures that one value may cause before users are warned."""


class BakedIn:
    """What the forwards of a model's modules and the loss function bake into a graph: their numbers, words and switches
    (dropout's p, training), containers, configs and plain tensors with what is in them, functions with what they read,
    hooks, classes, which parameters there are, and the shapes of buffers.

    Asked at every step: that nothing was replaced is seen without reading everything again.

        >>> model = nn.Dropout(0.5)
        >>> baked_in = BakedIn([model])
        >>> first = baked_in.number()
        >>> baked_in.captured()
        ''
        >>> model.p = 0.1
        >>> baked_in.number() == first
        False
        >>> baked_in.captured()
        'model.p changed from 0.5 to 0.1'
        >>> model.p = 0.5
        >>> baked_in.number() == first
        True
    """

    def __init__(self, models: Iterable[nn.Module], loss_fn: Any = None) -> None:
        self._models, self._loss_fn = tuple(models), loss_fn
        self._serials = Serials()
        self._numbers: dict[tuple[tuple[str, Token], ...], int] = {}
        self._new = count()
        self._number = -1
        self._asked = 0
        self._reading: Reading | None = None
        self._captured: dict[str, Token] | None = None
        self._causes: Counter[str] = Counter()
        self._told: set[str] = set()
        self.reason = ""
        """What had changed when a program was captured last."""

    def number(self) -> int:
        """A number for all of it: the same again whenever all is the same."""
        if self._reading is None or not self._is_current(self._reading):
            self._read()
        return self._number

    def captured(self) -> str:
        """Remember that a program is captured with what was read last; what of it has changed since the one before."""
        now = self._reading.tokens if self._reading is not None else {}
        changed = _changes(self._captured, now) if self._captured is not None else {}
        self._captured, self.reason = now, _in_words(changed)
        self._causes.update(changed.keys())
        if often := {path: how for path, how in changed.items() if self._causes[path] == _OFTEN}:
            log.warning("%s", _too_often(often, now))
        return self.reason

    def path_of(self, value: Any) -> str:
        """Where something was found when all was read last, if it was."""
        return self._reading.path_of(value) if self._reading is not None else ""

    def generators(self) -> dict[str, Any]:
        """Random generators of Python's and numpy's that were found when all was read last, by path."""
        return self._reading.generators if self._reading is not None else {}

    def watching_code(self) -> Callable[[], dict[str, str]]:
        """Asked before a capture. What it gives is called behind it, and says what the code itself has changed of what
        it may compute with: numbers, tensors in objects, the members of lists, how far iterators have gone."""
        before = self._reading
        if before is None:
            return dict
        positions = {path: position_of(iterator) for path, iterator in before.iterators.items()}

        def changed() -> dict[str, str]:
            moved = {
                path: "is moved on" for path, value in before.iterators.items() if position_of(value) != positions[path]
            }
            if before.watch.is_current():
                return moved
            now = Reading(self._models, self._loss_fn, self._serials).tokens
            return moved | {
                path: _change(was, now[path]).replace("changed", "is changed", 1)
                for path, was in before.tokens.items()
                if path in now and now[path] != was and _may_go_on(was, now[path], alone=not before.is_told_of(path))
            }

        return changed

    def untold(self, changed: dict[str, str]) -> dict[str, str]:
        """Those of some changes that nobody was asked about before."""
        new = {path: how for path, how in changed.items() if path not in self._told}
        self._told |= new.keys()
        return new

    def facts(self) -> dict[str, str]:
        """For the report: how all of it is watched, and which change led to the last capture."""
        return {"guards": self.watched()} | ({"captured again": self.reason} if self.reason else {})

    def watched(self) -> str:
        """How much is watched, and how."""
        assert self._reading is not None, "nothing was read yet"
        watch, others = self._reading.watch, self._reading.if_replaced
        seldom = [f"{number:,} {kind}" for kind, number in watch.seldom.items()]
        only = [f"{number:,} {kind}" for kind, number in others.most_common(8)]
        return "; ".join(
            [f"{watch.values:,} values watched at every step"]
            + ([f"compared every {EVERY} steps: {', '.join(seldom)}"] if seldom else [])
            + ([f"seen only when replaced: {', '.join(only)}"] if only else [])
        )

    def _is_current(self, reading: Reading) -> bool:
        self._asked += 1
        due = bool(reading.watch.seldom) and self._asked % EVERY == 0
        return not due and reading.watch.is_current()

    def _read(self) -> None:
        self._reading = Reading(self._models, self._loss_fn, self._serials)
        key = tuple(self._reading.tokens.items())
        known = self._numbers.pop(key, None)
        self._number = self._numbers[key] = next(self._new) if known is None else known
        if len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]  # what was longest not seen


def _changes(before: dict[str, Token], now: dict[str, Token]) -> dict[str, str]:
    """What differs, by path; of something that was replaced, not also what is in it."""
    if before is now:
        return {}
    paths = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    return {path: _change(before.get(path), now.get(path)) for path in paths}


def _change(before: Token | None, now: Token | None) -> str:
    if before is None or now is None:
        return f"is new: {shown(now)}" if before is None else f"is gone: {shown(before)}"
    was, became = shown(before), shown(now)
    return f"changed from {was} to {became}" if was != became else f"changed ({became})"


def _may_go_on(was: Token, now: Token, *, alone: bool) -> bool:
    """Whether code may compute with what it left the last time: no new entry and no tensor where there was none, which
    is how code keeps what it needs to compute only once. `alone` where nobody else tells of numbers and tensors."""
    kinds = [_kind(was), _kind(now)]
    return kinds == ["members", "members"] or (alone and kinds[0] == kinds[1] != "")


def _kind(token: Token) -> str:
    if isinstance(token, ObjectToken):
        first = token.facts[0] if token.facts else None
        if token.words.startswith("a tensor of"):
            return "tensor" if len(token.facts) > 2 else ""  # of the model's own, the values are inputs
        return "members" if first in (list, deque) else ""
    return "number" if isinstance(token, tuple) and token[0] in (int, float) else ""


def _in_words(changed: dict[str, str]) -> str:
    few = [f"{path} {how}" for path, how in list(changed.items())[:3]]
    return ", ".join(few + ([f"and {len(changed) - 3:,} more"] if len(changed) > 3 else []))


def _too_often(often: dict[str, str], now: dict[str, Token]) -> str:
    path, how = next(iter(often.items()))
    others = f" (so have {len(often) - 1:,} more)" if len(often) > 1 else ""
    remedy = "keep what changes at each step outside of the model and the loss, or pass it with the batch, as a tensor"
    if path in now and _kind(now[path]) == "tensor":
        own = "register it with register_buffer" if path.startswith("model.") else TAKEN_IN
        remedy = f"tensors of the model may change between steps, so {own}; or pass it with the batch"
    return (
        f"{path} has been the cause of {_OFTEN} captures{others}, each of which takes seconds (last it {how}): {remedy}"
    )


def ambient() -> tuple[Any, ...]:
    """What torch itself bakes in: autocast, the default dtype and device, and which kernels may be chosen."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    kernels = [enabled() for enabled in _KERNELS]
    return (*autocast, torch.get_default_dtype(), torch.get_default_device(), *kernels)


_KERNELS = (
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
