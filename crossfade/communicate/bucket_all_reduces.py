"""Many small all-reduces become few large ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective
from crossfade.graph.order import Order, Reachability, written_inputs
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.rewrite import erase_if_dead, splice

MB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Some all-reduces, in the order in which their inputs become ready, that travel as one."""

    members: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{len(self.members)} all-reduces, {self.bytes / MB:.2f} MB: {', '.join(self.members)}"


@dataclass(frozen=True)
class BucketPlan:
    """Which all-reduces go into which bucket, and why the others do not."""

    buckets: tuple[Bucket, ...]
    left: tuple[Verdict, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.buckets), *map(str, self.left)])


@dataclass(frozen=True)
class BucketAllReduces(Pass):
    """Pack all-reduces of one group, dtype and reduction into buckets of at most `cap_mb`, in the order they are ready.

    The first bucket is small (`first_mb`), so that the network starts early. An all-reduce on whose result another
    collective depends is left alone: delaying it would delay that one. Results are views of the bucket, but for those
    that the program returns, which are copies: results must not share memory.

    Before:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        s: f32[2] = c10d.all_reduce(a, "avg", "dp")
        w: f32[2] = c10d.wait_tensor(s)
        s2: f32[3] = c10d.all_reduce(b, "avg", "dp")
        w2: f32[3] = c10d.wait_tensor(s2)
        neg: f32[2] = aten.neg(w)
        return output("a", neg), output("b", w2)

    After:
        a: f32[2] = input("a")
        b: f32[3] = input("b")
        view: f32[2] = aten.view(a, [-1])
        view_1: f32[3] = aten.view(b, [-1])
        cat: f32[5] = aten.cat([view, view_1])
        all_reduce: f32[5] = c10d.all_reduce(cat, "avg", "dp")
        wait_tensor: f32[5] = c10d.wait_tensor(all_reduce)
        split_with_sizes: (f32[2], f32[3]) = aten.split_with_sizes(wait_tensor, [2, 3])
        getitem: f32[2] = split_with_sizes[0]
        getitem_1: f32[3] = split_with_sizes[1]
        view_2: f32[2] = aten.view(getitem, [2])
        view_3: f32[3] = aten.view(getitem_1, [3])
        clone: f32[3] = aten.clone(view_3)
        neg: f32[2] = aten.neg(view_2)
        return output("a", neg), output("b", clone)
    """

    name = "bucket-all-reduces"
    numerics = Numerics.REASSOCIATES  # a ring splits a bucket at other places than it splits its members
    provides = frozenset({"bucketed"})

    cap_mb: float = 2.0
    first_mb: float = 1.0

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        plan = self.plan(program)
        verdicts = [*plan.left, *apply_buckets(program, plan)]
        packed = sum(len(bucket.members) for bucket in plan.buckets)
        counts = {"buckets": len(plan.buckets), "bucketed": packed, "left": len(plan.left)}
        return PassResult(bool(plan.buckets), counts, tuple(verdicts))

    def plan(self, program: Program) -> BucketPlan:
        """Choose the buckets; pure."""
        return plan_buckets(program, cap=int(self.cap_mb * MB), first=int(self.first_mb * MB))


def plan_buckets(program: Program, *, cap: int, first: int) -> BucketPlan:
    """Greedy buckets in graph order, one open bucket a key; see `BucketAllReduces`."""
    found = [one for one in collectives.find(program.graph) if one.kind is collectives.Kind.ALL_REDUCE]
    order = Order(program.graph)
    awaited = _depended_on(order, program)
    left: list[Verdict] = []
    closed: list[list[Collective]] = []
    open_buckets: dict[Hashable, _OpenBucket] = {}
    for one in found:
        if (reason := _reason_against(one, awaited)) is not None:
            left.append(Verdict.of(one.node, Outcome.LEFT, reason, bytes=one.bytes))
            continue
        key = (one.group, one.dtype, one.reduce_op, one.node.meta["val"].device)
        bucket = open_buckets.get(key)
        if bucket is not None and not bucket.has_room(one, order):
            closed.append(bucket.members)
            bucket = None
        if bucket is None:
            is_first = key not in open_buckets
            bucket = open_buckets[key] = _OpenBucket(first if is_first else cap)
        bucket.add(one, order)
    closed += [bucket.members for bucket in open_buckets.values()]
    return _freeze(closed, left, order, cap)


def apply_buckets(program: Program, plan: BucketPlan) -> list[Verdict]:
    """Carry out a plan; every member's result becomes a view of its bucket's."""
    named = {one.node.name: one for one in collectives.find(program.graph)}
    verdicts: list[Verdict] = []
    for number, bucket in enumerate(plan.buckets):
        members = [named[name] for name in bucket.members]
        detail = f"bucket {number} with {len(members)} members, {bucket.bytes / MB:.2f} MB"
        verdicts += [
            Verdict.of(one.node, Outcome.BUCKETED, "packed with others into one", detail=detail, bytes=one.bytes)
            for one in members
        ]
        _merge(program, members)
    return verdicts


class _OpenBucket:
    def __init__(self, cap: int) -> None:
        self.cap, self.bytes, self.first_use = cap, 0, float("inf")
        self.members: list[Collective] = []

    def has_room(self, one: Collective, order: Order) -> bool:
        """Whether it fits, and where `one` is ready every result is still unused and every input still unchanged."""
        fits = self.bytes + one.bytes <= self.cap
        return fits and order.position[one.node] < self.first_use

    def add(self, one: Collective, order: Order) -> None:
        self.members.append(one)
        self.bytes += one.bytes
        uses = [order.position[user] for wait in one.waits for user in wait.users]
        uses += [order.position[after] for after in order.successors(one.node) if written_inputs(after)]
        self.first_use = min(self.first_use, *uses)


def _depended_on(order: Order, program: Program) -> set[fx.Node]:
    """The collectives on whose results another one depends; the order of starts within a group does not count."""
    starts = [one.node for one in collectives.find(program.graph)]
    reach = Reachability(order, [wait for one in collectives.find(program.graph) for wait in one.waits])
    needed = 0
    for start in starts:
        for source in start.all_input_nodes:
            needed |= reach.ancestors[source] | reach.bit.get(source, 0)
    found = (collectives.started_by(wait) for wait, bit in reach.bit.items() if bit & needed)
    return {start for start in found if start is not None}


def _reason_against(one: Collective, awaited: set[fx.Node]) -> str | None:
    if one.coalesced or one.in_place:
        return "it is already coalesced or in place"
    if not one.waits or not all(wait.users for wait in one.waits):
        return "nothing uses its result"
    if isinstance(one.node.meta["val"].numel(), torch.SymInt):
        return "its size is not known before it runs"
    if one.node in awaited:
        return "another collective depends on its result, and would be delayed with it"
    return None


def _freeze(closed: Sequence[list[Collective]], left: list[Verdict], order: Order, cap: int) -> BucketPlan:
    buckets = []
    for members in sorted(closed, key=lambda m: order.position[m[-1].node]):
        if len(members) == 1:
            one = members[0]
            why, detail = "no neighbour of the same kind fits its bucket", f"cap {cap / MB:g} MB"
            remedy = "a larger cap_mb packs more"
            left.append(Verdict.of(one.node, Outcome.LEFT, why, detail=detail, remedy=remedy, bytes=one.bytes))
        else:
            buckets.append(Bucket(tuple(m.node.name for m in members), sum(m.bytes for m in members)))
    return BucketPlan(tuple(buckets), tuple(left))


def _merge(program: Program, members: list[Collective]) -> None:
    """Start the bucket where its last member would have started."""
    last = members[-1]
    group, reduce_op = last.group, str(last.reduce_op)
    returned = [any(user.op == "output" for wait in one.waits for user in wait.users) for one in members]

    def exchange(*values: Tensor) -> list[Tensor]:
        flat = [value.view(-1) if value.is_contiguous() else value.reshape(-1) for value in values]
        done = collectives.wait(collectives.all_reduce(torch.cat(flat), reduce_op, group))
        parts = done.split([value.numel() for value in values])
        views = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        return [view.clone() if out else view for view, out in zip(views, returned, strict=True)]

    results = splice(program, exchange, *(one.inputs[0] for one in members), before=last.node, like=last.node)
    for one, result in zip(members, results, strict=True):
        for wait in one.waits:
            wait.replace_all_uses_with(result)
            program.graph.erase_node(wait)
        program.graph.erase_node(one.node)
        erase_if_dead(one.inputs[0])
