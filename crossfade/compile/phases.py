"""A compilation as a list of named phases: printed, changed by name, and recorded as it ran."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from crossfade.errors import PassError
from crossfade.graph.passes import Pass, PassRecord, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.program import Program


@dataclass
class Compilation:
    """What the phases of one compilation hand on: every compiler adds its own fields. Nothing has been made yet where a
    field is None."""

    program: Program | None = None
    measured: dict[str, float] | None = None
    """Seconds of operators, by key, as all ranks plan with them."""
    changes: tuple[Change, ...] = ()
    changed: set[str] = field(default_factory=set)
    """The changes that have met their pass."""

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
        self.program = run_passes(self.made(), self.edited(passes), context=self.context)

    def edited(self, passes: Sequence[Pass]) -> Pipeline:
        """Passes with the user's changes."""
        pipeline = passes if isinstance(passes, Pipeline) else Pipeline(passes)
        for change in self.changes:
            if change.name in pipeline.names():
                self.changed.add(change.name)
                pipeline = change.apply(pipeline)
        return pipeline


@dataclass(frozen=True)
class Change:
    """A change of one pass, wherever a phase runs it."""

    name: str
    apply: Callable[[Pipeline], Pipeline] = field(compare=False)


@dataclass(frozen=True)
class Phase:
    """One phase: what it does to a compilation, what it takes and gives (fields of the compilation), and when.

    `why_not` says why it has nothing to do in a compilation; nothing, if it has.
    """

    name: str
    run: Callable[[Any], None] = field(compare=False)
    takes: tuple[str, ...] = ("program",)
    gives: tuple[str, ...] = ("program",)
    why_not: Callable[[Any], str] = field(default=lambda compilation: "", compare=False)

    def __str__(self) -> str:
        return f"{self.name:<20} {', '.join(self.takes)} -> {', '.join(self.gives)}"


@dataclass(frozen=True)
class PhaseRecord:
    """What became of one phase: the passes that it ran, or why it was left out."""

    phase: Phase
    passes: tuple[PassRecord, ...]
    seconds: float
    left_out: str = ""

    def __str__(self) -> str:
        if self.left_out:
            return f"{self.phase.name:<20} left out: {self.left_out}"
        lines = [f"{self.phase!s:<66} {self.seconds * 1e3:8.1f} ms"]
        lines += [f"    {record.spelling}{'' if record.changed else ' (no change)'}" for record in self.passes]
        return "\n".join(lines)


class Ran(tuple[PhaseRecord, ...]):
    """The phases of a compilation as they ran, with their passes; prints as the compiler that it was."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def names(self) -> list[str]:
        """The phases that ran."""
        return [record.phase.name for record in self if not record.left_out]

    def seconds_until(self, last: str) -> float:
        """What the phases up to one took."""
        names = [record.phase.name for record in self]
        return sum(record.seconds for record in self[: names.index(last) + 1 if last in names else len(names)])


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
    >>> phases.without_pass("sink-waits").names()
    ['capture', 'simplify', 'changed: sink-waits']
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
        return "\n".join([*map(str, self._phases), *(f"changed: {change.name}" for change in self._changes)])

    def names(self) -> list[str]:
        """The phases' names, and of the passes that are changed."""
        return [*(phase.name for phase in self), *(f"changed: {change.name}" for change in self._changes)]

    def without(self, name: str) -> Phases:
        """The same but this phase."""
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
        return self._changing(name, lambda pipeline: pipeline.without(name))

    def replace_pass(self, name: str, other: Pass) -> Phases:
        """With another pass in place of one: the same with other options, say."""
        return self._changing(name, lambda pipeline: pipeline.replace(name, other))

    def before_pass(self, name: str, *passes: Pass) -> Phases:
        """With other passes before one."""
        return self._changing(name, lambda pipeline: pipeline.before(name, *passes))

    def after_pass(self, name: str, *passes: Pass) -> Phases:
        """With other passes after one."""
        return self._changing(name, lambda pipeline: pipeline.after(name, *passes))

    def run(self, compilation: Compilation) -> Ran:
        """Run the phases on a compilation; what each takes must have been made, and what it gives is made then."""
        compilation.changes = self._changes
        ran = [_run(phase, compilation) for phase in self]
        passes = sorted({record.name for phase in ran for record in phase.passes})
        for change in self._changes:
            if change.name not in compilation.changed:
                raise PassError(
                    f"a change of the pass {change.name!r}, which no phase runs here",
                    expected=f"one of: {', '.join(passes)}",
                    remedy=_nearest(change.name, passes),
                )
        return Ran(ran)

    def _with(self, name: str, change: Callable[[Phase], list[Phase]]) -> Phases:
        known = [phase.name for phase in self]
        if name not in known:
            raise PassError(f"no phase {name!r}", expected=f"one of: {', '.join(known)}", remedy=_nearest(name, known))
        changed = [other for phase in self for other in (change(phase) if phase.name == name else [phase])]
        return Phases(changed, self._changes)

    def _changing(self, name: str, apply: Callable[[Pipeline], Pipeline]) -> Phases:
        return Phases(self._phases, [*self._changes, Change(name, apply)])


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}" if near else "use one of these names"


def _run(phase: Phase, compilation: Compilation) -> PhaseRecord:
    if why_not := phase.why_not(compilation):
        return PhaseRecord(phase, (), 0.0, why_not)
    _check(phase, compilation, "takes", phase.takes)
    before, start = _records(compilation), time.perf_counter()
    phase.run(compilation)
    seconds = time.perf_counter() - start
    _check(phase, compilation, "gives", phase.gives)
    return PhaseRecord(phase, _records(compilation)[len(before) :], seconds)


def _records(compilation: Compilation) -> tuple[PassRecord, ...]:
    return compilation.program.history if compilation.program is not None else ()


def _check(phase: Phase, compilation: Compilation, verb: str, names: Sequence[str]) -> None:
    for name in names:
        if getattr(compilation, name) is None:
            raise PassError(
                f"the phase {phase.name}, which {verb} {name}, and there is none",
                expected="each phase after those that give what it takes, and what it gives to be there after it",
                remedy="move it, or put back the phase that it needs",
            )
