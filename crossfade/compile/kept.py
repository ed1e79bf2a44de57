"""A compiled step as text and back: its program as text, its report, its constants as bytes. Nothing in it is run.

Two lines of JSON: a head, by which it is known whether the rest is wanted, and the rest, of which the head has the sum.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.capture.optimizer import parameter_names
from crossfade.capture.optimizer_state import FirstState
from crossfade.compile.built import Built
from crossfade.compile.cache_surroundings import FORMAT, own_files
from crossfade.compile.job import Job
from crossfade.compile.kept_numbers import KeptNumbers, NotKept, as_json, read
from crossfade.compile.kept_split import KeptSplit
from crossfade.compile.phases import Phase, PhaseRecord, PhaseRecords
from crossfade.compile.step_plan import Origin
from crossfade.errors import CrossfadeError, StateError
from crossfade.files.found import FileValue
from crossfade.files.plain import decoded_json
from crossfade.graph import launches
from crossfade.graph.launches import Launch
from crossfade.graph.passes import PassRecord, fingerprint
from crossfade.graph.program import MADE_FOR, Program, source_line
from crossfade.graph.text import parse, render
from crossfade.graph.words import ALL_DTYPES
from crossfade.report import json_text
from crossfade.report.report import Report
from crossfade.report.strict import Shortfall
from crossfade.shard.loss_parts import LossParts

__all__ = ["Head", "Kept", "NotKept", "read_head", "read_rest", "written"]

_REMEDY = "delete the file: it is written again"
_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
_MOST_CONSTANTS = 64 << 20


@dataclass(frozen=True)
class Head:
    """By what a kept step is chosen."""

    identity: str
    """Of the compilation: the same on all ranks that compiled together."""
    sum: str
    numbers: KeptNumbers
    files: Mapping[str, str]
    """The user's own files that were loaded in the end, with sums of their contents."""


@dataclass(frozen=True)
class Kept:
    """What a process keeps of a compiled step for others, beside the numbers."""

    program: Program
    report: Report
    state_keys: Mapping[str, list[str]]
    exchanges: tuple[Launch, ...]
    shortfalls: tuple[Shortfall, ...]
    phases: PhaseRecords
    loss_parts: LossParts
    draws: bool
    """Whether ranks compare their random generators."""
    captured: tuple[str, Mapping[str, Any]]
    """What tracing made: its fingerprint and its constants."""
    warnings: tuple[str, ...]
    """What was warned of in the log while it was compiled."""
    split: KeptSplit
    """How parameters were split on the way."""
    origin: Origin | None = None
    """What a plan file begins with."""

    @classmethod
    def of(cls, built: Built, *, draws: bool, warnings: tuple[str, ...], split: KeptSplit) -> Kept:
        """What is to be kept of a compilation."""
        keys = {name: list(entries) for name, entries in built.state_keys.items()}
        return cls(
            built.program,
            built.report,
            keys,
            tuple(built.exchanges),
            tuple(built.shortfalls),
            built.phases,
            built.mark.loss_parts,
            draws,
            (built.mark.text, built.mark.constants),
            warnings,
            split,
            built.origin,
        )


def written(kept: Kept, numbers: KeptNumbers, job: Job, key: str, identity: str) -> str:
    """The text of a compiled step, once it is known to be read back as the same; raises `NotKept` if it is not."""
    rest = json.dumps(_rest(kept))
    head = {
        "format": FORMAT,
        "key": key,
        "identity": identity,
        "sum": _sum(rest),
        "files": own_files(),
        **as_json(numbers, parameter_names(job.model)),
    }
    text = json.dumps(head)
    try:
        read_head(text, job, key, {}, "what was to be kept")
        again = read_rest(rest, "what was to be kept")
    except CrossfadeError as error:
        raise NotKept(str(error)) from error
    if again.phases != kept.phases or again.report != kept.report:
        raise NotKept("its report is not read back as it is")
    return f"{text}\n{rest}\n"


def _rest(kept: Kept) -> dict[str, Any]:
    program = kept.program
    if symbolic := next((node.name for node in program.graph.nodes if _has_symbols(node.meta.get("val"))), ""):
        raise NotKept(f"the sizes of {symbolic} are symbols")
    ran = [record for phase in kept.phases for record in phase.passes]
    if ran != list(kept.report.records):
        raise NotKept("the report and the phases tell of different passes")
    mark, constants = kept.captured
    return {
        "fingerprint": fingerprint(program),
        "program": render(program),
        "groups": dict(program.groups),
        "facts": sorted(program.facts),
        "sources": {node.name: line for node in program.graph.nodes if (line := source_line(node))},
        "constants": {name: _bytes_of(name, value) for name, value in program.constants.items() if _is_tensor(value)},
        "report": json_text.dump(kept.report),
        "state_keys": dict(kept.state_keys),
        "exchanges": launches.as_json(kept.exchanges),
        "shortfalls": [asdict(shortfall) for shortfall in kept.shortfalls],
        "phases": [_phase(record) for record in kept.phases],
        "loss_parts": asdict(kept.loss_parts),
        "draws": kept.draws,
        "captured": mark,
        "captured_constants": {
            name: None if program.constants.get(name) is value else _bytes_of(name, value)
            for name, value in constants.items()
            if _is_tensor(value)
        },
        "captured_graphs": [name for name, value in constants.items() if not _is_tensor(value)],
        "warnings": list(kept.warnings),
        "split": kept.split.as_json(),
        "origin": None if kept.origin is None else asdict(kept.origin),
    }


def read_head(text: str, job: Job, key: str, first: Mapping[str, FirstState], where: str) -> Head:
    """The head of what `written` wrote, as one of a job; raises a `StateError` that names what is wrong."""
    found = _decoded(text, where)
    if found["format"].value != FORMAT or found["key"].value != key:
        raise found["key"].wrong(f"the key {key[:16]}... in format {FORMAT}")
    parameters: dict[str, Tensor] = dict(job.model.named_parameters())
    numbers = read(found, job.optimizer, parameters, first)
    return Head(found["identity"].text(), found["sum"].text(), numbers, found["files"].read_as(Mapping[str, str]))


def is_sum_of(head: Head, rest: str) -> bool:
    """Whether a head was written with the rest."""
    return _sum(rest) == head.sum


def read_rest(text: str, where: str) -> Kept:
    """The rest of what `written` wrote; raises a `CrossfadeError` that names what is wrong."""
    found = _decoded(text, where)
    constants = {name: _tensor(item) for name, item in found["constants"].entries().items()}
    program = parse(
        found["program"].text(),
        groups=found["groups"].read_as(Mapping[str, int]),
        constants=constants,
        as_written=True,
    )
    if fingerprint(program) != found["fingerprint"].text():
        raise found["fingerprint"].wrong(f"that of the program beside it, {fingerprint(program)}")
    report = json_text.load(Report, found["report"].text(), where)
    _describe(program, found)
    program.facts, program.history = frozenset(found["facts"].read_as(tuple[str, ...])), report.records
    captured = {
        name: constants[name] if item.value is None and name in constants else _tensor(item)
        for name, item in found["captured_constants"].entries().items()
    } | dict.fromkeys(found["captured_graphs"].read_as(tuple[str, ...]), _ANOTHER_GRAPH)
    return Kept(
        program,
        report,
        found["state_keys"].read_as(Mapping[str, list[str]]),
        found["exchanges"].read_as(tuple[Launch, ...]),
        found["shortfalls"].read_as(tuple[Shortfall, ...]),
        _phases(found["phases"], report.records),
        _loss_parts(found["loss_parts"]),
        found["draws"].flag(),
        (found["captured"].text(), captured),
        found["warnings"].read_as(tuple[str, ...]),
        KeptSplit.read(found["split"]),
        found["origin"].read_as(Origin | None),
    )


_ANOTHER_GRAPH = object()
"""In the place of a nested graph: one that is traced again is never the same object."""


def _decoded(text: str, where: str) -> FileValue:
    return FileValue(decoded_json(text, where, StateError, _REMEDY, finite=False), where, "", StateError, _REMEDY)


def _describe(program: Program, found: FileValue) -> None:
    """Give nodes the source lines that a program's text has not."""
    sources = found["sources"].read_as(Mapping[str, str])
    for node in program.graph.nodes:
        if node.name in sources:
            node.meta[MADE_FOR] = sources[node.name]


def _phase(record: PhaseRecord) -> dict[str, Any]:
    phase = record.phase
    return {
        "name": phase.name, "takes": list(phase.takes), "gives": list(phase.gives), "passes": len(record.passes),
        "seconds": record.seconds, "left_out": record.left_out,
    }  # fmt: skip


def _phases(found: FileValue, records: tuple[PassRecord, ...]) -> PhaseRecords:
    ran, rest = [], list(records)
    for item in found.items():
        names = [item[key].read_as(tuple[str, ...]) for key in ("takes", "gives")]
        count = item["passes"].whole(least=0, most=len(rest))
        passes, rest = tuple(rest[:count]), rest[count:]
        phase = Phase(item["name"].text(), _nothing, *names)
        ran.append(PhaseRecord(phase, passes, item["seconds"].number(), item["left_out"].text()))
    return PhaseRecords(ran)


def _nothing(compilation: Any) -> None:
    """Do nothing: an earlier process has done it."""


def _loss_parts(found: FileValue) -> LossParts:
    loss_is = found["loss_is"]
    put_together = None if loss_is.value is None else loss_is.one_of({"mean": "mean", "sum": "sum"})
    shared = found["shared_numbers"].read_as(tuple[str, ...])
    return LossParts(put_together, found["unproved"].text(), shared, found["buffers"].read_as(tuple[str, ...]))


def _has_symbols(value: Any) -> bool:
    """Whether sizes of tensors are symbols; numbers that are inputs may be."""
    if isinstance(value, tuple | list):
        return any(map(_has_symbols, value))
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, fx.GraphModule)


def _bytes_of(name: str, value: Any) -> dict[str, Any]:
    plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    if not plain or value.is_quantized or value.dtype not in _NAMES or value.nbytes > _MOST_CONSTANTS:
        raise NotKept(f"the constant {name} is a {type(value).__name__} that has no plain form")
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        raise NotKept(f"the constant {name} does not lie in one piece")
    raw = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "bytes": base64.b64encode(raw).decode()}


def _tensor(item: FileValue) -> Tensor:
    dtype = item["dtype"].one_of(ALL_DTYPES)
    shape = [size.whole(least=0, most=1 << 40) for size in item["shape"].items()]
    try:
        raw = base64.b64decode(item["bytes"].text(), validate=True)
    except ValueError as error:
        raise item["bytes"].wrong("bytes in base 64") from error
    like = torch.empty(shape, dtype=dtype, device="meta")
    if like.nbytes != len(raw):
        raise item["bytes"].wrong(f"{like.nbytes} bytes")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
