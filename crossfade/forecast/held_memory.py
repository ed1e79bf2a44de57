"""The memory that training holds: a program's tensors, placed step after step as torch's allocator places them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from crossfade.cost.allocator import MIB, Block, CachingAllocator
from crossfade.forecast.recompute_layers import KEPT
from crossfade.forecast.repeat import BACKWARD, FORWARD, layer_of
from crossfade.forecast.shard_layers import GATHERED
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.memory import Storages
from crossfade.graph.program import OutputKind, Program
from crossfade.graph.prologues import prologue_of

WORKSPACES = 64 * MIB
"""cuBLAS and cuBLASLt on Hopper, of 32 MiB each, from the same allocator."""
_STEPS = 3
"""The first has no optimizer's state yet, which then takes places between activations; from the third on all repeat."""
_CUT = torch.ops.aten.split_with_sizes_copy.default
COMPUTE, GATHER, SCATTER = "compute", "gather", "scatter"


@dataclass(frozen=True)
class Held:
    """Bytes of tensors when they are the most, and bytes that the allocator has taken for them by then."""

    alive: int
    reserved: int


@dataclass(frozen=True)
class Kept:
    """What lasts beyond a program: bytes by parameter, of it and of the optimizer's state; gradients kept beside.

    `buckets` lie beside gradients as long as training goes (those of torch's DDP). `streams` is the group
    whose gathers and scatters have streams, and so memory, of their own, as FSDP's have. `eager` keeps what selective
    checkpointing has chosen even where nothing reads it.
    """

    parameters: Sequence[int]
    states: Sequence[int]
    buckets: int = 0
    streams: str = ""
    eager: bool = True
    micro_batches: int = 1
    own: bool = False
    """Whether Crossfade runs it, whose programs free each value after its last use."""
    unwritten: Collection[fx.Node] = field(default_factory=frozenset)
    """What only lives inside of compiled kernels."""


def held_memory(program: Program, kept: Kept, *, expandable: bool = False) -> Held:
    """Run training in an allocator until its steps repeat.

    Parameters come first; the optimizer's state is made behind the first backward; gradients stay until the next
    forward. Of what is added to it, an update by torch's Adam makes one copy (`foreach`, its default).
    """
    allocator = CachingAllocator(expandable)
    allocator.take(WORKSPACES)
    for size in (*kept.parameters, kept.buckets):
        allocator.take(size)
    lives = _lives(program, kept)
    made_state = False
    for _ in range(_STEPS):
        gradients: list[Block | None] = []
        for _ in range(min(kept.micro_batches, 2)):  # the second adds to what the first has left, as all others do
            fresh = _run(allocator, lives)
            if gradients:
                for block in fresh:
                    allocator.free(block)
            else:
                gradients = fresh
        if not made_state:
            for size in kept.states:
                allocator.take(size)
            made_state = True
        copies = [allocator.take(size // 2) for size in kept.states]
        for block in [*copies, *gradients]:
            allocator.free(block)
    return Held(allocator.most, allocator.reserved)


def _run(allocator: CachingAllocator, lives: _Lives) -> list[Block | None]:
    """One forward and backward; what it leaves."""
    blocks: dict[int, Block | None] = {}
    for begin, end in zip(lives.begin, lives.end, strict=True):
        for cell, size, stream in begin:
            blocks[cell] = allocator.take(size, stream)
        for cell in end:
            allocator.free(blocks.pop(cell))
    return list(blocks.values())


@dataclass(frozen=True)
class _Lives:
    """For each node, the storages that it makes (number, bytes, stream), and those that end behind it."""

    begin: list[list[tuple[int, int, str]]]
    end: list[list[int]]


def _lives(program: Program, kept: Kept) -> _Lives:
    storages = Storages(program.graph.nodes)
    nodes = storages.nodes
    position = {node: index for index, node in enumerate(nodes)}
    first: dict[int, int] = {}
    last = [-1] * len(storages.size)
    for index, node in enumerate(nodes):
        for cell in storages.touches[node]:
            first.setdefault(cell, index)
            last[cell] = index
    results = {cell for value in _left(program) for cell in storages.cells_of(value)}
    for node, until in _kept_longer(program, position, kept):
        for cell in storages.cells_of(node):
            last[cell] = max(last[cell], until)
    for cell in reversed(range(len(last))):  # what a cell keeps was made before it
        for inside in storages.then[cell]:
            last[inside] = max(last[inside], last[cell])
    nothing, streams = set(_made_on_the_way(program, kept)), dict(_streams(program, kept))
    begin: list[list[tuple[int, int, str]]] = [[] for _ in nodes]
    end: list[list[int]] = [[] for _ in nodes]
    for cell, at in first.items():
        size = storages.size[cell]
        if size and (nodes[at] not in nothing or cell in results):
            begin[at].append((cell, size, streams.get(nodes[at], COMPUTE)))
            if cell not in results:
                end[last[cell]].append(cell)
    return _Lives(begin, end)


def _left(program: Program) -> Iterator[fx.Node]:
    """Gradients: what a step leaves to the update. A loss is a number."""
    return (value for out, value in program.named_results()
            if out.kind is OutputKind.GRADIENT and isinstance(value, fx.Node))  # fmt: skip


def _kept_longer(program: Program, position: Mapping[fx.Node, int], kept: Kept) -> Iterator[tuple[fx.Node, int]]:
    """What frameworks keep beyond its last use, and until where.

    FSDP: what was gathered outside of layers until the backward ends; a gather's result until the next one's is cut.
    Selective checkpointing in eager mode: what it chose until its layer's backward begins.
    """
    begins: dict[int, int] = {}
    cuts: list[tuple[fx.Node, Any]] = []
    for node in program.graph.nodes:
        place = layer_of(node) if node.op == "call_function" else None
        if place is not None and place[1] == BACKWARD:
            begins.setdefault(place[0], position[node])
        if (gather := _cuts(node)) is not None:
            cuts.append((node, gather))
    if not kept.own:
        yield from _of_split_losses(program, position)
    if kept.eager:
        for node in program.graph.nodes:
            if KEPT in node.meta and (place := layer_of(node)) is not None:
                yield node, begins.get(place[0], -1)
    for (cut, gather), (following, _) in itertools.pairwise([*cuts, (program.output_node, None)]):
        number, phase = gather.meta[GATHERED]
        if number is None:
            yield cut, position[program.output_node]
        if phase == FORWARD:
            yield gather, position[following]


def _of_split_losses(program: Program, position: Mapping[fx.Node, int]) -> Iterator[tuple[fx.Node, int]]:
    """What torch's `loss_parallel` keeps of split logits: its backward is one function, and holds all until its end."""
    for ones in program.graph.find_nodes(op="call_function", target=torch.ops.aten.scatter_add.default):
        for total in ones.users:
            for share in total.all_input_nodes:
                if share is not ones and total.target is torch.ops.aten.add.Tensor:
                    yield from ((source, position[total]) for source in share.all_input_nodes)


def _cuts(node: fx.Node) -> fx.Node | None:
    """The gather of parameters whose result a node cuts, if it does."""
    if node.target is not _CUT:
        return None
    while node.all_input_nodes and not collectives.is_collective(node):
        node = node.all_input_nodes[0]
    return node if GATHERED in node.meta else None


def _made_on_the_way(program: Program, kept: Kept) -> Iterator[fx.Node]:
    """What is never in memory: packed by one kernel into what a collective sends, or inside a compiled kernel."""
    yield from kept.unwritten
    if not kept.streams:
        return
    for found in collectives.find(program.graph):
        if found.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            sent = set(found.node.all_input_nodes)
            for node in prologue_of(found.node):
                if not sent & {node, *node.users} or _is_smaller(node, sent):
                    yield node


def _is_smaller(node: fx.Node, sent: Collection[fx.Node]) -> bool:
    """Whether what a collective sends is made of a node, in another precision."""
    users = [user for user in node.users if user in sent]
    return bool(users) and node not in sent and users[0].meta["val"].dtype != node.meta["val"].dtype


def _streams(program: Program, kept: Kept) -> Iterator[tuple[fx.Node, str]]:
    """What is made on streams of their own: what gathers of parameters send and get, what scatters get."""
    for found in collectives.find(program.graph):
        if GATHERED in found.node.meta:
            yield from ((node, GATHER) for node in (found.node, *prologue_of(found.node)))
        elif found.kind is Kind.REDUCE_SCATTER and found.group == kept.streams:
            yield found.node, SCATTER
