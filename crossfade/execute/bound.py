"""The inputs of a step's program: looked up once, and again only when something that they rely on was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

Watch = tuple[Mapping[Any, Any], Any, Any]
"""A mapping, a key, and the object that must still be there."""


def watch(mapping: Any, key: Any) -> Watch:
    """Watch a mapping's entry; what a scripted module keeps is no dict, and is looked up at every step."""
    return (mapping, key, mapping[key]) if isinstance(mapping, dict) else ({}, key, mapping)


class BoundValue(NamedTuple):
    """An input's value, and what it relies on."""

    value: Any
    watches: tuple[Watch, ...] = ()


class Bound:
    """A program's inputs by place: how to find those that last from step to step, how to take the others from a batch.

    Users load checkpoints, change rates and replace tensors between steps; mostly they do not. To see that nothing was
    replaced takes a fraction of looking everything up.

        >>> model = {"w": 1}
        >>> lasting = {0: lambda: BoundValue(model["w"] + 1, (watch(model, "w"),))}
        >>> bound = Bound(lasting, {1: lambda batch: batch["x"]})
        >>> bound.is_current()
        False
        >>> bound.look_up()
        >>> bound.values({"x": 5})
        [2, 5]
        >>> model["w"] = 2
        >>> bound.is_current()
        False
    """

    def __init__(
        self, lasting: Mapping[int, Callable[[], BoundValue]], fresh: Mapping[int, Callable[[dict[str, Any]], Any]]
    ) -> None:
        self._lasting, self._fresh = lasting, list(fresh.items())
        self._values: list[Any] | None = None
        self._whole = _WholeMappings([])
        self._watches: list[Watch] = []

    def is_current(self) -> bool:
        """Whether everything was looked up, and nothing that it relies on has been replaced since."""
        if self._values is None or not self._whole.are_current():
            return False
        for mapping, key, expected in self._watches:  # noqa: SIM110 (at every step: the fewest calls)
            if mapping.get(key) is not expected:
                return False
        return True

    def look_up(self) -> None:
        """Find all that lasts."""
        found = {place: find() for place, find in self._lasting.items()}
        relied_on = {(id(watched[0]), watched[1]): watched for value in found.values() for watched in value.watches}
        self._whole = _WholeMappings(relied_on.values())
        self._watches = [watched for watched in relied_on.values() if watched[0] not in self._whole]
        count = len(found) + len(self._fresh)
        self._values = [found[place].value if place in found else None for place in range(count)]

    def forget(self) -> None:
        """Let go of what was looked up."""
        self._values, self._whole, self._watches = None, _WholeMappings([]), []

    def values(self, batch: dict[str, Any]) -> list[Any]:
        """All inputs, those of the batch taken out of it."""
        assert self._values is not None, "look up first"
        values = self._values.copy()
        for place, take in self._fresh:
            values[place] = take(batch)
        return values


class _WholeMappings:
    """Dictionaries of which every entry is watched: compared without looking up a key, which for tensors is slow."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        watched: dict[int, list[Watch]] = {}
        for watch in watches:
            watched.setdefault(id(watch[0]), []).append(watch)
        first = [entries[0][0] for entries in watched.values() if len(entries) == len(entries[0][0])]
        self._mappings = [mapping for mapping in first if isinstance(mapping, dict)]
        self._ids = set(map(id, self._mappings))
        self._lengths = list(map(len, self._mappings))
        self._expected = list(self._values())

    def __contains__(self, mapping: Any) -> bool:
        return id(mapping) in self._ids

    def are_current(self) -> bool:
        """Whether each holds the same objects in the same order."""
        return list(map(len, self._mappings)) == self._lengths and all(map(is_, self._values(), self._expected))

    def _values(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._mappings))
