"""Regions: the stretches of a program, from one collective to the next, that a compiler may take as a whole.

Launches, waits and what else stays eager keep their places: a region is cut wherever such a node stands, so that
nothing moves across it. Three kinds of nodes belong to no region and cut none:

- views, which cost nothing and are looked up again where they are needed, so that a region sees all names that one
  piece of memory has;
- numbers computed on the host (rates, corrections by the count of steps), which come before everything else;
- elements of what one operator returns, which go with it.

The optimizer's update of each parameter, which is what takes such numbers, is a region of its own, after the rest of
its stretch: those of parameters of one shape are equal, and compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.execute.number_operators import takes_numbers
from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, aliased_by, has_hidden_effect, is_random, written_inputs
from crossfade.graph.lasting import only_looks
from crossfade.graph.metadata import COMPUTED_AGAIN
from crossfade.graph.private import OpOverload, schema_of
from crossfade.graph.program import InputKind, Program, device_of

FEWEST = 2
"""Operators that make a region: there is nothing to fuse in one."""

_LONG = 16
"""Operators that are a region of their own before what is computed again."""

_ALONE = "nothing to fuse: one operator alone"
_RANDOM = "it draws random numbers, which a compiler would draw differently"
_FOREIGN = "no ATen operator: the compiler does not know it"
_EFFECT = "it does something that its operator does not declare"
_WRITES = "it writes memory that others know by other names: a bucket, a part of a parameter"
_NUMBERS = "it takes a number that changes from step to step where the compiler knows only fixed ones"
_SIZES = "its sizes are symbols"
_ELSEWHERE = "it works on numbers of the host and of the device"
_NAMED_TWICE = "it writes memory that it is given under two names"

_KNOWN = ("aten", "prims")
"""The namespaces of operators that the compiler knows."""

_OWNED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.OPTIMIZER_STATE)


@dataclass(eq=False)
class Region:
    """Operators of a program, in order, to be compiled together, and what nodes outside give them and need of them.

    `inputs` own their memory: views of them that the region uses are made inside.
    """

    nodes: list[fx.Node]
    end: fx.Node
    """The last operator of its stretch, where it runs; several that end there run in the order of their list."""
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Regions:
    """The regions of a program; what stays eager, each with the reason; and the nodes that compute on the host."""

    regions: list[Region]
    left: dict[fx.Node, str]
    host: dict[fx.Node, None]


def regions_of(program: Program) -> Regions:
    """Choose a program's regions.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(a)
    ... sent: f32[4] = c10d.all_reduce(b, "sum", "dp")
    ... c: f32[4] = aten.mul.Tensor(a, 2.0)
    ... d: f32[4] = aten.neg(c)
    ... came: f32[4] = c10d.wait_tensor(sent)
    ... e: f32[4] = aten.add.Tensor(came, d)
    ... return output("e", e)
    ... ''', groups={"dp": 2})
    >>> chosen = regions_of(program)
    >>> [(region.nodes, region.inputs, region.outputs) for region in chosen.regions]
    [([a, b], [x], [a, b]), ([c, d], [a], [d])]
    >>> chosen.left
    {e: 'nothing to fuse: one operator alone'}
    """
    return _Chooser(program).choose()


def base_of(node: fx.Node, stop: Callable[[fx.Node], bool] = lambda node: False) -> fx.Node:
    """The node whose memory a view or an in-place result shows, or the first on the way there that `stop` holds for."""
    while not stop(node) and (source := aliased_by(node)) is not None and (is_view(node) or _is_in_place(node)):
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at the memory of another: it can be made again wherever that is known."""
    return looks(node) and not any(map(_is_number, node.all_input_nodes))


def looks(node: fx.Node) -> bool:
    """Whether a node is a view, perhaps of a place that numbers say: a rank's rows, which a region is given as such."""
    return node.op == "call_function" and only_looks(node.target) and aliased_by(node) is not None


def _is_in_place(node: fx.Node) -> bool:
    """Whether a node's result is the argument that it has written."""
    source = aliased_by(node)
    return source is not None and isinstance(node.target, OpOverload) and source in written_inputs(node)


class _Chooser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.roots = alias_roots(self.nodes)
        self.kinds = {node: item.kind for item, node in program.named_inputs()}
        self.host = _host_nodes(program)
        self.device = device_of(program).type
        self.left: dict[fx.Node, str] = {}
        self.regions: list[Region] = []
        self._run: list[fx.Node] = []
        self._taken: set[fx.Node] = set()
        self._made: set[fx.Node] = set()

    def choose(self) -> Regions:
        """Walk once, cutting where something stays eager; then see what crosses the borders."""
        for node in self.nodes:
            if node.op != "call_function" or node in self.host or node in self._taken or is_view(node):
                continue
            if looks(node):
                if self.roots[node] in self._made:  # it is needed as an input of what comes
                    self._cut()
                continue
            if collectives.is_collective(node) or collectives.is_wait(node):
                self._cut()
            elif why_not := self._why_not(node):
                self.left[node] = why_not
                self._cut()
            else:
                if self._begins_again(node):
                    self._cut()
                self._take(node)
        self._cut()
        regions = self.regions
        self._find_borders(regions)
        while named_twice := [region for region in regions if self._is_named_twice(region)]:
            ends = {region.end for region in named_twice}  # what comes at one place stays together
            self.left.update((node, _NAMED_TWICE) for each in regions if each.end in ends for node in each.nodes)
            regions = [region for region in regions if region.end not in ends]
            self._find_borders(regions)
        return Regions(regions, self.left, self.host)

    def _begins_again(self, node: fx.Node) -> bool:
        """Whether what is computed again begins here: beside what computes the same first, a compiler might do both at
        once and keep the result; and what is kept for the backward is freed region by region."""
        first = node.meta.get(COMPUTED_AGAIN)
        if first is None or not self._run:
            return False
        begins = COMPUTED_AGAIN not in self._run[-1].meta
        return (begins and len(self._run) >= _LONG) or any(other.name == first for other in self._run)

    def _take(self, node: fx.Node) -> None:
        """Add an operator to the run, and the elements of what it returns with it."""
        elements = [user for user in node.users if user.target is operator.getitem and not is_view(user)]
        for added in (node, *elements):
            self._run.append(added)
            self._taken.add(added)
            self._made.add(self.roots[added])

    def _cut(self) -> None:
        run, self._run, self._made = self._run, [], set()
        alone = [node for node in run if node.target is not operator.getitem]
        if len(alone) < FEWEST:
            self.left.update(dict.fromkeys(alone, _ALONE))
            return
        for part in self._without_updates(run):
            self.regions.append(Region(part, alone[-1]))  # elements of what it returns may stand behind the cut

    def _without_updates(self, run: list[fx.Node]) -> list[list[fx.Node]]:
        """A run's operators without those that follow from numbers of the host; then these, by what they share.

        The former may come first: what reads memory that the others write, or writes what they read, is one of them.
        """
        updates = _Updates(self.roots)
        rest = [node for node in run if not updates.takes(node)]
        return [part for part in (rest, *updates.parts()) if part]

    def _why_not(self, node: fx.Node) -> str:
        """Why an operator stays eager; empty if it may be compiled."""
        target = node.target
        if not isinstance(target, OpOverload) or _namespace(target) not in _KNOWN:
            return _FOREIGN
        if is_random(node):
            return _RANDOM
        if has_hidden_effect(node) and not written_inputs(node):
            return _EFFECT
        values = [value for each in (node, *node.all_input_nodes) for value in _tensors(each.meta.get("val"))]
        if any(not _is_static(value) for value in values):
            return _SIZES
        if any(source in self.host and _tensors(source.meta.get("val")) for source in node.all_input_nodes):
            return _ELSEWHERE
        if any(value.device.type != self.device and not _is_seed(value) for value in values):
            return _ELSEWHERE
        if any(map(_is_number, node.all_input_nodes)) and not takes_numbers(node):
            return _NUMBERS
        return "" if all(self._may_write(source) for source in written_inputs(node)) else _WRITES

    def _may_write(self, source: fx.Node) -> bool:
        """Whether an argument is memory that this run has made, or the whole of what lasts or an operator has made."""
        root, base = self.roots[source], base_of(source, stop=is_view)
        if root in self._made:
            return True
        if self.kinds.get(root) in _OWNED:
            return base is root or (looks(base) and not is_view(base))
        return base is root and _is_computed(root)

    def _find_borders(self, regions: list[Region]) -> None:
        """What each region is given, and what others need of it."""
        owner = {node: region for region in regions for node in region.nodes}
        needed: dict[fx.Node, None] = {}
        for node in self.nodes:
            if node in owner or is_view(node):
                continue
            for source in node.all_input_nodes:
                needed[base_of(source)] = None
        for region in regions:
            inside = set(region.nodes)
            given: dict[fx.Node, None] = {}
            for node in region.nodes:
                for source in node.all_input_nodes:
                    base = base_of(source, stop=inside.__contains__)
                    if base not in inside and not is_constant(base):
                        given[base] = None
            region.inputs = list(given)
            needed |= given
        for region in regions:
            region.outputs = [node for node in region.nodes if node in needed and not is_constant(node)]

    def _is_named_twice(self, region: Region) -> bool:
        inside = set(region.nodes)
        written = {self.roots[source] for node in region.nodes for source in written_inputs(node)}
        names = [self.roots[node] for node in region.inputs if self.roots[node] in written and node not in inside]
        return len(names) != len(set(names))


class _Updates:
    """Operators that follow from numbers, in parts that have nothing to do with each other (a union-find)."""

    def __init__(self, roots: dict[fx.Node, fx.Node]) -> None:
        self._roots = roots
        self._parent: list[int] = []
        self._part: dict[fx.Node, int] = {}
        self._read: dict[fx.Node, int] = {}
        self._written: dict[fx.Node, int] = {}

    def takes(self, node: fx.Node) -> bool:
        """Take an operator if it follows from a number, or from what was taken; nodes come in their order."""
        sources = node.all_input_nodes
        memory, written = [self._roots[s] for s in sources], [self._roots[s] for s in written_inputs(node)]
        met = [self._part[source] for source in sources if source in self._part]
        met += [self._written[root] for root in memory if root in self._written]
        met += [self._read[root] for root in written if root in self._read]
        if not met and not any(map(_is_number, sources)):
            return False
        if not met:
            met = [len(self._parent)]
            self._parent += met
        part = self._find(met[0])
        for other in met[1:]:
            self._parent[self._find(other)] = part
        self._part[node] = part
        self._read.update(dict.fromkeys(memory, part))
        self._written.update(dict.fromkeys([*written, self._roots[node]], part))
        return True

    def _find(self, part: int) -> int:
        while self._parent[part] != part:
            self._parent[part] = self._parent[self._parent[part]]
            part = self._parent[part]
        return part

    def parts(self) -> list[list[fx.Node]]:
        """The operators taken, part by part."""
        found: dict[int, list[fx.Node]] = {}
        for node, part in self._part.items():
            found.setdefault(self._find(part), []).append(node)
        return list(found.values())


def _host_nodes(program: Program) -> dict[fx.Node, None]:
    """The nodes that compute with numbers, and with single numbers on the CPU that last, and with nothing else.

    None of these if something else reads such a tensor: it would have to stay where it is.
    """
    held = {
        node
        for item, node in program.named_inputs()
        if item.kind is InputKind.SCALAR or (item.kind in _OWNED[1:] and _is_single(node.meta.get("val")))
    }
    known, host = set(held), dict[fx.Node, None]()
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and known.issuperset(sources) and _stays_on_host(node):
            known.add(node)
            host[node] = None
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if node not in host and source in known and _tensors(source.meta.get("val")):
                return {}
    return host


def _stays_on_host(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not is_random(node) and (_is_single(value) or not _tensors(value))


def _is_computed(root: fx.Node) -> bool:
    """Whether memory was made by an ATen operator: not by a collective, whose siblings a backend may write again."""
    maker = root.args[0] if root.target is operator.getitem else root
    return isinstance(maker, fx.Node) and isinstance(maker.target, OpOverload) and _namespace(maker.target) in _KNOWN


def _namespace(target: OpOverload) -> str:
    return schema_of(target).name.partition("::")[0]


def is_constant(node: fx.Node) -> bool:
    """Whether a node is a number that is known beforehand: a length that attention returns beside its result."""
    return node.target is operator.getitem and isinstance(node.meta.get("val"), (bool, int, float))


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a number that may be another one in the next step."""
    return not _tensors(node.meta.get("val")) and not is_constant(node)


def _is_seed(value: Tensor) -> bool:
    """Whether a tensor is where attention says what it drew with, which is nothing where nothing is drawn."""
    return value.device.type == "cpu" and not value.dtype.is_floating_point and value.numel() <= 2


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _is_static(value: Tensor) -> bool:
    sizes: Iterable[Any] = (*value.shape, *value.stride()) if value.layout is torch.strided else (torch.SymInt,)
    return not any(isinstance(size, torch.SymInt) or size is torch.SymInt for size in sizes)
