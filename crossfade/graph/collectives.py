"""One view over torch's functional collectives. No other file names these ops.

A collective is *started* by one node and its results become usable through `wait` nodes. `view` recognises a start in
any spelling (functional, in-place, into a given buffer, coalesced); `all_reduce` and its siblings below build one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the shape rules of these ops
from torch import Tensor, fx

from crossfade.graph import copy_engines, exchange_rows
from crossfade.graph.metadata import tensor_bytes
from crossfade.graph.operators import remembered
from crossfade.graph.private import schema_of

NAMESPACE = "_c10d_functional"
_ops = torch.ops._c10d_functional


class Kind(StrEnum):
    """What a collective does, whatever its spelling."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Where one op keeps its facts: argument positions, -1 where it has none."""

    kind: Kind
    group: int
    reduce_op: int = -1
    group_size: int = -1
    coalesced: bool = False
    in_place: bool = False
    has_out: bool = False
    by_copy_engines: bool = False


def _spellings() -> dict[Any, _Spelling]:
    reduce, gather = Kind.ALL_REDUCE, Kind.ALL_GATHER
    scatter = Kind.REDUCE_SCATTER
    table = {
        "all_reduce": _Spelling(reduce, 2, reduce_op=1),
        "all_reduce_": _Spelling(reduce, 2, reduce_op=1, in_place=True),
        "all_reduce_coalesced": _Spelling(reduce, 2, reduce_op=1, coalesced=True),
        "all_reduce_coalesced_": _Spelling(reduce, 2, reduce_op=1, coalesced=True, in_place=True),
        "all_gather_into_tensor": _Spelling(gather, 2, group_size=1),
        "all_gather_into_tensor_out": _Spelling(gather, 2, group_size=1, has_out=True),
        "all_gather_into_tensor_coalesced": _Spelling(gather, 2, group_size=1, coalesced=True),
        "reduce_scatter_tensor": _Spelling(scatter, 3, reduce_op=1, group_size=2),
        "reduce_scatter_tensor_out": _Spelling(scatter, 3, reduce_op=1, group_size=2, has_out=True),
        "reduce_scatter_tensor_coalesced": _Spelling(scatter, 3, reduce_op=1, group_size=2, coalesced=True),
        "all_to_all_single": _Spelling(Kind.ALL_TO_ALL, 3),
        "broadcast": _Spelling(Kind.BROADCAST, 2),
        "broadcast_": _Spelling(Kind.BROADCAST, 2, in_place=True),
    }
    # reduce_scatter_tensor_out is younger than torch 2.11: take what this torch has.
    found = {getattr(_ops, name).default: how for name, how in table.items() if hasattr(_ops, name)}
    by_copy_engines = _Spelling(gather, 2, group_size=1, by_copy_engines=True)
    return {
        **found,
        exchange_rows.OPERATOR: _Spelling(Kind.ALL_TO_ALL, 4),
        copy_engines.OPERATOR: by_copy_engines,
    }


QUANTIZED = ":int8"
"""What ends the name of a reduction whose inputs are to be sent in 8 bits: `quantize-reductions` spells it out."""

_SPELLINGS = _spellings()
_WAIT = _ops.wait_tensor.default
_POINT_TO_POINT = {
    getattr(_ops, name).default: how
    for name, how in {"isend": "isend", "irecv": "irecv", "batch_p2p_ops": "both"}.items()
    if hasattr(_ops, name)  # these too are younger than torch 2.11
}
_NAMES = {"::".join(str(target).split(".")[:2]) for target in _SPELLINGS}


def is_named(name: str) -> bool:
    """Whether a profiler's name of an operator is that of one that starts a collective.

    >>> is_named(f"{NAMESPACE}::all_reduce"), is_named(f"{NAMESPACE}::wait_tensor")
    (True, False)
    """
    return name in _NAMES


HAS_MESSAGES = bool(_POINT_TO_POINT)
"""Whether this torch has operators for messages between two ranks."""

GATHER, GATHER_INTO = _ops.all_gather_into_tensor.default, _ops.all_gather_into_tensor_out.default
"""The ops of `all_gather` and `all_gather_into`."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A started collective, its inputs, results and waits, as one thing.

    `results` are the nodes that stand for its output tensors before the wait: the start itself, or its `getitem`s
    by index if coalesced. `bytes` is the size of the larger side (input or output): what travels, up to a factor.
    """

    node: fx.Node
    kind: Kind
    group: str
    group_size: int | None
    reduce_op: str | None
    inputs: tuple[fx.Node, ...]
    out: fx.Node | None
    results: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    coalesced: bool
    in_place: bool
    by_copy_engines: bool
    """Whether a GPU's copy engines carry it, which slow no computation down."""

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that make it one movable thing: its start, its elements if coalesced, and its waits."""
        return list(dict.fromkeys((self.node, *self.results, *self.waits)))

    @property
    def bytes(self) -> int:
        """Bytes of the larger of its inputs and outputs on one rank; a byte a number where they are to be quantized.

        Where it is known only when it runs how many rows arrive, the smaller: the larger has room for all that could.
        """
        sent = sum(tensor_bytes(node.meta.get("val")) for node in self.inputs)
        sides = sent, tensor_bytes(self.node.meta.get("val"))
        larger = min(sides) if counts_rows_as_it_runs(self.node) else max(sides)
        return larger // self.dtype.itemsize if self.exact_op != self.reduce_op else larger

    @property
    def exact_op(self) -> str | None:
        """The reduction without the word that what it is given is to be quantized."""
        return self.reduce_op.removesuffix(QUANTIZED) if self.reduce_op is not None else None

    @property
    def plain(self) -> bool:
        """Whether it makes one new tensor, which is waited for and read through its waits only."""
        simple = not (self.coalesced or self.in_place or self.out is not None)
        return simple and bool(self.waits) and len(self.waits) == len(self.node.users)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its (first) input."""
        return self.inputs[0].meta["val"].dtype


def is_wait(node: fx.Node) -> bool:
    """Whether this node waits for a collective's result."""
    return node.target is _WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether this node starts a collective."""
    return node.op == "call_function" and _spelling(node.target) is not None


def view(node: fx.Node) -> Collective | None:
    """The collective that `node` starts, or None if it starts none."""
    how = _spelling(node.target) if node.op == "call_function" else None
    if how is None:
        return None
    first: Any = _argument(node, 0)
    results: tuple[fx.Node, ...] = (node,)
    if how.coalesced:
        elements = [user for user in node.users if user.target is operator.getitem]
        results = tuple(sorted(elements, key=lambda element: element.args[1]))  # type: ignore[arg-type,return-value]
    return Collective(
        node=node,
        kind=how.kind,
        group=_argument(node, how.group),
        group_size=_argument(node, how.group_size),
        reduce_op=_argument(node, how.reduce_op),
        inputs=tuple(first) if how.coalesced else (first,),
        out=node.kwargs.get("out") if how.has_out else None,  # type: ignore[arg-type]
        results=results,
        waits=tuple(user for result in results for user in result.users if is_wait(user)),
        coalesced=how.coalesced,
        in_place=how.in_place,
        by_copy_engines=how.by_copy_engines,
    )


def counts_rows_as_it_runs(node: fx.Node) -> bool:
    """Whether a node exchanges rows in numbers that are values of the program, not sizes in it."""
    return node.target is exchange_rows.OPERATOR


def find(graph: fx.Graph) -> list[Collective]:
    """Every collective of the graph, in order.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... start: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... done: f32[4] = c10d.wait_tensor(start)
    ... return output("y", done)
    ... ''', groups={"dp": 2})
    >>> [(c.kind.value, c.group, c.reduce_op, c.bytes) for c in find(program.graph)]
    [('all_reduce', 'dp', 'sum', 16)]
    """
    starts = [node for target in _SPELLINGS for node in graph.find_nodes(op="call_function", target=target, sort=False)]
    return [found for node in sorted(starts) if (found := view(node)) is not None]


def waits(graph: fx.Graph) -> list[fx.Node]:
    """Every wait of the graph, in order, on whatever it waits for."""
    return list(graph.find_nodes(op="call_function", target=_WAIT))


def has(graph: fx.Graph, kind: Kind) -> bool:
    """Whether the graph starts a collective of this kind."""
    targets = [target for target, how in _SPELLINGS.items() if how.kind is kind]
    return any(graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)


def waited_value(wait: fx.Node) -> fx.Node:
    """The node that `wait` waits for: a start, or an element of a coalesced one."""
    return _argument(wait, 0)


def group_of(node: fx.Node) -> str | None:
    """The group that a node communicates on, also if `view` does not know the op (sends, fused matmuls); else None."""
    index = _group_argument(node.target) if node.op == "call_function" else -1
    return _argument(node, index) if index >= 0 else None


def communicates(target: Any) -> bool:
    """Whether an operator starts, takes part in, or waits for communication."""
    return target is _WAIT or _spelling(target) is not None or _group_argument(target) >= 0


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor that a node sends to, or receives from, the rank `peer` of its group (counted in the group)."""

    sends: bool
    peer: int
    tag: int
    tensor: fx.Node


def messages(node: fx.Node) -> list[Message] | None:
    """What a point-to-point operation sends and receives, all at once; None if `node` is none."""
    sends = _POINT_TO_POINT.get(node.target) if node.op == "call_function" else None
    if sends is None:
        return None
    first, second, third, fourth = (_argument(node, index) for index in range(4))
    if sends != "both":
        return [Message(sends == "isend", second, third, first)]
    parts = zip(first, second, third, fourth, strict=True)
    return [Message(how == "isend", peer, tag, tensor) for how, peer, tag, tensor in parts]


def reduced_value(reduction: Collective) -> fx.Node:
    """What a reduction is given; without the rows of padding, where these were added so that each rank has as many."""
    given = reduction.inputs[0]
    return given.args[0] if given.target is torch.ops.aten.constant_pad_nd.default else given  # type: ignore[return-value]


def started_by(wait: fx.Node) -> fx.Node | None:
    """The node that started the collective which `wait` waits for; None for a wait on an ordinary tensor."""
    source = waited_value(wait)
    if source.target is operator.getitem:
        source = source.args[0]  # type: ignore[assignment]
    return source if is_collective(source) else None


def settings(node: fx.Node) -> tuple[Any, ...]:
    """The settings of a collective beside its input (reduction, sizes, group), equal in every spelling of the call."""
    return tuple(_argument(node, index) for index in range(1, len(schema_of(node.target).arguments)))


def equal_parts(node: fx.Node) -> int | None:
    """Among how many ranks an all-to-all exchanges equal parts; None if they differ, or are known only when it runs."""
    if counts_rows_as_it_runs(node):
        return None
    received, sent = _argument(node, 1), _argument(node, 2)
    rows = node.meta["val"].shape[0] if node.meta["val"].dim() else 0
    if not sent or not all(isinstance(part, int) for part in (*received, *sent)):
        return None
    return len(sent) if len({*received, *sent}) == 1 and sent[0] * len(sent) == rows else None


def group_sizes(graph: fx.Graph) -> dict[str, int]:
    """The sizes of the groups that this graph's collectives name, where the ops say them (0 where none does)."""
    sizes: dict[str, int] = {}
    for collective in find(graph):
        sizes[collective.group] = max(sizes.get(collective.group, 0), collective.group_size or 0)
    return sizes


def count_by_kind(graph: fx.Graph) -> dict[str, tuple[int, int]]:
    """Number and bytes of the collectives of each kind, for reports."""
    table: dict[str, tuple[int, int]] = {}
    for collective in find(graph):
        number, size = table.get(collective.kind, (0, 0))
        table[str(collective.kind)] = (number + 1, size + collective.bytes)
    return table


def rename_groups(nodes: Iterable[fx.Node], names: dict[str, str]) -> None:
    """Replace logical group names by those of real process groups, just before execution."""
    for node in nodes:
        if (group := group_of(node)) in names:
            index = _group_argument(node.target)
            if index < len(node.args):
                node.update_arg(index, names[group])
            else:
                node.update_kwarg(schema_of(node.target).arguments[index].name, names[group])


def gather_by_copy_engines(node: fx.Node) -> None:
    """Let a GPU's copy engines carry a plain all-gather; the node stays what it was called."""
    gather = view(node)
    assert gather is not None and gather.kind is Kind.ALL_GATHER and gather.plain
    node.target, node.kwargs = copy_engines.OPERATOR, {}
    node.args = (gather.inputs[0], gather.group_size, gather.group)


def rename_reduction(node: fx.Node, reduce_op: str) -> None:
    """Let a collective reduce by another name."""
    index = _SPELLINGS[node.target].reduce_op
    if index < len(node.args):
        node.update_arg(index, reduce_op)
    else:
        node.update_kwarg(schema_of(node.target).arguments[index].name, reduce_op)


def in_place_form(node: fx.Node) -> Any:
    """The op that does the same collective inside its input's buffer, or None."""
    forms: dict[Any, Any] = {
        _ops.all_reduce.default: _ops.all_reduce_.default,
        _ops.broadcast.default: _ops.broadcast_.default,
    }
    return forms.get(node.target)


def ask_inputs_for_sizes(graph: fx.Graph) -> None:
    """Let symbolic sizes of what is in flight be read off its inputs: torch.compile asks the started collective itself.

    Asking reads no data, but would keep the result tied to this very start.
    """
    for collective in find(graph):
        queries = [user for user in collective.node.users if user.target is torch.ops.aten.sym_size.int]
        for query in queries if not collective.coalesced else ():
            dim: Any = query.args[1]
            first = dim % collective.node.meta["val"].dim() == 0
            with graph.inserting_before(query):
                size = graph.call_function(torch.ops.aten.sym_size.int, (collective.inputs[0], dim))
                size.meta["val"] = collective.inputs[0].meta["val"].shape[dim]
                if first and collective.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
                    change = operator.mul if collective.kind is Kind.ALL_GATHER else operator.floordiv
                    size = graph.call_function(change, (size, collective.group_size))
                    size.meta["val"] = query.meta["val"]
            query.replace_all_uses_with(size)
            graph.erase_node(query)


def return_waited(graph: fx.Graph) -> None:
    """Return the result of a wait in place of what is in flight: torch.compile keeps the started collective for the
    backward, which may only ask for its size, though a wait stands beside it."""
    for collective in find(graph):
        if collective.waits and not collective.coalesced:
            collective.node.replace_all_uses_with(collective.waits[0], delete_user_cb=lambda user: user.op == "output")


# Builders: ordinary functions on tensors, to be called inside functions that `splice.splice` records.


def all_reduce(tensor: Tensor, reduce_op: str, group: str) -> Tensor:
    """Start an all-reduce."""
    return _ops.all_reduce(tensor, reduce_op, group)


def all_gather(tensor: Tensor, group_size: int, group: str) -> Tensor:
    """Start an all-gather along dim 0."""
    return _ops.all_gather_into_tensor(tensor, group_size, group)


def all_gather_into(out: Tensor, tensor: Tensor, group_size: int, group: str) -> Tensor:
    """Start an all-gather along dim 0 whose result will be in `out`."""
    return GATHER_INTO(tensor, group_size, group, out=out)


def reduce_scatter(tensor: Tensor, reduce_op: str, group_size: int, group: str) -> Tensor:
    """Start a reduce-scatter along dim 0."""
    return _ops.reduce_scatter_tensor(tensor, reduce_op, group_size, group)


def all_to_all(tensor: Tensor, group_size: int, group: str) -> Tensor:
    """Start an exchange of equal parts along dim 0: part `r` goes to rank `r`."""
    parts = [tensor.shape[0] // group_size] * group_size
    return _ops.all_to_all_single(tensor, parts, parts, group)


def all_to_all_split(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start an exchange of parts along dim 0: `sent[r]` rows go to rank `r`, and `received[r]` come from it."""
    return _ops.all_to_all_single(tensor, list(received), list(sent), group)


def all_to_all_rows(tensor: Tensor, sent: Tensor, received: Tensor, rows: int, group: str) -> Tensor:
    """Start an exchange of as many rows as two tensors say when it runs, with room for `rows` of them."""
    return exchange_rows.exchange_rows(tensor, sent, received, rows, group)


def broadcast(tensor: Tensor, source: int, group: str) -> Tensor:
    """Start a broadcast from the group's rank `source`."""
    return _ops.broadcast(tensor, source, group)


def all_reduce_coalesced(tensors: Sequence[Tensor], reduce_op: str, group: str) -> list[Tensor]:
    """Start an all-reduce of each tensor, as one collective."""
    return _ops.all_reduce_coalesced(list(tensors), reduce_op, group)


def all_gather_coalesced(tensors: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
    """Start an all-gather of each tensor along dim 0, as one collective."""
    return _ops.all_gather_into_tensor_coalesced(list(tensors), group_size, group)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], reduce_op: str, group_size: int, group: str) -> list[Tensor]:
    """Start a reduce-scatter of each tensor along dim 0, as one collective."""
    return _ops.reduce_scatter_tensor_coalesced(list(tensors), reduce_op, group_size, group)


def divided(tensor: Tensor, ranks: int) -> Tensor:
    """A rank's share of an average, by a multiplication where that has the same bits."""
    is_power_of_two = not ranks & (ranks - 1)
    return tensor * (1 / ranks) if is_power_of_two and tensor.is_floating_point() else tensor / ranks


def wait(tensor: Tensor) -> Tensor:
    """Wait for a started collective's result."""
    return _ops.wait_tensor(tensor)


def _argument(node: fx.Node, index: int) -> Any:
    if index < len(node.args):
        return None if index < 0 else node.args[index]
    return node.kwargs.get(schema_of(node.target).arguments[index].name)


@remembered
def _spelling(target: Any) -> _Spelling | None:
    return _SPELLINGS.get(target)


@remembered
def _group_argument(target: Any) -> int:
    """The position of an op's group name, -1 if it has none."""
    schema = schema_of(target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("group_name") if "group_name" in names else -1
