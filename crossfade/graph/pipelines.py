"""Pipelines: passes in an order, changed by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from operator import is_
from typing import Any, overload

from crossfade.errors import PassError
from crossfade.graph.passes import Pass

Name = str | type[Pass]
"""A pass by its name, or by its class."""


class Pipeline(Sequence[Pass]):
    """An immutable order of passes. Those that hold others in their field `passes` are reached into.

    Every change makes another pipeline. Whether each pass comes after what provides what it requires depends on the
    program, and is checked by `run_passes` before anything runs.

        >>> from crossfade.simplify.remove_aliases import RemoveAliases
        >>> from crossfade.simplify.remove_dead_code import RemoveDeadCode
        >>> Pipeline([RemoveDeadCode()]).before("remove-dead-code", RemoveAliases())
        remove-aliases
        remove-dead-code
        >>> Pipeline([RemoveDeadCode()]).without("remove-dead-cod")
        Traceback (most recent call last):
        ...
        crossfade.errors.PassError: the pass 'remove-dead-cod': expected one of: remove-dead-code. Remedy: ...
    """

    def __init__(self, passes: Iterable[Pass] = ()) -> None:
        self._passes = tuple(passes)

    @overload
    def __getitem__(self, index: int) -> Pass: ...
    @overload
    def __getitem__(self, index: slice) -> Pipeline: ...
    def __getitem__(self, index: int | slice) -> Pass | Pipeline:
        return Pipeline(self._passes[index]) if isinstance(index, slice) else self._passes[index]

    def __len__(self) -> int:
        return len(self._passes)

    def __add__(self, other: Iterable[Pass]) -> Pipeline:
        return Pipeline((*self._passes, *other))

    def __radd__(self, other: Iterable[Pass]) -> Pipeline:
        return Pipeline((*other, *self._passes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self._passes == other._passes

    def __hash__(self) -> int:
        return hash(self._passes)

    def __repr__(self) -> str:
        return "\n".join(pass_.spelling for pass_ in self._passes)

    def names(self) -> list[str]:
        """The names of all passes, those inside others after the one that holds them.

        >>> from crossfade.simplify.remove_dead_code import RemoveDeadCode
        >>> Pipeline([RemoveDeadCode()]).names()
        ['remove-dead-code']
        """
        return [pass_.name for pass_ in _all(self._passes)]

    def without(self, *names: Name) -> Pipeline:
        """The same passes but these, wherever they occur; one that held only these goes too."""
        found = {self._known(name) for name in names}
        return Pipeline(_rewritten(self._passes, lambda pass_: [] if pass_.name in found else [pass_]))

    def before(self, name: Name, *passes: Pass) -> Pipeline:
        """With other passes before the one of this name, which occurs once; inside what holds it, if one does."""
        once = self._once(name)
        return Pipeline(_rewritten(self._passes, lambda pass_: [*passes, pass_] if pass_.name == once else [pass_]))

    def after(self, name: Name, *passes: Pass) -> Pipeline:
        """With other passes after the one of this name, which occurs once; inside what holds it, if one does."""
        once = self._once(name)
        return Pipeline(_rewritten(self._passes, lambda pass_: [pass_, *passes] if pass_.name == once else [pass_]))

    def replace(self, name: Name, other: Pass) -> Pipeline:
        """With another pass wherever this one occurs: the same with other options, say."""
        found = self._known(name)
        return Pipeline(_rewritten(self._passes, lambda pass_: [other] if pass_.name == found else [pass_]))

    def _known(self, name: Name) -> str:
        text = name if isinstance(name, str) else name.name
        known = list(dict.fromkeys(self.names()))
        if text not in known:
            near = difflib.get_close_matches(text, known)
            remedy = f"did you mean {' or '.join(near)}" if near else "use one of these names"
            raise PassError(f"the pass {text!r}", expected=f"one of: {', '.join(known) or 'none'}", remedy=remedy)
        return text

    def _once(self, name: Name) -> str:
        text = self._known(name)
        if (times := self.names().count(text)) > 1:
            raise PassError(
                f"the pass {text!r} at {times} places",
                expected="one place to add passes at",
                remedy="name a pass that occurs once, or build the pipeline from a list",
            )
        return text


def _held(pass_: Pass) -> tuple[Pass, ...]:
    """The passes that a pass holds in its field `passes`."""
    return pass_.passes if any(option.name == "passes" for option in fields(pass_)) else ()  # type: ignore[attr-defined]


def _all(passes: Iterable[Pass]) -> Iterator[Pass]:
    for pass_ in passes:
        yield pass_
        yield from _all(_held(pass_))


def _rewritten(passes: Iterable[Pass], change: Callable[[Pass], list[Pass]]) -> tuple[Pass, ...]:
    """Each pass as `change` has it, those inside others too; what held passes and holds none any more goes."""
    result: list[Pass] = []
    for pass_ in passes:
        for kept in change(pass_):
            held = _held(kept) if kept is pass_ else ()
            inside = _rewritten(held, change)
            if len(inside) == len(held) and all(map(is_, inside, held)):
                result.append(kept)
            elif inside:
                options: dict[str, Any] = {"passes": inside}
                result.append(replace(kept, **options))
    return tuple(result)
