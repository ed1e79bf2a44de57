"""Stretches of a program recorded once as CUDA graphs, and replayed: one launch instead of hundreds.

What reads numbers of the host stays outside and cuts. So do collectives of backends that a graph cannot hold (gloo),
and those that would be under way where a stretch ends: what is recorded on another stream must be waited for inside.
Recording runs nothing, so that ranks that record at different moments do not wait for each other.
The first run goes operator by operator (libraries set themselves up, kernels are tuned); the second records. Recorded
kernels know addresses, so parameters, states and buckets must stay where they are: when one has moved, the stretch is
recorded again. Whatever else comes in is copied to where the graph reads it; what the program returns is copied out,
since the next replay writes there again.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.execute.codegen import compile_program
from crossfade.execute.outline import WRITES, Staged
from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, written_inputs
from crossfade.graph.lasting import LASTING
from crossfade.graph.private import OpOverload
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program

log = logging.getLogger("crossfade")

FEWEST = 2
"""Nodes that are worth a graph."""

_READS_ON_HOST = frozenset({"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2"})

_pools: dict[int, tuple[Any, weakref.WeakSet[Any]]] = {}
"""Of each device, the memory that its graphs share, and those of them that there still are."""


def with_replays(program: Program, groups: Collection[str] = ()) -> Program:
    """A program whose recordable stretches are single nodes, each of which records itself at its second run.

    Collectives of these `groups` can be recorded. On a CPU there is nothing to record:

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... a: f32[4] = aten.neg(x)
        ... b: f32[4] = aten.exp(a)
        ... return output("b", b)
        ... ''')
        >>> [node.name for node in with_replays(program).graph.nodes]
        ['x', 'a', 'b', 'output']
    """
    stretches = _stretches(program, groups)
    return _Recorder(program, stretches).rewrite() if stretches else program


def _stretches(program: Program, groups: Collection[str]) -> list[list[fx.Node]]:
    """Runs of neighbouring nodes that can be recorded, with the collectives that begin and end in one."""
    nodes = program.graph.nodes
    known = [node for node in nodes if not collectives.counts_rows_as_it_runs(node)]  # the others ask the host
    recorded = {node for node in known if (found := collectives.view(node)) is not None and found.group in groups}
    waits = [(node, start) for node in nodes if collectives.is_wait(node) and (start := collectives.started_by(node))]
    while True:
        stretches = _split(program, recorded)
        place = {node: index for index, stretch in enumerate(stretches) for node in stretch}
        under_way = {start for wait, start in waits if start in recorded and place.get(wait) != place.get(start)}
        if not under_way:
            return [stretch for stretch in stretches if len(stretch) >= FEWEST]
        recorded -= under_way


def _split(program: Program, recorded: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Runs of neighbouring nodes that can be recorded, given which collectives can."""
    found: list[list[fx.Node]] = [[]]
    inside: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" or _is_left_to_python(node, inside):
            continue
        if can_be_recorded(node, recorded):
            found[-1].append(node)
            inside.add(node)
        elif found[-1]:
            found.append([])
            inside = set()
    return found


def _is_left_to_python(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a node touches no memory, and needs nothing of the stretch it stands in: that goes on around it.

    Elements of lists that come from elsewhere are taken out there, since a stretch is given tensors; and whole numbers
    are computed from others, such as where a rank's rows begin.
    """
    if node.target is operator.getitem:
        return node.args[0] not in inside
    return isinstance(_value(node), int | torch.SymInt) and all(
        isinstance(_value(source), int | torch.SymInt) for source in node.all_input_nodes
    )


def said_of_replays(program: Program, groups: Collection[str] = ()) -> str:
    """How much of a program is replayed as CUDA graphs, and what runs outside of them, in words.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... return output("a", a)
    ... ''')
    >>> said_of_replays(program)
    'none; 1 node runs by itself: neg'
    """
    stretches = _stretches(program, groups)
    inside = {node for stretch in stretches for node in stretch}
    outside = [node for node in program.graph.nodes if node.op == "call_function" and node not in inside]
    device = [node for node in outside if isinstance(node.target, Staged) or not _is_number(node)]
    names = Counter(getattr(node.target, "__name__", str(node.target)).partition(".")[0] for node in device)
    kinds = ", ".join(f"{count} {name}" if count > 1 else name for name, count in names.most_common(8))
    graphs = f"{len(stretches)} of {len(inside)} nodes" if stretches else "none"
    runs = "node runs by itself" if len(device) == 1 else "nodes run by themselves"
    return f"{graphs}; {len(device)} {runs}: {kinds}" if device else graphs


def _is_number(node: fx.Node) -> bool:
    """Whether a node computes a number, or a tensor of one on the host."""
    value = _value(node)
    return not isinstance(value, (Tensor, list, tuple)) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0
    )


def can_be_recorded(node: fx.Node, recorded: Collection[fx.Node] = ()) -> bool:
    """Whether all that a node does happens on a CUDA device, unseen by the host; of collectives, these can."""
    if node.op != "call_function" or isinstance(node.target, Staged):
        return False
    if collectives.is_collective(node) and node not in recorded:
        return False
    if collectives.is_wait(node) and collectives.started_by(node) not in recorded:
        return False
    if isinstance(node.target, OpOverload) and node.target.overloadpacket.__name__ in _READS_ON_HOST:
        return False
    return all(map(_is_on_device, [*map(_value, node.all_input_nodes), _value(node)]))


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_on_device(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_on_device, value))
    static = isinstance(value, Tensor) and not any(isinstance(size, torch.SymInt) for size in value.shape)
    return value is None or isinstance(value, int | torch.SymInt) or (static and value.device.type == "cuda")


class _Recorder:
    def __init__(self, program: Program, stretches: Sequence[list[fx.Node]]) -> None:
        self.program, self.stretches = program, stretches
        self.recorded = {node for stretch in stretches for node in stretch}
        self.graph = fx.Graph()
        self.known: dict[fx.Node, fx.Node] = {}
        self.roots = alias_roots(program.graph.nodes)
        self.stays = {node for item, node in program.named_inputs() if item.kind in LASTING}
        """Nodes whose memory is at the same place at every run."""

    def rewrite(self) -> Program:
        last = {stretch[-1]: stretch for stretch in self.stretches}
        for node in self.program.graph.nodes:
            if node in last:
                self._record(last[node])
            elif node not in self.recorded and node.op != "output":
                self.known[node] = self.graph.node_copy(node, self.known.__getitem__)
        results = [self._out(value) for value in self.program.results]
        output = self.graph.output(tuple(results))
        output.meta = dict(self.program.output_node.meta)
        return replace(self.program, graph=self.graph)

    def _record(self, stretch: list[fx.Node]) -> None:
        inner, given, returned = _apart(self.program, stretch)
        written = {self.roots[source] for node in stretch for source in _written_by(node)}
        stays = [
            self.roots[node] in self.stays or node in self.stays or node.op == "get_attr" or not _is_tensor(node)
            for node in given
        ]
        target = Replay(inner, stays, written=[self.roots[node] in written for node in given])
        call = self.graph.create_node(
            "call_function", target, tuple(self.known[node] for node in given), {}, name="replay"
        )
        for index, node in enumerate(returned):
            element = self.graph.create_node("call_function", operator.getitem, (call, index), {}, name=node.name)
            element.meta = dict(node.meta)
            self.known[node] = element
            self.stays.add(node)

    def _out(self, value: Any) -> Any:
        """A result in memory of its own: what a graph has written, it writes again at the next replay."""
        if not isinstance(value, fx.Node):
            return value
        found = self.known[value]
        return self.graph.call_function(torch.ops.aten.clone.default, (found,)) if value in self.recorded else found


def _written_by(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments whose memory a node writes; a call of a region says so itself."""
    return node.meta[WRITES] if WRITES in node.meta else written_inputs(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(_value(node), Tensor)


def _apart(program: Program, stretch: list[fx.Node]) -> tuple[Program, list[fx.Node], list[fx.Node]]:
    """A stretch as a program of its own, what it is given, and what others need of it."""
    inside, graph, known = set(stretch), fx.Graph(), dict[fx.Node, fx.Node]()
    given = list(dict.fromkeys(s for node in stretch for s in node.all_input_nodes if s not in inside))
    returned = [node for node in stretch if any(user not in inside for user in node.users)]
    for node in given:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in stretch:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in returned))
    inputs = tuple(Input(InputKind.INPUT, node.name) for node in given)
    outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(returned)))
    return Program(graph, inputs, outputs, constants=program.constants), given, returned


class Replay:
    """Runs a program eagerly at first, then as a CUDA graph.

    `stays` says which inputs have an address that lasts, or are whole numbers: when one is another, it is recorded
    again. Those of the others that it has `written` are copied back.
    """

    __name__ = "replay"

    def __init__(self, program: Program, stays: Sequence[bool], written: Sequence[bool] = ()) -> None:
        self.program, self.stays = program, tuple(stays)
        self.copied_back = [index for index, writes in enumerate(written) if writes and not stays[index]]
        self.function = compile_program(program).function
        tensors = [_is_tensor(node) for node in program.placeholders]
        self._staying = [index for index, stay in enumerate(stays) if stay and tensors[index]]
        self._moving = [index for index, stay in enumerate(stays) if not stay]
        self._numbers = [index for index, tensor in enumerate(tensors) if not tensor]
        self.runs = 0
        self.recordings = 0
        self.failed = ""
        """Why it is not recorded."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._where: list[int] = []
        self._outputs: tuple[Any, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Run on the inputs, in the program's order."""
        self.runs += 1
        if self.runs == 1 or self.failed or torch.cuda.is_current_stream_capturing():
            return self.function(list(inputs))
        if self._graph is None or self._where != self._places(inputs):
            self._record(inputs)
            if self._graph is None:
                return self.function(list(inputs))
        for index in self._moving:
            self._inputs[index].copy_(inputs[index])
        self._graph.replay()
        for index in self.copied_back:
            inputs[index].copy_(self._inputs[index])
        return self._outputs

    def _places(self, inputs: Sequence[Any]) -> list[int]:
        """Where the inputs are that should not move, and the numbers. Asked at every step of every parameter."""
        staying = map(inputs.__getitem__, self._staying)
        return [*map(Tensor.data_ptr, staying), *(inputs[index] for index in self._numbers)]

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._graph, self._outputs = None, ()
        self._inputs = [
            given if stays else torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            for stays, given in zip(self.stays, inputs, strict=True)
        ]
        self._where = self._places(inputs)
        graph = torch.cuda.CUDAGraph()
        pool, sharing = _pool_of(torch.cuda.current_device())
        try:
            # Other threads, such as NCCL's watchdog, may go on asking the device.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs = self.function(list(self._inputs))
        except RuntimeError as error:
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]
            self._inputs, self._outputs = [], ()
            log.warning("%d nodes run one by one, not as a CUDA graph: %s", len(self.program.graph.nodes), self.failed)
            return
        self._graph = graph
        sharing.add(graph)
        self.recordings += 1


def _pool_of(device: int) -> tuple[Any, weakref.WeakSet[Any]]:
    """The memory that graphs of a device share; torch takes it back with the last of them, and refuses it then."""
    if device not in _pools or not _pools[device][1]:
        _pools[device] = torch.cuda.graph_pool_handle(), weakref.WeakSet()
    return _pools[device]
