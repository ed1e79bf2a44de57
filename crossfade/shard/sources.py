"""Where the parts of a state come from: tensors in memory, or files of which a rank reads no more than its part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from crossfade.errors import StateError
from crossfade.shard.placements import Placement, Shard, block_sizes


class Source(Protocol):
    """Gives parts of named tensors."""

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """A rank's part of a tensor, as a tensor of its own."""
        ...


def source_of(state: Any) -> Source:
    """What to read a state from: a dict of tensors, or the path of a safetensors file, of a folder of such, or of a
    checkpoint that `torch.distributed.checkpoint` wrote."""
    if isinstance(state, Mapping):
        return InMemory(state)
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


class InMemory:
    """Whole tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """A copy of the part, so that the whole can be freed."""
        if name not in self.tensors:
            raise _missing(name, self.tensors)
        return local_part(self.tensors[name].detach(), placement, rank, ranks)


class SafetensorsFiles:
    """Safetensors files, read slice by slice."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._open = safe_open
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        index = path / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text())["weight_map"]
            self.files = {name: path / file for name, file in listed.items()}
        else:
            self.files = {name: file for file in files for name in self._names(file)}

    def _names(self, file: Path) -> list[str]:
        with self._open(str(file), framework="pt") as opened:
            return list(opened.keys())

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """Only the part's bytes are read."""
        if name not in self.files:
            raise _missing(name, self.files)
        with self._open(str(self.files[name]), framework="pt") as opened:
            if not isinstance(placement, Shard):
                return opened.get_tensor(name)
            view = opened.get_slice(name)
            ranges = own_ranges(placement, view.get_shape()[placement.dim], rank, ranks)
            ahead = (slice(None),) * placement.dim
            return torch.cat([view[(*ahead, slice(*one))] for one in ranges], placement.dim).contiguous()


class DistributedCheckpoint:
    """A folder that `torch.distributed.checkpoint` wrote, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self.path = path
        self.items = FileSystemReader(str(path)).read_metadata().state_dict_metadata

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """One whole tensor at a time is read, and its part kept."""
        import torch.distributed.checkpoint as dcp

        if name not in self.items:
            raise _missing(name, self.items)
        item: Any = self.items[name]
        whole = torch.empty(item.size, dtype=item.properties.dtype)
        dcp.load({name: whole}, checkpoint_id=str(self.path), no_dist=True)
        return local_part(whole, placement, rank, ranks)


def own_ranges(shard: Shard, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Where a rank's part lies along the split dim: one range a block.

    >>> own_ranges(Shard(0, outer=2), 8, rank=1, ranks=2)
    [(2, 4), (6, 8)]
    """
    start, found = 0, []
    for block in block_sizes(shard, size):
        width = block // ranks
        found.append((start + rank * width, start + (rank + 1) * width))
        start += block
    return found


def local_part(tensor: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """A rank's part of a whole tensor, as a copy of its own where it is only a part.

    >>> local_part(torch.arange(8), Shard(0, outer=2), rank=1, ranks=2)
    tensor([2, 3, 6, 7])
    """
    if not isinstance(placement, Shard):
        return tensor
    ranges = own_ranges(placement, tensor.shape[placement.dim], rank, ranks)
    return torch.cat([tensor.narrow(placement.dim, start, end - start) for start, end in ranges], placement.dim)


def _missing(name: str, known: Mapping[str, Any]) -> StateError:
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return StateError(
        f"no tensor named {name!r} in the state",
        expected="every parameter and buffer of the program",
        remedy=f"did you mean {near[0]}" if near else "give the state of the model that was exported",
    )
