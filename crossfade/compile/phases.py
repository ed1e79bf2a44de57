"""A compilation as a list of named phases: printed, changed by name, and recorded as it ran."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from crossfade.compile.catalogue import known_passes
from crossfade.errors import PassError
from crossfade.graph.passes import Pass, PassRecord, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.program import Program, paused_garbage_collection


@dataclass
class Compilation:
    """What the phases of one compilation hand on: every compiler adds its own fields. Nothing has been made yet where a
    field is None."""

    program: Program | None = None
    measured: dict[str, float] | None = None
    """Seconds of operators, by key, as all ranks plan with them."""
    records: list[PassRecord] = field(default_factory=list)
    """What passes did, in the order in which they ran."""
    changes: tuple[Change, ...] = ()
    met: set[Change] = field(default_factory=set)
    """The changes that have met their pass."""
    begun: Callable[[str], None] = field(default=lambda phase: None, compare=False)
    """Told the name of each phase that begins."""

    @property
    def context(self) -> dict[str, Any]:
        """What passes may ask for."""
        return {} if self.measured is None else {"measured": self.measured}

    def made(self) -> Program:
        """The program as it is now."""
        assert self.program is not None, "no phase has made a program yet"
        return self.program

    def run(self, passes: Sequence[Pass]) -> None:
        """Run passes over the program, as the user has changed them."""
        self.take(run_passes(self.made(), self.edited(passes), context=self.context))

    def take(self, program: Program) -> None:
        """Go on with a program that passes have made of the present one."""
        self.records += program.history[len(self.made().history) :]
        self.program = program

    def need(self, names: Sequence[str], who: str) -> None:
        """Refuse to go on without what some phase should have made."""
        for name in names:
            if getattr(self, name, None) is None:
                raise PassError(
                    f"{who} needs {name}, which no phase before it has made",
                    expected="each phase after those that give what it takes",
                    remedy="move it, or put back the phase that it needs",
                )

    def edited(self, passes: Sequence[Pass]) -> Pipeline:
        """Passes with the user's changes."""
        pipeline = passes if isinstance(passes, Pipeline) else Pipeline(passes)
        for change in self.changes:
            if change.name in pipeline.names():
                self.met.add(change)
                pipeline = change.apply(pipeline)
        return pipeline


@dataclass(frozen=True)
class Change:
    """A change of one pass, wherever a phase runs it; `text` says which, the same on all ranks."""

    name: str
    text: str
    apply: Callable[[Pipeline], Pipeline] = field(compare=False)
    adds: tuple[str, ...] = ()
    """The names of the passes that it brings in."""


@dataclass(frozen=True)
class Phase:
    """One phase: what it does to a compilation, what it takes and gives (fields of the compilation), and when.

    `why_not` returns the reason to leave it out of a compilation, or an empty text.
    """

    name: str
    run: Callable[[Any], None] = field(compare=False)
    takes: tuple[str, ...] = ("program",)
    gives: tuple[str, ...] = ("program",)
    why_not: Callable[[Any], str] = field(default=lambda compilation: "", compare=False)

    def __str__(self) -> str:
        return f"{self.name:<20} {', '.join(self.takes)} -> {', '.join(self.gives) or 'nothing'}"


@dataclass(frozen=True)
class PhaseRecord:
    """What became of one phase: the passes that it ran, or why it was left out."""

    phase: Phase
    passes: tuple[PassRecord, ...]
    seconds: float
    left_out: str = ""
    earlier: bool = False
    """Whether that was in an earlier process, whose result was taken from the cache."""

    def __str__(self) -> str:
        if self.left_out:
            return f"{self.phase.name:<20} left out: {self.left_out}"
        lines = [f"{self.phase!s:<66} {self.seconds * 1e3:8.1f} ms{' earlier' if self.earlier else ''}"]
        lines += [f"    {record.shown}{'' if record.changed else ' (no change)'}" for record in self.passes]
        return "\n".join(lines)


class PhaseRecords(tuple[PhaseRecord, ...]):
    """The phases of a compilation as they ran, with their passes; prints one line a phase and a pass."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def names(self) -> list[str]:
        """The phases that ran."""
        return [record.phase.name for record in self if not record.left_out]

    def seconds(self, *names: str) -> float:
        """What some phases took."""
        return sum(record.seconds for record in self if record.phase.name in names)


class Phases(Sequence[Phase]):
    """An immutable list of phases. Every change makes another; phases and the passes that they run go by their names.

    >>> nothing = lambda compilation: None
    >>> phases = Phases([Phase("capture", nothing, ("batch",)), Phase("simplify", nothing)])
    >>> phases.without("simplify")
    capture              batch -> program
    >>> phases.without("simplfy")
    Traceback (most recent call last):
    ...
    crossfade.errors.PassError: no phase 'simplfy': expected one of: capture, simplify. Remedy: did you mean simplify.
    >>> phases.without_pass("sink-waits").changes()
    ['without sink-waits']
    """

    def __init__(self, phases: Sequence[Phase], changes: Sequence[Change] = ()) -> None:
        self._phases, self._changes = tuple(phases), tuple(changes)

    @overload
    def __getitem__(self, index: int) -> Phase: ...
    @overload
    def __getitem__(self, index: slice) -> Phases: ...
    def __getitem__(self, index: int | slice) -> Phase | Phases:
        return Phases(self._phases[index], self._changes) if isinstance(index, slice) else self._phases[index]

    def __len__(self) -> int:
        return len(self._phases)

    def __iter__(self) -> Iterator[Phase]:
        return iter(self._phases)

    def __repr__(self) -> str:
        return "\n".join([*map(str, self._phases), *self.changes()])

    def names(self) -> list[str]:
        """The phases' names."""
        return [phase.name for phase in self]

    def changes(self) -> list[str]:
        """How passes are changed, in words."""
        return [change.text for change in self._changes]

    def settings(self) -> list[str]:
        """What ranks must have in common: the phases, the functions that they call, and the changes of passes."""
        return [*(f"{phase.name} by {_called(phase.run)}" for phase in self), *self.changes()]

    def without(self, name: str) -> Phases:
        """Leave out a phase."""
        return self._with(name, lambda phase: [])

    def replace(self, name: str, run: Callable[[Any], None]) -> Phases:
        """With another function for a phase, which takes and gives the same."""
        return self._with(name, lambda phase: [replace(phase, run=run)])

    def before(self, name: str, *phases: Phase) -> Phases:
        """With other phases before this one."""
        return self._with(name, lambda phase: [*phases, phase])

    def after(self, name: str, *phases: Phase) -> Phases:
        """With other phases after this one."""
        return self._with(name, lambda phase: [phase, *phases])

    def without_pass(self, name: str) -> Phases:
        """Without a pass, in whichever phase it runs."""
        return self._changing(name, "without {}", lambda pipeline: pipeline.without(name))

    def replace_pass(self, name: str, other: Pass) -> Phases:
        """With another pass in place of one: the same with other options, say."""
        return self._changing(name, "{1} instead of {0}", lambda pipeline: pipeline.replace(name, other), other)

    def before_pass(self, name: str, *passes: Pass) -> Phases:
        """With other passes before one."""
        return self._changing(name, "{1} before {0}", lambda pipeline: pipeline.before(name, *passes), *passes)

    def after_pass(self, name: str, *passes: Pass) -> Phases:
        """With other passes after one."""
        return self._changing(name, "{1} after {0}", lambda pipeline: pipeline.after(name, *passes), *passes)

    def run(self, compilation: Compilation) -> PhaseRecords:
        """Run the phases on a compilation; what each takes must have been made, and what it gives is made then.

        A change of a pass that did not run here is recorded as left out: whether one runs depends on the program.
        """
        compilation.changes = self._changes
        with paused_garbage_collection():
            ran = [_run(phase, compilation) for phase in self]
        unmet = [change for change in self._changes if change not in compilation.met]
        ran += [PhaseRecord(Phase(change.text, _nothing), (), 0.0, "no phase ran the pass") for change in unmet]
        return PhaseRecords(ran)

    def _with(self, name: str, change: Callable[[Phase], list[Phase]]) -> Phases:
        known = [phase.name for phase in self]
        if name not in known:
            raise PassError(f"no phase {name!r}", expected=f"one of: {', '.join(known)}", remedy=_nearest(name, known))
        changed = [other for phase in self for other in (change(phase) if phase.name == name else [phase])]
        return Phases(changed, self._changes)

    def _changing(self, name: str, text: str, apply: Callable[[Pipeline], Pipeline], *adds: Pass) -> Phases:
        known = [*known_passes(), *(added for change in self._changes for added in change.adds)]
        if name not in known:
            raise PassError(f"no pass {name!r}", expected="a known pass", remedy=_nearest(name, known))
        said = text.format(name, ", ".join(added.spelling for added in adds))
        change = Change(name, said, apply, tuple(added.name for added in adds))
        return Phases(self._phases, [*self._changes, change])


def _called(function: Callable[..., Any]) -> str:
    """A function's name, the same on all ranks."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _nothing(compilation: Compilation) -> None:
    """Do nothing."""


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}" if near else "`crossfade passes` lists the passes, `print(TRAINING)` the phases"


def _run(phase: Phase, compilation: Compilation) -> PhaseRecord:
    if why_not := phase.why_not(compilation):
        return PhaseRecord(phase, (), 0.0, why_not)
    compilation.need(phase.takes, f"the phase {phase.name}")
    before, start = len(compilation.records), time.perf_counter()
    compilation.begun(phase.name)
    phase.run(compilation)
    seconds = time.perf_counter() - start
    compilation.need(phase.gives, f"what comes after the phase {phase.name}")
    return PhaseRecord(phase, tuple(compilation.records[before:]), seconds)
