"""Texts and JSON from files: what cannot be read is one of our errors, with the file and the byte or line in it.

>>> decoded_json('{"ranks": 2, "ranks": 3}', "plan.json", CrossfadeError, "write it again")
Traceback (most recent call last):
crossfade.errors.CrossfadeError: plan.json, in which 'ranks' stands twice...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crossfade.errors import CrossfadeError


def read_text(path: Path, error: type[CrossfadeError], remedy: str) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{path}, byte {reason.start}, which is not UTF-8", expected="text", remedy=remedy) from reason
    except OSError as reason:
        raise error(f"{path}, which cannot be read ({reason.strerror})", expected="a file", remedy=remedy) from reason


def read_json(path: Path, error: type[CrossfadeError], remedy: str) -> Any:
    """What a JSON file holds."""
    return decoded_json(read_text(path, error, remedy), str(path), error, remedy)


def decoded_json(
    text: str | bytes, where: str, error: type[CrossfadeError], remedy: str, *, finite: bool = True
) -> Any:
    """What JSON text holds. A key that stands twice is refused, and so is NaN or Infinity unless `finite` is false."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(found)
        if len(result) < len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{where}, in which {twice!r} stands twice", expected="every key once", remedy=remedy)
        return result

    def constant(word: str) -> float:
        if finite:
            raise error(f"{where}, in which {word} stands", expected="finite numbers", remedy=remedy)
        return float(word)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as reason:
        said = "nested too deeply" if isinstance(reason, RecursionError) else str(reason)
        raise error(f"{where}, which is not JSON ({said})", remedy=remedy) from reason
