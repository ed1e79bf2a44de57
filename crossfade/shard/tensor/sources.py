"""Where the parts of a state come from: tensors in memory, or files of which a rank reads no more than its part."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from crossfade.errors import StateError
from crossfade.files.found import FileValue
from crossfade.files.inside import named_inside
from crossfade.files.plain import read_json
from crossfade.files.tensors import TensorsFile
from crossfade.shard.tensor.devices import has_numbers
from crossfade.shard.tensor.placements import Placement, Shard, block_sizes, local_size


class Source(Protocol):
    """Gives parts of named tensors."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """What it has."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor, without reading it."""
        ...

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """A rank's part of a tensor that is there."""
        ...


def source_of(state: Any) -> Source:
    """What to read a state from: a dict of tensors, the path of a safetensors file, of a folder of such, or of a
    checkpoint that `torch.distributed.checkpoint` wrote; or a list of these, of which the first that has a name counts.
    """
    if isinstance(state, Mapping):
        return InMemory(state)
    if isinstance(state, (list, tuple)):
        return FirstOf([source_of(source) for source in state])
    path = Path(state)
    if path.is_file() or list(path.glob("*.safetensors")):
        return SafetensorsFiles(path)
    if (path / ".metadata").exists():
        return DistributedCheckpoint(path)
    raise StateError(
        f"no state in {path}",
        expected="a .safetensors file, a folder of them, or a folder of torch.distributed.checkpoint",
        remedy="give the path of one, or a dict of tensors",
    )


class FirstOf:
    """Several sources, the first that has a name counts."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources

    def __contains__(self, name: str) -> bool:
        return any(name in source for source in self.sources)

    def names(self) -> Iterable[str]:
        """Of all."""
        return [name for source in self.sources for name in source.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the first that has it."""
        return self._holder(name).shape(name)

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """Of the first that has it."""
        return self._holder(name).part(name, placement, rank, ranks)

    def _holder(self, name: str) -> Source:
        return next(source for source in self.sources if name in source)


class InMemory:
    """Whole tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        """The keys."""
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.tensors[name].shape)

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """A copy of the part, so that the whole can be freed; the tensor itself where all of it is kept."""
        tensor = self.tensors[name].detach()
        if not has_numbers(tensor):
            raise StateError(
                f"{name} has no numbers: it is on the meta device or fake",
                remedy="pass state=: a dict of tensors, or the path of a checkpoint",
            )
        return local_part(tensor, placement, rank, ranks)


class SafetensorsFiles:
    """Safetensors files, read slice by slice. What is kept whole stays mapped from the file until it is used."""

    def __init__(self, path: Path) -> None:
        self._opened: dict[Path, TensorsFile] = {}
        indices = [] if path.is_file() else sorted(path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise StateError(
                f"{path} has {' and '.join(index.name for index in indices)}",
                expected="one index",
                remedy="give the path of a folder that holds one checkpoint",
            )
        if indices:
            self.files = _listed(indices[0])
        else:
            self.files = {}
            for file in [path] if path.is_file() else _files_in(path):
                for name in self._file(file).names:
                    if name in self.files:
                        raise StateError(
                            f"{name} is both in {self.files[name].name} and in {file.name}",
                            expected="every tensor in one file of the folder",
                            remedy="give the path of one file, or of a folder that holds one checkpoint",
                        )
                    self.files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Iterable[str]:
        """Of all files."""
        return self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's header."""
        return self._file(self.files[name]).shape(name)

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """Only the part's bytes are copied."""
        opened = self._file(self.files[name])
        if not isinstance(placement, Shard):
            return opened.tensor(name)
        size = opened.shape(name)[placement.dim]
        ranges = own_ranges(placement, size, rank, ranks)
        ahead = (slice(None),) * placement.dim
        return padded([opened.part(name, (*ahead, slice(*limits))) for limits in ranges], placement, size, ranks)

    def _file(self, file: Path) -> TensorsFile:
        """A file, opened once: its header is long where it has many tensors."""
        if file not in self._opened:
            if not file.exists():
                raise StateError(f"no file {file}, which the index lists", remedy="complete the checkpoint")
            self._opened[file] = TensorsFile(file)
        return self._opened[file]


class DistributedCheckpoint:
    """A folder that `torch.distributed.checkpoint` wrote, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        from crossfade.files.checkpoints import read_metadata

        self.path = path
        items = read_metadata(path).state_dict_metadata
        self.items: dict[str, Any] = {name: item for name, item in items.items() if hasattr(item, "size")}

    def __contains__(self, name: str) -> bool:
        return name in self.items

    def names(self) -> Iterable[str]:
        """Of its tensors."""
        return self.items

    def shape(self, name: str) -> tuple[int, ...]:
        """From the metadata."""
        return tuple(self.items[name].size)

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """One whole tensor at a time is read, and its part kept."""
        from crossfade.files.checkpoints import load_into

        item = self.items[name]
        whole = torch.empty(item.size, dtype=item.properties.dtype)
        load_into({name: whole}, self.path)
        return local_part(whole, placement, rank, ranks)


def _listed(index: Path) -> dict[str, Path]:
    """The files of tensors, by their names, as an index lists them: all in its folder."""
    remedy = "download or write the index again"
    found = FileValue(read_json(index, StateError, remedy), str(index), "", StateError, remedy)
    entries = found["weight_map"].entries()
    paths = {file: named_inside(index.parent, file, str(index), StateError)
             for file in {entry.text() for entry in entries.values()}}  # fmt: skip
    return {name: paths[entry.value] for name, entry in entries.items()}


def _files_in(folder: Path) -> list[Path]:
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    return [named_inside(folder, name, f"the folder {folder}", StateError) for name in names]


def own_ranges(shard: Shard, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Where a rank's part lies along the split dim: one range a block, without padding.

    >>> own_ranges(Shard(0, outer=2), 8, rank=1, ranks=2), own_ranges(Shard(0, units=3), 3, rank=1, ranks=2)
    ([(2, 4), (6, 8)], [(2, 3)])
    """
    start, found = 0, []
    for block in block_sizes(shard, size):
        width = local_size(shard, block, ranks)
        found.append((start + min(rank * width, block), start + min((rank + 1) * width, block)))
        start += block
    return found


def padded(pieces: Sequence[Tensor], shard: Shard, size: int, ranks: int) -> Tensor:
    """A rank's pieces of a dim's blocks side by side, each as long as every rank's: zeros where it ends sooner.

    >>> padded([torch.ones(1), torch.ones(1)], Shard(0, outer=2, units=3), size=6, ranks=2)
    tensor([1., 0., 1., 0.])
    """
    found = []
    for piece, block in zip(pieces, block_sizes(shard, size), strict=True):
        lacking = local_size(shard, block, ranks) - piece.shape[shard.dim]
        rest = [*piece.shape[: shard.dim], lacking, *piece.shape[shard.dim + 1 :]]
        found += [piece, piece.new_zeros(rest)] if lacking else [piece]
    return torch.cat(found, shard.dim)


def local_part(tensor: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """A rank's part of a whole tensor, as a copy of its own where it is only a part.

    >>> local_part(torch.arange(8), Shard(0, outer=2), rank=1, ranks=2)
    tensor([2, 3, 6, 7])
    """
    if not isinstance(placement, Shard):
        return tensor
    size = tensor.shape[placement.dim]
    ranges = own_ranges(placement, size, rank, ranks)
    return padded([tensor.narrow(placement.dim, start, end - start) for start, end in ranges], placement, size, ranks)


def missing(name: str, source: Source) -> StateError:
    """The error for a name that a source does not have."""
    near = difflib.get_close_matches(name, list(source.names()), n=1)
    return StateError(
        f"the state has no tensor named {name!r}",
        expected="every parameter and buffer of the program",
        remedy=f"did you mean {near[0]}" if near else "give the state of the model that was exported",
    )
