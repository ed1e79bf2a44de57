"""Safetensors files: opened, and read tensor by tensor, with errors that name file and tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from crossfade.errors import CrossfadeError, StateError

_REMEDY = "download or save the file again"


def safetensors_for(path: Path) -> Any:
    """The safetensors package, which is wanted for a path."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise StateError(f"{path} but no safetensors package", remedy="install safetensors") from error
    return safetensors


class TensorsFile:
    """An open file; a number is read when it is first used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        package = safetensors_for(path)
        with self._readable("its header"):
            self.opened = package.safe_open(str(path), framework="pt")
            self.names: list[str] = list(self.opened.keys())

    def metadata(self) -> dict[str, str]:
        """What its header says beside the tensors."""
        with self._readable("its header"):
            return self.opened.metadata() or {}

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        with self._readable(f"{name!r}"):
            return tuple(self.opened.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, mapped from the file."""
        with self._readable(f"{name!r}"):
            return self.opened.get_tensor(name)

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Some of a tensor: only its bytes are copied."""
        with self._readable(f"{name!r}"):
            return self.opened.get_slice(name)[index]

    @contextlib.contextmanager
    def _readable(self, place: str) -> Iterator[None]:
        try:
            yield
        except CrossfadeError:
            raise
        except Exception as reason:
            said = str(reason).partition("\n")[0][:300]
            raise StateError(f"{self.path}, {place}, which cannot be read ({type(reason).__name__}: {said})",
                             expected="a safetensors file", remedy=_REMEDY) from reason  # fmt: skip
