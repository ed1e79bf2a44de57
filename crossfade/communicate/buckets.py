"""Buckets: which collectives travel as one. Planning is the same for every kind; each kind packs in its own way.

A bucket starts where its first member would have started, or as soon after as all inputs are ready. A collective joins
the open bucket of its key if it fits under the cap and is ready before any result of the bucket is used, which is why
no member ever depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.order import Order, Reachability, written_inputs
from crossfade.graph.passes import Outcome, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.rewrite import erase_if_dead, insert_call, splice

MB = 2**20

Exchange = Callable[[list[Collective]], Callable[..., list[Tensor]]]
"""Given a bucket's members, the function from their inputs to their results that travels as one collective."""


@dataclass(frozen=True)
class Bucket:
    """Some collectives, in the order in which their inputs become ready, that travel as one."""

    members: tuple[str, ...]
    kind: str
    bytes: int

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        return f"{len(self.members)} {name}s, {self.bytes / MB:.2f} MB: {', '.join(self.members)}"


@dataclass(frozen=True)
class BucketPlan:
    """Which collectives go into which bucket, and why the others do not."""

    buckets: tuple[Bucket, ...]
    left: tuple[Verdict, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.buckets), *map(str, self.left)])


def plan_buckets(program: Program, kind: Kind, *, cap: int, first: int, may_delay: bool) -> BucketPlan:
    """Greedy buckets in graph order, one open bucket for each group, dtype, reduction and device; pure.

    With `may_delay` the bucket may start later than a member would have, which is refused for a member on whose
    result another collective depends.
    """
    order = Order(program.graph)
    found = collectives.find(program.graph)
    awaited = _depended_on(order, found) if may_delay else set()
    planner = _Planner(order, cap, first)
    for one in found:
        if one.kind is kind:
            planner.consider(one, _reason_against(one, awaited))
    return planner.plan(kind)


def apply_buckets(program: Program, plan: BucketPlan, exchange: Exchange) -> list[Verdict]:
    """Carry out a plan and say into which bucket each member went."""
    named = {one.node.name: one for one in collectives.find(program.graph)}
    order = Order(program.graph)
    chosen = [[named[name] for name in bucket.members] for bucket in plan.buckets]
    places = [_place(order, members) for members in chosen]  # before anything is merged, and positions change
    verdicts: list[Verdict] = []
    for number, (bucket, members, place) in enumerate(zip(plan.buckets, chosen, places, strict=True)):
        detail = f"bucket {number} with {len(members)} members, {bucket.bytes / MB:.2f} MB"
        verdicts += [
            Verdict.of(one.node, Outcome.BUCKETED, "packed with others into one", detail=detail, bytes=one.bytes)
            for one in members
        ]
        before = next(node for node in order.nodes[place:] if not node._erased)
        _merge(program, members, exchange(members), before)
    return verdicts


def bucket_result(plan: BucketPlan, verdicts: Sequence[Verdict]) -> PassResult:
    """What a bucketing pass returns."""
    packed = sum(len(bucket.members) for bucket in plan.buckets)
    counts = {"buckets": len(plan.buckets), "bucketed": packed, "left": len(plan.left)}
    return PassResult(bool(plan.buckets), counts, (*plan.left, *verdicts))


def flat(value: Tensor) -> Tensor:
    """A tensor's elements in one dim, without a copy where its layout allows."""
    return value.view(-1) if value.is_contiguous() else value.reshape(-1)


@dataclass
class _OpenBucket:
    cap: int
    members: list[Collective] = field(default_factory=list)
    bytes: int = 0
    first_use: float = float("inf")
    """Position of the first node that uses a result or changes an input: the bucket must start above it."""


class _Planner:
    def __init__(self, order: Order, cap: int, first: int) -> None:
        self.order, self.cap, self.first = order, cap, first
        self.open: dict[Hashable, _OpenBucket] = {}
        self.closed: list[_OpenBucket] = []
        self.left: list[Verdict] = []

    def consider(self, one: Collective, reason: str | None) -> None:
        """Put a collective into the open bucket of its key, or into a new one, or leave it."""
        if reason is not None:
            self.left.append(Verdict.of(one.node, Outcome.LEFT, reason, bytes=one.bytes))
            return
        key = one.group, one.group_size, one.dtype, one.reduce_op, one.node.meta["val"].device
        bucket = self.open.get(key)
        if bucket is None or not self._fits(bucket, one):
            if bucket is not None:
                self.closed.append(bucket)
            bucket = self.open[key] = _OpenBucket(self.cap if bucket is not None else self.first)
        self._add(bucket, one)

    def plan(self, kind: Kind) -> BucketPlan:
        """The buckets of more than one member, in the order they start."""
        buckets = []
        position = self.order.position
        for bucket in sorted([*self.closed, *self.open.values()], key=lambda b: position[b.members[-1].node]):
            if len(bucket.members) > 1:
                names = tuple(one.node.name for one in bucket.members)
                buckets.append(Bucket(names, str(kind), bucket.bytes))
            else:
                self.left.append(self._alone(bucket.members[0]))
        return BucketPlan(tuple(buckets), tuple(self.left))

    def _fits(self, bucket: _OpenBucket, one: Collective) -> bool:
        return bucket.bytes + one.bytes <= bucket.cap and _ready(self.order, one) < bucket.first_use

    def _add(self, bucket: _OpenBucket, one: Collective) -> None:
        position = self.order.position
        uses = [position[user] for wait in one.waits for user in wait.users]
        uses += [position[after] for after in self.order.successors(one.node) if written_inputs(after)]
        bucket.members.append(one)
        bucket.bytes += one.bytes
        bucket.first_use = min(bucket.first_use, *uses)

    def _alone(self, one: Collective) -> Verdict:
        reason, detail = "no neighbour of the same kind fits its bucket", f"cap {self.cap / MB:g} MB"
        return Verdict.of(
            one.node, Outcome.LEFT, reason, detail=detail, remedy="a larger cap_mb packs more", bytes=one.bytes
        )


def _ready(order: Order, one: Collective) -> int:
    """The position after which a collective could start, were it not for the others of its group."""
    last = order.last_predecessor(one.node, within_group=False)
    return -1 if last is None else order.position[last]


def _depended_on(order: Order, found: Sequence[Collective]) -> set[fx.Node]:
    """The collectives on whose results another one depends; the order of starts within a group does not count."""
    reach = Reachability(order, [wait for one in found for wait in one.waits])
    needed = 0
    for one in found:
        for source in one.node.all_input_nodes:
            needed |= reach.ancestors[source] | reach.bit.get(source, 0)
    starts = (collectives.started_by(wait) for wait, bit in reach.bit.items() if bit & needed)
    return {start for start in starts if start is not None}


def _reason_against(one: Collective, awaited: set[fx.Node]) -> str | None:
    if one.coalesced or one.in_place or one.out is not None:
        return "it is already coalesced or in place"
    if not one.waits or not all(wait.users for wait in one.waits):
        return "nothing uses its result"
    if isinstance(one.node.meta["val"].numel(), torch.SymInt):
        return "its size is not known before it runs"
    if one.node in awaited:
        return "another collective depends on its result, and would be delayed with it"
    return None


def _place(order: Order, members: list[Collective]) -> int:
    """The position at which a bucket starts: its first member's, or the first at which all inputs are ready."""
    ready = max(_ready(order, one) for one in members)
    return max(order.position[members[0].node], ready + 1)


def _merge(program: Program, members: list[Collective], exchange: Callable[..., list[Tensor]], before: fx.Node) -> None:
    inputs = [one.inputs[0] for one in members]
    results = splice(program, exchange, *inputs, before=before, like=members[-1].node)
    for one, result in zip(members, results, strict=True):
        for wait in one.waits:
            wait.replace_all_uses_with(result)
            program.graph.erase_node(wait)
        program.graph.erase_node(one.node)
        erase_if_dead(one.inputs[0])
    _unshare_results(program, results)


def _unshare_results(program: Program, views: Sequence[fx.Node]) -> None:
    """Return copies of views of a bucket: results must not share memory. Made at the end, to keep no wait up there."""
    end = program.output_node
    copies = {
        view: insert_call(program, torch.ops.aten.clone.default, view, before=end, like=view)
        for view in views
        if end in view.users and not _owns_memory(view)
    }
    if copies:
        program.set_results([copies.get(value, value) for value in program.results])


def _owns_memory(view: fx.Node) -> bool:
    """Whether a result was copied out of its bucket already."""
    source = view.args[0] if view.args else None
    return isinstance(source, fx.Node) and source.target is torch.ops.aten.clone.default
