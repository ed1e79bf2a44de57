"""A compiled step as JSON and back: its program as text, its report, its constants as bytes. Nothing in it is run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from crossfade.compile.cache_key import FORMAT, content_of, own_files
from crossfade.errors import CrossfadeError, StateError
from crossfade.files.found import FileValue
from crossfade.files.plain import decoded_json
from crossfade.graph.launches import Launch, as_json
from crossfade.graph.passes import fingerprint
from crossfade.graph.program import MADE_FOR, Program, source_line
from crossfade.graph.text import parse, render
from crossfade.graph.words import ALL_DTYPES
from crossfade.report import json_text
from crossfade.report.report import Report

_REMEDY = "delete the file: it is written again"
_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
_MOST_CONSTANTS = 64 << 20


@dataclass(frozen=True)
class Kept:
    """What a process keeps of a compiled step for others."""

    program: Program
    report: Report
    state_keys: Mapping[str, list[str]]
    exchanges: tuple[Launch, ...]
    reduce_op: str
    """How numbers that ranks compare are put together."""
    numbers: tuple[str, ...]
    """Numbers of the batch that the loss depends on."""
    warning: str
    """What was warned of when it was captured."""


class NotKept(Exception):
    """A step that cannot be written down, and why."""


def written(kept: Kept, key: str) -> str:
    """The JSON of a compiled step, once it is known to be read back as the same; raises `NotKept` if it is not."""
    program = kept.program
    if symbolic := next((node.name for node in program.graph.nodes if _has_symbols(node.meta.get("val"))), ""):
        raise NotKept(f"the sizes of {symbolic} are symbols")
    text_of_program = render(program)
    constants = {name: _bytes_of(name, value) for name, value in program.constants.items() if _is_tensor(value)}
    content = {
        "format": FORMAT,
        "key": key,
        "fingerprint": fingerprint(program),
        "program": text_of_program,
        "sum": _sum(text_of_program),
        "groups": dict(program.groups),
        "facts": sorted(program.facts),
        "sources": {node.name: line for node in program.graph.nodes if (line := source_line(node))},
        "constants": constants,
        "report": json_text.dump(_without_texts(kept.report)),
        "state_keys": {name: list(entries) for name, entries in kept.state_keys.items()},
        "exchanges": as_json(kept.exchanges),
        "reduce_op": kept.reduce_op,
        "numbers": list(kept.numbers),
        "warning": kept.warning,
        "files": own_files(),
    }
    text = json.dumps(content)
    try:
        read(text, key, "what was to be kept")
    except CrossfadeError as error:
        raise NotKept(str(error)) from error
    return text


def _without_texts(report: Report) -> Report:
    """The program before and after each pass would be most of a file, and is in no one's way to a step."""
    return replace(report, records=tuple(replace(record, before="", after="") for record in report.records))


def read(text: str, key: str, where: str) -> Kept:
    """What `written` wrote; raises a `StateError` that names what is wrong."""
    found = FileValue(decoded_json(text, where, StateError, _REMEDY, finite=False), where, "", StateError, _REMEDY)
    if found["format"].value != FORMAT or found["key"].value != key:
        raise found["key"].wrong(f"the key {key[:16]}... in format {FORMAT}")
    constants = {name: _tensor(item) for name, item in found["constants"].entries().items()}
    groups = found["groups"].read_as(Mapping[str, int])
    text_of_program = found["program"].text()
    if _sum(text_of_program) != found["sum"].text():
        raise found["sum"].wrong("that of the program beside it")
    program = parse(text_of_program, groups=groups, constants=constants, as_written=True)
    if fingerprint(program) != found["fingerprint"].text():
        raise found["fingerprint"].wrong(f"that of the program beside it, {fingerprint(program)}")
    report = json_text.load(Report, found["report"].text(), where)
    sources = found["sources"].read_as(Mapping[str, str])
    for node in program.graph.nodes:
        if node.name in sources:
            node.meta[MADE_FOR] = sources[node.name]
    program.facts, program.history = frozenset(found["facts"].read_as(tuple[str, ...])), report.records
    return Kept(
        program,
        report,
        found["state_keys"].read_as(Mapping[str, list[str]]),
        found["exchanges"].read_as(tuple[Launch, ...]),
        found["reduce_op"].text(),
        found["numbers"].read_as(tuple[str, ...]),
        found["warning"].text(),
    )


def changed_file(text: str) -> str:
    """A file of the user's that the capture had loaded in the end and that is another now; empty if there is none."""
    files = json.loads(text)["files"]
    return next((path for path, content in files.items() if content_of(path) != content), "")


def _has_symbols(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_symbols, value))
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, fx.GraphModule)


def _bytes_of(name: str, value: Any) -> dict[str, Any]:
    plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    if not plain or value.is_quantized or value.dtype not in _NAMES or value.nbytes > _MOST_CONSTANTS:
        raise NotKept(f"the constant {name} is a {type(value).__name__} that has no plain form")
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        raise NotKept(f"the constant {name} does not lie in one piece")
    raw = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "bytes": base64.b64encode(raw).decode()}


def _tensor(item: FileValue) -> torch.Tensor:
    dtype = item["dtype"].one_of(ALL_DTYPES)
    shape = [size.whole(least=0, most=1 << 40) for size in item["shape"].items()]
    try:
        raw = base64.b64decode(item["bytes"].text(), validate=True)
    except ValueError as error:
        raise item["bytes"].wrong("bytes in base 64") from error
    like = torch.empty(shape, dtype=dtype, device="meta")
    if like.nbytes != len(raw):
        raise item["bytes"].wrong(f"{like.nbytes} bytes")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
