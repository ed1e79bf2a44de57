"""The numbers of one rank: its parts of parameters and buffers, put into a local program that had only their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.export import ExportedProgram

from crossfade.errors import StateError
from crossfade.graph.private import exported_with
from crossfade.shard.tensor.builder import RANK
from crossfade.shard.tensor.devices import has_numbers, like
from crossfade.shard.tensor.localize import LocalProgram
from crossfade.shard.tensor.parts import whole_shape
from crossfade.shard.tensor.placements import REPLICATE, Placement, Shard
from crossfade.shard.tensor.sources import InMemory, Source, missing


def filled(local: LocalProgram, aliases: Mapping[str, str], source: Source, rank: int) -> ExportedProgram:
    """The program with a rank's parts of a whole state; `local` is left empty, for other ranks.

    What a checkpoint never has, buffers that are not saved and constants, comes from the exported program itself, and
    only where that has no numbers either, from the source.
    """
    taken = _Taken(local, aliases, source, rank)
    state: dict[str, Tensor] = {}
    for name, empty in local.exported.state_dict.items():
        canonical = aliases.get(name, name)
        if canonical not in state:  # tied names hold one tensor
            state[canonical] = taken.state(canonical, empty)
        state[name] = state[canonical]
    constants = {name: taken.constant(name, value) for name, value in local.exported.constants.items()}
    return exported_with(local.exported, state, constants)


def devices_of(exported: ExportedProgram) -> dict[str, torch.device]:
    """Where each parameter, buffer and constant belongs, by its name."""
    nodes = exported.graph.find_nodes(op="placeholder")
    pairs = zip(exported.graph_signature.input_specs, nodes, strict=True)
    return {
        str(spec.target): node.meta["val"].device for spec, node in pairs if isinstance(node.meta.get("val"), Tensor)
    }


class _Taken:
    """Takes a rank's parts from a source."""

    def __init__(self, local: LocalProgram, aliases: Mapping[str, str], source: Source, rank: int) -> None:
        self.local, self.source, self.rank = local, source, rank
        self.devices = devices_of(local.exported)
        self.tied: dict[str, list[str]] = {}
        for alias, canonical in aliases.items():
            self.tied.setdefault(canonical, []).append(alias)

    def state(self, name: str, empty: Tensor) -> Tensor:
        """What a parameter or a saved buffer holds on this rank."""
        if name == RANK:
            return torch.tensor(self.rank, device=self.devices[name])
        names = [name, *self.tied.get(name, ())]
        known = next((alias for alias in names if alias in self.source), None)  # files often have one of several
        if known is None:
            raise missing(name, self.source)
        placement = self.local.parameters.get(name, REPLICATE)
        return like(self._part(self.source, known, placement, empty), empty)

    def constant(self, name: str, value: object) -> object:
        """What a constant holds on this rank."""
        if not isinstance(value, Tensor):
            return value
        placement = self.local.parameters.get(name, REPLICATE)
        if has_numbers(value):
            if not isinstance(placement, Shard) and value.device == self.devices.get(name, value.device):
                return value
            return self._part(InMemory({name: value}), name, placement, None)
        if name not in self.source:
            raise StateError(
                f"{name}, a constant or a buffer that is not saved, has no numbers",
                expected="its numbers in the exported program, since no checkpoint has them",
                remedy=f"build it on a device, or pass it too: state=[checkpoint, {{{name!r}: tensor}}]",
            )
        return self._part(self.source, name, placement, None)

    def _part(self, source: Source, name: str, placement: Placement, empty: Tensor | None) -> Tensor:
        ranks = self.local.ranks
        if empty is not None:
            _check(f"{name} of shape", source.shape(name), whole_shape(empty.shape, placement, ranks))
        part = source.part(name, placement, self.rank, ranks)
        if empty is not None:
            _check(f"{name} of type", part.dtype, empty.dtype)
        return part.to(self.devices.get(name, part.device))


def _check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise StateError(
            f"the state has {what} {found}", expected=f"{expected}", remedy="give the state of the model as exported"
        )
