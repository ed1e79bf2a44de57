"""What a user expects of a compilation, in one small form: a dataclass, a mapping or a line of text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Verdict

_REMEDY = "see the table in docs/strict.md"


@dataclass(frozen=True, slots=True)
class Like:
    """Verdicts that match these patterns (`*` is anything): of a pass, with an outcome, a reason, and a source.

    >>> Like.of("raise-launches/left*/starting it earlier*")
    Like(name='raise-launches', outcome='left*', reason='starting it earlier*', source='*')
    """

    name: str = "*"
    outcome: str = "*"
    reason: str = "*"
    source: str = "*"

    @classmethod
    def of(cls, given: Like | Mapping[str, str] | str) -> Like:
        """From its text `PASS/OUTCOME/REASON/SOURCE`, of which the last ones may be left out, or from a mapping."""
        if isinstance(given, Like):
            return given
        if isinstance(given, Mapping):
            _check_names(given, [field.name for field in fields(cls)])
            return cls(**given)
        parts = given.split("/")
        if len(parts) > 4 or not all(parts):
            raise CrossfadeError(f"no:{given}", expected="no:PASS/OUTCOME/REASON/SOURCE", remedy=_REMEDY)
        return cls(*parts)

    def matches(self, name: str, verdict: Verdict) -> bool:
        """Whether a verdict of a pass is one of these."""
        pairs = ((name, self.name), (verdict.outcome, self.outcome), (verdict.reason, self.reason))
        return all(fnmatchcase(str(text), pattern) for text, pattern in (*pairs, (verdict.source, self.source)))

    def __str__(self) -> str:
        return "/".join((self.name, self.outcome, self.reason, self.source)).removesuffix("/*")


@dataclass(frozen=True)
class Expect:
    """What must hold of a compiled program, for `strict=`; what is left out is not asked for.

    Args:
        exposed_ms: at most so many milliseconds of communication are predicted to be exposed; needs a machine.
        collectives: at most so many collectives are started.
        megabytes: at most so many megabytes in them.
        bucketed: what must share buckets: `"gradients"`, `"weights"`, `"all"`, or a pattern of sources.
        no_gather: what may not be all-gathered: `"weights"`, or a pattern of inputs or sources.
        no_left: passes, by name or pattern, that may leave nothing alone.
        rules: every operator has a rule under the tensor-parallel plan, so that none is replicated.
        bitwise: no pass changed the program that may change the numbers.
        no_remedies: no communication is left alone or exposed by a verdict that names a remedy.
        no: verdicts that may not be given, as `Like`, mappings or `"PASS/OUTCOME/REASON/SOURCE"`.

    It prints as the text that it may be written as:

    >>> expect = Expect(exposed_ms=5, bucketed="gradients", no_left=("sink-waits",))
    >>> print(expect)
    exposed<=5ms bucketed:gradients no-left:sink-waits
    >>> Expect.of("exposed<=5ms bucketed:gradients no-left:sink-waits") == expect
    True
    >>> Expect.of({"exposed_ms": 5, "bucketed": "gradients", "no_left": ["sink-waits"]}) == expect
    True
    """

    exposed_ms: float | None = None
    collectives: int | None = None
    megabytes: float | None = None
    bucketed: str | None = None
    no_gather: str | None = None
    no_left: tuple[str, ...] = ()
    rules: bool = False
    bitwise: bool = False
    no_remedies: bool = False
    no: tuple[Like, ...] = ()

    def __post_init__(self) -> None:
        left: Any = [self.no_left] if isinstance(self.no_left, str) else self.no_left
        given: Any = [self.no] if isinstance(self.no, (str, Mapping, Like)) else self.no
        object.__setattr__(self, "no_left", tuple(left))
        object.__setattr__(self, "no", tuple(Like.of(verdicts) for verdicts in given))
        for name in ("exposed_ms", "collectives", "megabytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                raise CrossfadeError(f"{name}={value!r}", expected="a number that is not negative", remedy=_REMEDY)

    @classmethod
    def of(cls, given: Expect | Mapping[str, Any] | str | bool | None) -> Expect | None:
        """From any of its forms; `True` is `DEFAULT`, `None` and `False` expect nothing."""
        if given is None or given is False:
            return None
        if given is True:
            return DEFAULT
        if isinstance(given, Expect):
            return given
        if isinstance(given, Mapping):
            _check_names(given, [field.name for field in fields(cls)])
            return cls(**given)
        if isinstance(given, str):
            return cls(**_read(given))
        raise CrossfadeError(f"strict={given!r}", expected="True, a text, a mapping or an Expect", remedy=_REMEDY)

    def __str__(self) -> str:
        parts = [
            f"exposed<={self.exposed_ms:g}ms" if self.exposed_ms is not None else "",
            f"collectives<={self.collectives}" if self.collectives is not None else "",
            f"sent<={self.megabytes:g}MB" if self.megabytes is not None else "",
            f"bucketed:{self.bucketed}" if self.bucketed is not None else "",
            f"no-gather:{self.no_gather}" if self.no_gather is not None else "",
            *(f"no-left:{name}" for name in self.no_left),
            *(word for word, wanted in _words(self).items() if wanted),
            *(f"no:{like}" for like in self.no),
        ]
        return " ".join(shlex.quote(part) if " " in part or "*" in part else part for part in parts if part)


def _words(expect: Expect) -> dict[str, bool]:
    return {"rules": expect.rules, "bitwise": expect.bitwise, "no-remedies": expect.no_remedies}


DEFAULT = Expect(rules=True, no_remedies=True)
"""What `strict=True` expects: nothing is left undone about communication that a verdict says how to do."""

_LIMITS = {"exposed": ("exposed_ms", "ms"), "collectives": ("collectives", ""), "sent": ("megabytes", "MB")}
_LIMIT = re.compile(r"(\w+)<=([\d.]+)(ms|MB|)")


def _read(text: str) -> dict[str, Any]:
    """The fields that a text spells."""
    found: dict[str, Any] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CrossfadeError(f"strict={text!r} ({error})", expected="closed quotes", remedy=_REMEDY) from error
    for word in words:
        name, value = _field(word)
        found[name] = (*found.get(name, ()), value) if name in ("no_left", "no") else value
    return found


def _field(word: str) -> tuple[str, Any]:
    if (limit := _LIMIT.fullmatch(word)) and limit[1] in _LIMITS and limit[3] == _LIMITS[limit[1]][1]:
        return _LIMITS[limit[1]][0], _number(word, limit[2])
    name, colon, value = word.partition(":")
    if word in ("rules", "bitwise", "no-remedies"):
        return word.replace("-", "_"), True
    if colon and value and name in ("bucketed", "no-gather", "no-left", "no"):
        return name.replace("-", "_"), Like.of(value) if name == "no" else value
    raise CrossfadeError(
        f"unknown word {word!r} in strict=",
        expected="exposed<=5ms, collectives<=12, sent<=10MB, bucketed:, no-gather:, no-left:, no:, rules, bitwise or "
        "no-remedies",
        remedy=_REMEDY,
    )


def _number(word: str, digits: str) -> float | int:
    try:
        return int(digits) if digits.isdecimal() else float(digits)
    except ValueError as error:
        raise CrossfadeError(f"unknown word {word!r} in strict=", expected="a number", remedy=_REMEDY) from error


def _check_names(given: Mapping[str, Any], known: list[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise CrossfadeError(
            f"unknown names {', '.join(map(repr, unknown))} in strict=", expected=", ".join(known), remedy=_REMEDY
        )
