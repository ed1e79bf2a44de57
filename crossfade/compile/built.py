"""What a compilation makes: everything that one captured step needs to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.numbers import StepNumbers
from crossfade.capture.symbolic_sizes import FittingSizes
from crossfade.compile.captured import CaptureMark
from crossfade.compile.fit_memory import StepMemory
from crossfade.compile.phases import PhaseRecords
from crossfade.compile.step_plan import Origin
from crossfade.execute.compile_regions import CompiledRegions
from crossfade.graph.launches import Launch
from crossfade.graph.program import Program
from crossfade.ranks.alike import RankComparison
from crossfade.report.report import Report
from crossfade.report.strict import Shortfall


@dataclass(frozen=True)
class Built:
    """Everything one captured step needs to run, for one shape of batch."""

    program: Program
    layout: BatchLayout
    report: Report
    state_keys: Mapping[str, Collection[str]]
    """For each parameter that is stepped, the entries of optimizer state that the program takes."""
    comparisons: Sequence[RankComparison]
    """What ranks compare at every step."""
    exchanges: Sequence[Launch]
    """What was to be communicated before it was put together, each with what it is for."""
    shortfalls: Sequence[Shortfall]
    """What is short of what `strict=` expects, as this rank sees it."""
    phases: PhaseRecords
    """How it was compiled."""
    mark: CaptureMark
    """By what the program that tracing made is known again."""
    numbers: StepNumbers = field(default_factory=StepNumbers)
    """The optimizer's numbers that the program takes, and those that the step changes."""
    fitting: FittingSizes | None = None
    """Which sizes it is right for, where these are symbols."""
    origin: Origin | None = None
    """By what the program that choices were made for is known again."""
    memory: StepMemory | None = None
    """How it fits a memory budget, where there is one."""
    regions: CompiledRegions | None = None
    """What is compiled of the program; None where all of it runs eagerly."""
