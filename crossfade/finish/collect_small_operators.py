"""Small operators that nothing waits for, postponed until there are many, so that one call serves them all."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from crossfade.finish.group_small_operators import is_light, small_call
from crossfade.graph import collectives
from crossfade.graph.in_place import ByteRange, MemoryUse
from crossfade.graph.order import reorder
from crossfade.graph.passes import Numerics, Pass, PassResult
from crossfade.graph.private import has_schema
from crossfade.graph.program import Program, tensor_bytes


@dataclass(frozen=True)
class CollectSmallOperators(Pass):
    """Postpone small operators that only others of them need, for `group-small-operators` to find them side by side.

    An optimizer's run where each gradient is ready, between operators of the backward. They wait until they make or
    change `most_mb` (with Adam, an eighth of that in gradients lives longer); until something communicates; or until
    memory asks for them, since something reads what they write, or writes what they touch. For devices that are slower
    to call than to compute: on a CPU a gradient would have left the cache.

    Also known as: nothing; torch's foreach optimizers get the same effect by stepping after the backward.

    Before:
        p: f32[2] = parameter("p")
        q: f32[2] = parameter("q")
        x: f32[2] = input("x")
        m: f32[2] = aten.mul_.Tensor(p, 2.0)
        y: f32[2] = aten.exp(x)
        n: f32[2] = aten.mul_.Tensor(q, 2.0)
        return output("y", y)

    After:
        p: f32[2] = parameter("p")
        q: f32[2] = parameter("q")
        x: f32[2] = input("x")
        y: f32[2] = aten.exp(x)
        m: f32[2] = aten.mul_.Tensor(p, 2.0)
        n: f32[2] = aten.mul_.Tensor(q, 2.0)
        return output("y", y)
    """

    name = "collect-small-operators"
    numerics = Numerics.BITWISE

    most_mb: float = 256.0

    def run(self, program: Program) -> PassResult:
        """Walk once; hold back what may wait, and let all of it go where something must not pass it."""
        memory, waiting = MemoryUse(program), _that_may_wait(program)
        held = _Held(memory)
        order: list[fx.Node] = []
        for node in program.graph.nodes:
            size = tensor_bytes(node.meta["val"]) if node in waiting and small_call(node) else 0
            if held.bytes + size > self.most_mb * 2**20 or (node not in waiting and held.is_before(node)):
                order += held.let_go()
            if node in waiting:
                held.add(node, size)
            else:
                order.append(node)
        changed = reorder(program.graph, order)
        return PassResult(changed, {"put off": held.count})


def _that_may_wait(program: Program) -> set[fx.Node]:
    """Small operators, views and numbers that only others of them use, or nobody.

    Elements of a list are taken out where they stand: the list would keep the others alive.
    """
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        small = (small_call(node) or is_light(node)) and node.target is not operator.getitem
        if small and found.issuperset(node.users):
            found.add(node)
    return found


class _Held:
    """What is held back, and the memory that it touches."""

    def __init__(self, memory: MemoryUse) -> None:
        self.memory = memory
        self.nodes: list[fx.Node] = []
        self.bytes = self.count = 0
        self._read: dict[fx.Node, set[ByteRange]] = {}
        self._written: dict[fx.Node, set[ByteRange]] = {}

    def add(self, node: fx.Node, size: int) -> None:
        self.nodes.append(node)
        self.bytes += size
        self.count += 1
        for known, found in zip((self._read, self._written), self.memory.touched(node), strict=True):
            for region in found:
                known.setdefault(region.root, set()).add(region)

    def let_go(self) -> list[fx.Node]:
        nodes = self.nodes
        self.nodes, self.bytes, self._read, self._written = [], 0, {}, {}
        return nodes

    def is_before(self, node: fx.Node) -> bool:
        """Whether a node must not run before what is held."""
        if not self.nodes or is_light(node) or node.op in ("placeholder", "get_attr"):
            return False
        if not has_schema(node.target) or collectives.is_collective(node) or collectives.is_wait(node):
            return True  # of the output, and of what has no schema, it is not known what is read or written
        if any(isinstance(source.meta.get("val"), (list, tuple)) for source in node.all_input_nodes):
            return True  # it reads memory of many
        read, written = self.memory.touched(node)
        return self._overlap(read | written, self._written) or self._overlap(written, self._read)

    @staticmethod
    def _overlap(regions: Iterable[ByteRange], known: dict[fx.Node, set[ByteRange]]) -> bool:
        return any(region.overlaps(other) for region in regions for other in known.get(region.root, ()))
