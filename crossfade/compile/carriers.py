"""Carriers: what carries the collectives of each mesh axis, and what follows from it for a machine and its programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.lower_reduce_scatters import PIECE_MB
from crossfade.cost.machine import Machine
from crossfade.graph.collectives import Kind

_EMULATED = "emulated"
_SLOWS_MUCH = 0.2
"""By which share travelling must slow computation down before pieces are made for the processor rather than the link:
twice as large, they cost it a fifth less, and keep the link less busy."""


@dataclass(frozen=True)
class Carriers:
    """The backend of each axis, and the machine that is planned for, if any.

    >>> Carriers({"dp": "gloo", "tp": "nccl"}, None).exchanged
    ('dp',)
    """

    backends: Mapping[str, str]
    machine: Machine | None
    summed_here: tuple[str, ...] = ()
    """The axes whose sums are of 16 bits, to be added up in float32 where they arrive."""

    @property
    def on_gloo(self) -> tuple[str, ...]:
        """The axes on gloo."""
        return self._on("gloo")

    @property
    def exchanged(self) -> tuple[str, ...]:
        """The axes whose reduce-scatters are better exchanged: on gloo, those summed here, and emulated where the
        machine says so."""
        return tuple(axis for axis, backend in self.backends.items() if self._is_exchanged(axis, backend))

    @property
    def recorded(self) -> tuple[str, ...]:
        """The axes whose collectives a CUDA graph can hold: those that a stream carries, not threads of the host."""
        return self._on(_EMULATED)

    def _on(self, wanted: str) -> tuple[str, ...]:
        return tuple(axis for axis, backend in self.backends.items() if backend == wanted)

    def _is_exchanged(self, axis: str, backend: str) -> bool:
        if axis in self.summed_here:
            return True
        if self.machine is None or backend != _EMULATED:
            return backend == "gloo"
        links = self.machine.fabric(axis).links
        return links[Kind.REDUCE_SCATTER].bandwidth < 0.75 * links[Kind.ALL_TO_ALL].bandwidth

    def run_on(self, machine: Machine) -> Machine:
        """A machine as these backends use it: an emulated fabric does not slow computation down.

        >>> from crossfade.cost.presets import preset
        >>> machine = preset("ethernet-10gbit")
        >>> carriers = Carriers({"dp": "emulated"}, machine)
        >>> [known.fabric("dp").slows_compute for known in (machine, carriers.run_on(machine))]
        [1.0, 0.0]
        """
        return machine.with_computation_undisturbed(self._on(_EMULATED))

    def planned_for(self, machine: Machine) -> Machine:
        """The machine to plan a program for that is yet to be lowered."""
        return self.run_on(machine).with_scatters_as_exchanges(self.exchanged)

    def pieces(self, groups: Mapping[str, int]) -> tuple[float, ...]:
        """The megabytes of an exchange's pieces along each axis that is `exchanged`; `groups` has the axes' sizes."""
        return tuple(self._piece_mb(axis, groups.get(axis, 0)) for axis in self.exchanged)

    def gather_pieces(self, groups: Mapping[str, int]) -> tuple[float, ...]:
        """The megabytes of a gather's pieces along each axis on gloo; infinite where no machine says less is faster."""
        return tuple(self._gather_piece_mb(axis, groups.get(axis, 0)) for axis in self.on_gloo)

    def _gather_piece_mb(self, axis: str, ranks: int) -> float:
        piece = None if self.machine is None else self.machine.piece(Kind.ALL_GATHER, ranks, axis)
        return math.inf if piece is None else max(self._cheapest_mb(axis), piece / MB)

    def _piece_mb(self, axis: str, ranks: int) -> float:
        """As small as latency allows, larger where they cost computation much; infinite where any are as fast."""
        if self.backends[axis] not in ("gloo", _EMULATED):
            return math.inf
        if self.machine is None:
            return PIECE_MB
        if self.machine.fabric(axis).links[Kind.ALL_TO_ALL].piece is None:
            return math.inf
        return max(self._cheapest_mb(axis), self.machine.worthwhile(Kind.ALL_TO_ALL, ranks, axis) / MB)

    def _cheapest_mb(self, axis: str) -> float:
        """The least piece that does not cost computation more than it gains."""
        assert self.machine is not None
        return 2 * PIECE_MB if self.run_on(self.machine).fabric(axis).slows_compute > _SLOWS_MUCH else PIECE_MB
