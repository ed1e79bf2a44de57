"""Reduce-scatters for backends that scatter no faster than they all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.communicate.pieces import (
    Megabytes,
    check_pieces,
    finish_at_its_wait,
    lower_each,
    number_of_pieces,
    ranks_of,
)
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice

PIECE_MB = 1.0
"""Exchanges on gloo between two ranks were fastest in pieces of this size (`benchmarks/reduce_scatter.py`)."""


@dataclass(frozen=True)
class LowerReduceScatters(Pass):
    """Exchange the parts of a reduce-scatter as they are and reduce what arrives, for the groups named (gloo).

    Gloo's reduce-scatter moves as many bytes as its all-reduce; an all-to-all moves half. Within one call gloo sends
    and receives in turns, so what is larger than `piece_mb` by half travels in equal pieces of about that, started
    together; give one number for all groups, or one for each.

    Before:
        x: f32[8, 4] = input("x")
        s: f32[4, 4] = c10d.reduce_scatter_tensor(x, "sum", 2, "dp")
        e: f32[8, 4] = aten.exp(x)
        w: f32[4, 4] = c10d.wait_tensor(s)
        return output("y", w), output("e", e)

    After:
        x: f32[8, 4] = input("x")
        view: f32[2, 16] = aten.view(x, [2, 16])
        all_to_all_single: f32[2, 16] = c10d.all_to_all_single(view, [1, 1], [1, 1], "dp")
        e: f32[8, 4] = aten.exp(x)
        wait_tensor: f32[2, 16] = c10d.wait_tensor(all_to_all_single)
        unbind: (f32[16], f32[16]) = aten.unbind.int(wait_tensor)
        getitem: f32[16] = unbind[0]
        getitem_1: f32[16] = unbind[1]
        add: f32[16] = aten.add.Tensor(getitem, getitem_1)
        view_1: f32[4, 4] = aten.view(add, [4, 4])
        return output("y", view_1), output("e", e)
    """

    name = "lower-reduce-scatters"
    numerics = Numerics.REASSOCIATES

    groups: tuple[str, ...] = ("dp",)
    piece_mb: Megabytes = PIECE_MB

    def __post_init__(self) -> None:
        check_pieces(self.name, self.groups, self.piece_mb)

    def run(self, program: Program) -> PassResult:
        """Lower each reduce-scatter of the groups named."""

        def lower(scatter: Collective, replaced: Replacements) -> tuple[str, str]:
            pieces = number_of_pieces(scatter, self.groups, self.piece_mb)
            count = _lower(program, scatter, pieces, replaced)
            return "exchanged, then reduced where it arrives", f"{count} pieces of all-to-all"

        return lower_each(program, Kind.REDUCE_SCATTER, self._reason_against, lower)

    def _reason_against(self, scatter: Collective) -> str | None:
        if scatter.group not in self.groups:
            return "its group's backend scatters well by itself"
        if not scatter.plain:
            return "only the plain reduce-scatter is lowered"
        if scatter.reduce_op not in _LOCAL:
            return "its reduction has no local form"
        value: Tensor = scatter.node.meta["val"]
        if scatter.reduce_op == "avg" and not (value.is_floating_point() or value.is_complex()):
            return "a division of integers would not stay in its dtype"
        if sum(isinstance(size, torch.SymInt) for size in value.shape) > 1:
            return "more than one of its sizes is not known before it runs"
        return None


def _summed(parts: Tensor) -> Tensor:
    return _of_two(parts) if _is_pair(parts) else parts.sum(0, dtype=parts.dtype)


def _averaged(parts: Tensor) -> Tensor:
    return _of_two(parts) * 0.5 if _is_pair(parts) else parts.mean(0)


def _of_two(parts: Tensor) -> Tensor:
    first, second = parts.unbind(0)
    return first + second


def _is_pair(parts: Tensor) -> bool:
    """Whether to add the parts of two ranks as they are, which on a CPU takes half the time of a reduction over a dim
    of two. Not of narrow floats, whose sum may not fit though their mean does."""
    return parts.shape[0] == 2 and parts.dtype in (torch.float32, torch.float64)


_LOCAL: dict[str | None, Callable[[Tensor], Tensor]] = {
    "sum": _summed,
    "avg": _averaged,
    "product": lambda parts: parts.prod(0, dtype=parts.dtype),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
"""Each reduction, over the parts that arrived from the ranks."""


def _lower(program: Program, scatter: Collective, count: int, replaced: Replacements) -> int:
    """Start the pieces where the start stood, reduce where its first wait stood; return how many there are."""
    ranks, reduce = ranks_of(scatter), _LOCAL[scatter.reduce_op]
    shape = _known_sizes(scatter.node.meta["val"])

    def start(value: Tensor) -> list[Tensor]:
        table = value.contiguous().view(ranks, -1 if -1 in shape else value.numel() // ranks)
        pieces = table.chunk(count, 1) if count > 1 else [table]
        return [collectives.all_to_all(piece.contiguous(), ranks, scatter.group) for piece in pieces]

    def finish(*started: Tensor) -> Tensor:
        parts = [reduce(collectives.wait(piece)) for piece in started]  # while the next ones are still on their way
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(shape)

    started = splice(program, start, scatter.inputs[0], before=scatter.node, like=scatter.node)
    finish_at_its_wait(program, scatter, started, finish, replaced)
    return len(started)


def _known_sizes(value: Tensor) -> list[int]:
    """The sizes of a tensor, -1 for one that is not known before it runs."""
    return [-1 if isinstance(size, torch.SymInt) else size for size in value.shape]
