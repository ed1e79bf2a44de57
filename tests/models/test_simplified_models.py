"""Graphs of real models, simplified: they compute what they computed, and are smaller.

By default every architecture as `torch.export` leaves it, and a few decomposed, with open sizes and with their
backward; `pytest -m models` runs all combinations.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.capture.exported import capture_exported
from crossfade.compile import pipeline
from crossfade.compile.catalogue import known_passes
from crossfade.execute.executable import Executable
from crossfade.graph.passes import Numerics, Pass, run_passes
from crossfade.graph.program import InputKind, Program, from_graph_module
from tests.models.choice import some
from tests.models.zoo import ARCHITECTURES, Architecture, architecture

pytest.importorskip("transformers")

NAMES = [architecture.name for architecture in ARCHITECTURES]
DECOMPOSED = ["llama", "bert", "mixtral", "vit"]
DYNAMIC = ["llama", "distilbert", "vit"]
TRAINED = ["llama", "gpt2", "bert"]
NOT_DECOMPOSABLE = {"gpt2": "torch decomposes no view of its tied Conv1D weight"}


def every_simplification() -> list[Pass]:
    """All passes of the stage that need no option, by name."""
    for module in pkgutil.iter_modules(importlib.import_module("crossfade.simplify").__path__):
        if not module.name.endswith("_triton"):
            importlib.import_module(f"crossfade.simplify.{module.name}")
    found = [kind for kind in known_passes().values() if kind.__module__.startswith("crossfade.simplify.")]
    return [kind() for kind in found if all(option.default is not MISSING for option in fields(kind))]


def arguments(exported: ExportedProgram, program: Program, inputs: dict[str, Any]) -> list[Any]:
    """Values for a program's inputs, each a copy."""
    state = {**exported.state_dict, **exported.constants}
    given = [inputs[item.name] if item.kind is InputKind.INPUT else state[item.name] for item in program.inputs]
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in given]


def check_same(program: Program, values: Sequence[Any]) -> Program:
    """The default pipeline keeps every bit; all passes together keep the numbers. Returns what the pipeline made."""
    expected = Executable(program, {})(copied(values))
    simplified = run_passes(program, pipeline.simplification(), keep_text=False)
    for old, new in zip(expected, Executable(simplified, {})(copied(values)), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    everything = run_passes(program, every_simplification(), keep_text=False)
    bitwise = all(record.numerics == Numerics.BITWISE for record in everything.history if record.changed)
    for old, new in zip(expected, Executable(everything, {})(copied(values)), strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, **({"rtol": 0, "atol": 0} if bitwise else CLOSE))
    assert len(simplified.graph.nodes) < len(program.graph.nodes)
    return simplified


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def copied(values: Sequence[Any]) -> list[Any]:
    """Values for one run, which may write them."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def check_exported(chosen: Architecture, *, dynamic: bool = False, decomposed: bool = False) -> None:
    exported = chosen.export(dynamic)
    if decomposed:
        exported = exported.run_decompositions()
    program = capture_exported(exported)
    for batch, seq in [(3, 20), (2, 12)] if dynamic else [(2, 12)]:
        check_same(program, arguments(exported, program, chosen.inputs(batch, seq)))


@pytest.mark.parametrize("name", some(NAMES))
def test_exported(name: str):
    check_exported(architecture(name))


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed(name: str):
    check_exported(architecture(name), decomposed=True)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(name: str):
    """Run on sizes that the graph was not exported with."""
    check_exported(architecture(name), dynamic=True)


@pytest.mark.models
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_all_combinations(name: str, decomposed: bool, dynamic: bool):
    if decomposed and name in NOT_DECOMPOSABLE:
        pytest.skip(NOT_DECOMPOSABLE[name])
    check_exported(architecture(name), dynamic=dynamic, decomposed=decomposed)


@pytest.mark.parametrize("name", TRAINED)
def test_forward_and_backward(name: str):
    """The loss and all gradients, from one graph."""
    program, values = training_program(architecture(name))
    check_same(program, values)


def training_program(chosen: Architecture) -> tuple[Program, list[Any]]:
    """A loss and its gradients as one program, and values for its inputs."""
    model = chosen.build()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = list(parameters)

    def step(weights: list[Tensor], state: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        swapped = {**dict(zip(names, leaves, strict=True)), **dict(zip(buffers, state, strict=True))}
        given = dict(zip(chosen.inputs(), inputs, strict=True))
        logits = torch.func.functional_call(model, swapped, (), given, tie_weights=True).logits
        loss = logits.float().log_softmax(-1).square().mean()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [loss, *(gradient for gradient in gradients if gradient is not None)]

    values = [value.detach() for value in parameters.values()], list(buffers.values()), list(chosen.inputs().values())
    module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*values)
    module.graph.eliminate_dead_code()
    return from_graph_module(module), [value for many in values for value in many]
