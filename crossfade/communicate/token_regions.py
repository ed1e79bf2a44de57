"""Regions of a program that can be computed on each rank's own tokens: found, weighed and described.

A region begins at all-reduces that become reduce-scatters, and grows through calls that compute each token by itself.
Everything in it is alike on all ranks, so any of it can be had whole by a gather, and what enters whole can be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, fx

from crossfade.cost.machine_parts import bytes_sent
from crossfade.graph import collectives, per_token
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.effects import alias_roots, is_random, rewritten
from crossfade.graph.per_token import SUMMED, Place, Split
from crossfade.graph.private import has_schema
from crossfade.graph.program import Program, tensor_bytes

NOT_ALIKE = "what it meets is not known to be alike on all ranks"
_EVERYWHERE = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST)
"""Collectives whose result is the same on all ranks of their group."""


@dataclass(frozen=True)
class Seed:
    """An all-reduce that may become a reduce-scatter along `dim` of `value`: its result or the last of `views`."""

    collective: Collective
    value: fx.Node
    dim: int
    views: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Blocked:
    """A call that ends a region, why, and for one that meets a value not alike on all ranks, what made it so."""

    node: fx.Node
    reason: str
    culprit: fx.Node | None = None


@dataclass(frozen=True)
class TokenRegion:
    """What would be computed on each rank's own tokens, and what travels then.

    `inside` has the calls in order, `gathered` the values that something reads whole, with their dims, `summed` those
    that become sums over this rank's tokens, to be all-reduced. Bytes are what each rank sends.
    """

    group: str
    ranks: int
    seeds: tuple[Seed, ...]
    inside: tuple[tuple[fx.Node, Split], ...]
    gathered: tuple[tuple[fx.Node, int], ...]
    summed: tuple[fx.Node, ...]
    blocked: tuple[Blocked, ...] = field(default=(), repr=False)

    @property
    def bytes_before(self) -> int:
        """Bytes that each rank sends for the all-reduces."""
        return round(sum(bytes_sent(Kind.ALL_REDUCE, seed.collective.bytes, self.ranks) for seed in self.seeds))

    @property
    def travels(self) -> list[tuple[Kind, fx.Node, int]]:
        """The collectives afterwards: kind, value, and bytes of its larger side."""
        scatters = [(Kind.REDUCE_SCATTER, seed.value, seed.collective.bytes) for seed in self.seeds]
        gathers = [(Kind.ALL_GATHER, node, tensor_bytes(node.meta["val"])) for node, _ in self.gathered]
        sums = [(Kind.ALL_REDUCE, node, tensor_bytes(node.meta["val"])) for node in self.summed]
        return [*scatters, *gathers, *sums]

    @property
    def bytes_after(self) -> int:
        """Bytes that each rank sends for what takes their place."""
        return round(sum(bytes_sent(kind, size, self.ranks) for kind, _, size in self.travels))

    def __str__(self) -> str:
        found = f"{len(self.seeds)} reduce-scatters, {len(self.gathered)} all-gathers, {len(self.summed)} small sums"
        before, after = self.bytes_before, self.bytes_after
        return f"{self.group}: {len(self.seeds)} all-reduces become {found}; {before} bytes sent become {after}"


class AlikeValues:
    """Which values are the same on all ranks of a group: what the user says is, what was exchanged, and what follows.

    Groups are axes of a mesh: what is alike along one axis stays so through a collective along another.
    """

    def __init__(self, program: Program, group: str, is_promised: Callable[[str], bool]) -> None:
        nodes = list(program.graph.nodes)
        self.written = rewritten(nodes, alias_roots(nodes))
        self._culprits: dict[fx.Node, fx.Node] = {}
        names = {node: item.name for item, node in program.named_inputs()}
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                if not is_promised(names.get(node, str(node.target))):
                    self._culprits[node] = node
            elif node.op == "call_function":
                self._follow(node, group)

    def culprit(self, node: fx.Node) -> fx.Node | None:
        """The first thing that may make a value differ between the ranks; None if it is alike."""
        return self._culprits.get(node)

    def _follow(self, node: fx.Node, group: str) -> None:
        collective = collectives.view(node)
        if collective is not None and collective.group == group and not collective.in_place:
            if collective.kind not in _EVERYWHERE:
                self._culprits[node] = node
            return
        known = has_schema(node.target) or getattr(node.target, "__module__", "") in ("_operator", "math")
        if not known or collectives.group_of(node) == group or is_random(node) or node in self.written:
            self._culprits[node] = node
            return
        for source in node.all_input_nodes:
            if source in self._culprits:
                self._culprits[node] = self._culprits[source]
                return


def grow(program: Program, group: str, ranks: int, seeds: list[Seed], alike: AlikeValues) -> list[TokenRegion]:
    """The regions around some all-reduces, each with the all-reduces that meet in it."""
    grown = _Growth(ranks, alike)
    grown.grow(program.graph.nodes, {seed.value: seed for seed in seeds})
    grown.shrink()
    return grown.regions(group)


class _Growth:
    """Calls that work on parts, found in one walk down, then given up where gathering what they read is cheaper."""

    def __init__(self, ranks: int, alike: AlikeValues) -> None:
        self.ranks, self.alike = ranks, alike
        self.seeds: dict[fx.Node, Seed] = {}
        self.places: dict[fx.Node, Place] = {}
        self.splits: dict[fx.Node, Split] = {}
        self.blocked: dict[fx.Node, Blocked] = {}

    def grow(self, nodes: Iterable[fx.Node], seeds: dict[fx.Node, Seed]) -> None:
        self.seeds = seeds
        for node in nodes:
            if node in seeds:
                self.places[node] = seeds[node].dim
            elif node.op == "call_function" and any(self._in_parts(source) for source in node.all_input_nodes):
                self._take(node)

    def _in_parts(self, node: fx.Node) -> bool:
        return self.places.get(node, SUMMED) != SUMMED

    def _take(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            if isinstance(node.meta["val"], Tensor):  # a gradient not asked for is None
                self.places[node] = self.places[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        found = {source: self.places[source] for source in node.all_input_nodes if self._in_parts(source)}
        if any(isinstance(place, tuple) for place in found.values()):
            self.blocked[node] = Blocked(node, per_token.UNKNOWN)
            return
        how = per_token.split(node, found, self.ranks)  # type: ignore[arg-type]
        culprits = [culprit for source in node.all_input_nodes if (culprit := self.alike.culprit(source)) is not None]
        if isinstance(how, str):
            self.blocked[node] = Blocked(node, how)
        elif culprits or node in self.alike.written:
            self.blocked[node] = Blocked(node, NOT_ALIKE, culprits[0] if culprits else None)
        else:
            self.places[node], self.splits[node] = how.place, how

    def shrink(self) -> None:
        """One walk up: a call is settled when all that read it are."""
        for node in reversed(list(self.places)):
            if node in self.places and self._in_parts(node):
                self._settle_sums(node)
                self._settle_leaves(node)
                self._settle(node)

    def _reads_parts(self, user: fx.Node) -> bool:
        return user in self.places

    def _whole_users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if not self._reads_parts(user)]

    def _is_leaf(self, node: fx.Node) -> bool:
        single = node in self.splits and isinstance(self.places[node], int) and self._in_parts(node)
        return single and len(self._whole_users(node)) == len(node.users)

    def _settle_sums(self, node: fx.Node) -> None:
        """Sum what is gathered anyway, or is no larger than its sum, from the whole."""
        gathered = bool(self._whole_users(node))
        whole = bytes_sent(Kind.ALL_GATHER, tensor_bytes(node.meta["val"]), self.ranks)
        for user in list(node.users):
            if self.places.get(user) == SUMMED and user.target is not operator.getitem:
                own = bytes_sent(Kind.ALL_REDUCE, tensor_bytes(user.meta["val"]), self.ranks)
                if gathered or own >= whole:
                    self._give_up(user)

    def _settle_leaves(self, node: fx.Node) -> None:
        """Gather one value rather than several that are made of it, or a larger one."""
        leaves = [user for user in node.users if self._is_leaf(user) and self._only_reads(user, node)]
        size = 0 if self._whole_users(node) else tensor_bytes(node.meta["val"])
        if leaves and size < sum(tensor_bytes(leaf.meta["val"]) for leaf in leaves):
            for leaf in leaves:
                self._give_up(leaf)

    def _only_reads(self, user: fx.Node, node: fx.Node) -> bool:
        return [source for source in user.all_input_nodes if source in self.places] == [node]

    def _settle(self, node: fx.Node) -> None:
        """Let views be taken of what was gathered; and gather nothing that does not lie in order, as a gather does."""
        if node.target is operator.getitem or node in self.seeds:
            return
        if isinstance(self.places[node], tuple):
            elements = [user for user in node.users if self._in_parts(user)]
            if any(self._whole_users(element) and not lies_in_order(element) for element in elements):
                self._give_up(node)
                for user in node.users:
                    self.places.pop(user, None)
        elif self._whole_users(node) and (
            not lies_in_order(node) or (per_token.is_view(node.target) and self._is_leaf(node))
        ):
            self._give_up(node)

    def _give_up(self, node: fx.Node) -> None:
        del self.places[node]
        del self.splits[node]

    def regions(self, group: str) -> list[TokenRegion]:
        """What hangs together, in the order of the first all-reduce of each."""
        leaders: dict[fx.Node, fx.Node] = {}

        def leader(node: fx.Node) -> fx.Node:
            while (above := leaders.setdefault(node, node)) is not node:
                leaders[node] = leaders[above]
                node = above
            return node

        for node in self.places:
            for source in node.all_input_nodes:
                if source in self.places and self._in_parts(source):
                    leaders[leader(node)] = leader(source)
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.places:
            members.setdefault(leader(node), []).append(node)
        found = [self._region(group, nodes) for nodes in members.values()]
        return sorted((region for region in found if region.seeds), key=lambda region: region.seeds[0].collective.node)

    def _region(self, group: str, nodes: list[fx.Node]) -> TokenRegion:
        single = [node for node in nodes if isinstance(node.meta["val"], Tensor)]
        gathered = [node for node in single if self._in_parts(node) and self._whole_users(node)]
        ends = [user for node in gathered for user in node.users if user in self.blocked]
        return TokenRegion(
            group,
            self.ranks,
            seeds=tuple(self.seeds[node] for node in nodes if node in self.seeds),
            inside=tuple((node, self.splits[node]) for node in nodes if node in self.splits),
            gathered=tuple((node, self.places[node]) for node in gathered),  # type: ignore[misc]
            summed=tuple(node for node in single if self.places[node] == SUMMED and node.users),
            blocked=tuple(self.blocked[user] for user in dict.fromkeys(ends)),
        )


def lies_in_order(node: fx.Node) -> bool:
    """Whether a value's strides are those of a fresh one, sizes of 1 included."""
    value: Tensor = node.meta["val"]
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
