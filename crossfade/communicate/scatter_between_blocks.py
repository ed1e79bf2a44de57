"""All-reduces between matmuls become reduce-scatters and all-gathers, each rank computing on its own tokens between."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from crossfade.communicate import token_regions
from crossfade.communicate.token_regions import NOT_ALIKE, AlikeValues, Seed, TokenRegion, grow
from crossfade.cost.estimate import Estimator
from crossfade.cost.keys import Keys
from crossfade.cost.machine import Machine
from crossfade.graph import collectives, per_token
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.own_part import own_part
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.per_token import Split, elements, work_on_part
from crossfade.graph.program import Program
from crossfade.graph.splice import splice

_aten = torch.ops.aten
_MATMULS = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    *(_aten.matmul.default, _aten.linear.default, _aten._scaled_mm.default),
}
_LEAST_ROWS = 2
"""Rows of a rank along the dim that is cut: fewer make too few pieces, if another dim has more."""
_DONE = "its result is computed on in parts, between matmuls that can be fused with what travels"
_NO_MAKER = "no matmul makes what is reduced"
_NO_READER = "no matmul reads what is made of it"
_BYTES = "more bytes would travel"
_SECONDS = "it would take longer on this machine"


@dataclass(frozen=True)
class ScatterBetweenBlocks(Pass):
    """Reduce-scatter the result of a row-parallel matmul over its tokens, and gather it again where a matmul reads it.

    What lies between (residual additions, norms, pointwise calls, views) is computed by each rank on its own tokens:
    1/ranks of the work. As many bytes travel as for the all-reduce, in two collectives that can be fused with the
    matmuls before and after. Through the residual stream it goes on over many layers, and through the backward. What
    leaves is gathered; what enters whole is cut by `crossfade.own_part`; sums over all tokens, such as the gradients
    of a norm's weight, become sums over own tokens and a small all-reduce, unless their input is gathered anyway.

    It holds only of values that are alike on all ranks of the group. Results of all-reduces and all-gathers are; of
    inputs and constants nobody knows, so the user must say which are: `alike` has their names, or patterns with `*`.
    That is a promise. `groups` restricts it to some groups. A region is left alone unless at least one matmul can be
    fused on each side, and the bytes that each rank sends grow by no more than the fraction `max_growth`. With a
    `machine`, the collectives, less what the matmuls beside them can hide, must not take longer than the all-reduces.

    Also known as: sequence parallelism (Megatron's `--sequence-parallel`, torch's `SequenceParallel`).

    Before:
        x: f32[4, 8] = input("x")
        w: f32[8, 6] = input("w")
        u: f32[6, 8] = input("u")
        s: f32[8, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
        a: f32[8, 8] = c10d.wait_tensor(s)
        h: f32[8, 6] = aten.mm(a, w)
        m: f32[8, 8] = aten.mm(h, u)
        r: f32[8, 8] = c10d.all_reduce(m, "sum", "dp")
        b: f32[8, 8] = c10d.wait_tensor(r)
        y: f32[8, 8] = aten.add.Tensor(a, b)
        g: f32[8, 8] = aten.gelu(y)
        z: f32[8, 6] = aten.mm(g, w)
        return output("z", z)

    After:
        x: f32[4, 8] = input("x")
        w: f32[8, 6] = input("w")
        u: f32[6, 8] = input("u")
        s: f32[8, 8] = c10d.all_gather_into_tensor(x, 2, "dp")
        a: f32[8, 8] = c10d.wait_tensor(s)
        h: f32[8, 6] = aten.mm(a, w)
        m: f32[8, 8] = aten.mm(h, u)
        reduce_scatter_tensor: f32[4, 8] = c10d.reduce_scatter_tensor(m, "sum", 2, "dp")
        wait_tensor: f32[4, 8] = c10d.wait_tensor(reduce_scatter_tensor)
        own_part: f32[4, 8] = crossfade.own_part(a, 0, 2, "dp")
        y: f32[4, 8] = aten.add.Tensor(own_part, wait_tensor)
        g: f32[4, 8] = aten.gelu(y)
        all_gather_into_tensor: f32[8, 8] = c10d.all_gather_into_tensor(g, 2, "dp")
        wait_tensor_1: f32[8, 8] = c10d.wait_tensor(all_gather_into_tensor)
        z: f32[8, 6] = aten.mm(wait_tensor_1, w)
        return output("z", z)
    """

    name = "scatter-between-blocks"
    numerics = Numerics.REASSOCIATES

    alike: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    max_growth: float = 0.25
    machine: Machine | None = from_context()

    def run(self, program: Program) -> PassResult:
        """Plan and carry out one group after the other: what one leaves is the next one's program."""
        found = dict.fromkeys(start.group for start in collectives.find(program.graph) if start.kind is Kind.ALL_REDUCE)
        counts = dict.fromkeys(("scattered", "gathered", "summed", "cut", "left"), 0)
        verdicts: list[Verdict] = []
        for group in [group for group in found if not self.groups or group in self.groups]:
            plan = plan_scatters(program, group, self)
            verdicts += plan.left
            for region in plan.regions:
                verdicts += _done(region)
                counts["cut"] += apply_region(program, region)
                counts["scattered"] += len(region.seeds)
                counts["gathered"] += len(region.gathered)
                counts["summed"] += len(region.summed)
            counts["left"] += len(plan.left)
        return PassResult(counts["scattered"] > 0, counts, tuple(verdicts))


@dataclass(frozen=True)
class ScatterPlan:
    """What becomes of one group's all-reduces: the regions to be computed in parts, and a verdict on each other one."""

    group: str
    regions: tuple[TokenRegion, ...]
    left: tuple[Verdict, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.regions, *self.left))) or f"{self.group}: nothing to scatter"


def plan_scatters(program: Program, group: str, options: ScatterBetweenBlocks | None = None) -> ScatterPlan:
    """Find the regions of one group that pay; the program is left as it is.

    Tokens are cut along the dim with which most all-reduces can be scattered, then the fewest bytes travel; the
    first of those.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4, 8] = input("x")
    ... w: f32[8, 8] = input("w")
    ... m: f32[4, 8] = aten.mm(x, w)
    ... s: f32[4, 8] = c10d.all_reduce(m, "sum", "tp")
    ... y: f32[4, 8] = c10d.wait_tensor(s)
    ... r: f32[4, 8] = aten.relu(y)
    ... z: f32[4, 8] = aten.mm(r, w)
    ... return output("z", z)
    ... ''', groups={"tp": 2})
    >>> print(plan_scatters(program, "tp"))
    tp: 1 all-reduces become 1 reduce-scatters, 1 all-gathers, 0 small sums; 128 bytes sent become 128
    """
    options = options or ScatterBetweenBlocks()
    ranks = program.groups.get(group, 0)
    reductions = [found for found in collectives.find(program.graph) if found.kind is Kind.ALL_REDUCE]
    alike = AlikeValues(program, group, _is_promised(options.alike))
    left: list[Verdict] = []
    taken: list[Collective] = []
    for collective in reductions:
        if collective.group != group:
            continue
        reason = _reason_against(collective, ranks, alike)
        if reason is None:
            taken.append(collective)
        else:
            detail = f"{ranks} ranks, {_shape(collective)}"
            remedy = f"say it: groups={{{group!r}: ...}}" if not ranks else ""
            left.append(_left(collective, reason, detail, remedy))
    weighing = _Weighing(program, options)
    best: tuple[tuple[int, int, bool, int], list[TokenRegion], list[Verdict]] | None = None
    preferred = sorted({dim for collective in taken for _, dim in _cuts(collective, ranks)})
    for dim in preferred:
        pays, declined = [], []
        for region in grow(program, group, ranks, [_seed(collective, ranks, dim) for collective in taken], alike):
            refusal = weighing.reason_against(region)
            if refusal is None:
                pays.append(region)
            else:
                declined += [_left(seed.collective, *refusal) for seed in region.seeds]
        seeds = [seed for region in pays for seed in region.seeds]
        thin = any(seed.value.meta["val"].shape[seed.dim] < _LEAST_ROWS * ranks for seed in seeds)
        rank = (-len(seeds), sum(region.bytes_after for region in pays), thin, dim)
        if best is None or rank < best[0]:
            best = rank, pays, declined
    _, regions, declined = best or (None, [], [])
    return ScatterPlan(group, tuple(regions), (*left, *declined))


def _is_promised(names: tuple[str, ...]) -> Callable[[str], bool]:
    exact, patterns = set(names), [name for name in names if set(name) & set("*?")]
    return lambda name: name in exact or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _shape(collective: Collective) -> str:
    value = collective.node.meta["val"]
    return str(list(value.shape)) if isinstance(value, Tensor) else "several values"


def _reason_against(collective: Collective, ranks: int, alike: AlikeValues) -> str | None:
    """Why an all-reduce cannot become a reduce-scatter at all."""
    if not collective.plain or len(collective.waits) != 1:
        return "it is not a plain collective with one wait"
    if ranks < 2:
        return "its group has one rank" if ranks else "the size of its group is not known"
    if collective.reduce_op not in ("sum", "avg"):
        return "it reduces by something other than a sum or an average"
    value: Tensor = collective.node.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return "its sizes are not known before it runs"
    if {collective.inputs[0], *collective.waits} & alike.written:
        return "its memory is written in place"
    if value.dim() < 2:
        return "it has no dim but the last"
    if not _cuts(collective, ranks):
        return "no dim but the last divides by the ranks"
    return None


def _chain(collective: Collective) -> list[fx.Node]:
    """An all-reduce's result, then the views of it as long as each is all that is read of the one before."""
    found = [collective.waits[0]]
    while len(users := list(found[-1].users)) == 1 and users[0].target in _RESHAPES:
        found.append(users[0])
    return found


_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}


def _cuts(collective: Collective, ranks: int) -> list[tuple[int, int]]:
    """Where a result can be cut: which value of its chain, and along which dim."""
    found = []
    for index, node in enumerate(_chain(collective)):
        shape = node.meta["val"].shape
        if token_regions.lies_in_order(node):
            found += [(index, dim) for dim, size in enumerate(shape[:-1]) if size % ranks == 0 and size]
    return found


def _seed(collective: Collective, ranks: int, preferred: int) -> Seed:
    """Cut along the preferred dim, of the first value that has it; else along the first dim that can be cut."""
    cuts = _cuts(collective, ranks)
    index, dim = next((cut for cut in cuts if cut[1] == preferred), cuts[0])
    chain = _chain(collective)
    return Seed(collective, chain[index], dim, tuple(chain[1 : index + 1]))


class _Weighing:
    """Whether a region pays."""

    def __init__(self, program: Program, options: ScatterBetweenBlocks) -> None:
        self.program, self.options = program, options
        machine = options.machine
        self.estimator = Estimator(program, machine, {}, Keys(None)) if machine is not None else None

    def reason_against(self, region: TokenRegion) -> tuple[str, str, str] | None:
        """The first reason to leave a region alone, its numbers, and a remedy; None if it pays."""
        makers = {seed.value: found for seed in region.seeds if (found := _maker(seed.collective)) is not None}
        inside = {node for node, _ in region.inside}
        readers = {node: matmuls for node, _ in region.gathered if (matmuls := _readers(node, inside))}
        around = f"{len(makers)} matmuls before, {sum(map(len, readers.values()))} after"
        if not makers:
            return _NO_MAKER, around, ""
        met = [blocker for blocker in region.blocked if blocker.reason == NOT_ALIKE and blocker.culprit is not None]
        if not readers and met:
            return NOT_ALIKE, f"{met[0].node.name}, because of {met[0].culprit}", self._remedy(met[0].culprit)
        if not readers:
            return _NO_READER, around, ""
        before, after = region.bytes_before, region.bytes_after
        if after > before * (1 + self.options.max_growth):
            grown = f"{before} bytes sent would become {after}, more than {1 + self.options.max_growth:g} times as many"
            return _BYTES, grown, self._remedy(met[0].culprit) if met else ""
        return self._too_slow(region, makers, readers)

    def _remedy(self, culprit: fx.Node | None) -> str:
        names = {node: item.name for item, node in self.program.named_inputs()}
        if culprit is None or culprit.op not in ("placeholder", "get_attr"):
            return ""
        return f"if it is alike, alike=({names.get(culprit, str(culprit.target))!r}, ...) says so"

    def _too_slow(
        self, region: TokenRegion, makers: dict[fx.Node, fx.Node], readers: dict[fx.Node, list[fx.Node]]
    ) -> tuple[str, str, str] | None:
        machine, estimator = self.options.machine, self.estimator
        if machine is None or estimator is None:
            return None
        ranks, axis = region.ranks, region.group
        sizes = [seed.collective.bytes for seed in region.seeds]
        before = sum(machine.collective_seconds(Kind.ALL_REDUCE, size, ranks, axis) for size in sizes)
        after = 0.0
        for kind, node, size in region.travels:
            beside = {Kind.REDUCE_SCATTER: [makers[node]] if node in makers else [], Kind.ALL_GATHER: readers.get(node)}
            computing = sum(estimator.compute_seconds(matmul) for matmul in beside.get(kind) or ())
            travel = machine.collective_seconds(kind, size, ranks, axis)
            after += max(travel - computing * (ranks - 1) / ranks, travel / ranks)  # the last piece hides nothing
        if after <= before:
            return None
        return _SECONDS, f"{before * 1e6:.0f} us in sight would become {after * 1e6:.0f} us", ""


def _maker(collective: Collective) -> fx.Node | None:
    """The matmul that makes what is reduced, and nothing else reads."""
    node = collective.inputs[0]
    while len(node.users) == 1 and per_token.is_view(node.target):
        node = node.all_input_nodes[0]
    return node if len(node.users) == 1 and node.target in _MATMULS else None


def _readers(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """The matmuls that read a value through views, other than in parts."""
    found: dict[fx.Node, None] = {}
    waiting = [user for user in node.users if user not in inside]
    while waiting:
        user = waiting.pop()
        if user.target in _MATMULS:
            found[user] = None
        elif per_token.is_view(user.target):
            waiting += user.users
    return list(found)


def _left(collective: Collective, reason: str, detail: str, remedy: str) -> Verdict:
    return Verdict.of(collective.node, Outcome.LEFT, reason, detail=detail, remedy=remedy, bytes=collective.bytes)


def _done(region: TokenRegion) -> list[Verdict]:
    verdicts, described = [], str(region)
    for seed in region.seeds:
        detail = f"along dim {seed.dim} of {list(seed.value.meta['val'].shape)}; {described}"
        collective = seed.collective
        verdicts.append(Verdict.of(collective.node, Outcome.REPLACED, _DONE, detail=detail, bytes=collective.bytes))
    return verdicts


def apply_region(program: Program, region: TokenRegion) -> int:
    """Carry out a plan for one region; return how many values were cut."""
    return _Rewriting(program, region).carry_out()


class _Rewriting:
    """One region of a program, on its way to being computed in parts: the calls stay, what they read changes."""

    def __init__(self, program: Program, region: TokenRegion) -> None:
        self.program, self.region = program, region
        self.in_parts: set[fx.Node] = {seed.value for seed in region.seeds}
        for node, _ in region.inside:
            self.in_parts |= {node, *elements(node)}
        self.leaving: dict[fx.Node, list[fx.Node]] = {}
        for node, _ in region.gathered:
            self.leaving[node] = [user for user in node.users if user not in self.in_parts]
        for node in region.summed:
            self.leaving[node] = list(node.users)
        self.scattered: dict[fx.Node, fx.Node] = {}
        self.cuts: dict[tuple[fx.Node, int], fx.Node] = {}

    def carry_out(self) -> int:
        """Rewrite everything; return how many values were cut."""
        for seed in self.region.seeds:
            self.scattered[seed.value] = self._scatter(seed)
        for node, how in self.region.inside:
            self._enter(node, how)
        for node, dim in self.region.gathered:
            self._gather(node, dim)
        for node in self.region.summed:
            self._sum(node)
        for seed in self.region.seeds:
            for old in (*reversed(seed.views), *seed.collective.waits, seed.collective.node):
                self.program.graph.erase_node(old)
        return len(self.cuts)

    def _scatter(self, seed: Seed) -> fx.Node:
        """Put a reduce-scatter in place of an all-reduce, and give its result to what is computed in parts."""
        collective, dim, ranks = seed.collective, seed.dim, self.region.ranks
        shape = list(seed.value.meta["val"].shape)
        part = [*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]]

        def start(value: Tensor) -> Tensor:
            laid = _viewed(value.contiguous(), shape[dim:] if _leads(shape, dim) else shape)
            laid = laid if _leads(shape, dim) else torch.cat(laid.chunk(ranks, dim))
            return collectives.reduce_scatter(laid, str(collective.reduce_op), ranks, collective.group)

        begun = splice(self.program, start, collective.inputs[0], before=collective.node, like=collective.node)
        last = seed.value.next
        made = splice(
            self.program, lambda value: _viewed(collectives.wait(value), part), begun, before=last, like=collective.node
        )
        for user in [user for user in seed.value.users if user in self.in_parts]:
            user.replace_input_with(seed.value, made)
        return made

    def _enter(self, node: fx.Node, how: Split) -> None:
        """Give a call parts to work on, and describe what it makes of them."""
        for source, dim in how.cut.items():
            if source not in self.in_parts:
                node.replace_input_with(source, self._cut(source, dim, node))
        work_on_part(self.program, node, how)

    def _cut(self, source: fx.Node, dim: int, before: fx.Node) -> fx.Node:
        if (source, dim) not in self.cuts:
            ranks, group = self.region.ranks, self.region.group
            self.cuts[source, dim] = splice(
                self.program, lambda value: own_part(value, dim, ranks, group), source, before=before, like=source
            )
        return self.cuts[source, dim]

    def _gather(self, node: fx.Node, dim: int) -> None:
        part, ranks, group = self.scattered.get(node, node), self.region.ranks, self.region.group
        shape = list(part.meta["val"].shape)
        whole = [*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]]
        leads = _leads(shape, dim)

        def start(value: Tensor) -> Tensor:
            laid = value.contiguous()
            return collectives.all_gather(_viewed(laid, shape[dim:]) if leads else laid, ranks, group)

        def put_together(value: Tensor) -> Tensor:
            done = collectives.wait(value)
            return _viewed(done, whole) if leads else torch.cat(done.chunk(ranks), dim)

        begun = splice(self.program, start, part, before=part.next, like=node)
        users = self.leaving[node]
        _hand_over(users, node, splice(self.program, put_together, begun, before=min(users), like=node))

    def _sum(self, node: fx.Node) -> None:
        """Add up what each rank has summed over its own tokens."""
        group = self.region.group

        def start(value: Tensor) -> Tensor:
            return collectives.all_reduce(value.contiguous(), "sum", group)

        begun = splice(self.program, start, node, before=node.next, like=node)
        users = self.leaving[node]
        _hand_over(users, node, splice(self.program, collectives.wait, begun, before=min(users), like=node))


def _hand_over(users: Iterable[fx.Node], old: fx.Node, new: fx.Node) -> None:
    for user in users:
        user.replace_input_with(old, new)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether parts along a dim lie one after the other: then nothing needs to be copied."""
    return math.prod(shape[:dim]) == 1


def _viewed(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value if list(value.shape) == list(shape) else value.view(shape)
