"""All-to-alls for backends that send and receive in turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossfade.communicate.lower_reduce_scatters import PIECE_MB
from crossfade.communicate.pieces import Megabytes, check_pieces, finish_at_its_wait, lower_each, number_of_pieces
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice


@dataclass(frozen=True)
class LowerAllToAlls(Pass):
    """Exchange in pieces that are started together, along the groups named (gloo).

    Within one call gloo sends and receives in turns: between two ranks, 60 MB in pieces of 1 MB take half the time.
    What is larger than `piece_mb` by half travels in equal pieces of about that, and is put together where it is first
    waited for; give one number for all groups, or one for each.

    Before:
        x: f32[4, 131072] = input("x")
        s: f32[4, 131072] = c10d.all_to_all_single(x, [2, 2], [2, 2], "dp")
        w: f32[4, 131072] = c10d.wait_tensor(s)
        return output("y", w)

    After:
        x: f32[4, 131072] = input("x")
        view: f32[2, 262144] = aten.view(x, [2, -1])
        split: (f32[2, 131072], f32[2, 131072]) = aten.split.Tensor(view, 131072, 1)
        getitem: f32[2, 131072] = split[0]
        getitem_1: f32[2, 131072] = split[1]
        clone: f32[2, 131072] = aten.clone(getitem, memory_format=contiguous_format)
        all_to_all_single: f32[2, 131072] = c10d.all_to_all_single(clone, [1, 1], [1, 1], "dp")
        clone_1: f32[2, 131072] = aten.clone(getitem_1, memory_format=contiguous_format)
        all_to_all_single_1: f32[2, 131072] = c10d.all_to_all_single(clone_1, [1, 1], [1, 1], "dp")
        wait_tensor: f32[2, 131072] = c10d.wait_tensor(all_to_all_single)
        wait_tensor_1: f32[2, 131072] = c10d.wait_tensor(all_to_all_single_1)
        cat: f32[2, 262144] = aten.cat([wait_tensor, wait_tensor_1], 1)
        view_1: f32[4, 131072] = aten.view(cat, [4, 131072])
        return output("y", view_1)
    """

    name = "lower-all-to-alls"
    numerics = Numerics.BITWISE

    groups: tuple[str, ...] = ("dp",)
    piece_mb: Megabytes = PIECE_MB

    def __post_init__(self) -> None:
        check_pieces(self.name, self.groups, self.piece_mb)

    def run(self, program: Program) -> PassResult:
        """Cut each large all-to-all of the groups named."""

        def lower(exchange: Collective, replaced: Replacements) -> tuple[str, str]:
            count = _cut(program, exchange, number_of_pieces(exchange, self.groups, self.piece_mb), replaced)
            return "its group's backend sends and receives in turns", f"{count} pieces"

        return lower_each(program, Kind.ALL_TO_ALL, self._reason_against, lower)

    def _reason_against(self, exchange: Collective) -> str | None:
        if exchange.group not in self.groups:
            return "its group's backend exchanges well by itself"
        if not exchange.plain:
            return "only the plain all-to-all is cut"
        if collectives.equal_parts(exchange.node) is None:
            return "its parts differ in size, or are not known before it runs"
        if number_of_pieces(exchange, self.groups, self.piece_mb) < 2:
            return "it is no larger than a piece"
        return None


def _cut(program: Program, exchange: Collective, count: int, replaced: Replacements) -> int:
    ranks, shape = collectives.equal_parts(exchange.node) or 1, list(exchange.node.meta["val"].shape)

    def start(value: Tensor) -> list[Tensor]:
        pieces = value.contiguous().view(ranks, -1).chunk(count, 1)
        return [collectives.all_to_all(piece.contiguous(), ranks, exchange.group) for piece in pieces]

    def finish(*started: Tensor) -> Tensor:
        return torch.cat([collectives.wait(piece) for piece in started], 1).view(shape)

    started = splice(program, start, exchange.inputs[0], before=exchange.node, like=exchange.node)
    finish_at_its_wait(program, exchange, started, finish, replaced)
    return len(started)
