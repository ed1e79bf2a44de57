"""All-gathers that leave the processors of a GPU to the matmuls beside them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.hiding import Hiding
from crossfade.cost.fused import is_fused
from crossfade.cost.machine import Machine
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.metadata import tensor_bytes
from crossfade.graph.operators import arguments
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.private import schema_of
from crossfade.graph.program import Program


@dataclass(frozen=True)
class GatherByCopyEngines(Pass):
    """Let copy engines carry the all-gathers that matmuls hide: NCCL's kernels take processors (SMs) from these.

    Each rank puts its part into memory that all ranks of its node see, and copy engines fetch those of the others. With
    nothing beside it that is slower than a plain gather, so it is done only along the groups named, which must have
    symmetric memory (CUDA devices of one node that reach each other's memory), for gathers with a matmul between start
    and wait and no collective of another group, which would share their links, and from `least_mb` megabytes of each
    rank: all ranks wait for each other before and after. Reduce-scatters stay: they would add in another order.

    Not in a default pipeline: which groups have symmetric memory is yours to say. It comes after the passes that choose
    an order: `optimization({"dp": "nccl"}) + [GatherByCopyEngines(("dp",))]`, and in a step
    `compile_step(..., phases=TRAINING.before_pass("pack-in-place", GatherByCopyEngines(("dp",))))`.

    Also known as: low-contention collectives of torch's symmetric memory and Inductor.

    Before:
        x: f32[4096, 4096] = input("x")
        w: f32[2048, 2048] = parameter("w")
        s: f32[4096, 2048] = c10d.all_gather_into_tensor(w, 2, "dp")
        mm: f32[4096, 4096] = aten.mm(x, x)
        g: f32[4096, 2048] = c10d.wait_tensor(s)
        y: f32[4096, 2048] = aten.mm(mm, g)
        return output("y", y)

    After:
        x: f32[4096, 4096] = input("x")
        w: f32[2048, 2048] = parameter("w")
        s: f32[4096, 2048] = crossfade.all_gather_by_copy_engines(w, 2, "dp")
        mm: f32[4096, 4096] = aten.mm(x, x)
        g: f32[4096, 2048] = c10d.wait_tensor(s)
        y: f32[4096, 2048] = aten.mm(mm, g)
        return output("y", y)
    """

    name = "gather-by-copy-engines"
    numerics = Numerics.BITWISE

    groups: tuple[str, ...] = ("dp",)
    least_mb: float = 16.0
    machine: Machine | None = from_context()

    def __post_init__(self) -> None:
        if not self.least_mb > 0:
            raise PassError(
                f"{self.name}(least_mb={self.least_mb})",
                expected="a number more than 0",
                remedy="pass the least megabytes of each rank",
            )

    def run(self, program: Program) -> PassResult:
        """Judge every all-gather as the program stands; then let copy engines carry those with nothing against it."""
        everything = collectives.find(program.graph)
        gathers = [found for found in everything if found.kind is Kind.ALL_GATHER]
        order = Order(program.graph)
        hiding, beside = Hiding(order), _Beside(everything, order)
        shared = _groups_of_products(program.graph)
        verdicts = []
        for gather in gathers:
            reason, detail = self._reason_against(gather, shared)
            if reason is None and hiding.window(gather).hidden_by is None:
                reason = "no matmul runs beside it: a plain gather is quicker"
            if reason is None and beside.others(gather):
                reason = "collectives of other groups travel beside it, over the same links"
            verdicts.append(_verdict(gather, reason, detail))
        for gather, verdict in zip(gathers, verdicts, strict=True):
            if verdict.outcome is Outcome.REPLACED:
                collectives.gather_by_copy_engines(gather.node)
        return PassResult.of(verdicts, Outcome.REPLACED, done="replaced", left="left")

    def _reason_against(self, gather: Collective, shared: set[str]) -> tuple[str | None, str]:
        """Why a gather cannot go by copy engines, or should not wherever it stands; and the numbers of it."""
        if gather.group not in self.groups:
            return "its group is not named as one with symmetric memory", ""
        if gather.by_copy_engines:
            return "copy engines carry it already", ""
        if not gather.plain:
            return "only a gather of one tensor into memory of its own goes by copy engines", ""
        ranks = gather.group_size or 0
        if self.machine is not None and self.machine.network is not None and ranks > self.machine.network.per_node:
            return "its group spans nodes", f"{ranks} ranks, {self.machine.network.per_node} in a node"
        part = gather.inputs[0].meta["val"]
        if isinstance(part.numel(), torch.SymInt):
            return "its size is not known before it runs, nor how much symmetric memory it takes", ""
        if gather.group in shared:
            return "products along its group use the same symmetric memory", ""
        given = tensor_bytes(part)
        if given < self.least_mb * MB:
            return "it is too small to make all ranks wait twice", f"{given / MB:.2f} MB of each rank"
        return None, ""


class _Beside:
    """How many collectives of other groups are on their way at some time while one is."""

    def __init__(self, everything: Iterable[Collective], order: Order) -> None:
        self._order = order
        self._times: dict[str | None, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for collective in everything:
            start, awaited = self._under_way(collective)
            for group in (collective.group, None):  # None has all groups
                self._times[group][0].append(start)
                self._times[group][1].append(awaited)
        for starts, ends in self._times.values():
            starts.sort()
            ends.sort()

    def others(self, collective: Collective) -> int:
        return self._number(None, collective) - self._number(collective.group, collective)

    def _number(self, group: str | None, collective: Collective) -> int:
        start, awaited = self._under_way(collective)
        starts, ends = self._times[group]
        return bisect_left(starts, awaited) - bisect_right(ends, start)

    def _under_way(self, collective: Collective) -> tuple[int, int]:
        position = self._order.position
        start = position[collective.node]
        return start, min((position[wait] for wait in collective.waits), default=start)


def _groups_of_products(graph: fx.Graph) -> set[str]:
    """The groups along which torch's operators, or our products in the form `symmetric`, use symmetric memory."""
    return {group for node in graph.nodes if (group := collectives.group_of(node)) and _is_through_memory(node)}


def _is_through_memory(node: fx.Node) -> bool:
    if is_fused(node.target):
        return bool(arguments(node)["form"] == "symmetric")
    return bool(schema_of(node.target).name.startswith("symm_mem::"))


def _verdict(gather: Collective, reason: str | None, detail: str = "") -> Verdict:
    if reason is None:
        done = "copy engines carry it, and leave the processors to the matmuls beside it"
        return Verdict.of(gather.node, Outcome.REPLACED, done, bytes=gather.bytes)
    return Verdict.of(gather.node, Outcome.LEFT, reason, detail=detail, bytes=gather.bytes)
