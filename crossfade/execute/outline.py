"""A stretch of a program as a program of its own, and the whole with one call in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from crossfade.execute.regions import Region, Regions, base_of, is_constant, is_view, looks
from crossfade.graph.effects import written_inputs
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program

_ALIGNED = 2
"""Numbers in 16 bytes, at whose multiples compiled kernels expect their inputs."""

WRITES = "crossfade_writes"
"""Of a call: the arguments whose memory it writes, which no schema tells."""

Call = Callable[..., Sequence[Any]]
"""What runs instead of a region: takes its inputs, in order, and returns its outputs. With `takes_staged` it takes the
tensors among them, and then one tensor of the numbers."""


def outlined(program: Program, region: Region) -> Program:
    """A region as a program: its inputs under the names of their nodes, views of them made inside.

    >>> from crossfade.execute.regions import regions_of
    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[2, 3] = input("x")
    ... t: f32[3, 2] = aten.permute(x, [1, 0])
    ... a: f32[3, 2] = aten.neg(t)
    ... b: f32[3, 2] = aten.exp(a)
    ... return output("b", b)
    ... ''')
    >>> print(outlined(program, regions_of(program).regions[0]))
    x: f32[2, 3] = input("x")
    t: f32[3, 2] = aten.permute(x, [1, 0])
    a: f32[3, 2] = aten.neg(t)
    b: f32[3, 2] = aten.exp(a)
    return output("0", b)
    """
    inside, graph, known = set(region.nodes), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in region.inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)

    def enter(node: fx.Node) -> Any:
        if is_constant(node):
            return node.meta["val"]
        if node not in known:
            if node not in inside and not is_view(node):
                return enter(base_of(node, stop=lambda at: at in known or is_view(at)))
            known[node] = graph.node_copy(node, enter)
        return known[node]

    for node in region.nodes:
        if not is_constant(node):
            known[node] = graph.node_copy(node, enter)
    graph.output(tuple(known[node] for node in region.outputs))
    inputs = tuple(Input(InputKind.INPUT, node.name) for node in region.inputs)
    outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(region.outputs)))
    return Program(graph, inputs, outputs, constants=program.constants)


def with_calls(
    program: Program,
    chosen: Regions,
    calls: Mapping[Region, Call],
    device: torch.device,
    *,
    host_first: bool = False,
) -> Program:
    """A program in which each region is one node that calls something.

    What the host computes stands right before the first node that needs some of it, so that a device has begun by then;
    with `host_first` before everything else, so that it interrupts nothing.
    Numbers that compiled regions take come after it, together, as a tensor on the device.

        >>> from crossfade.execute.regions import regions_of
        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... a: f32[4] = aten.neg(x)
        ... b: f32[4] = aten.exp(a)
        ... return output("b", b)
        ... ''')
        >>> chosen = regions_of(program)
        >>> calls = {chosen.regions[0]: lambda x: [x.neg().exp()]}
        >>> [node.name for node in with_calls(program, chosen, calls, torch.device("cpu")).graph.nodes]
        ['x', 'region', 'b', 'output']
    """
    return _Caller(program, chosen, calls, device).rewrite(host_first)


class _Caller:
    def __init__(self, program: Program, chosen: Regions, calls: Mapping[Region, Call], device: torch.device) -> None:
        self.program, self.chosen, self.calls, self.device = program, chosen, calls, device
        self.graph = fx.Graph()
        self.known: dict[fx.Node, fx.Node] = {}
        self.inside = {node: region for region in calls for node in region.nodes}
        self.begun = False
        self.staged: dict[Region, tuple[fx.Node, int]] = {}

    def rewrite(self, host_first: bool) -> Program:
        """Copy node by node: what the host computes before it is needed; a region where its last node stands; views
        where needed."""
        nodes = [node for node in self.program.graph.nodes if node.op != "output"]
        for node in self.program.placeholders:
            self.known[node] = self.graph.node_copy(node)
        if host_first:
            self._compute_on_host()
        ending: dict[fx.Node, list[Region]] = {}
        for region in self.calls:
            ending.setdefault(region.end, []).append(region)
        for node in nodes:
            if node in ending:
                for region in ending[node]:
                    self._call(region)
            elif (
                node not in self.known and node not in self.inside and node not in self.chosen.host and not looks(node)
            ):
                self.known[node] = self.graph.node_copy(node, self._find)
        self._compute_on_host()
        output = self.graph.output(fx.map_arg(self.program.output_node.args[0], self._find))
        output.meta = dict(self.program.output_node.meta)
        return replace(self.program, graph=self.graph)

    def _find(self, node: fx.Node) -> Any:
        """What stands for a node: of a view, itself, made where it is first needed; of an in-place result, its base."""
        if is_constant(node):
            return node.meta["val"]
        if node in self.chosen.host:
            self._compute_on_host()
        if node not in self.known:
            if looks(node):
                self.known[node] = self.graph.node_copy(node, self._find)
            else:
                base = base_of(node, stop=lambda at: at in self.known or looks(at))
                assert base is not node, f"{node} is needed before it is there"
                return self._find(base)
        return self.known[node]

    def _compute_on_host(self) -> None:
        """Copy what the host computes, once."""
        if self.begun:
            return
        self.begun = True
        self._count_steps()
        for node in self.chosen.host:
            if node not in self.known:
                self.known[node] = self.graph.node_copy(node, self._find)
        self.staged = self._staged()

    def _count_steps(self) -> None:
        """Add to all counts of steps in one call: there is one for each parameter, and the host waits for nothing."""
        touched: set[fx.Node] = set()
        counts: dict[Any, list[fx.Node]] = {}
        for node in self.chosen.host:
            adds = node.target is torch.ops.aten.add_.Tensor and len(node.args) == 2 and not node.kwargs
            number: Any = node.args[1] if adds else None
            first = touched.isdisjoint(node.all_input_nodes) and node.all_input_nodes[0].op == "placeholder"
            if first and isinstance(number, (int, float)):
                counts.setdefault(number, []).append(node)
            touched.update(node.all_input_nodes)
        for number, nodes in counts.items():
            counted = [self.known[node.all_input_nodes[0]] for node in nodes]
            self.graph.call_function(torch.ops.aten._foreach_add_.Scalar, (counted, number))
            self.known.update(zip(nodes, counted, strict=True))

    def _staged(self) -> dict[Region, tuple[fx.Node, int]]:
        """For each region that takes numbers, the tensor of all of them, and where its own begin.

        Sent at once; each region's begin where a kernel likes to read.
        """
        taking = [
            each for each, call in self.calls.items() if getattr(call, "takes_staged", False) and numbers_of(each)
        ]
        numbers: list[Any] = []
        begin = {}
        for region in taking:
            begin[region] = len(numbers)
            numbers += [self.known[node] for node in numbers_of(region)]
            numbers += [0.0] * (len(numbers) % _ALIGNED)
        if not numbers:
            return {}
        staged = self.graph.call_function(Staged(self.device), tuple(numbers))
        staged.meta["val"] = self._numbers(len(numbers))
        return {region: (staged, begin[region]) for region in taking}

    def _numbers(self, count: int) -> torch.Tensor:
        with self.program.fake_mode:
            return torch.empty(count, dtype=torch.float64, device=self.device)

    def _call(self, region: Region) -> None:
        if numbers_of(region):
            self._compute_on_host()
        staged = self.staged.get(region)
        given = [self._find(node) for node in (region.inputs if staged is None else tensors_of(region))]
        if staged is not None:
            (numbers, begin), count = staged, len(numbers_of(region))
            own = self.graph.call_function(torch.ops.aten.slice.Tensor, (numbers, 0, begin, begin + count))
            own.meta["val"] = self._numbers(count)
            given.append(own)
        call = self.graph.create_node("call_function", self.calls[region], tuple(given), {}, name="region")
        call.meta["val"] = [node.meta.get("val") for node in region.outputs]
        call.meta[WRITES] = [self._find(node) for node in _written_by(region)]
        for index, node in enumerate(region.outputs):
            element = self.graph.create_node("call_function", operator.getitem, (call, index), {}, name=node.name)
            element.meta = dict(node.meta)
            self.known[node] = element


class Staged:
    """Numbers of the host as one tensor on a device; the host does not wait for it."""

    __name__ = "staged"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, *numbers: float) -> torch.Tensor:
        """The numbers, in double precision."""
        return torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)


def _written_by(region: Region) -> list[fx.Node]:
    """The inputs of a region that it writes."""
    given = set(region.inputs)
    bases = (base_of(source, stop=given.__contains__) for node in region.nodes for source in written_inputs(node))
    return [base for base in dict.fromkeys(bases) if base in given]


def tensors_of(region: Region) -> list[fx.Node]:
    """The inputs of a region that are tensors."""
    return [node for node in region.inputs if isinstance(node.meta.get("val"), torch.Tensor)]


def numbers_of(region: Region) -> list[fx.Node]:
    """The inputs of a region that are numbers."""
    return [node for node in region.inputs if not isinstance(node.meta.get("val"), torch.Tensor)]
