"""The seconds of a whole step: micro-batches, what is exchanged after the last backward, the optimizer's update."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.cost.machine import Machine
from crossfade.forecast.prepared import Prepared, at_the_pace_of
from crossfade.graph.collectives import Kind


@dataclass(frozen=True)
class Exchanged:
    """What travels once a step when nothing computes: an all-reduce of gradients after the backward, say."""

    kind: Kind
    bytes: int
    axis: str


@dataclass(frozen=True)
class Once:
    """What a step does once, after its micro-batches, and the bytes that each further micro-batch adds gradients by."""

    exchanged: tuple[Exchanged, ...] = ()
    update_bytes: float = 0.0
    added_bytes: float = 0.0

    def seconds(self, machine: Machine, mesh: dict[str, int], micro_batches: int) -> float:
        """Seconds beside those of the micro-batches; the machine's fabrics are laid over the mesh."""
        travel = sum(machine.collective_seconds(each.kind, each.bytes, mesh[each.axis], each.axis)
                     for each in self.exchanged)  # fmt: skip
        moved = self.update_bytes + (micro_batches - 1) * self.added_bytes
        return travel + moved / machine.memory_bandwidth


@dataclass(frozen=True)
class StepTimes:
    """A step of many equal layers, from a program with few: the last one is costed once and repeated."""

    few: Prepared
    more: int
    """How many layers there are beyond those of the program."""
    micro_batches: int
    once: Once

    def seconds(self, machine: Machine) -> float:
        """Seconds of the step on a machine."""
        mesh = dict(self.few.mesh)
        on_mesh = machine.on_mesh(mesh)
        paced = at_the_pace_of(on_mesh, mesh.get("tp", 1))
        micro_batch = self.few.seconds(paced, more=self.more)
        return self.micro_batches * micro_batch + self.once.seconds(on_mesh, mesh, self.micro_batches)
