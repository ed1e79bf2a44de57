"""Checkpoints of `torch.distributed.checkpoint`, read without running what is pickled in them.

Their `.metadata` is a pickle, which torch reads with `pickle.load`: a file that names `os.system` would run it. Here
only the classes that metadata is made of can be named, and values that are no tensors are read as plain data.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata

from crossfade.errors import CrossfadeError, StateError
from crossfade.files.inside import named_inside
from crossfade.files.pickled import check_plain
from crossfade.graph.private import checkpoint_classes

METADATA = ".metadata"
_REMEDY = "save the checkpoint again, or copy all of its files"


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint's folder; its metadata is checked before anything is made of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """What the checkpoint holds, and in which files."""
        found = read_metadata(self.folder)
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class PlainPlanner(DefaultLoadPlanner):
    """Reads values that are no tensors, if they are plain data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Put one value into the state."""
        check_plain(value.getvalue(), f"{self.folder}, {read_item.storage_index.fqn!r}", StateError, _REMEDY)
        super().load_bytes(read_item, value)


def read_metadata(folder: Path) -> metadata.Metadata:
    """What a checkpoint says of itself; StateError where that cannot be, with the entry that says so."""
    path = folder / METADATA
    try:
        found = _Metadata(io.BytesIO(path.read_bytes())).load()
    except CrossfadeError:
        raise
    except Exception as reason:
        said = str(reason).partition("\n")[0][:300]
        raise StateError(
            f"{path}, which is no metadata ({type(reason).__name__}: {said})", expected="a checkpoint's", remedy=_REMEDY
        ) from reason
    _Checked(folder, found).check()
    return found


def load_into(state: dict[str, Any], folder: Path, group: Any = None) -> None:
    """Read what a checkpoint has into the tensors and values of a state: from all ranks of a group, or from one."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        checkpoint.load(
            state,
            storage_reader=CheckpointReader(folder),
            planner=PlainPlanner(folder),
            process_group=group,
            no_dist=group is None,
        )
    except CrossfadeError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception, and carries those of all ranks
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(reason, CrossfadeError):
            raise reason from error
        said = (str(reason).splitlines() or [""])[0][:300]
        raise StateError(
            f"{type(reason).__name__} while loading from {folder}: {said}",
            remedy="see that the folder is whole, and that model and optimizer are those that were saved",
        ) from error


class _Metadata(pickle._Unpickler):
    """Makes objects of the classes that metadata has. Written in Python, so that what is on its stack can be seen."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """A class of metadata, by its name in the file."""
        found = _classes().get(f"{module}.{name}")
        if found is None:
            raise StateError(
                f"{METADATA} that names {module}.{name}",
                expected="only classes of checkpoint metadata",
                remedy="do not use this checkpoint, unless you know where it comes from: torch runs what it names",
            )
        return found

    def load_build(self) -> None:
        """Give an object its state; a class or an enum must not get one: that would change what others see of it."""
        built = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(built, type) or not dataclasses.is_dataclass(built):
            raise StateError(f"{METADATA} that changes {built!r:.80}", expected="only values", remedy=_REMEDY)
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
    del dispatch[pickle.BYTEARRAY8[0]]  # reserves as much as the file says


@functools.cache
def _classes() -> dict[str, Any]:
    """What metadata may name. Paths are read as pure ones: those of another system cannot be made here."""
    classes = [*checkpoint_classes(), torch.Size, torch.device, OrderedDict, set, frozenset]
    pure = {"Posix": pathlib.PurePosixPath, "Windows": pathlib.PureWindowsPath}
    paths = {f"pathlib.{how}{system}Path": kind for system, kind in pure.items() for how in ("", "Pure")}
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {f"{class_.__module__}.{class_.__qualname__}": class_ for class_ in classes} | paths | dtypes


class _Checked:
    """Whether metadata is of one piece, and speaks of no more than the folder has."""

    def __init__(self, folder: Path, found: Any) -> None:
        self.folder, self.found = folder, found
        self.sizes: dict[str, int] = {}

    def wrong(self, name: object, what: str) -> StateError:
        return StateError(f"{self.folder / METADATA}, {name!r}, {what}", remedy=_REMEDY)

    def check(self) -> None:
        entries, places = getattr(self.found, "state_dict_metadata", None), getattr(self.found, "storage_data", None)
        if type(self.found) is not metadata.Metadata or not isinstance(entries, dict) or not isinstance(places, dict):
            raise self.wrong("the whole", "which lists neither values nor files")
        for name, entry in entries.items():
            self.entry(name, entry)
        for index, place in places.items():
            self.place(index, place)
        for name, entry in entries.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                self.fits(name, entry)

    def entry(self, name: object, entry: Any) -> None:
        if not isinstance(name, str):
            raise self.wrong(name, "which is no name")
        if isinstance(entry, metadata.BytesStorageMetadata):
            return
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise self.wrong(name, "which is neither a tensor nor bytes")
        dtype = getattr(getattr(entry, "properties", None), "dtype", None)
        chunks = getattr(entry, "chunks", None)
        if not isinstance(dtype, torch.dtype) or not _is_size(getattr(entry, "size", None)):
            raise self.wrong(name, "which has no shape or no dtype")
        if not isinstance(chunks, list) or not all(_lies_in(chunk, entry.size) for chunk in chunks):
            raise self.wrong(name, "whose pieces do not lie in it")

    def place(self, index: Any, place: Any) -> None:
        name, offset, length = (getattr(place, word, None) for word in ("relative_path", "offset", "length"))
        if not isinstance(index, metadata.MetadataIndex) or not isinstance(getattr(index, "fqn", None), str):
            raise self.wrong(index, "which is no place of a value")
        if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
            raise self.wrong(index.fqn, "which has no file, or no place in it")
        if offset < 0 or length < 0 or offset + length > self.size(name):
            raise self.wrong(index.fqn, f"which lies at bytes {offset} to {offset + length} of {name}: it has fewer")

    def size(self, name: str) -> int:
        """Of a file, in bytes."""
        if name not in self.sizes:
            path = named_inside(self.folder, name, str(self.folder / METADATA), StateError)
            if not path.is_file():
                raise StateError(f"no {name} in {self.folder}, which {METADATA} lists", remedy=_REMEDY)
            self.sizes[name] = path.stat().st_size
        return self.sizes[name]

    def fits(self, name: str, entry: metadata.TensorStorageMetadata) -> None:
        """A tensor has no more bytes than all files: nobody is made to reserve what is not there."""
        needed = math.prod(entry.size) * entry.properties.dtype.itemsize
        if needed > sum(self.sizes.values()):
            raise self.wrong(name, f"which has {needed} bytes: all files together have {sum(self.sizes.values())}")


def _is_size(value: Any) -> bool:
    return isinstance(value, (torch.Size, tuple, list)) and all(
        type(item) is int and 0 <= item < 2**62 for item in value
    )


def _lies_in(chunk: Any, size: Any) -> bool:
    if not isinstance(chunk, metadata.ChunkStorageMetadata):
        return False
    offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
    if not _is_size(offsets) or not _is_size(sizes) or not len(offsets) == len(sizes) == len(size):  # type: ignore[arg-type]
        return False
    return all(start + wide <= whole for start, wide, whole in zip(offsets, sizes, size, strict=True))  # type: ignore[arg-type]
