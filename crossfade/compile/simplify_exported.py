"""Simplifying exported models: a saved `torch.export` program in, a smaller one out, by a pipeline chosen by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from crossfade.capture.exported import capture_exported
from crossfade.compile.catalogue import pass_from_spelling
from crossfade.compile.pipeline import simplification
from crossfade.errors import CaptureError, PassError
from crossfade.files.pt2 import load_exported
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.pipelines import Pipeline
from crossfade.graph.private import exported_program
from crossfade.graph.program import Program, identifier
from crossfade.report.report import Report
from crossfade.tracebacks import users_frames


@dataclass(frozen=True)
class Simplified:
    """A simplified exported program and the account of what was done."""

    exported: ExportedProgram
    report: Report


@users_frames
def simplify(exported: ExportedProgram, passes: Sequence[Pass] | None = None, *, title: str = "model") -> Simplified:
    """Run passes over an exported program, by default `pipeline.simplification()`; `exported` is left as it is.

    The result has the same inputs and outputs, shares parameters and buffers, and runs by `.module()`. It is for
    inference: what only differentiation sees, such as `detach`, goes.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
        >>> exported = torch.export.export(model.eval(), (torch.ones(1, 2),))
        >>> print(simplify(exported).report)
        model: 0 collectives (0 B) became 0 (0 B), 6 nodes became 5...
    """
    before = capture_exported(exported)
    after = run_passes(before, simplification() if passes is None else passes)
    return Simplified(rebuild(exported, after), Report.of(before, after, title=title))


def rebuild(exported: ExportedProgram, program: Program) -> ExportedProgram:
    """An exported program around another graph, its signature true to it."""
    entries = exported.module_call_graph
    if kept := [entry.fqn for entry in entries[1:] if entry.signature is not None]:
        raise CaptureError(
            f"an exported program that keeps the calls of {', '.join(kept)}",
            expected="a graph whose inner values nobody names",
            remedy="export it without preserve_module_call_signature",
        )
    program = program.copy()
    for spec, node in zip(exported.graph_signature.input_specs, program.placeholders, strict=True):
        node.name = spec.arg.name  # a copied graph renames what Python reserves, such as `input`
    specs, constants = _with_constants_lifted(program, list(exported.graph_signature.input_specs))
    pairs = zip(exported.graph_signature.output_specs, program.results, strict=True)
    outputs = [OutputSpec(spec.kind, _argument(value, spec.arg), spec.target) for spec, value in pairs]
    entries = copy.deepcopy(entries)
    if entries and entries[0].signature is not None:
        results = [spec.arg for spec in outputs if spec.kind is OutputKind.USER_OUTPUT]
        entries[0].signature = replace(entries[0].signature, outputs=results)
    signature = ExportGraphSignature(specs, outputs)
    module = program.module()
    return exported_program(
        exported, module.graph, signature, root=module, calls=entries, constants={**exported.constants, **constants}
    )


def _argument(value: Any, like: Any) -> Any:
    """How a signature names a result."""
    if isinstance(value, fx.Node):
        return replace(like, name=value.name)
    return ConstantArgument(like.name, value)


def _with_constants_lifted(program: Program, specs: list[InputSpec]) -> tuple[list[InputSpec], dict[str, Any]]:
    """Make inputs of the tensors that passes added: an exported program keeps all its tensors outside its graph."""
    graph, constants = program.graph, {}
    first = next((index for index, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    before = list(graph.nodes)[first]  # the placeholders stand first
    for node in list(graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if not isinstance(program.constants[name], torch.Tensor):
            continue
        if name not in constants:
            with graph.inserting_before(before):
                constants[name] = graph.placeholder(f"c_{identifier(name)}")
            constants[name].meta = dict(node.meta)
            spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constants[name].name), name)
            specs, first = [*specs[:first], spec, *specs[first:]], first + 1
        node.replace_all_uses_with(constants[name])
        graph.erase_node(node)
    tensors = {name: program.constants[name] for name in constants}
    program.constants = {name: value for name, value in program.constants.items() if name not in tensors}
    return specs, tensors


def load(path: Path, *, trusted: bool = False) -> ExportedProgram:
    """A saved exported program. Nothing in the file is run, unless it is `trusted`."""
    return load_exported(path, trusted=trusted)[0]


def save(exported: ExportedProgram, path: Path) -> None:
    """Write an exported program to a file that `torch.export.load` reads."""
    try:
        torch.export.save(exported, path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CaptureError(
            f"a simplified model that torch.export does not save ({type(error).__name__}: {reason})",
            remedy="leave out the pass that put in what it does not know",
        ) from error


def choose(
    pipeline: Pipeline,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Pipeline:
    """Change a pipeline as the command line says: names to leave out, and `NAME=SPELLING` for passes to add.

    >>> choose(simplification(), only=["remove-dead-code"], before=["remove-dead-code=remove-asserts(values=True)"])
    remove-asserts(values=True)
    remove-dead-code
    """
    if only:
        pipeline = Pipeline(pass_from_spelling(spelling) for spelling in only)
    pipeline = pipeline.without(*without)
    for item in before:
        name, added = _place(item)
        pipeline = pipeline.before(name, added)
    for item in after:
        name, added = _place(item)
        pipeline = pipeline.after(name, added)
    return pipeline


def _place(item: str) -> tuple[str, Pass]:
    name, found, spelling = item.partition("=")
    if not found:
        raise PassError(f"{item!r}", expected="NAME=SPELLING", remedy="write remove-dead-code=remove-asserts, say")
    return name, pass_from_spelling(spelling)
