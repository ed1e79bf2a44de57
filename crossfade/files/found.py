"""A value read from a file, with its place there: asked for as what it should be, it says where it is not.

>>> account = FileValue({"ranks": "two"}, "sharded.json", "", CrossfadeError, "save it again")
>>> account["ranks"].whole(least=1)
Traceback (most recent call last):
crossfade.errors.CrossfadeError: sharded.json, ranks = 'two': expected a whole number of at least 1...
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crossfade.errors import CrossfadeError

_MOST_SHOWN = 80


@dataclass(frozen=True)
class FileValue:
    """What stands at one place of a file."""

    value: Any
    file: str
    place: str
    error: type[CrossfadeError]
    remedy: str

    def wrong(self, expected: str) -> CrossfadeError:
        """The error that says what should stand here."""
        shown = repr(self.value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        return self.error(f"{self.file}, {self.place or 'the whole'} = {shown}", expected=expected, remedy=self.remedy)

    def at(self, value: Any, place: str) -> FileValue:
        """A value inside this one."""
        return dataclasses.replace(self, value=value, place=f"{self.place}{place}".removeprefix("."))

    def __getitem__(self, key: str) -> FileValue:
        entries = self.entries()
        if key not in entries:
            raise self.error(
                f"{self.file}, {self.place or 'the whole'} without {key!r}", expected="that key", remedy=self.remedy
            )
        return entries[key]

    def get(self, key: str, default: Any) -> FileValue:
        """An entry, or another value in its place."""
        return self.entries().get(key) or self.at(default, f".{key}")

    def entries(self) -> dict[str, FileValue]:
        """The values of an object."""
        if not isinstance(self.value, dict) or not all(isinstance(key, str) for key in self.value):
            raise self.wrong("an object")
        return {key: self.at(value, f".{key}") for key, value in self.value.items()}

    def items(self) -> list[FileValue]:
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [self.at(value, f"[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def whole(self, least: int = -(2**63), most: int = 2**63 - 1) -> int:
        """A whole number in a range."""
        if type(self.value) is not int or not least <= self.value <= most:
            bounds = f" of at least {least}" if least > -(2**63) else ""
            raise self.wrong(f"a whole number{bounds}" + (f" and at most {most}" if most < 2**63 - 1 else ""))
        return self.value

    def number(self) -> float:
        """A number."""
        if type(self.value) not in (int, float) or (type(self.value) is int and abs(self.value) > 2**1000):
            raise self.wrong("a number")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def one_of(self, choices: Mapping[str, Any]) -> Any:
        """What a word stands for."""
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.wrong(f"one of {', '.join(map(str, choices))}")
        return choices[self.value]

    def record(self, kind: type, **given: Any) -> Any:
        """A dataclass from an object whose keys are its fields, each read as its type says; some may be `given`."""
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        entries = {name: entry for name, entry in self.entries().items() if name not in given}
        if unknown := sorted(entries.keys() - fields.keys()):
            raise self.error(f"{self.file}, {self.place}.{unknown[0]}".replace(", .", ", "),
                             expected=f"only {', '.join(fields)}", remedy=self.remedy)  # fmt: skip
        owed = [name for name, field in fields.items() if _is_owed(field) and name not in given]
        for name in owed:
            self[name]
        return kind(**{name: entry.read_as(hints[name]) for name, entry in entries.items()}, **given)

    def read_as(self, hint: Any) -> Any:
        """The value as a type hint says: numbers, texts, enums, dataclasses; tuples, lists and mappings of these."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._as_either(arguments)
        if origin is tuple:
            return self._as_tuple(arguments)
        if origin is list:
            return [item.read_as(arguments[0]) for item in self.items()]
        if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
            return {name: entry.read_as(arguments[1]) for name, entry in self.entries().items()}
        return self._as_plain(hint)

    def _as_either(self, hints: tuple[Any, ...]) -> Any:
        if self.value is None and type(None) in hints:
            return None
        for hint in (hint for hint in hints if hint is not type(None)):
            try:
                return self.read_as(hint)
            except CrossfadeError as error:
                last = error
        raise last

    def _as_tuple(self, hints: tuple[Any, ...]) -> tuple[Any, ...]:
        if hints[-1:] == (...,):
            return tuple(item.read_as(hints[0]) for item in self.items())
        if len(self.items()) != len(hints):
            raise self.wrong(f"a list of {len(hints)}")
        return tuple(item.read_as(hint) for item, hint in zip(self.items(), hints, strict=True))

    def _as_plain(self, hint: Any) -> Any:
        readers: dict[Any, Callable[[], Any]] = {str: self.text, int: self.whole, float: self.number, bool: self.flag}
        if hint in readers:
            return readers[hint]()
        if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
            return self.one_of({str(choice): choice for choice in hint})
        return self.record(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else self.value


def _is_owed(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold; true and false are none.

    >>> is_number(3), is_number(10**400), is_number(True), is_number(float("nan"))
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**1000 and math.isfinite(value)
