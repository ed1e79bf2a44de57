"""Estimate: the seconds of every node of a program on a machine, measured where that is known, else by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from crossfade.cost.collective_matmul import Forecast, forecast
from crossfade.cost.flops import flops_of, formula_of, is_convolution
from crossfade.cost.fused import FusedCollective, FusedProduct, is_fused, read_fused
from crossfade.cost.keys import Keys
from crossfade.cost.machine import Machine
from crossfade.cost.products import is_aligned, shape_of, share_of_attention
from crossfade.cost.timeline import Costs, Within
from crossfade.errors import MachineError
from crossfade.graph import collectives, offload
from crossfade.graph.collectives import Collective
from crossfade.graph.effects import written_inputs
from crossfade.graph.lasting import lasting_views
from crossfade.graph.operators import remembered
from crossfade.graph.private import OperatorBase, schema_of
from crossfade.graph.program import Program


def estimate(
    program: Program, machine: Machine, measured: Mapping[str, float] | None = None, *, threads: int | None = None
) -> Costs:
    """The seconds of every node: what `measured` says under its key (`crossfade.cost.keys.key_of`), else analytic.

    Analytic is the larger of two times, that of the floating-point operations at the machine's rate for the dtype (a
    dtype without one counts at float32's) and that of the bytes read and written at its memory bandwidth; plus the
    machine's overhead. Views only cost overhead, and nothing where the host runs ahead of the device, or where they
    look at memory that lasts from run to run. Elements, sizes and arithmetic on scalars cost nothing, nor do waits:
    what they stand still for is the timeline's to say.

    A copy to the host's memory or back travels for what `machine.host` says, or keeps a CPU busy for that long.
    A collective keeps computation busy for its fabric's launch, and travels for `machine.collective_seconds`; a
    coalesced one is one. A matmul that travels in pieces (`crossfade.gather_matmul`, `crossfade.matmul_scatter`) takes
    what `cost.collective_matmul` forecasts for its form and number of pieces. Symbolic sizes count by their hint.
    `threads` is the number that `measured` was measured with, by default torch's of now.

        >>> from crossfade.cost.presets import preset
        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[512, 512] = input("x")
        ... start: f32[512, 512] = c10d.all_reduce(x, "sum", "dp")
        ... y: f32[512, 512] = aten.mm(x, x)
        ... done: f32[512, 512] = c10d.wait_tensor(start)
        ... return output("y", y), output("done", done)
        ... ''', groups={"dp": 2})
        >>> costs = estimate(program, preset("ethernet-1gbit"))
        >>> x, start, y, *_ = program.graph.nodes
        >>> costs.compute[y] < costs.travel[start]
        True
    """
    return Estimator(program, machine, measured or {}, Keys(threads)).costs()


class Estimator:
    """Estimates the nodes of one program; see `estimate`."""

    def __init__(self, program: Program, machine: Machine, measured: Mapping[str, float], keys: Keys) -> None:
        self.program, self.machine, self.measured, self.keys = program, machine, measured, keys
        self.view_seconds = machine.overhead if machine.device == "cpu" else 0.0

    def costs(self, known: Mapping[fx.Node, float] | None = None) -> Costs:
        """The seconds of all nodes; those of nodes in `known` are taken from there."""
        compute: dict[fx.Node, float] = {}
        travel: dict[fx.Node, float] = {}
        slows: dict[str, float] = {}
        within: dict[fx.Node, Within] = {}
        made_once = lasting_views(self.program)
        for node in self.program.graph.nodes:
            collective = collectives.view(node)
            if collective is not None:
                compute[node] = self.machine.fabric(collective.group).launch
                travel[node] = self._travel(collective)
                slows[collective.group] = self.machine.fabric(collective.group).slows_compute
            elif (copy := offload.view(node)) is not None:
                link = self.machine.host_link()
                (travel if link.apart else compute)[node] = link.seconds(copy.bytes)
            elif is_fused(node.target):
                compute[node], within[node] = self._fused(read_fused(node, self.keys))
            elif computes(node) and node not in made_once:
                compute[node] = known[node] if known else self.compute_seconds(node)
        return Costs(compute, travel, slows, within, self._launches(compute))

    def _launches(self, compute: Mapping[fx.Node, float]) -> dict[fx.Node, float]:
        """Seconds of the host for each node that keeps the device busy."""
        seconds = self.machine.launching.seconds
        return {node: seconds for node, busy in compute.items() if busy} if seconds else {}

    def _fused(self, call: FusedCollective) -> tuple[float, Within]:
        """Seconds of a matmul in pieces, and what travels in it."""
        found = self.forecast(call)
        travel = self.machine.collective_seconds(call.kind, call.bytes, call.ranks, call.group)
        return found.seconds, Within(str(call.kind), call.group, call.bytes, travel, found.exposed)

    def forecast(self, call: FusedCollective) -> Forecast:
        """What a matmul in pieces takes: those that `measured` knows by their key as plain calls count as they do."""
        seconds, meanwhile = (sum(map(self._product, some)) for some in (call.products, call.meanwhile))
        return forecast(call.exchange(self.machine, seconds, meanwhile), call.kind, call.form, call.chunks)

    def _product(self, product: FusedProduct) -> float:
        known = [self.measured[key] for key in product.keys(self.keys) if key in self.measured]
        return known[0] if known else product.seconds(self.machine)

    def _travel(self, collective: Collective) -> float:
        ranks = self.program.groups.get(collective.group) or collective.group_size
        if not ranks:
            raise MachineError(
                f"the size of group {collective.group!r} is not known",
                expected="the number of its ranks",
                remedy=f'give the program groups={{"{collective.group}": ranks}}',
            )
        return self.machine.collective_seconds(collective.kind, collective.bytes, ranks, collective.group)

    def compute_seconds(self, node: fx.Node) -> float:
        """The seconds of one node for which `computes` holds."""
        if self.measured:
            seconds = self.measured.get(self.keys.of(node))
            if seconds is not None:
                return seconds
        if self.is_view(node):
            return self.view_seconds
        arithmetic = self._arithmetic(node) if formula_of(node.target) is not None else 0.0
        return max(arithmetic, self.traffic(node) / self.machine.memory_bandwidth) + self.machine.overhead

    def _arithmetic(self, node: fx.Node) -> float:
        """Seconds of the floating-point operations at the rate of the first tensor's dtype."""
        first = next(tensor for source in node.all_input_nodes for tensor in self.keys.tensors(source))
        rates = self.machine.flops
        dtype = str(first.dtype).removeprefix("torch.")
        rate = rates.get(dtype, rates["float32"])
        if is_convolution(node.target):
            rate *= self.machine.convolutions.get(dtype, 1.0)
        products = self.machine.products
        if products is None:
            return flops_of(node, self.keys) / rate
        shape = shape_of(node, self.keys)
        if shape is not None:
            return products.seconds(*shape, rate, aligned=is_aligned(node, self.keys))
        return flops_of(node, self.keys) / (rate * share_of_attention(products, node))

    def is_view(self, node: fx.Node) -> bool:
        """Whether the result is its first argument's memory; some operators copy, depending on how that lies."""
        name = _view_name(node.target)
        if name is None or name not in _COPY_IF_NEEDED:
            return name is not None
        before, after = (self.keys.tensors(value)[:1] for value in (node.all_input_nodes[0], node))
        if not before or not after or before[0].dtype != after[0].dtype:
            return False
        return before[0].strides == after[0].strides or (before[0].dense and after[0].dense and name != "contiguous")

    def traffic(self, node: fx.Node) -> float:
        """Bytes read and written; what is overwritten is not read, and what is looked up is read as far as it is."""
        name, inputs = _name(node.target), node.all_input_nodes
        if name in _ONLY_ALLOCATE:
            return 0.0
        made = self._made(node)
        read = sum(self._held(source) for source in inputs)
        if name in _LOOK_UP and inputs:
            read -= max(0, self._held(inputs[0]) - made)
        written = written_inputs(node)
        if written:
            once = sum(self._held(target) for target in written)
            return read + (0 if name in _OVERWRITE or "out" in node.kwargs else once)
        return read + made

    def _held(self, node: fx.Node) -> int:
        return sum([tensor.bytes for tensor in self.keys.tensors(node)])

    def _made(self, node: fx.Node) -> int:
        """Bytes of the results, those that are an argument's memory left out."""
        results = self.keys.tensors(node)
        copied = _view_name(node.target) is not None  # a view only where it can be, and here it cannot
        shared = () if copied else _shared_results(node.target)
        return sum([tensor.bytes for index, tensor in enumerate(results) if index >= len(shared) or not shared[index]])


def computes(node: fx.Node) -> bool:
    """Whether a node keeps the computing lane busy by itself: an operator, but no collective, wait or size.

    A matmul that travels in pieces does not: it cannot run without the other ranks.
    """
    if node.op != "call_function" or not _is_operator(node.target) or is_fused(node.target):
        return False
    if offload.is_launch(node) or offload.is_wait(node):
        return False
    return not collectives.is_collective(node) and not collectives.is_wait(node)


_COPY_IF_NEEDED = frozenset({"reshape", "reshape_as", "contiguous", "flatten", "to"})
_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"})
_LOOK_UP = frozenset({"embedding", "index", "index_select", "gather", "take", "_unsafe_index"})
_ONLY_ALLOCATE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


@remembered
def _name(target: Any) -> str:
    """An operator's name without namespace and overload."""
    schema = schema_of(target)
    return schema.name.split("::")[1] if schema is not None else str(target)


@remembered
def _is_operator(target: Any) -> bool:
    return isinstance(target, OperatorBase) and not _name(target).startswith("sym_")


@remembered
def _view_name(target: Any) -> str | None:
    """The operator's name if all it does is look at an argument's memory differently, else None."""
    schema = schema_of(target)
    if schema is None or not schema.returns:
        return None
    looks = all(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    name = _name(target)
    return name if looks or name == "_unsafe_view" else None


@remembered
def _shared_results(target: Any) -> tuple[bool, ...]:
    """For each result, whether it is an argument's memory. A list of results is one to the schema, and all or none."""
    schema = schema_of(target)
    shared = tuple(result.alias_info is not None for result in schema.returns) if schema is not None else ()
    return shared if any(shared) else ()
