"""Exported programs (`.pt2`), read without running what is in them.

`torch.export.load` unpickles weights, constants and example inputs, evaluates sizes as Python, looks operators up by
any path inside torch, imports the modules of enums, and makes source code of names and guards; an archive may also hold
compiled libraries. So the archive is checked first, through the reader that torch itself uses: everything pickled is
plain tensors, every operator is one that programs are made of, and every expression is arithmetic. What is more than
that needs `trusted=True`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from crossfade.errors import CaptureError, CrossfadeError
from crossfade.files.expressions import why_no_guard, why_no_size
from crossfade.files.found import FileValue
from crossfade.files.pickled import TRUST, check_plain
from crossfade.files.plain import decoded_json
from crossfade.graph.allowed import operator_named
from crossfade.graph.private import load_archive, open_archive, record_bytes

_SAVE = "save the model with torch.export.save(torch.export.export(model, inputs), path)"
_MODEL, _LIBRARIES, _WEIGHTS, _CONSTANTS = "models/", "data/aotinductor/", "data/weights/", "data/constants/"
_EXAMPLES = "data/sample_inputs/"


def load_exported(path: Path, *, trusted: bool = False) -> tuple[ExportedProgram, dict[str, Any]]:
    """A saved exported program, and the texts that were saved with it; CaptureError where the file holds none.

    With `trusted`, whatever `torch.export.load` does with the file is done, also running code from it.
    """
    try:
        if trusted:
            extra: dict[str, Any] = {"": ""}  # torch fills it, unless it is empty
            return torch.export.load(path, extra_files=extra), extra
        _Archive(path).check()
        contents = load_archive(str(path))
        program = contents.exported_programs["model"]
        _check_values(program, path)
        return program, dict(contents.extra_files)
    except CrossfadeError:
        raise
    except Exception as reason:
        said = str(reason).strip().partition("\n")[0][:300]
        raise CaptureError(
            f"{path}, which torch.export does not read ({type(reason).__name__}: {said})",
            expected="a file written by torch.export.save",
            remedy=_SAVE,
        ) from reason


def _check_values(program: ExportedProgram, path: Path) -> None:
    """Refuse a program whose signature names a tensor that the file does not hold."""
    held = {*program.state_dict, *program.constants}
    for spec in program.graph_signature.input_specs:
        if spec.target is not None and spec.target not in held:
            raise CaptureError(
                f"{path}, whose input {spec.arg.name} is {spec.target!r}, which it does not hold", remedy=_SAVE
            )


class _Archive:
    """Checks one file, record by record."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, open_archive(str(path))
        self.records: list[str] = self.reader.get_all_records()

    def refused(self, record: str, what: str) -> CaptureError:
        return CaptureError(f"{self.path}, {record}, {what}", expected="tensors and operators alone", remedy=TRUST)

    def check(self) -> None:
        if sum(record_bytes(self.reader, record) for record in self.records) > self.path.stat().st_size:
            raise CaptureError(f"{self.path}, which says that it is larger than it is", remedy=_SAVE)
        for record in self.records:
            if record.startswith(_LIBRARIES):
                raise self.refused(record, "a compiled library")
            if record.startswith(_MODEL) and record != f"{_MODEL}model.json":
                raise self.refused(record, "another model than the one that is asked for")
            if record.startswith((_WEIGHTS, _CONSTANTS, _EXAMPLES)) and record.endswith(".pt"):
                self.plain(record)
        self.model(f"{_MODEL}model.json")
        self.payloads(_WEIGHTS, "weights")
        self.payloads(_CONSTANTS, "constants")

    def plain(self, record: str) -> Any:
        data = self.reader.get_record(record)
        return check_plain(data, f"{self.path}, {record}", CaptureError) if data else None

    def json(self, record: str) -> FileValue:
        if record not in self.records:
            raise CaptureError(f"{self.path} without {record}", expected="a file of torch.export.save", remedy=_SAVE)
        where = f"{self.path}, {record}"
        data = decoded_json(self.reader.get_record(record), where, CaptureError, _SAVE, finite=False)
        return FileValue(data, where, "", CaptureError, _SAVE)

    def payloads(self, folder: str, kind: str) -> None:
        """Weights or constants: a table of names, each with a record of bytes or of one pickled tensor."""
        if f"{folder}model.pt" in self.records:  # of torch 2.8: one pickle, checked above
            return
        for entry in self.json(f"{folder}model_{kind}_config.json")["config"].entries().values():
            record = folder + entry["path_name"].text()
            if record not in self.records:
                raise entry["path_name"].wrong("a record of this archive")
            if "obj" in record.removeprefix(folder):
                raise self.refused(record, f"an object of its own kind, {entry.place}")
            if entry["use_pickle"].flag():
                self.tensor(record)
            elif entry["tensor_meta"].value is not None:
                self.bytes(record, entry)

    def tensor(self, record: str) -> None:
        if not isinstance(self.plain(record), torch.Tensor):
            raise self.refused(record, "which is no tensor")

    def bytes(self, record: str, entry: FileValue) -> None:
        """A tensor of no bytes is made of its sizes alone: none may be reserved for it, except on the meta device."""
        kept = entry["tensor_meta"]["device"]["type"].text() != "meta"
        sizes = [size["as_int"].whole(least=0) for size in entry["tensor_meta"]["sizes"].items()]
        if kept and math.prod(sizes) > 0 and not record_bytes(self.reader, record):
            raise entry["tensor_meta"]["sizes"].wrong("the size of an empty tensor, since its record is empty")

    def model(self, record: str) -> None:
        for found, key in _strings(self.json(record), ""):
            self.string(record, found, key)

    def string(self, record: str, found: FileValue, key: str) -> None:
        """One text of the model, by the key that it stands under."""
        if why := _CHECKS.get(key, _why_no_label)(found.value):
            raise self.refused(record, f"{found.place} = {found.value[:200]!r}, {why}")


def _why_no_operator(target: str) -> str | None:
    """Why a node may not call this."""
    name = target.removeprefix("torch.ops.") if target.startswith("torch.ops.") else target.removeprefix("_")
    return None if operator_named(name) is not None else "which is no operator of programs"


def _why_no_name(text: str) -> str | None:
    """Why nothing in a graph may be called this: names become source code."""
    return None if re.fullmatch(r"\w*", text, re.ASCII) else "which is no name of a value"


def _why_no_label(text: str) -> str | None:
    """Why this is not let through where a parameter's name or a word stands: these become source code, in quotes."""
    return None if text.isprintable() and not set(text) & set("\"'\\{}") else "which has quotes or escapes in it"


def _strings(found: FileValue, key: str) -> Iterator[tuple[FileValue, str]]:
    """Every text in a document that means something to torch, keys as well, with the key it stands under."""
    if isinstance(found.value, str):
        yield found, key
    elif isinstance(found.value, dict):
        for name, entry in found.entries().items():
            yield found.at(name, ", a key"), ""
            if name not in _FOR_PEOPLE:
                yield from _strings(entry, name)
    elif isinstance(found.value, list):
        for item in found.items():
            yield from _strings(item, key)


def _why_no_structure(text: str) -> str | None:
    """Why a description of nested inputs is refused: enums import the module that they name, and so do defaultdicts."""
    try:
        words = list(_words(json.loads(text)))
    except (ValueError, RecursionError):
        return "which is no structure"
    refused = ("__enum__", "default_factory_module", "collections.defaultdict")
    return next((f"which names {word[:80]!r}" for word in words if word in refused or _why_no_label(word)), None)


def _words(data: Any) -> Iterator[str]:
    """Every key and text, also of JSON inside texts."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from _words(value)
    elif isinstance(data, list):
        for item in data:
            yield from _words(item)
    elif isinstance(data, str):
        inner = _decoded(data)
        yield from _words(inner) if inner is not None else (data,)


def _decoded(text: str) -> Any:
    """What a text holds that is JSON itself; None if it is not, or a number or a word."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, (dict, list, str)) else None


_FOR_PEOPLE = frozenset(("metadata", "as_string", "as_strings", "torch_version"))
"""Keys whose texts torch keeps as they are; of metadata it looks some up, and calls nothing."""

_CHECKS: dict[str, Callable[[str], str | None]] = {
    "target": _why_no_operator,
    "as_operator": _why_no_operator,
    "name": _why_no_name,
    "forward_arg_names": _why_no_name,
    "expr_str": why_no_size,
    "guards_code": why_no_guard,
    "in_spec": _why_no_structure,
    "out_spec": _why_no_structure,
}
"""What a text must be, by the key it stands under; anything else is a label."""
