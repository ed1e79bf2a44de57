"""What a plan says about one program: how each parameter is split, and how activations enter and leave modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossfade.shard.tensor.placements import Shard, local_size
from crossfade.shard.tensor.plan_names import starred


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter (or a buffer that the plan names) is spread over the ranks.

    >>> fused = ParameterSharding("qkv.weight", dim=0, blocks=(8, 4, 4), shape=(16, 8), ranks=2)
    >>> fused.local_shape, fused.local_blocks(1)
    ((8, 8), (slice(4, 8, None), slice(10, 12, None), slice(14, 16, None)))
    """

    name: str
    """Fully qualified; of tied names the one that the graph reads."""
    dim: int | None
    """The dim that is split; None: every rank has all of it."""
    blocks: tuple[int, ...] = ()
    """Sizes along `dim` of blocks that are split one by one, and whose pieces a rank keeps side by side; () is one."""
    style: str = ""
    """The spelling that asked for it."""
    units: int = 0
    """In how many units each block comes if they do not divide by the ranks, and the last ranks are padded; else 0."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    ranks: int = 1

    def local_blocks(self, rank: int) -> tuple[slice, ...]:
        """The pieces along `dim` that a rank keeps, without padding: of what does not divide the last ranks get less,
        or nothing."""
        if self.dim is None:
            raise ValueError(f"{self.name} is not split")
        start, pieces = 0, []
        for size in self.blocks or (self.shape[self.dim],):
            step = local_size(Shard(self.dim, units=self.units or size), size, self.ranks)
            pieces.append(slice(start + min(rank * step, size), start + min((rank + 1) * step, size)))
            start += size
        return tuple(pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on every rank, padding included."""
        if self.dim is None:
            return self.shape
        kept = sum(piece.stop - piece.start for piece in self.local_blocks(0))
        return (*self.shape[: self.dim], kept, *self.shape[self.dim + 1 :])

    @property
    def bytes(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Of what a rank keeps."""
        return math.prod(self.local_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ModuleBoundary:
    """How activations enter and leave a module: `"replicate"`, `"shard(<dim>)"`, or None where they stay as they are.

    `input` speaks of the first tensor that the module takes, `output` of those that it returns and that have the dim.
    Partial sums that reach a boundary are reduce-scattered there for `"shard(<dim>)"`; for `"replicate"` they are
    all-reduced where something first needs them whole.
    """

    module: str
    input: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan applied to one program and a number of ranks; printed as a table, layers that are alike in one row."""

    parameters: Mapping[str, ParameterSharding]
    """All parameters by canonical name, and the buffers that the plan names."""
    boundaries: Mapping[str, ModuleBoundary]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The other names of tied parameters, with the canonical one."""
    ranks: int = 1
    notes: tuple[str, ...] = ()
    """What the reader should know: sizes that do not divide, parameters left whole beside split ones."""

    def __rich__(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        whole = sum(sharding.bytes for sharding in self.parameters.values())
        local = sum(sharding.local_bytes for sharding in self.parameters.values())
        table.add_column("parameter", f"{len(self.parameters)} of {_bytes(whole)}", overflow="fold")
        for heading in ("shape", "style", "split dim", "per rank"):
            table.add_column(heading)
        table.add_column("bytes per rank", _bytes(local), justify="right")
        for name, sharding, count in self._rows():
            split = "-" if sharding.dim is None else str(sharding.dim)
            split += f", {len(sharding.blocks)} blocks" if sharding.blocks else ""
            split += " (padded)" if sharding.units else ""
            cells = (name, _shape(sharding.shape), sharding.style or "-", split, _shape(sharding.local_shape))
            table.add_row(*map(Text, cells), _bytes(sharding.local_bytes * count))
        return table

    def __str__(self) -> str:
        console = Console(width=200, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())

    def _rows(self) -> Iterator[tuple[str, ParameterSharding, int]]:
        """Parameters whose names differ only in numbers and that are split alike, together."""
        alike: dict[tuple, list[ParameterSharding]] = {}
        for sharding in self.parameters.values():
            how = sharding.dim, sharding.blocks, sharding.style, sharding.shape, sharding.dtype
            key = (starred(sharding.name), *how)
            alike.setdefault(key, []).append(sharding)
        for (name, *_), group in alike.items():
            yield (f"{name} ({len(group)})" if len(group) > 1 else group[0].name), group[0], len(group)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _bytes(count: float) -> str:
    """
    >>> _bytes(512), _bytes(3 << 20)
    ('512 B', '3.0 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(int(math.log(count, 1024)), len(units) - 1) if count >= 1024 else 0
    return f"{count / 1024**power:.1f} {units[power]}" if power else f"{count:.0f} B"
