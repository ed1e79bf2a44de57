"""Whole experts spread over an axis of their own, beside the one that a plan is for: which, and a rank's of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from crossfade.shard.tensor.placements import Placement, Shard
from crossfade.shard.tensor.sources import Source, local_part


@dataclass(frozen=True)
class SpreadExperts:
    """The parameters that hold experts, by name, and the axis over whose ranks these are spread, as many on each."""

    axis: str
    ranks: int
    parameters: tuple[str, ...]


class OwnExperts:
    """A source that has, of the parameters that hold experts, one rank's alone: for it they are the whole."""

    def __init__(self, source: Source, spread: SpreadExperts, rank: int) -> None:
        self.source, self.spread, self.rank = source, spread, rank

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def names(self) -> Iterable[str]:
        """Of the source."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """With as many experts as a rank has; of what does not divide, as it is, which fits nowhere."""
        shape = self.source.shape(name)
        if name not in self.spread.parameters or not shape or shape[0] % self.spread.ranks:
            return shape
        return shape[0] // self.spread.ranks, *shape[1:]

    def part(self, name: str, placement: Placement, rank: int, ranks: int) -> Tensor:
        """This rank's experts are read, and then cut as the plan says."""
        if name not in self.spread.parameters:
            return self.source.part(name, placement, rank, ranks)
        own = self.source.part(name, Shard(0), self.rank, self.spread.ranks)
        return local_part(own, placement, rank, ranks)
