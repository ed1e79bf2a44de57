"""Forecast: how long a step takes and what memory it needs, what it waits for, and what would help."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossfade.cost.timeline import Timeline

GIB = 2**30


@dataclass(frozen=True)
class Help:
    """One thing that would make a step shorter, and by how much."""

    what: str
    seconds: float
    """Saved of each step."""


@dataclass(frozen=True)
class Memory:
    """What a rank's memory holds at its fullest, in bytes."""

    parameters: int
    optimizer: int
    at_peak: int
    """Activations, gradients, gathered parameters and whatever else the step makes, when they are the most."""
    allocator: int = 0
    """What torch's allocator has taken beside that: pools of streams, holes, rounding. On devices that have it."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.parameters + self.optimizer + self.at_peak + self.allocator


@dataclass(frozen=True)
class Forecast:
    """What one step is forecast to do on each rank of a mesh.

    `spent` says where the step goes, in seconds that add up to it: products, attention, memory (operators bound by
    bytes), update, exposed communication by axis and kind, and launches (the device waits for its host). `bounds` are
    the seconds that each resource would take by itself.
    """

    model: str
    machine: str
    mesh: Mapping[str, int]
    way: str
    seconds: float
    tokens: int
    """Of all ranks in a step."""
    flops: float
    """Floating-point operations of one rank's forward and backward, nothing counted twice that is computed again."""
    peak_flops: float
    """Operations a second that the device's data sheet promises; 0 where it is not known."""
    memory: Memory
    memory_limit: int | None
    spent: Mapping[str, float]
    bounds: Mapping[str, float]
    helps: tuple[Help, ...]
    timeline: Timeline
    micro_batches: int = 1

    @property
    def gpus(self) -> int:
        """Ranks of the mesh."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens, or samples, that each rank gets through in a second."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: operations of the model over what the data sheet promises."""
        return self.flops / self.seconds / self.peak_flops if self.peak_flops else None

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds in which computation stands still for communication, by axis and kind."""
        return {cause.removeprefix("exposed "): s for cause, s in self.spent.items() if cause.startswith("exposed ")}

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices; None where the machine does not say how much it has."""
        return None if self.memory_limit is None else self.memory.bytes <= self.memory_limit

    @property
    def bound_by(self) -> str:
        """The resource that takes longest by itself."""
        return max(self.bounds, key=self.bounds.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """All figures, without the timeline."""
        return {
            "model": self.model,
            "machine": self.machine,
            "mesh": dict(self.mesh),
            "gpus": self.gpus,
            "way": self.way,
            "step_seconds": self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "memory_bytes": self.memory.bytes,
            "memory": dataclasses.asdict(self.memory),
            "fits": self.fits,
            "spent_seconds": dict(self.spent),
            "bounds_seconds": dict(self.bounds),
            "bound_by": self.bound_by,
            "helps": [dataclasses.asdict(each) for each in self.helps],
        }

    def to_json(self) -> str:
        """All figures as JSON, without the timeline."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        fits = {True: "fits", False: "does not fit", None: "limit unknown"}[self.fits]
        limit = f" of {self.memory_limit / GIB:.1f}" if self.memory_limit else ""
        mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        lines = [
            f"{self.model} on {self.gpus} x {self.machine} ({mesh}), {self.way}",
            f"step {_seconds(self.seconds)}, {self.tokens_per_second_per_gpu:,.0f} tokens a second a GPU{mfu}",
            f"memory {self.memory.bytes / GIB:.1f}{limit} GiB: {fits} (parameters {self.memory.parameters / GIB:.1f}, "
            f"optimizer {self.memory.optimizer / GIB:.1f}, at the peak {self.memory.at_peak / GIB:.1f}, beside in the "
            f"allocator {self.memory.allocator / GIB:.1f})",
        ]
        for cause, spent in sorted(self.spent.items(), key=lambda item: -item[1]):
            if spent > 5e-4 * self.seconds:
                lines.append(f"  {spent / self.seconds:6.1%}  {_seconds(spent):>10}  {cause}")
        said = ", ".join(f"{name} {_seconds(s)}" for name, s in sorted(self.bounds.items(), key=lambda i: -i[1]))
        lines.append(f"bound by {self.bound_by}; each alone: {said}")
        lines += [f"would help: {each.what}, {_seconds(each.seconds)} ({each.seconds / self.seconds:.1%})"
                  for each in self.helps]  # fmt: skip
        return "\n".join(lines)


def _seconds(seconds: float) -> str:
    """A duration for people.

    >>> _seconds(0.0421), _seconds(3.5)
    ('42.1 ms', '3.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
