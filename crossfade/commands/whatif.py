"""What if: a program predicted on a machine that need not be here, as it stands and as it would be planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crossfade.compile.overlap import OverlapPlan, plan_overlap, predicted
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import PRESETS, preset
from crossfade.cost.timeline import Timeline, simulate
from crossfade.files.program_text import read_program_text
from crossfade.graph import collectives
from crossfade.graph.memory import alive_at_peak, live_by_name
from crossfade.report.report import Report

__all__ = ["PRESETS", "WhatIf", "machine_of", "what_if", "predicted"]


@dataclass(frozen=True)
class WhatIf:
    """What is predicted of one program on one machine."""

    machine: Machine
    before: Timeline
    plan: OverlapPlan
    peak: int
    report: Report

    def row(self) -> tuple[str, ...]:
        """As the cells of a table."""
        caps = ", ".join(f"{kind.replace('_', '-')} {size.cap_mb:.2f} MB" for kind, size in self.plan.sizes.items())
        return (
            self.machine.name,
            f"{self.before.seconds * 1e3:.3f} ms",
            f"{self.plan.timeline.seconds * 1e3:.3f} ms",
            f"{self.plan.timeline.exposed * 1e3:.3f} ms",
            f"{self.peak:,}",
            caps,
        )


def machine_of(name: str) -> Machine:
    """A machine by a preset's name, or from a JSON file."""
    return Machine.load(name) if name.endswith(".json") else preset(name)


def what_if(program: Path, machine: str, group_size: int, memory_limit: int | None = None) -> WhatIf:
    """Predict a program in text form on a preset, or on a machine kept as a JSON file."""
    before = read_program_text(program)
    before.groups = dict.fromkeys(collectives.group_sizes(before.graph), group_size)
    found = machine_of(machine)
    plan = plan_overlap(before, found, memory_limit=memory_limit)
    memory = live_by_name(plan.program)
    report = Report.of(before, plan.program, title=program.name).with_timelines(predicted=plan.timeline, memory=memory)
    report = report.with_timelines(alive=alive_at_peak(plan.program))
    peak = max(size for _, size in memory)
    return WhatIf(found, simulate(before, estimate(before, found)), plan, peak, report)
