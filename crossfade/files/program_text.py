"""Programs in text files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crossfade.errors import TextError
from crossfade.files.plain import read_text
from crossfade.graph.program import Program
from crossfade.graph.text import parse


def read_program_text(path: Path, *, groups: Mapping[str, int] | None = None) -> Program:
    """The program in a text file; what is wrong in it is named with the file and the line."""
    text = read_text(path, TextError, "give a program in Crossfade's text form; see docs/architecture.md")
    try:
        return parse(text, groups=groups)
    except TextError as error:
        raise TextError(f"{path}, {error.found}", expected=error.expected, remedy=error.remedy) from error
