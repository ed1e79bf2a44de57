"""How compiling a step has split parameters, as JSON and back: what must be done again before a kept step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from crossfade.compile.kept_numbers import NotKept
from crossfade.compile.place import Place
from crossfade.files.found import FileValue
from crossfade.graph.passes import Verdict
from crossfade.shard.tensor.placements import PARTIAL, REPLICATE, Placement, Shard


@dataclass(frozen=True)
class KeptSplit:
    """What stays whole where rows are split (`keep_whole="auto"`), and the placements that a plan came to."""

    whole: tuple[str, ...] | None = None
    placements: Mapping[str, Placement] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()

    @classmethod
    def of(cls, place: Place) -> KeptSplit:
        """What has been split so far."""
        whole = place.shards.whole if place.shards is not None else None
        tensor = place.tensor
        if tensor is None or tensor.parts is None:
            return cls(whole)
        return cls(whole, dict(tensor.parts.placements), dict(tensor.parts.aliases), tensor.verdicts)

    def why_not(self, place: Place) -> str:
        """Why a place is not one that can be split like this."""
        shards, tensor = place.shards, place.tensor
        if (shards is None and self.whole is not None) or (tensor is None) != (self.placements is None):
            return "another place"
        if shards is not None and shards.has_begun and not shards.will_split and shards.whole != self.whole:
            return "other parameters are split"
        if tensor is not None and tensor.parts is not None and tensor.parts.placements != self.placements:
            return "a plan has split the model otherwise"
        return ""

    def apply(self, place: Place) -> None:
        """Split what is not split yet."""
        if place.tensor is not None and self.placements is not None:
            place.tensor.split_again(self.placements, self.aliases, self.verdicts)
        place.begin_rows(self.whole)
        if place.shards is not None and place.shards.will_split:
            place.split_all_but(self.whole or ())

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        placements = self.placements
        return {
            "whole": None if self.whole is None else list(self.whole),
            "placements": None if placements is None else {name: _placement(at) for name, at in placements.items()},
            "aliases": dict(self.aliases),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }

    @classmethod
    def read(cls, found: FileValue) -> KeptSplit:
        """What `as_json` wrote."""
        placements = found["placements"]
        return cls(
            found["whole"].read_as(tuple[str, ...] | None),
            None if placements.value is None else {name: _read(at) for name, at in placements.entries().items()},
            found["aliases"].read_as(Mapping[str, str]),
            found["verdicts"].read_as(tuple[Verdict, ...]),
        )


def _placement(placement: Placement) -> Any:
    if not isinstance(placement, Shard):
        return "replicate" if placement == REPLICATE else "partial"
    if type(placement.outer) is not int:
        raise NotKept(f"a parameter {placement}, in a number of blocks that is a symbol")
    return {
        "dim": placement.dim,
        "outer": placement.outer,
        "sizes": list(placement.sizes),
        "units": placement.units,
    }


def _read(found: FileValue) -> Placement:
    if isinstance(found.value, str):
        whole: Placement = found.one_of({"replicate": REPLICATE, "partial": PARTIAL})
        return whole
    sizes = tuple(size.whole(least=1) for size in found["sizes"].items())
    units = found.get("units", 0).whole(least=0, most=1 << 40)
    return Shard(found["dim"].whole(least=0, most=64), found["outer"].whole(least=1), sizes, units)
