"""What a forward does beside computing: while it is captured, whatever it stores is put back."""

from __future__ import annotations

import contextlib
import logging
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from torch import Tensor, nn

from crossfade.capture.tokens import plain_token

log = logging.getLogger("crossfade")

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextlib.contextmanager
def as_it_was(roots: Iterable[Any], *, told: bool = True) -> Iterator[None]:
    """Give every module back the plain attributes it had, and the containers among them what was in them: a forward
    that stores a tensor would keep a traced one. Roots that are modules, or methods of one, have modules. Users are
    told of what training would need.

        >>> model = nn.ReLU()
        >>> model.seen = []
        >>> with as_it_was([model]):
        ...     model.seen.append(1)
        ...     model.last = 1
        >>> model.seen, hasattr(model, "last")
        ([], False)
    """
    owners = [getattr(root, "__self__", root) for root in roots]
    modules = {module: name for root in owners if isinstance(root, nn.Module) for name, module in root.named_modules()}
    before = [(module, dict(vars(module)), _contents(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            if told:
                _warn_of_counters(module, modules[module], attributes)
            vars(module).clear()
            vars(module).update(attributes)
            for container, members in contents:
                _refill(container, members)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in vars(module).values() if type(value) in _CONTAINERS]


def _refill(container: Any, before: Any) -> None:
    now, then = _members(container), _members(before)
    if len(now) != len(then) or not all(map(is_, now, then)):
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(before)


def _members(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _warn_of_counters(module: nn.Module, name: str, before: dict[str, Any]) -> None:
    """A forward that counts its calls, or keeps a running mean in a plain tensor, runs only when it is captured."""
    for attribute, was in before.items():
        now = vars(module).get(attribute, was)
        counts = type(was) in (int, float) and type(now) in (int, float) and now != was
        if counts or (isinstance(was, Tensor) and isinstance(now, Tensor) and now is not was):
            log.warning(
                "%s of %s is changed by the forward%s, which runs only when a step is captured, and is "
                "put back: if it computes with it, make it a buffer",
                attribute, name or f"the {type(module).__name__}", f" (from {was} to {now})" if counts else "",
            )  # fmt: skip


def position_of(iterator: Iterator[Any]) -> Any:
    """How far an iterator has gone, as far as it can be seen.

    >>> numbers = iter([1.0, 0.5])
    >>> before = position_of(numbers)
    >>> next(numbers), position_of(numbers) == before
    (1.0, False)
    """
    if not isinstance(iterator, types.GeneratorType):
        return operator.length_hint(iterator, -1), repr(iterator)
    frame = iterator.gi_frame
    if frame is None:
        return "at its end"
    held = [(name, plain_token(value) or id(value)) for name, value in frame.f_locals.items()]
    return frame.f_lasti, held
