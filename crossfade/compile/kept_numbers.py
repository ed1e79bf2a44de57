"""The optimizer's numbers that a kept step takes, changes and was asked about, as JSON and back.

Formulas are arithmetic on these numbers and nothing else (`files/expressions`): whatever a file says, nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from crossfade.capture.numbers import Branch, Formula, Learned, Number, NumberUpdate, StepNumbers
from crossfade.capture.optimizer_state import FirstState
from crossfade.files.expressions import why_no_formula
from crossfade.files.found import FileValue


class NotKept(Exception):
    """A step that cannot be written down, and why."""


@dataclass(frozen=True)
class KeptNumbers:
    """The numbers of a step, and what its capture has shown about the optimizer."""

    step: StepNumbers
    branches: tuple[Branch, ...]
    changing: frozenset[str]

    @classmethod
    def of(cls, step: StepNumbers, learned: Learned) -> KeptNumbers:
        """Those of a step that was captured just now: whatever was asked about numbers then is true now."""
        branches = tuple(branch for branch in learned.branches.values() if branch.holds())
        return cls(step, branches, frozenset(learned.changing))

    def fit(self) -> bool:
        """Whether the step does what the optimizer would do with its present numbers."""
        return all(branch.holds() for branch in self.branches)

    def teach(self, learned: Learned) -> None:
        """Add what the capture has shown."""
        learned.branches.update({branch.text: branch for branch in self.branches})
        learned.changing |= self.changing


def as_json(kept: KeptNumbers, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """All of them, each number once."""
    updates = kept.step.updates
    every = [*kept.step.inputs.values(), *(number for update in updates for number in (update.number, *update.sources))]
    every += [number for branch in kept.branches for number in branch.numbers]
    numbers = list({id(number): number for number in every}.values())
    place = {id(number): index for index, number in enumerate(numbers)}
    return {
        "numbers": [_number(number, names) for number in numbers],
        "inputs": {name: place[id(number)] for name, number in kept.step.inputs.items()},
        "updates": [
            {"number": place[id(update.number)], **_formula(update.function, update.sources, place)}
            for update in updates
        ],
        "branches": [
            {"condition": branch.text, **_formula(branch.function, branch.numbers, place)} for branch in kept.branches
        ],
        "changing": sorted(kept.changing),
    }


def read(
    found: FileValue, optimizer: Optimizer, parameters: Mapping[str, Tensor], first: Mapping[str, FirstState]
) -> KeptNumbers:
    """What `as_json` wrote, of an optimizer of these parameters; `first` are states that are not there yet."""
    numbers = [_read_number(item, optimizer, parameters, first) for item in found["numbers"].items()]
    inputs = {name: _at(item, numbers) for name, item in found["inputs"].entries().items()}
    updates = [
        NumberUpdate(_at(item["number"], numbers), *_read_formula(item, numbers)) for item in found["updates"].items()
    ]
    branches = [Branch(item["condition"].text(), *_read_formula(item, numbers)) for item in found["branches"].items()]
    changing = frozenset(found["changing"].read_as(tuple[str, ...]))
    return KeptNumbers(StepNumbers(inputs, tuple(updates)), tuple(branches), changing)


def _number(number: Number, names: Mapping[Tensor, str]) -> dict[str, Any]:
    kind, where, key = number.place
    key, element = key if kind == "group" else (key, None)
    if not isinstance(key, str):
        raise NotKept(f"the optimizer's number {number.name} has no plain form")
    where = names[where] if kind == "state" else where
    return {"name": number.name, "kind": kind, "where": where, "key": key, "element": element}


def _read_number(
    found: FileValue, optimizer: Optimizer, parameters: Mapping[str, Tensor], first: Mapping[str, FirstState]
) -> Number:
    """A number of this process: what it is before the first step is not what it was when the step was kept."""
    kind = found["kind"].one_of({word: word for word in ("group", "state", "attribute")})
    key, where, initial = found["key"].text(), found["where"], None
    if kind == "group":
        groups = len(optimizer.param_groups)
        element = found["element"]
        index = None if element.value is None else element.whole(least=0)
        place: Any = ("group", where.whole(least=0, most=groups - 1), (key, index))
    elif kind == "state":
        place = ("state", where.one_of(parameters), key)
        initial = first[where.text()].entries.get(key) if where.text() in first else None
    else:
        place = ("attribute", "", key)
    return Number(found["name"].text(), optimizer, place, initial)


def _formula(formula: Formula, numbers: Iterable[Number], place: Mapping[int, int]) -> dict[str, Any]:
    if why_not := why_no_formula(formula.text, formula.symbols):
        raise NotKept(f"the optimizer computes with a number in a way that has no plain form, {why_not}")
    return {"formula": formula.text, "symbols": formula.symbols, "of": [place[id(number)] for number in numbers]}


def _read_formula(found: FileValue, numbers: Sequence[Number]) -> tuple[tuple[Number, ...], Formula]:
    text, symbols = found["formula"].text(), found["symbols"].read_as(tuple[str, ...])
    if not all(symbol.isidentifier() and not symbol.startswith("__") for symbol in symbols):
        raise found["symbols"].wrong("names")
    if why_not := why_no_formula(text, symbols):
        raise found["formula"].wrong(f"arithmetic on numbers, not one {why_not}")
    of = tuple(_at(item, numbers) for item in found["of"].items())
    if len(of) != len(symbols) or len(set(symbols)) < len(symbols):
        raise found["of"].wrong("a number for each symbol")
    return of, Formula(text, symbols)


def _at(found: FileValue, numbers: Sequence[Number]) -> Number:
    return numbers[found.whole(least=0, most=len(numbers) - 1)]
