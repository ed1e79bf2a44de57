"""A program of all layers from one in which equal layers were captured twice: the second is repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from crossfade.errors import CaptureError
from crossfade.forecast.layers import Layers
from crossfade.forecast.marks import BEGINS, ENDS
from crossfade.forecast.marks import OPERATOR as MARK
from crossfade.graph.operators import RENAMING
from crossfade.graph.order import with_ancestors
from crossfade.graph.program import Input, Output, Program
from crossfade.shard.tensor.builder import RANK

FORWARD, BACKWARD = "forward", "backward"
LAYER = "layer"
"""In a node's metadata: the number of its period of equal layers, and whether it is in the forward or the backward."""


class CannotRepeat(CaptureError):
    """Layers that hand on more than one tensor, so that one cannot stand for all."""


def find_phases(program: Program) -> None:
    """Note in the metadata of each node the layer and phase that it lies in, as the marks say."""
    inside: tuple[int, str] | None = None
    for node in list(program.graph.nodes):
        if node.target is MARK:
            _, edge, number, backward = node.args
            opens = edge == (ENDS if backward else BEGINS)
            inside = (int(number), BACKWARD if backward else FORWARD) if opens else None
        elif node.op == "call_function":
            node.meta[LAYER] = inside


def without_marks(program: Program) -> None:
    """Take marks out, and what only passes a value on."""
    for node in list(program.graph.nodes):
        if node.target is MARK or node.target in RENAMING:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)


def only_needed(program: Program) -> None:
    """Take out what no result needs."""
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and node.target is not MARK:
            program.graph.erase_node(node)


def repeat_layers(program: Program, layers: Layers) -> Program:
    """The program as if all layers had been captured; the one given is used up.

    The nodes of the second period, in the forward and in the backward, are copied for each period that was left out.
    Raises `CannotRepeat` if layers share more than the value that they hand on.
    """
    for node in list(program.graph.nodes):
        if node.target in RENAMING:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    find_phases(program)
    if layers.left_out:
        _Repeater(program, layers).repeat()
    without_marks(program)
    only_needed(program)
    return program


@dataclass
class _Borders:
    """The marks of one period: where its forward and its backward begin and end."""

    begins: fx.Node
    ends: fx.Node
    backward_begins: fx.Node
    backward_ends: fx.Node


class _Repeater:
    def __init__(self, program: Program, layers: Layers) -> None:
        self.program, self.layers, self.graph = program, layers, program.graph
        self.template = layers.captured - 1
        self.borders = self._borders()
        nodes = list(self.graph.nodes)
        self.forward = [node for node in nodes if node.meta.get(LAYER) == (self.template, FORWARD)]
        self.backward = [node for node in nodes if node.meta.get(LAYER) == (self.template, BACKWARD)]
        self.added: set[fx.Node] = set()
        self.names = {node: item.name for item, node in program.named_inputs()}
        self.last = layers.start + layers.period * layers.captured
        self._check()

    def _borders(self) -> _Borders:
        found: dict[tuple[Any, ...], list[fx.Node]] = {}
        for node in self.graph.find_nodes(op="call_function", target=MARK):
            found.setdefault(tuple(node.args[1:]), []).append(node)
        wanted = [(BEGINS, self.template, False), (ENDS, self.template, False),
                  (ENDS, self.template, True), (BEGINS, self.template, True)]  # fmt: skip
        for key in wanted:
            if len(found.get(key, ())) != 1:
                raise CannotRepeat(
                    f"layers of {self.layers.owner} that are run {len(found.get(key, ()))} times a pass",
                    remedy="forecast the model with whole=True, which captures every layer",
                )
        return _Borders(*(found[key][0] for key in wanted))

    def _check(self) -> None:
        """Refuse layers that share more than what they hand on."""
        edges = {self.borders.ends, self.borders.backward_ends}
        inside = {*self.forward, *self.backward}
        results = {self.program.output_node}
        for node in inside:
            for user in node.users:
                if user not in inside and user not in edges and user not in results:
                    raise CannotRepeat(
                        f"{node.name} of a layer of {self.layers.owner} is used by {user.name} outside of it",
                        expected="layers that hand on one tensor",
                        remedy="forecast the model with whole=True, which captures every layer",
                    )
            for source in node.all_input_nodes:
                place = source.meta.get(LAYER)
                if place is not None and source not in inside and not self._lift(source):
                    raise CannotRepeat(
                        f"a layer of {self.layers.owner} uses {source.name} of another",
                        expected="layers that take one tensor from those before",
                        remedy="forecast the model with whole=True, which captures every layer",
                    )

    def _lift(self, node: fx.Node) -> bool:
        """Take what only depends on which rank this is, as masks of padding do, out of the layer that has it."""
        needed = with_ancestors(node)
        if any(each.op == "placeholder" and self.names[each] != RANK for each in needed):
            return False
        for each in needed:
            each.meta[LAYER] = None
        return True

    def repeat(self) -> None:
        """Copy the template for every period left out."""
        borders = self.borders
        periods = range(self.layers.captured, self.layers.count)
        inputs = self._inputs(periods)
        handed_on, maps = borders.ends.args[0], []
        for period in periods:
            known: dict[Any, Any] = {**inputs[period], borders.begins: handed_on}
            self._copy(self.forward, known, (period, FORWARD), before=borders.ends)
            handed_on = known[borders.ends.args[0]]
            maps.append(known)
        results = self._results_by_node()
        added: list[tuple[Output, Any]] = []
        gradient, before = borders.backward_begins.args[0], borders.backward_begins.next
        for period, known in zip(reversed(periods), reversed(maps), strict=True):
            known[borders.backward_begins] = gradient
            self._copy(self.backward, known, (period, BACKWARD), before=before)
            gradient = known[borders.backward_ends.args[0]]
            added += [
                (replace(out, name=self._name(out.name, period)), known[node]) for out, node in results if node in known
            ]
        borders.ends.args = (handed_on, *borders.ends.args[1:])
        borders.backward_begins.args = (gradient, *borders.backward_begins.args[1:])
        for node in self.backward:
            node.replace_input_with(borders.backward_begins, gradient)
        self._take_up(added)

    def _inputs(self, periods: Iterable[int]) -> dict[int, dict[fx.Node, fx.Node]]:
        """The inputs of each new period for those of the template."""
        own = [(item, node) for item, node in self.program.named_inputs() if self._is_own(item.name)]
        new = [(period, item, node) for period in periods for item, node in own]
        items = [
            (Input(item.kind, self._name(item.name, period)), node.meta["val"]) for period, item, node in new
        ]  # fmt: skip
        made = self.program.add_inputs(items) if items else []
        found: dict[int, dict[fx.Node, fx.Node]] = {period: {} for period in periods}
        for (period, _, node), placeholder in zip(new, made, strict=True):
            found[period][node] = placeholder
        self.added = set(made)
        return found

    def _copy(
        self, nodes: Sequence[fx.Node], known: dict[Any, Any], place: tuple[int, str], *, before: fx.Node
    ) -> None:
        with self.graph.inserting_before(before):
            for node in nodes:
                copy = self.graph.node_copy(node, lambda source: known.get(source, source))
                copy.meta = {**node.meta, LAYER: place}
                known[node] = copy

    def _results_by_node(self) -> list[tuple[Output, fx.Node]]:
        inside = {*self.forward, *self.backward}
        return [(out, node) for out, node in self.program.named_results() if node in inside]

    def _take_up(self, added: Sequence[tuple[Output, Any]]) -> None:
        """The new results behind the old ones, and the true names of layers behind those left out."""
        kept = list(self.program.named_results())
        results = [(replace(out, name=self._true_name(out.name)), value) for out, value in kept] + list(added)
        self.program.inputs = tuple(
            item if node in self.added else replace(item, name=self._true_name(item.name))
            for item, node in self.program.named_inputs()
        )
        self.program.set_results([value for _, value in results], tuple(out for out, _ in results))

    def _index(self, name: str) -> int | None:
        """Which layer of the owner a name is in."""
        prefix = f"{self.layers.owner}." if self.layers.owner else ""
        head = name.removeprefix(prefix).partition(".")[0]
        return int(head) if name.startswith(prefix) and head.isdigit() else None

    def _is_own(self, name: str) -> bool:
        index = self._index(name)
        return index is not None and self.last - self.layers.period <= index < self.last

    def _name(self, name: str, period: int) -> str:
        return self._moved(name, (period - self.template) * self.layers.period)

    def _true_name(self, name: str) -> str:
        index = self._index(name)
        behind = index is not None and index >= self.last
        return self._moved(name, self.layers.left_out * self.layers.period) if behind else name

    def _moved(self, name: str, by: int) -> str:
        index = self._index(name)
        prefix = f"{self.layers.owner}." if self.layers.owner else ""
        rest = name.removeprefix(prefix).partition(".")[2]
        return f"{prefix}{(index or 0) + by}.{rest}"


def layer_of(node: fx.Node) -> tuple[int, str] | None:
    """The number of the period of equal layers that a node is in, and its phase."""
    return node.meta.get(LAYER)
