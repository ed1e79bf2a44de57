"""Buckets carried out: members put side by side, then made one collective. What all bucketing passes share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, fx

from crossfade.communicate.bucket_plan import (
    MB,
    BucketPlan,
    Delay,
    Grouping,
    Packing,
    Policy,
    plan_buckets,
    plan_chain,
)
from crossfade.communicate.named_modules import NamedModules, are_modules
from crossfade.cost.machine import Machine
from crossfade.errors import PassError
from crossfade.graph import collectives, packing
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.contraction import Contraction
from crossfade.graph.effects import memory_of
from crossfade.graph.order import Order, reorder
from crossfade.graph.own_results import return_copies
from crossfade.graph.passes import Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Program, paused_garbage_collection
from crossfade.graph.splice import Replacements, splice

_aten = torch.ops.aten

Mode = Literal["auto", "concat", "copy-kernel", "coalesced"]
Cap = float | tuple[float, ...] | Callable[[int], float]


@dataclass(frozen=True)
class CopyIn:
    """How members' inputs become one buffer: by plain ops or by a kernel, converted and divided on the way."""

    mode: Mode = "concat"
    dtype: torch.dtype | None = None
    divisor: float | None = None

    def __call__(self, values: Sequence[Tensor], rows: int = 1) -> Tensor:
        """One flat buffer; with `rows`, each value is cut into that many, and row comes after row."""
        if self.mode == "copy-kernel":
            return packing.pack(list(values), rows, dtype=self.dtype, divisor=self.divisor)
        if rows == 1:
            packed = torch.cat([flat(value) for value in values])
        else:
            packed = torch.cat([_viewed(value, rows, -1) for value in values], 1).view(-1)
        return packed if self.divisor is None else packed / self.divisor


@dataclass(frozen=True)
class BucketPass(Pass):
    """What all bucketing passes share: their options, and the way from a plan to a program.

    - `cap_mb`: the most megabytes in a bucket: a number, a tuple by the bucket's index (the last one repeated), or a
      function of the index.
    - `first_mb`: the cap of the first bucket, where `cap_mb` is a larger number.
    - `alone_mb`: what has so many megabytes or more travels alone, since to copy it would take longer than a launch;
      what comes after it may still join what came before.
    - `along`: other sizes for some groups, as `(("tp", cap_mb, alone_mb),)`.
    - `saturates`: on a machine, let a bucket grow until it fills the link of its group: until latency is a fifth of its
      travel, which is soon inside a node, and late where an axis leaves it.
    - `grouping`: what may travel together: `"any"` of one process group, dtype, reduction and device, or of these only
      what serves one `"module"`, the innermost numbered one such as `layers.3`; or a tuple of modules, each with
      buckets of its own: names with `*` for one part, as in `("layers.*", "head")`, and tuples of names that share
      buckets. What serves none of these travels with `"any"` other.
    - `packing`: the order inside a bucket: as in the `"program"`, `"reversed"`, or `"largest-first"`.
    - `mode`: how members get into their bucket: by `"concat"`, by one `"copy-kernel"`, or not at all, `"coalesced"`,
      where the backend takes a list. `"auto"` takes the kernel where it is faster: where it saves a conversion, and
      to copy gathered members out on CUDA.
    - `fold`: take members' divisions by one number into the bucket, and in `copy-kernel` mode their conversions.
    - `keeps_overlap`: leave out whom a bucket would take the matmuls from under which it travels, as the program is
      written; not where the order is chosen afterwards.
    """

    kind: ClassVar[Kind]
    delay: ClassVar[Delay]
    results_are_views: ClassVar[bool] = True

    cap_mb: Cap = 2.0
    first_mb: float | None = None
    alone_mb: float = math.inf
    along: tuple[tuple[str, float, float], ...] = ()
    saturates: bool = False
    grouping: Grouping = "any"
    packing: Packing = "program"
    mode: Mode = "auto"
    fold: bool = True
    keeps_overlap: bool = True
    machine: Machine | None = from_context()

    def __post_init__(self) -> None:
        for name, kind in (("grouping", get_args(Grouping)[0]), ("packing", Packing), ("mode", Mode)):
            value = getattr(self, name)
            if value not in get_args(kind) and not (name == "grouping" and are_modules(value)):
                expected = " or ".join(map(repr, get_args(kind))) + (
                    " or names of modules" if name == "grouping" else ""
                )
                raise PassError(f"{self.name}({name}={value!r})", expected=expected, remedy="pass one of those")
        caps = () if callable(self.cap_mb) else self.cap_mb if isinstance(self.cap_mb, tuple) else (self.cap_mb,)
        if not callable(self.cap_mb) and not (caps and all(isinstance(c, (int, float)) and c > 0 for c in caps)):
            raise PassError(
                f"{self.name}(cap_mb={self.cap_mb!r})",
                expected="megabytes, more than 0, or a function of the bucket's index",
                remedy="pass a size or a function",
            )
        if not all(isinstance(entry, tuple) and _is_sizes(*entry) for entry in self.along):
            raise PassError(
                f"{self.name}(along={self.along!r})",
                expected="for each group its name, cap_mb and alone_mb, as in (('tp', 0.5, 0.1),)",
                remedy="pass such entries",
            )
        if not self.alone_mb > 0:
            raise PassError(
                f"{self.name}(alone_mb={self.alone_mb!r})", expected="megabytes, more than 0", remedy="pass a size"
            )

    def plan(self, program: Program) -> BucketPlan:
        """Choose the buckets; pure."""
        policy = self._policy(program)
        return plan_chain(program.graph, self.kind, policy) or plan_buckets(Order(program.graph), self.kind, policy)[0]

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        if not collectives.has(program.graph, self.kind):
            return PassResult(False, {"buckets": 0, "bucketed": 0, "left": 0})
        with paused_garbage_collection():
            policy = self._policy(program)
            plan, units = plan_chain(program.graph, self.kind, policy), None
            if plan is None:
                plan, units = plan_buckets(Order(program.graph), self.kind, policy)
            verdicts = apply_buckets(program, plan, self, units)
        packed = sum(len(bucket.members) for bucket in plan.buckets)
        counts = {"buckets": len(plan.buckets), "bucketed": packed, "left": len(plan.left)}
        decided = None if self.saturates and self.machine is not None else replace(self, machine=None)
        return PassResult(bool(plan.buckets), counts, (*plan.left, *verdicts), decided=decided)

    def mixes_dtypes(self) -> bool:
        """Whether members of one bucket may differ in dtype."""
        return False

    def reason_against(self, collective: Collective) -> str | None:
        """Why this pass leaves a collective alone, beside what no bucket can take."""
        return None

    def exchange(self, members: Sequence[Collective], copy_in: CopyIn) -> Callable[..., list[Tensor]]:
        """The function from members' inputs to their results that travels as one collective."""
        raise NotImplementedError

    def _policy(self, program: Program) -> Policy:
        """What the options come to for a program."""
        named = self.grouping if isinstance(self.grouping, tuple) else ()
        return Policy(
            cap=lambda index, member: self._cap_for(index, member, program.groups),
            delay=self.delay,
            alone=lambda collective: self._along(collective)[1] * MB,
            grouping=self.grouping,
            packing=self.packing,
            mixed_dtypes=self.mixes_dtypes(),
            results_are_views=self.results_are_views and self.mode != "coalesced",
            keeps_overlap=self.keeps_overlap,
            against=self.reason_against,
            serves=NamedModules(named).of_collectives(program) if named else {},
        )

    def _along(self, collective: Collective) -> tuple[float | None, float]:
        """The cap that is given for a collective's group, if one is, and from how many megabytes on one is alone."""
        found = next((entry for entry in self.along if entry[0] == collective.group), None)
        return (found[1], found[2]) if found is not None else (None, self.alone_mb)

    def _cap_for(self, index: int, collective: Collective, groups: Mapping[str, int]) -> float:
        """The most bytes of a bucket that a collective may be in; `groups` has the sizes of groups."""
        given, _ = self._along(collective)
        cap = given * MB if given is not None else self._cap(index)
        ranks = groups.get(collective.group) or collective.group_size
        if not self.saturates or self.machine is None or ranks is None:
            return cap
        return max(cap, self.machine.worthwhile(collective.kind, ranks, collective.group))

    def _cap(self, index: int) -> int:
        if callable(self.cap_mb):
            megabytes = self.cap_mb(index)
        elif isinstance(self.cap_mb, tuple):
            megabytes = self.cap_mb[min(index, len(self.cap_mb) - 1)]
        else:
            first = self.first_mb if index == 0 and self.first_mb is not None else self.cap_mb
            megabytes = min(first, self.cap_mb)
        return int(megabytes * MB)


def _is_sizes(*entry: Any) -> bool:
    """Whether these are a group's name and two sizes."""
    if len(entry) != 3 or not isinstance(entry[0], str):
        return False
    return all(isinstance(size, (int, float)) and size > 0 for size in entry[1:])


def apply_buckets(
    program: Program, plan: BucketPlan, how: BucketPass, units: Contraction | None = None
) -> list[Verdict]:
    """Carry out a plan, made by a pass or by hand, and say into which bucket each member went.

    `units` is the contraction that the plan came with, if it was made for this very program.
    """
    if not plan.buckets:
        return []
    units = units or _contracted(program, plan)
    written = units.order.rewritten()
    named = {node.name: node for members in units.members for node in members}
    reorder(program.graph, units.sorted(at_first=how.delay == "no use"))
    chosen = [[named[name] for name in bucket.members] for bucket in plan.buckets]
    verdicts: list[Verdict] = []
    replaced = Replacements(program)
    for number, names in enumerate(chosen):
        views = [collectives.view(node) for node in names]  # only now: inputs may have been replaced
        members = [member for member in views if member is not None]
        sources, copy_in = _fold(members, how, written)
        size = sum(member.bytes for member in members) / MB
        detail = f"bucket {number} with {len(members)} members, {size:.2f} MB, by {_said(copy_in)}"
        verdicts += [
            Verdict.of(member.node, Outcome.BUCKETED, "packed with others into one", detail=detail, bytes=member.bytes)
            for member in members
        ]
        _merge(program, members, sources, how.exchange(members, copy_in), replaced)
    replaced.finish()
    _unshare_results(program, list(replaced.new.values()))
    return verdicts


def flat(value: Tensor) -> Tensor:
    """A tensor's elements in one dim, without a copy where its layout allows."""
    return value if value.dim() == 1 else _viewed(value, -1)


def _viewed(value: Tensor, *shape: int) -> Tensor:
    return value.view(shape) if value.is_contiguous() else value.reshape(shape)


def shaped(part: Tensor, *shape: Any) -> Tensor:
    """A flat tensor in another shape."""
    return part if len(shape) == 1 else part.view(shape)


def _contracted(program: Program, plan: BucketPlan) -> Contraction:
    """The contraction that a plan stands for, if the program has its members and it makes no cycle."""
    order = Order(program.graph)
    named = {collective.node.name for collective in collectives.find(program.graph)}
    bucket_of = {name: number for number, bucket in enumerate(plan.buckets) for name in bucket.members}
    if missing := sorted(bucket_of.keys() - named):
        raise PassError(
            f"the plan names {', '.join(missing)}",
            expected="collectives of this program",
            remedy="plan for this program",
        )
    units = Contraction(order)
    unit_of: dict[int, int] = {}
    for node in order.nodes:
        units.walk(node)
        number = bucket_of.get(node.name)
        if number in unit_of:
            units.join(node, unit_of[number])
        elif collectives.group_of(node) is not None:
            unit = units.open(node)
            if number is not None:
                unit_of[number] = unit
    return units


def _merge(
    program: Program,
    members: list[Collective],
    sources: list[fx.Node],
    exchange: Callable[..., list[Tensor]],
    replaced: Replacements,
) -> None:
    starts = {member.node for member in members}
    before = members[0].node
    while before.prev in starts:
        before = before.prev
    above = before.prev
    results = splice(program, exchange, *sources, before=before, like=members[-1].node)
    _wait_where_members_did(above.next, before, members)
    for member, result in zip(members, results, strict=True):
        for wait in member.waits:
            replaced.replace(wait, result)
        replaced.drop(member.node)


def _wait_where_members_did(first: fx.Node, end: fx.Node, members: Sequence[Collective]) -> None:
    """Put a bucket's waits, and what takes it apart, where the first wait on a member stands: what hides them stays
    between."""
    waits = [wait for member in members for wait in member.waits]
    if not waits or not end < (place := min(waits)):
        return
    node = first
    while node is not end and not collectives.is_wait(node):
        node = node.next
    while node is not end:
        following = node.next
        place.prepend(node)
        node = following


def _unshare_results(program: Program, members: Sequence[fx.Node]) -> None:
    """Return copies of what lies in a bucket: members' results must not share memory, nor keep a whole bucket alive."""
    together = Counter(memory_of(member) for member in dict.fromkeys(members))
    return_copies(program, {member: member for member in members if together[memory_of(member)] > 1})


def _fold(members: Sequence[Collective], how: BucketPass, written: set[fx.Node]) -> tuple[list[fx.Node], CopyIn]:
    """What to pack, and how: divisions and conversions that only feed the members are taken into the bucket."""
    sources = [member.inputs[0] for member in members]
    if how.mode == "coalesced":
        return sources, CopyIn("coalesced")
    copies_out_on_cuda = sources[0].meta["val"].is_cuda and not how.results_are_views
    mode = how.mode if how.mode != "auto" else "copy-kernel" if copies_out_on_cuda else "concat"
    dtype = divisor = None
    unconverted = [_converted_from(source, written) for source in sources]
    converts = how.fold and any(unconverted) and how.mode != "concat"
    if converts:
        sources = [before or source for before, source in zip(unconverted, sources, strict=True)]
    if how.fold and len({member.dtype for member in members}) == 1:
        if converts:
            mode, dtype = "copy-kernel", members[0].dtype
        divided = [_divided(source, written) for source in sources]
        if len(divisors := {by for _, by in divided}) == 1 and None not in divisors:
            divisor = divisors.pop()
            sources = [source for source, _ in divided]
    return sources, CopyIn(mode, dtype, divisor)


def _said(copy_in: CopyIn) -> str:
    """How a bucket is packed, in words."""
    words: list[str] = [copy_in.mode]
    words += [f"converted to {str(copy_in.dtype).removeprefix('torch.')}"] if copy_in.dtype is not None else []
    words += [f"divided by {copy_in.divisor:g}"] if copy_in.divisor is not None else []
    return ", ".join(words)


def _converted_from(node: fx.Node, written: set[fx.Node]) -> fx.Node | None:
    """The source of a conversion to another dtype that feeds nothing but one collective, or None."""
    converts = node.target is torch.ops.prims.convert_element_type.default or (
        node.target is _aten._to_copy.default and node.kwargs.keys() == {"dtype"}
    )
    source: Any = node.args[0] if converts and len(node.users) == 1 else None
    return source if source not in written else None


def _divided(node: fx.Node, written: set[fx.Node]) -> tuple[fx.Node, float | None]:
    """The dividend and the divisor of a division by a number that feeds nothing else; else the node itself."""
    if node.target is _aten.div.Tensor and len(node.users) == 1 and not node.kwargs:
        source: Any
        source, divisor = node.args
        same_dtype = isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
        if isinstance(divisor, (int, float)) and same_dtype and source not in written:
            return source, float(divisor)
    return node, None
