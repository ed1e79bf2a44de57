"""Files of `torch.save`, read without running what is pickled in them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from crossfade.errors import CrossfadeError

TRUST = "pass trusted=True (--trusted on the command line) if you know where the file comes from"


def load_tensors(path: Path, error: type[CrossfadeError], *, trusted: bool = False) -> Any:
    """What `torch.save` wrote: tensors, numbers and texts in lists and dicts; with `trusted`, any object."""
    try:
        if trusted:
            return torch.load(path, weights_only=False)
        _check_sizes(path)
        return torch.load(path, weights_only=True)
    except CrossfadeError:
        raise
    except Exception as reason:
        raise _unreadable(str(path), reason, error, f"save it again, or {TRUST}") from reason


def check_plain(
    data: bytes, where: str, error: type[CrossfadeError], remedy: str = f"save it again, or {TRUST}"
) -> Any:
    """What some bytes of `torch.save` hold, if these are tensors, numbers and texts alone."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as reason:
        raise _unreadable(where, reason, error, remedy) from reason


def _unreadable(where: str, reason: Exception, error: type[CrossfadeError], remedy: str) -> CrossfadeError:
    expected = "what torch.save wrote of tensors, numbers and texts"
    found = f"{where}, which cannot be read as tensors ({type(reason).__name__}: {_gist(str(reason))})"
    return error(found, expected=expected, remedy=remedy)


def _gist(message: str) -> str:
    """What torch found, without its advice.

    >>> _gist("Load failed. Do it if you must. WeightsUnpickler error: Unsupported global: posix.mkdir was not allowed")
    'Unsupported global: posix.mkdir was not allowed'
    """
    _, _, found = message.rpartition("WeightsUnpickler error: ")
    return found.strip().partition("\n")[0].partition(". ")[0][:200]


def _check_sizes(path: Path) -> None:
    """What a file unpacks to is no larger than the file: torch neither compresses nor makes tensors of nothing."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("its parts say that they are larger than the file")
