"""Plans in files: a mapping of names to styles, as JSON or YAML by the file's suffix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from crossfade.errors import PlanError
from crossfade.files.plain import decoded_json, read_text

_ALIASES = re.compile(r"^[^#'\"]*(?::|-|\{|\[|,)\s+[&*]\w", re.MULTILINE)


def write(data: Mapping[str, Any], path: Path) -> None:
    """Save entries, in their order."""
    if _is_yaml(path):
        text = _yaml(path).safe_dump(dict(data), sort_keys=False)
    else:
        text = json.dumps(data, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The entries that a file holds."""
    text, remedy = read_text(path, PlanError, "correct the file"), "correct the file"
    data = _parsed_yaml(text, path) if _is_yaml(path) else decoded_json(text, str(path), PlanError, remedy)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise PlanError(f"{path} holds no mapping", expected="names and styles", remedy="write 'name: style' lines")
    return data


def _parsed_yaml(text: str, path: Path) -> Any:
    yaml = _yaml(path)
    if _ALIASES.search(text):  # aliases of aliases make much of little
        raise PlanError(f"{path} has an anchor or an alias", expected="names and styles", remedy="write them out")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not YAML ({error})", remedy="correct the file") from error


def _is_yaml(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise PlanError(f"{path} is no plan file", expected="a suffix .json, .yaml or .yml", remedy="rename the file")
    return path.suffix != ".json"


def _yaml(path: Path) -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise PlanError(
            f"{path} needs PyYAML, which is not installed", remedy="install pyyaml, or write the plan as .json"
        ) from error
    return yaml
