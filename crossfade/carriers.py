"""Carriers: what carries the collectives of each mesh axis, and what follows from it for a machine and its programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.cost.machine import Machine
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Pass
from crossfade.pipeline import lowering

_EMULATED = "emulated"


@dataclass(frozen=True)
class Carriers:
    """The backend of each axis, and the machine that is planned for, if any.

    >>> [one.spelling for one in Carriers({"dp": "gloo"}, None).lowering({"dp": 2})]
    ['lower-averages', 'lower-reduce-scatters', 'lower-coalesced-gathers']
    """

    backends: Mapping[str, str]
    machine: Machine | None

    @property
    def exchanged(self) -> list[str]:
        """The axes whose reduce-scatters are better exchanged: on gloo, and emulated where the machine says so."""
        return [axis for axis, backend in self.backends.items() if self._is_exchanged(axis, backend)]

    def _is_exchanged(self, axis: str, backend: str) -> bool:
        if self.machine is None or backend != _EMULATED:
            return backend == "gloo"
        links = self.machine.fabric(axis).links
        return links[Kind.REDUCE_SCATTER].bandwidth < 0.75 * links[Kind.ALL_TO_ALL].bandwidth

    def run_on(self, machine: Machine) -> Machine:
        """A machine as these backends use it: an emulated fabric does not slow computation down.

        >>> from crossfade.cost.presets import preset
        >>> machine = preset("ethernet-10gbit")
        >>> carriers = Carriers({"dp": "emulated"}, machine)
        >>> [one.fabric("dp").slows_compute for one in (machine, carriers.run_on(machine))]
        [1.0, 0.0]
        """
        emulated = [axis for axis, backend in self.backends.items() if backend == _EMULATED]
        return machine.with_computation_undisturbed(emulated)

    def planned_for(self, machine: Machine) -> Machine:
        """The machine to plan a program for that is yet to be lowered."""
        return self.run_on(machine).with_scatters_as_exchanges(self.exchanged)

    def lowering(self, groups: Mapping[str, int]) -> list[Pass]:
        """Passes that say a program as these backends do it best; `groups` has the sizes of its groups."""
        pieces = [self._piece_mb(axis, groups[axis]) for axis in self.exchanged if axis in groups and self.machine]
        return lowering(self.backends, self.exchanged, min(pieces, default=None))

    def _piece_mb(self, axis: str, ranks: int) -> float:
        """The megabytes of an exchange's pieces: as small as they are without a machine, if latency allows; infinite
        where larger ones are no slower."""
        assert self.machine is not None
        if self.machine.fabric(axis).piece is None:
            return math.inf
        return max(LowerReduceScatters.piece_mb, self.machine.worthwhile(Kind.ALL_TO_ALL, ranks, axis) / MB)
