"""Traced parts of an optimizer's step, put behind a program that computes gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from crossfade.capture.numbers import SymbolicNumbers
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program, attribute
from crossfade.graph.splice import inline

GRAD_NORM = "grad_norm"
"""Name of the output that carries the gradient norm before clipping."""

_TAKEN = (OutputKind.GRADIENT, OutputKind.SHARD)
"""What a step takes of a program's results."""


@dataclass(frozen=True)
class Piece:
    """A traced part of a step: of parameters, their gradients, their state and the numbers, the new values of all but
    the gradients and the numbers. If it `updates` nothing, of parameters and gradients, the new gradients. The norm of
    all gradients is the last result, if it has that."""

    names: Sequence[str]
    body: fx.GraphModule
    norm: bool = False
    updates: bool = True


def state_name(parameter: str, key: str) -> str:
    """The program's name for one entry of one parameter's optimizer state."""
    return f"{parameter}:{key}"


def _take_over_constants(program: Program, body: fx.GraphModule) -> None:
    """Give a program the tensors that traced code made from Python's numbers."""
    constants = dict(program.constants)
    for node in body.graph.find_nodes(op="get_attr"):
        name = f"of_optimizer{node.target}"
        constants[name] = attribute(body, str(node.target))
        node.target = name
    program.constants = constants


def append_pieces(
    program: Program,
    pieces: Sequence[Piece],
    symbolic: SymbolicNumbers,
    *,
    operands: Mapping[str, fx.Node],
    ready: Mapping[str, fx.Node],
    state: Mapping[str, Mapping[str, Tensor]],
) -> list[str]:
    """Put a traced step behind a program, of which it takes the gradients; return the names of the numbers it uses.

    `operands` are what is updated for each parameter, `ready` their gradients, `state` what describes their state.
    """
    bodies = list({id(piece.body): piece.body for piece in pieces if piece.updates}.values())
    taken = [_last(body.graph, symbolic.symbols) for body in bodies]
    used = [name for name in symbolic.symbols if any(numbers[name].users for numbers in taken)]
    for piece in pieces:
        _take_over_constants(program, piece.body)
    entries = [(name, key) for name in ready for key in state[name]]
    of_state = [(Input(InputKind.OPTIMIZER_STATE, state_name(n, key)), state[n][key].detach()) for n, key in entries]
    of_numbers = [(Input(InputKind.SCALAR, name), symbolic.symbols[name]) for name in used]
    added = program.add_inputs([*of_state, *of_numbers])
    known = dict(zip([*entries, *used], added, strict=True))
    gradients, norm = dict(ready), []
    new: dict[Any, Any] = {}
    for piece in pieces:
        names, graph = piece.names, piece.body.graph
        own = [(name, key) for name in names for key in state[name]]
        given = [*(operands[n] for n in names), *(gradients[n] for n in names)]
        arguments = dict(
            zip(graph.find_nodes(op="placeholder"), [*given, *(known[entry] for entry in own)], strict=False)
        )
        if piece.updates:
            arguments |= {node: known[name] for name, node in _last(graph, symbolic.symbols).items() if name in used}
        results = inline(program, piece.body.graph, arguments, before=program.output_node)
        norm += results[len(results) - piece.norm :]
        if piece.updates:
            new |= dict(zip([*names, *own], results, strict=False))
        else:
            gradients = dict(zip(names, results, strict=False))
    kept = [(out, value) for out, value in program.named_results() if out.kind not in _TAKEN]
    kept += [(Output(OutputKind.UPDATE, name), new[name]) for name in ready]
    kept += [(Output(OutputKind.UPDATE, state_name(*entry)), new[entry]) for entry in entries]
    kept += [(Output(OutputKind.OUTPUT, GRAD_NORM), value) for value in norm]
    program.set_results([value for _, value in kept], tuple(out for out, _ in kept))
    program.facts |= {"optimizer"}
    return used


def _last(graph: fx.Graph, names: Collection[str]) -> dict[str, fx.Node]:
    """The last inputs of a graph, by their names."""
    inputs = list(graph.find_nodes(op="placeholder"))
    return dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
