"""What a compiler would make of elementwise operators: one kernel between products, which reads and writes less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from crossfade.cost.estimate import computes
from crossfade.cost.flops import formula_of
from crossfade.cost.keys import Keys
from crossfade.graph import collectives
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program

_ALONE = ("embedding", "index", "scatter", "gather", "sort", "topk", "nll_loss", "cat", "clone")
"""Operators that move elements elsewhere, by the beginnings of their names: kernels of their own."""


@dataclass
class Kernel:
    """Operators computed in one kernel: how many bytes it reads and writes, and its nodes in order."""

    nodes: list[fx.Node] = field(default_factory=list)
    bytes: int = 0
    unwritten: list[fx.Node] = field(default_factory=list)
    """Those whose results nothing else reads."""


def fused_kernels(
    program: Program,
    is_view: Callable[[fx.Node], bool],
    keys: Keys,
    is_compiled: Callable[[fx.Node], bool] = lambda node: True,
) -> list[Kernel]:
    """Elementwise operators and sums that follow each other, up to the next product, attention or collective.

    What a kernel makes and only itself uses is neither written nor read. What `is_compiled` leaves out runs by itself.
    """
    kernels: list[Kernel] = []
    current = Kernel()
    for node in program.graph.nodes:
        if node.op != "call_function" or is_view(node) or not (computes(node) or _ends(node)):
            continue
        if _ends(node) or not is_compiled(node):
            current = Kernel()
            continue
        if not current.nodes:
            kernels.append(current)
        current.nodes.append(node)
    for kernel in kernels:
        inside = set(kernel.nodes)
        kernel.unwritten = [node for node in kernel.nodes if not _used_outside(node, inside, is_view)]
        kernel.bytes = _traffic(kernel, is_view, keys)
    return kernels


def _ends(node: fx.Node) -> bool:
    """Whether a kernel cannot go on past a node."""
    if collectives.is_collective(node) or collectives.is_wait(node) or formula_of(node.target) is not None:
        return True
    schema = schema_of(node.target)
    return schema is not None and schema.name.split("::")[1].lstrip("_").startswith(_ALONE)


def _traffic(kernel: Kernel, is_view: Callable[[fx.Node], bool], keys: Keys) -> int:
    inside, unwritten, read, total = set(kernel.nodes), set(kernel.unwritten), set(), 0
    for node in kernel.nodes:
        for source in node.all_input_nodes:
            root = _root(source, is_view)
            if root not in inside and root not in read:
                read.add(root)
                total += sum(tensor.bytes for tensor in keys.tensors(source))
        if node not in unwritten:
            total += sum(tensor.bytes for tensor in keys.tensors(node))
    return total


def _root(node: fx.Node, is_view: Callable[[fx.Node], bool]) -> fx.Node:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _used_outside(node: fx.Node, inside: set[fx.Node], is_view: Callable[[fx.Node], bool]) -> bool:
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user in inside:
            continue
        if user.op != "call_function" or not is_view(user):
            return True
        waiting += user.users
    return False
