"""Which module each node of a program belongs to, in the user's names, and whether it computes forward, backward or an
update. Whatever reads a parameter belongs to the parameter's module; the rest to the module that its input came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile

from torch import fx

from crossfade.graph.program import InputKind, OutputKind, Program

_OWNED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.OPTIMIZER_STATE)


def by_module(program: Program, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each node that computes: its phase, if the program has a loss, and its module (`forward blocks.0.up`).

    `known` says it of nodes that an earlier form of the program had, by their names.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... w: f32[8, 8] = parameter("blocks.0.up.weight")
        ... x: f32[4, 8] = input("x")
        ... mm: f32[4, 8] = aten.mm(x, w)
        ... y: f32[4, 8] = aten.relu(mm)
        ... return output("y", y)
        ... ''')
        >>> by_module(program)
        {'mm': 'blocks.0.up', 'y': 'blocks.0.up'}
    """
    known = known or {}
    phases, modules = _phases(program), _Modules(program)
    found = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            module = modules.of(node, known.get(node.name), has_phases=bool(phases))
            place = known.get(node.name) or f"{phases.get(node, '')} {module}".strip()
            if place:
                found[node.name] = place
    return found


class _Modules:
    """The module of each node, found in the order of the nodes."""

    def __init__(self, program: Program) -> None:
        self._of: dict[fx.Node, str] = {}
        self._weights: set[fx.Node] = set()
        names = [entry.name for entry in program.inputs if entry.kind is InputKind.PARAMETER]
        longest_first = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
        for node, entry in zip(program.placeholders, program.inputs, strict=True):
            if entry.kind in _OWNED:
                parameter = longest_first.match(entry.name)
                self._of[node] = (parameter.group() if parameter else entry.name).rpartition(".")[0]
                self._weights.add(node)

    def of(self, node: fx.Node, known: str | None, *, has_phases: bool) -> str:
        """The module of a node whose inputs have theirs."""
        inputs = node.all_input_nodes
        weights = [source for source in inputs if source in self._weights]
        if weights and len(weights) == len(inputs):
            self._weights.add(node)  # a view, a copy or a gathered form of parameters
        stack = node.meta.get("nn_module_stack") or {}
        if known is not None:
            module = known.partition(" ")[2] if has_phases else known
        elif stack:
            module = _plain(str(list(stack.values())[-1][0]))
        elif weights:
            module = common_module(self._of[source] for source in weights)
        else:
            module = next((self._of[source] for source in reversed(inputs) if self._of.get(source)), "")
        self._of[node] = module
        return module


def _plain(path: str) -> str:
    """A module's path without how torch's tracers spell the model itself."""
    return re.sub(r"^L\['self'\]\.?(_modules\['(\w+)'\])?", r"\2", path)


def common_module(paths: Iterable[str]) -> str:
    """The innermost module that holds all of these.

    >>> common_module(["blocks.0.up", "blocks.0.down"]), common_module(["blocks.0", "norm"])
    ('blocks.0', '')
    """
    split = [path.split(".") for path in dict.fromkeys(paths)]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return ".".join(parts[0] for parts in shared)


def _phases(program: Program) -> dict[fx.Node, str]:
    losses = _results(program, OutputKind.LOSS)
    if not losses:
        return {}
    phases = dict.fromkeys(_ancestors(losses), "forward")
    starts = zip(program.placeholders, program.inputs, strict=True)
    updating = {node for node, entry in starts if entry.kind is InputKind.OPTIMIZER_STATE}
    parameters = {entry.name for entry in program.inputs if entry.kind is InputKind.PARAMETER}
    updated = set(_results(program, OutputKind.UPDATE, parameters))
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in phases:
            late = node in updated or any(source in updating for source in node.all_input_nodes)
            phases[node] = "update" if late else "backward"
            updating |= {node} if late else set()
    return phases


def _results(program: Program, kind: OutputKind, names: Iterable[str] | None = None) -> list[fx.Node]:
    pairs = zip(program.results, program.outputs, strict=True)
    wanted = [value for value, out in pairs if out.kind is kind and (names is None or out.name in names)]
    return [value for value in wanted if isinstance(value, fx.Node)]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
