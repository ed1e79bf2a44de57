"""`crossfade check`: programs from files, groups as the command line spells them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossfade.check.compatible import check_compatible
from crossfade.check.findings import Compatibility
from crossfade.check.groups import read_mesh
from crossfade.errors import CrossfadeError, MeshError, TextError
from crossfade.graph.sources import parse_with_sources


def check_files(paths: Sequence[Path], mesh: str, groups: Sequence[str], backend: str) -> Compatibility:
    """What `check_compatible` says of programs written as text, one file a rank or one for all."""
    if mesh and groups:
        raise MeshError(f"both --mesh {mesh} and --group", expected="one of them", remedy="leave one out")
    meshes = read_mesh(mesh) if mesh else read_groups(groups) or None
    return check_compatible([_read(path) for path in paths], meshes, backend=backend)  # type: ignore[arg-type]


def _read(path: Path) -> Any:
    try:
        return parse_with_sources(path.read_text(encoding="utf-8"), path.name)
    except CrossfadeError as error:
        raise type(error)(f"{path}: {error.found}", expected=error.expected, remedy=error.remedy) from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path}, which is no text ({error})", remedy="pass what a program prints as") from error


def read_groups(items: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Groups as the command line spells them, each on its own.

    >>> read_groups(["dp=0,2", "dp=1,3", "pp=0,1,2,3"])
    {'dp': [(0, 2), (1, 3)], 'pp': [(0, 1, 2, 3)]}
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    for item in items:
        name, _, ranks = item.partition("=")
        numbers = ranks.split(",")
        if not name or not all(number.strip().isdecimal() for number in numbers):
            raise MeshError(f"the group {item!r}", expected="its name and ranks, as in pp=0,1", remedy="write it so")
        found.setdefault(name, []).append(tuple(int(number) for number in numbers))
    return found
