"""Which collectives share a bucket: one walk over the graph, pure, printable.

A collective joins the open bucket of its key if it fits under the cap, depends on no member, not even through other
buckets, and delays nothing that the pass must not delay. Else it opens the next bucket of its key.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from crossfade.communicate.bucket_chains import eligible_chain, leads_on
from crossfade.communicate.hiding import Hiding, Window
from crossfade.communicate.named_modules import Modules
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.contraction import Contraction
from crossfade.graph.order import Order
from crossfade.graph.passes import Outcome, Verdict
from crossfade.graph.program import MADE_FOR

MB = 2**20

Grouping = Literal["any", "module"] | Modules
Packing = Literal["program", "reversed", "largest-first"]
Delay = Literal["no use", "no collective", "uses of the last"]
"""What a bucket may delay: no use of a result, since it starts with its first member, for whose place all are ready;
or, starting with its last member, uses, but no collective that depends on one; or uses, if none depends on any.
All of it, like the packing, is decided by communicating nodes and what they depend on, which all ranks have in common.
Of computation only the matmuls between starts and waits count, which ranks that run one program have in common too."""

_LARGE = "it is large enough to travel alone, and is not copied so"
_ONLY = "it is the only one of its group, dtype and reduction"
_ONLY_OF_MODULE = "it is the only one of its group, dtype and reduction that serves its module"
_CAP = "no neighbour of the same kind fits its bucket"
_DEPENDS = "its neighbour depends on its result"
_USED = "its neighbour is not ready that early"
_DELAYED = "a collective that depends on its result would be delayed"
_AWAITED = "another collective depends on its result, and would be delayed with it"
_EXPOSED = "in a bucket it would lose computation that hides it"

_MOST_SETS = 16
"""How many sets of collectives that others depend on are looked through: of a longer chain, the last ones."""


@dataclass(frozen=True)
class Bucket:
    """Some collectives that travel as one, in the order in which they are packed."""

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


@dataclass(frozen=True)
class Policy:
    """What decides who shares a bucket: `cap` in bytes by a bucket's index in its key and by a member, from how many
    bytes one travels `alone`, and the passes' options. `serves` says which of the modules that the user named a
    collective serves."""

    cap: Callable[[int, Collective], float]
    delay: Delay
    alone: Callable[[Collective], float] = lambda collective: math.inf
    grouping: Grouping = "any"
    packing: Packing = "program"
    mixed_dtypes: bool = False
    results_are_views: bool = True
    keeps_overlap: bool = False
    against: Callable[[Collective], str | None] = lambda collective: None
    serves: Mapping[fx.Node, Hashable] = field(default_factory=dict)


def plan_buckets(order: Order, kind: Kind, policy: Policy) -> tuple[BucketPlan, Contraction]:
    """Greedy buckets in graph order, one open bucket for each group, dtype, reduction and device; pure.

    With the plan comes the contraction that it stands for, which saves `apply_buckets` a walk.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... wait_a: f32[4] = c10d.wait_tensor(a)
    ... b: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ... wait_b: f32[4] = c10d.wait_tensor(b)
    ... c: f32[4] = c10d.all_reduce(x, "max", "dp")
    ... wait_c: f32[4] = c10d.wait_tensor(c)
    ... return output("a", wait_a), output("b", wait_b), output("c", wait_c)
    ... ''', groups={"dp": 2})
    >>> policy = Policy(cap=lambda index, member: MB, delay="uses of the last")
    >>> print(plan_buckets(Order(program.graph), Kind.ALL_REDUCE, policy)[0])
    2 all-reduces, 0.00 MB: a, b
    c: left alone: it is the only one of its group, dtype and reduction
    """
    planner = _BucketPlanner(order, policy)
    for node in order.nodes:
        planner.units.walk(node)
        if node in planner.communicating:
            collective = collectives.view(node)
            if collective is not None and collective.kind is kind:
                planner.consider(collective)
            else:
                planner.units.open(node)
    return planner.plan(kind), planner.units


def plan_chain(graph: fx.Graph, kind: Kind, policy: Policy) -> BucketPlan | None:
    """The plan of a program in which every collective of a kind depends on the one before it: no bucket, and the same
    reasons that `plan_buckets` gives; None for any other program."""
    members = eligible_chain(graph, kind)
    if members is None or len({_key(member, policy) for member in members}) > 1:
        return None
    left, alone = [], list[_OpenBucket]()
    for member in members:
        if (reason := _reason_against(member, policy)) is not None:
            left.append(Verdict.of(member.node, Outcome.LEFT, reason, bytes=member.bytes))
        else:
            alone.append(_OpenBucket(len(alone), _DEPENDS, [member], member.bytes))
    if policy.delay == "uses of the last":
        for bucket in alone[:-1]:
            bucket.why_alone = _AWAITED
        for bucket in alone[-1:]:
            bucket.index, bucket.why_alone = 0, _AWAITED if leads_on(bucket.members[0]) else _only(policy)
    else:
        for last, bucket in itertools.pairwise(alone):
            bucket.why_alone = (
                _CAP if last.bytes + bucket.bytes > policy.cap(last.index, bucket.members[0]) else _DEPENDS
            )
        for bucket in alone[:1]:
            bucket.why_alone = alone[1].why_alone if len(alone) > 1 else _only(policy)
    return BucketPlan((), (*left, *(_alone(bucket, policy) for bucket in alone)))


@dataclass(frozen=True)
class _Span:
    """The windows of a bucket's members as one: the first use of any, and the last matmul that hides a member, of all
    members the last and of the worst one the first; infinite where nothing hides any."""

    first_use: float = math.inf
    last_hider: float = -math.inf
    least_hider: float = math.inf

    def with_window(self, window: Window) -> _Span:
        """The span of one more member."""
        hider = window.hidden_by[1] if window.hidden_by else None
        return _Span(
            min(self.first_use, window.first_use),
            self.last_hider if hider is None else max(self.last_hider, hider),
            self.least_hider if hider is None else min(self.least_hider, hider),
        )


@dataclass
class _OpenBucket:
    index: int
    why_alone: str
    """Why the first member did not join the bucket before, or if there was none, why the next one did not join it."""
    members: list[Collective] = field(default_factory=list)
    bytes: int = 0
    start_above: float = float("inf")
    """The position of the first communicating node that depends on a member."""
    unit: int = -1
    span: _Span = field(default_factory=_Span)


class _BucketPlanner:
    def __init__(self, order: Order, policy: Policy) -> None:
        self.order, self.policy = order, policy
        self.units = Contraction(order)
        self.communicating = {node for node in order.nodes if collectives.group_of(node) is not None}
        self.next_collective = _next_collective(order, self.communicating)
        self.strided = order.strided_owners() if policy.results_are_views else set()
        self.hiding = Hiding(order)
        self.only = _only(policy)
        self.open: dict[Hashable, _OpenBucket] = {}
        self.awaited: dict[Hashable, list[_OpenBucket]] = {}
        """Buckets of collectives that others depend on: several at once, none of which needs a later one."""
        self.closed: list[_OpenBucket] = []
        self.left: list[Verdict] = []

    def consider(self, collective: Collective) -> None:
        """Put a collective into the open bucket of its key, or into a new one, or leave it."""
        reason = self._reason_against(collective)
        if reason is not None:
            self.left.append(Verdict.of(collective.node, Outcome.LEFT, reason, bytes=collective.bytes))
            self.units.open(collective.node)
            return
        key = _key(collective, self.policy)
        if self.policy.delay == "uses of the last":
            is_awaited = self.next_collective[collective.node] < len(self.order.nodes)
            is_dispatched = collective.kind is Kind.ALL_TO_ALL  # tokens' weights may travel with the tokens
            together = self._set_for(key, collective) if is_awaited else None
            if is_dispatched and together is None:
                together = self._set_joined(key, collective)
            if together is not None:
                self._add(together, collective)
                return
        bucket = self.open.get(key)
        why_not = self._why_not(bucket, collective) if bucket is not None else self.only
        if why_not is not None or bucket is None:
            if bucket is not None:
                if bucket.why_alone == self.only:
                    bucket.why_alone = why_not or ""
                self.closed.append(bucket)
            index = bucket.index + 1 if bucket is not None else 0
            bucket = self.open[key] = _OpenBucket(index, why_not or "")
        self._add(bucket, collective)

    def _add(self, bucket: _OpenBucket, collective: Collective) -> None:
        if bucket.members:
            self.units.join(collective.node, bucket.unit)
        else:
            bucket.unit = self.units.open(collective.node)
        bucket.members.append(collective)
        bucket.bytes += collective.bytes
        bucket.start_above = min(bucket.start_above, self.next_collective[collective.node])
        if self.policy.keeps_overlap:
            bucket.span = bucket.span.with_window(self.hiding.window(collective))

    def _set_for(self, key: Hashable, collective: Collective) -> _OpenBucket:
        """The set of independent collectives for one on whose result others depend: one it may join, or a new one."""
        found = self._set_joined(key, collective)
        if found is None:
            recent = self.awaited[key]
            found = _OpenBucket(len(recent), _AWAITED)
            recent.append(found)
        return found

    def _set_joined(self, key: Hashable, collective: Collective) -> _OpenBucket | None:
        """The first set of independent collectives that others depend on and that one may join.

        It joins where it was ready from the first on, with no matmul in between: little is delayed.
        """
        here = self.order.position[collective.node]
        recent: list[_OpenBucket] = []
        for bucket in self.awaited.get(key, ()):
            first = self.order.position[bucket.members[0].node]
            (self.closed if self.hiding.matmuls_between(first, here) else recent).append(bucket)
        while len(recent) > _MOST_SETS:
            self.closed.append(recent.pop(0))
        self.awaited[key] = recent
        for bucket in recent:
            if self.units.is_ready_for(collective.node, bucket.unit) and self._why_not(bucket, collective) is None:
                return bucket
        return None

    def plan(self, kind: Kind) -> BucketPlan:
        """The buckets of more than one member, in the order of their last members."""
        buckets = []
        position = self.order.position
        awaited = [bucket for buckets in self.awaited.values() for bucket in buckets]
        everything = [*self.closed, *self.open.values(), *awaited]
        for bucket in sorted(everything, key=lambda b: position[b.members[-1].node]):
            if len(bucket.members) > 1:
                names = tuple(member.node.name for member in _packed(bucket.members, self.policy.packing))
                buckets.append(Bucket(names, str(kind), bucket.bytes))
            else:
                self.left.append(_alone(bucket, self.policy))
        return BucketPlan(tuple(buckets), tuple(self.left))

    def _reason_against(self, collective: Collective) -> str | None:
        if collective.node in self.strided:
            return "a view of it counts in strides, which differ in a bucket"
        return _reason_against(collective, self.policy)

    def _why_not(self, bucket: _OpenBucket, collective: Collective) -> str | None:
        if bucket.bytes + collective.bytes > self.policy.cap(bucket.index, collective):
            return _CAP
        if not self.units.may_join(collective.node, bucket.unit):
            return _DEPENDS
        if self.policy.delay == "no use" and not self.units.is_ready_for(collective.node, bucket.unit):
            return _USED
        if self.policy.delay == "no collective" and self.order.position[collective.node] >= bucket.start_above:
            return _DELAYED
        return _EXPOSED if self.policy.keeps_overlap and self._is_exposed(bucket, collective) else None

    def _is_exposed(self, bucket: _OpenBucket, collective: Collective) -> bool:
        """Whether a bucket with one more member loses what hides one of them: one that starts with its first member,
        if any matmul stands below the first use; one that starts with its last, if one has no matmul left."""
        span = bucket.span.with_window(self.hiding.window(collective))
        if span.last_hider == -math.inf:
            return False
        if self.policy.delay == "no use":
            return span.last_hider > span.first_use
        start = self.order.position[collective.node]
        return span.least_hider < start or not self.hiding.matmuls_between(start, int(span.first_use))


def _only(policy: Policy) -> str:
    return _ONLY_OF_MODULE if policy.serves else _ONLY


def _reason_against(collective: Collective, policy: Policy) -> str | None:
    """Why a collective can be in no bucket, whatever is around it."""
    if collective.coalesced or collective.in_place or collective.out is not None:
        return "it is already coalesced or in place"
    if collective.by_copy_engines:
        return "copy engines gather it as it is"
    if not collective.waits or not all(wait.users for wait in collective.waits):
        return "nothing uses its result"
    if any(not collectives.is_wait(user) for user in collective.node.users):
        return "something other than a wait names its result"
    if collective.bytes >= policy.alone(collective):
        return _LARGE
    return policy.against(collective)


def _key(collective: Collective, policy: Policy) -> Hashable:
    """What the members of a bucket have in common."""
    dtype = None if policy.mixed_dtypes else collective.dtype
    numbered = _module_of(collective.node) if policy.grouping == "module" else None
    module = policy.serves.get(collective.node, numbered)
    device = collective.inputs[0].meta["val"].device
    return collective.group, collective.group_size, dtype, collective.reduce_op, device, module


def _alone(bucket: _OpenBucket, policy: Policy) -> Verdict:
    member = bucket.members[0]
    capped = bucket.why_alone == _CAP
    caps = [policy.cap(index, member) for index in (bucket.index, 0, 1)]
    detail = f"cap {caps[0] / MB:g} MB" if capped else ""
    first = ", and first_mb for the first bucket," if caps[1] != caps[2] else ""
    remedy = f"a larger cap_mb{first} packs more" if capped else ""
    return Verdict.of(member.node, Outcome.LEFT, bucket.why_alone, detail=detail, remedy=remedy, bytes=member.bytes)


def _next_collective(order: Order, communicating: set[fx.Node]) -> dict[fx.Node, int]:
    """For each node, the position of the first communicating node that depends on it; the graph's end if none does."""
    first: dict[fx.Node, int] = {}
    end, position = len(order.nodes), order.position
    for node in reversed(order.nodes):
        found = end
        for after in order.successors(node, within_group=False):
            reached = position[after] if after in communicating else first[after]
            if reached < found:
                found = reached
        first[node] = found
    return first


def _packed(members: Sequence[Collective], packing: Packing) -> list[Collective]:
    """Members in the order to pack them, which only depends on what all ranks have in common."""
    if packing == "largest-first":
        return sorted(members, key=lambda member: -member.bytes)
    return list(members if packing == "program" else reversed(members))


def _module_of(node: fx.Node) -> str:
    """The innermost numbered module that a node serves, such as `layers.3`; its whole name if none is numbered."""
    stack = node.meta.get("nn_module_stack") or {}
    name = node.meta.get(MADE_FOR) or (list(stack.values())[-1][0] if stack else "")
    found = re.match(r".*\.?\b\d+(?=\.|$)", name)
    return found[0] if found else name
