"""Files that another file names: only such as lie in the same folder.

>>> named_inside(Path("models"), "../secret.safetensors", "the index", CrossfadeError)
Traceback (most recent call last):
crossfade.errors.CrossfadeError: '../secret.safetensors' in the index, which is outside of models...
"""

from __future__ import annotations

from pathlib import Path

from crossfade.errors import CrossfadeError


def named_inside(folder: Path, name: str, where: str, error: type[CrossfadeError]) -> Path:
    """The path of a file that is named relative to a folder, and in it, also where links lead."""
    remedy = "put the file itself into the folder, and name it there"
    try:
        path = folder / name
        path.exists()  # raises where no file can have this name
        lies_inside = not Path(name).is_absolute() and ".." not in Path(name).parts and _leads_inside(folder, path)
    except (OSError, ValueError, RuntimeError) as reason:  # null bytes, names that are too long, links in a circle
        raise error(f"{name!r} in {where}, which is no name of a file ({reason})", remedy=remedy) from reason
    if not name or not lies_inside:
        raise error(f"{name!r} in {where}, which is outside of {folder}", expected="a file in it", remedy=remedy)
    return path


def _leads_inside(folder: Path, path: Path) -> bool:
    """Whether a path is in a folder once links are followed; the Hugging Face cache links from `snapshots/<revision>`
    to `blobs` beside it, which is the same download."""
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    return any(path.resolve().is_relative_to(home) for home in homes)
