"""How buffers that a forward updates from its samples follow from parts of the batch: what is to be taken over ranks.

As `loss_parts` follows the loss. No gradient comes back from a buffer, so every total over samples can be made the
whole batch's where it comes in: a sum, a mean, a largest or smallest value. What is a mean up to the buffer itself is
left to be averaged there.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from crossfade.graph.operators import arguments
from crossfade.graph.order import with_ancestors
from crossfade.graph.program import InputKind, Output, OutputKind, Program
from crossfade.shard.loss_parts import (
    ADDS,
    BY_SUM,
    COUNT,
    DIVIDES,
    LIKE,
    MULTIPLIES,
    NLL_BACKWARD,
    SAME,
    SAMPLES,
    SCALED,
    Again,
    Holds,
    LossParts,
    Share,
    Unproved,
    Walk,
    adds_a_number,
    is_zero,
    loss_node,
    terms_of,
)
from crossfade.shard.mixed_samples import is_mean, operator_name
from crossfade.shard.synchronize_batch_norm import is_synchronized

OVER_RANKS, READS_WHOLE, TIMES_RANKS = "total_over_ranks", "reads_total_over_ranks", "number_times_ranks"
"""Metadata keys: how a total is taken over ranks; that a node uses such totals; and the argument that is the number of
samples of one rank."""

_EXTREMES = {"amax": "max", "amin": "min"}
_EXTREMES_WITH_PLACES = {("max", 0): "max", ("min", 0): "min", ("aminmax", 0): "min", ("aminmax", 1): "max"}
# fmt: off
_PASSED_ON = frozenset({
    "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "t",
    "expand", "select", "slice", "index", "index_select", "gather", "neg", "sum", "mean", "stack", "cat", "copy",
    "_to_copy", "getitem",
})
# fmt: on
"""Operators that do to a total what they do to its parts, and fill in nothing."""


def with_buffer_parts(
    parts: LossParts, program: Program, larger: Program, times: int, *, micro_batches: bool
) -> LossParts:
    """Find how updated buffers follow from parts, mark what is taken over ranks, and note what is not known.

    To be called behind `find_loss_parts`, with the same programs.

        >>> from crossfade.graph.text import parse
        >>> text = '''
        ... b: f32[2] = buffer("b")
        ... x: f32[{0}, 2] = input("x")
        ... seen: f32[2] = {1}
        ... add: f32[2] = aten.add.Tensor(b, seen)
        ... loss: f32[] = aten.mean(x)
        ... return loss("loss", loss), update("b", add)
        ... '''
        >>> def found(seen):
        ...     small, large = (parse(text.format(size, seen)) for size in (4, 8))
        ...     return with_buffer_parts(LossParts("mean"), small, large, 2, micro_batches=False).buffers
        >>> found("aten.sum.dim_IntList(x, [0])")
        ()
        >>> found("aten.var.dim(x, [0])")
        ('b: seen (var.dim) reduces the samples of one part',)
    """
    names = [out.name for out, value in _updates(program) if not _is_of_batch_norm(value)]
    if not names:
        return parts
    walk = _BufferWalk(program, frozenset(), micro_batches, names=tuple(names))
    try:
        walk.compare(larger, times)
    except Unproved as reason:
        varying = [name for name, value in zip(names, walk.ends, strict=True) if _follows_from_batch(program, value)]
        return replace(parts, buffers=tuple(f"{name}: {reason}" for name in varying))
    return replace(parts, buffers=walk.reasons_against())


def _updates(program: Program) -> list[tuple[Output, fx.Node]]:
    buffers = {item.name for item in program.inputs if item.kind is InputKind.BUFFER}
    results = program.named_results()
    return [(out, value) for out, value in results if out.kind is OutputKind.UPDATE and out.name in buffers]


def _is_of_batch_norm(value: fx.Node) -> bool:
    """Whether these are a norm's running statistics, which `synchronize-batch-norm` accounts for."""
    return value.target is operator.getitem and "batch_norm" in str(getattr(value.args[0], "target", ""))


def _follows_from_batch(program: Program, value: fx.Node) -> bool:
    inputs = {node for item, node in program.named_inputs() if item.kind is InputKind.INPUT}
    return not inputs.isdisjoint(with_ancestors(value))


@dataclass
class _BufferWalk(Walk):
    """One walk from the batch to all buffers that follow from it."""

    names: tuple[str, ...] = ()
    over_ranks: dict[fx.Node, str] = field(default_factory=dict)
    """Totals to be taken over ranks, and how."""
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    """Sums with the number of samples, and which argument that is."""
    unknown: dict[fx.Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.for_loss = set(with_ancestors(loss_node(self.program)))

    def ends_in(self, program: Program) -> list[fx.Node]:
        """The new values of the buffers."""
        updates = {out.name: value for out, value in program.named_results() if out.kind is OutputKind.UPDATE}
        return [updates[name] for name in self.names if name in updates]

    def reasons_against(self) -> tuple[str, ...]:
        """Walk, mark what is found, and say of which buffers nothing is known and why."""
        place, again = {node: place for place, node in enumerate(self.forward)}, 0
        while again < len(self.forward):
            node = self.forward[again]
            try:
                self.visit(node)
            except Again:
                again = min(place[total] for total in self.over_ranks if self.shares[total].holds is Holds.TOTAL)
                continue
            except Unproved as reason:
                self.unknown[node], self.shares[node] = str(reason), SAMPLES
            again += 1
        reasons = [(name, self._reason_against(value)) for name, value in zip(self.names, self.ends, strict=True)]
        self.mark()
        return tuple(f"{name}: {reason}" for name, reason in reasons if reason)

    def _reason_against(self, value: fx.Node) -> str:
        share = self.shares[value]
        if value in self.unknown:
            return self.unknown[value]
        if share == Share(Holds.TOTAL):
            self.over_ranks[value] = "sum"
            return ""
        averaged = share == Share(Holds.TOTAL, 1) and value.meta["val"].is_floating_point()
        return "" if averaged or share == SAME else str(Unproved(value, "depends on which samples a part has"))

    def visit(self, node: fx.Node) -> None:
        """Find the share of a node; what comes of an unknown value is unknown, but for its shape."""
        self.unknown.pop(node, None)
        if node in self.kinds:
            super().visit(node)
        elif known := [s for s in node.all_input_nodes if s in self.unknown and operator_name(node.target) not in LIKE]:
            self.unknown[node], self.shares[node] = self.unknown[known[0]], SAMPLES
        elif node in self.over_ranks:
            self.shares[node] = SAME
        elif node in self.for_loss and any(source in self.over_ranks for source in node.all_input_nodes):
            raise Unproved(node, "uses a total over the samples of one part")
        elif SCALED in node.meta or (COUNT in node.meta and self.micro_batches):
            raise Unproved(node, "is counted over all micro-batches")
        elif COUNT in node.meta and node.target not in NLL_BACKWARD:
            self.shares[node] = SAME
        else:
            self.shares[node] = self.share_of(node)

    def check_numbers(self, node: fx.Node, counted: frozenset[Any] = frozenset(MULTIPLIES | DIVIDES | ADDS)) -> None:
        """Numbers that are added may be of samples, too."""
        super().check_numbers(node, counted)

    def _element(self, node: fx.Node) -> Share:
        source: Any = node.args[0]
        place: Any = node.args[1]
        if place and is_synchronized(source, self.grown.get(source.args[0], ())):
            return SAME
        if is_mean(node):
            return Share(Holds.TOTAL, 1)
        if (how := _EXTREMES_WITH_PLACES.get((operator_name(source.target), place))) is not None:
            return self._extreme(node, how)
        if source.target not in NLL_BACKWARD:
            raise Unproved(source, "reduces the samples of one part")
        if arguments(source)["reduction"] == BY_SUM and place == 0:
            return Share(Holds.TOTAL)
        if COUNT not in source.meta or place:
            raise Unproved(source, "counts the samples of one part")
        return Share(Holds.TOTAL, 1)

    def _extreme(self, node: fx.Node, how: str) -> Share:
        self.over_ranks[node] = how
        return SAME

    def _added_up(self, node: fx.Node) -> Share:
        name = operator_name(node.target)
        how = _EXTREMES.get(name) or (name if str(node.target) in ("aten.max.default", "aten.min.default") else None)
        if how is not None:
            return self._extreme(node, how)
        if name == "histc" and arguments(node)["min"] < arguments(node)["max"]:
            return Share(Holds.TOTAL)
        return super()._added_up(node)

    def _of_totals(self, node: fx.Node) -> Share:
        linear = node.target in MULTIPLIES | DIVIDES | ADDS or operator_name(node.target) in _PASSED_ON
        if linear and not _rounds(node):
            return super()._of_totals(node)
        self.make_whole(node)
        return SAME

    def _can_be_whole(self, node: fx.Node) -> bool:
        share = self.shares[node]
        return share.holds is Holds.TOTAL and (share.power == 0 or (share.power == 1 and not _is_whole(node)))

    def _count(self, node: fx.Node) -> None:
        self.over_ranks[node] = "avg" if self.shares[node].power else "sum"
        raise Again

    def _sum_power(self, node: fx.Node) -> int:
        """Means may be mixed with what all parts have, and sums with sums; else totals are made whole before."""
        terms = [term for term in terms_of(node) if not is_zero(term)]
        totals = [term for term in terms if self.shares[term].holds is Holds.TOTAL]
        number = self.literal_powers.get((node, 1)) if node.target in ADDS else None
        if totals:
            powers = {self.shares[total].power for total in totals}
            others = [term for term in terms if term not in totals]
            is_mean = powers == {1} and number is None and all(self.shares[term] == SAME for term in others)
            if is_mean or (powers == {0} and not others and not adds_a_number(node)):
                return powers.pop()
            if not self._can_be_whole(totals[0]):
                raise Unproved(node, "uses a total over the samples of one part")
            self._count(totals[0])
        powers = {self.shares[term].power for term in terms}
        if len(powers) > 1 or (number is not None and (number != -1 or any(self.shares[t] != SAME for t in terms))):
            raise Unproved(node, "uses a number that grows with the batch")
        if number is not None:
            self.numbers[node] = 1
        return next(iter(powers), 0)

    def mark(self) -> None:
        """Mark what is taken over ranks, who uses that, and numbers of samples."""
        inside = set(self.forward) - self.for_loss
        for node, how in self.over_ranks.items():
            node.meta[OVER_RANKS] = how
            for user in node.users:
                if user in inside:
                    user.meta[READS_WHOLE] = True
        for node, place in self.numbers.items():
            node.meta[TIMES_RANKS] = place


def _is_whole(node: fx.Node) -> bool:
    """Whether a value's numbers are whole ones, which have no mean."""
    return not node.meta["val"].is_floating_point()


def _rounds(node: fx.Node) -> bool:
    """Whether a conversion of totals loses what is behind the point."""
    converts = operator_name(node.target) in ("_to_copy", "copy")
    return converts and _is_whole(node) and not _is_whole(node.all_input_nodes[-1])
