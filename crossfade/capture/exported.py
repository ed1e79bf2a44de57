"""Capture of a `torch.export.ExportedProgram`: its graph as a Program, with the roles its signature gives."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedInput
from torch.export.graph_signature import OutputKind as ExportedOutput

from crossfade.errors import CaptureError
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, from_graph_module

_INPUTS = {
    ExportedInput.PARAMETER: InputKind.PARAMETER,
    ExportedInput.BUFFER: InputKind.BUFFER,
    ExportedInput.CONSTANT_TENSOR: InputKind.BUFFER,
    ExportedInput.USER_INPUT: InputKind.INPUT,
}
_OUTPUTS = {
    ExportedOutput.USER_OUTPUT: OutputKind.OUTPUT,
    ExportedOutput.LOSS_OUTPUT: OutputKind.LOSS,
    ExportedOutput.BUFFER_MUTATION: OutputKind.UPDATE,
    ExportedOutput.PARAMETER_MUTATION: OutputKind.UPDATE,
    ExportedOutput.USER_INPUT_MUTATION: OutputKind.UPDATE,
    ExportedOutput.GRADIENT_TO_PARAMETER: OutputKind.GRADIENT,
}


def capture_exported(exported: ExportedProgram) -> Program:
    """The program of an exported model; parameters, buffers and constants are inputs under their own names.

    Mutated buffers and inputs appear as updates. The exported program is left as it is.

        >>> import torch
        >>> exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
        >>> print(capture_exported(exported))
        p_weight: f32[3, 2] = parameter("weight")
        p_bias: f32[3] = parameter("bias")
        input_1: f32[4, 2] = input("input")
        linear: f32[4, 3] = aten.linear(input_1, p_weight, p_bias)
        return output("linear", linear)
    """
    program = from_graph_module(exported.graph_module)
    signature = exported.graph_signature
    program.inputs = tuple(_input(spec) for spec in signature.input_specs)
    program.outputs = tuple(_output(spec) for spec in signature.output_specs)
    return program


def _input(spec: Any) -> Input:
    if spec.kind not in _INPUTS:
        raise CaptureError(f"the program has an input of kind {spec.kind.name}", remedy="export the model without it")
    return Input(_INPUTS[spec.kind], spec.target or spec.arg.name)


def _output(spec: Any) -> Output:
    if spec.kind not in _OUTPUTS:
        raise CaptureError(f"the program has an output of kind {spec.kind.name}", remedy="export the model without it")
    return Output(_OUTPUTS[spec.kind], spec.target or getattr(spec.arg, "name", "constant"))
