"""A plan file: everything that was chosen for a step, as text that a person reviews and compares.

It holds what the plan was made for (model, torch, device, settings), what is given back to `compile_step` (mesh,
data-parallel mode, tensor-parallel plan, what stays whole), and for each program the passes that make it what it is,
with their decisions: buckets, factors that travel, the order of everything. The same choice gives the same bytes.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfade.compile.catalogue import literals_of, pass_from_spelling
from crossfade.cost.machine import Machine
from crossfade.cost.presets import PRESETS, preset
from crossfade.errors import CrossfadeError, PassError, PlanError
from crossfade.files.found import FileValue
from crossfade.files.plain import read_json
from crossfade.graph.passes import Pass, fingerprint
from crossfade.graph.program import Program
from crossfade.shard.tensor.plan import Plan

FORMAT = 1
_REMEDY = "save the plan again (step.save_plan), from a step that was compiled without plan="
_INFINITE = {math.inf: "inf", -math.inf: "-inf"}
_NUMBERS = {text: number for number, text in _INFINITE.items()}


@dataclass(frozen=True)
class Origin:
    """By what the program that a plan begins with is known again: its fingerprint, and how often it calls what."""

    fingerprint: str
    operators: Mapping[str, int]

    @classmethod
    def of(cls, program: Program) -> Origin:
        """What a program is known by."""
        called = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        return cls(fingerprint(program), dict(sorted(called.items())))


@dataclass(frozen=True)
class PlannedProgram:
    """What is chosen for the program of one kind of batch."""

    batch: tuple[str, ...]
    """The batch's tensors, a line each."""
    origin: Origin
    passes: tuple[str, ...]
    """Spellings of the passes that were run over it, with their decisions."""
    buckets: tuple[str, ...]
    """What travels together, for the reader."""
    collectives: tuple[str, ...]
    """What is launched in which order, for the reader."""
    result: str
    """The fingerprint of the program that runs."""

    def made(self) -> list[Pass]:
        """The passes."""
        return [pass_from_spelling(spelling) for spelling in self.passes]


@dataclass(frozen=True)
class StepPlan:
    """All that was chosen for a step; `crossfade.compile.planned` makes one of a step, and holds a step to it."""

    made_for: Mapping[str, Any]
    """The model, torch, the device and the settings that the plan is for."""
    chosen: Mapping[str, Any]
    """What `compile_step` takes from it."""
    parameters: Mapping[str, str]
    """What each parameter is, and how it lies on the mesh."""
    programs: tuple[PlannedProgram, ...]

    def __repr__(self) -> str:
        return f"StepPlan({hashlib.sha256(self.text().encode()).hexdigest()[:16]})"

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "format": FORMAT,
            "made_for": dict(self.made_for),
            "chosen": dict(self.chosen),
            "parameters": dict(self.parameters),
            "programs": [_program_as_json(program) for program in self.programs],
        }

    def text(self) -> str:
        """What the file holds."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file; an earlier one stays until this one is whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(self.text(), encoding="utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> StepPlan:
        """The plan that `save` wrote; errors name the file and the place in it."""
        raw = read_json(Path(path), CrossfadeError, _REMEDY)
        found = FileValue(raw, str(path), "", CrossfadeError, _REMEDY)
        if found["format"].value != FORMAT:
            raise found["format"].wrong(f"{FORMAT}, the format that this version writes")
        made_for, chosen = found["made_for"].entries(), found["chosen"].entries()
        for key in ("model", "torch", "device", "backends", "settings"):
            found["made_for"][key]
        _check_chosen(found["chosen"])
        return cls(
            {name: entry.value for name, entry in made_for.items()},
            {name: entry.value for name, entry in chosen.items()},
            found["parameters"].read_as(Mapping[str, str]),
            tuple(map(_read_program, found["programs"].items())),
        )

    @property
    def machine(self) -> Machine | None:
        """The machine that the plan was made for, by its name: its figures are not needed any more."""
        name = self.chosen["machine"]
        if name is None:
            return None
        return PRESETS.get(name) or _named(name)


def _named(name: str) -> Machine:
    like = preset("loopback-gloo")
    return Machine(name, like.fabrics, like.flops, like.memory_bandwidth, source="named in a plan file, never asked")


def _check_chosen(found: FileValue) -> None:
    mesh = found["mesh"]
    if mesh.value is not None:
        for size in mesh.entries().values():
            size.whole(least=1)
    for key in ("data_parallel", "keep_whole", "tensor_parallel", "machine", "memory_limit"):
        found[key]
    found["keep_whole"].read_as(tuple[str, ...])
    found["machine"].read_as(str | None)
    found["memory_limit"].read_as(int | None)
    entries = found["tensor_parallel"]
    if entries.value is not None:
        try:
            Plan(entries.value)
        except PlanError as error:
            raise entries.error(
                f"{entries.file}, {entries.place}: {error.found}", expected=error.expected, remedy=error.remedy
            ) from error


def _program_as_json(program: PlannedProgram) -> dict[str, Any]:
    return {
        "batch": list(program.batch),
        "captured": program.origin.fingerprint,
        "operators": dict(program.origin.operators),
        "passes": [_pass_as_json(spelling) for spelling in program.passes],
        "buckets": list(program.buckets),
        "collectives": list(program.collectives),
        "result": program.result,
    }


def _pass_as_json(spelling: str) -> dict[str, Any]:
    return {"pass": spelling.partition("(")[0], **_plain(literals_of(spelling))}


def _plain(value: Any) -> Any:
    """Options as JSON has them; it has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return _INFINITE[value] if isinstance(value, float) and math.isinf(value) else value


def _read_program(found: FileValue) -> PlannedProgram:
    origin = Origin(found["captured"].text(), found["operators"].read_as(Mapping[str, int]))
    spellings = tuple(map(_read_pass, found["passes"].items()))
    batch, buckets, collectives = (found[key].read_as(tuple[str, ...]) for key in ("batch", "buckets", "collectives"))
    return PlannedProgram(batch, origin, spellings, buckets, collectives, found["result"].text())


def _read_pass(found: FileValue) -> str:
    options = {name: entry for name, entry in found.entries().items() if name != "pass"}
    name = found["pass"].text()
    try:
        given = ",".join(f"{option}={_spelled(entry.value)}" for option, entry in options.items())
        return pass_from_spelling(f"{name}({given})" if options else name).spelling
    except (PassError, RecursionError) as error:
        raise found.wrong("a known pass, with options that it has") from error


def _spelled(value: Any) -> str:
    """An option of a pass as a literal."""
    if isinstance(value, list):
        return f"({''.join(f'{_spelled(entry)},' for entry in value)})"
    if isinstance(value, str) and value in _NUMBERS:
        return "1e999" if value == "inf" else "-1e999"
    return repr(value)


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """How two contents of plan files differ, a line each.

    >>> differences({"mesh": {"dp": 2}, "order": ["a", "b"]}, {"mesh": {"dp": 4}, "order": ["b"]})
    ['mesh.dp: 2 -> 4', 'order: - a']
    >>> differences({"mesh": {"dp": 2, "tp": 2}}, {"mesh": {"tp": 2, "dp": 2}})
    ['mesh: dp, tp -> tp, dp']
    """
    return list(_differences(before, after, path))


def _differences(before: Any, after: Any, path: str) -> Iterator[str]:
    if json.dumps(before) == json.dumps(after):  # of a mesh, the order of its axes counts
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            place = f"{path}.{name}".removeprefix(".")
            if name not in after:
                yield f"{place}: - {_short(before[name])}"
            elif name not in before:
                yield f"{place}: + {_short(after[name])}"
            else:
                yield from _differences(before[name], after[name], place)
        if before.keys() == after.keys() and list(before) != list(after):
            yield f"{path}: {', '.join(before)} -> {', '.join(after)}"
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(before, after, path)
    else:
        yield f"{path}: {_short(before)} -> {_short(after)}"


def _of_lists(before: Sequence[Any], after: Sequence[Any], path: str) -> Iterator[str]:
    alike = len(before) == len(after) and all(isinstance(entry, dict) for entry in [*before, *after])
    if alike:
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, f"{path}[{index}]")
        return
    old, new = ([_short(entry) for entry in entries] for entries in (before, after))
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if line[:1] in ("-", "+") and line not in ("--- ", "+++ "):
            yield f"{path}: {line[0]} {line[1:]}"


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
