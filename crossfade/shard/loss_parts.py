"""How the losses of a batch's parts make up the loss of the whole batch: as a mean, or as a sum, found in the graph.

A rank, and each of its micro-batches, computes the loss of a part of the batch. Every value on the way there is
followed from the batch to the loss: it holds samples, or a total over samples, or is the same for every part. A total
that counts (the tokens that are not ignored, the sum of a mask) and does not depend on what is trained can be made the
whole batch's before it is used; then the losses of parts add up exactly. What a part cannot know is named.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, fx

from crossfade.graph.effects import is_random
from crossfade.graph.operators import arguments
from crossfade.graph.order import with_ancestors
from crossfade.graph.program import InputKind, OutputKind, Program, source_line
from crossfade.shard.batch_blocks import find_blocks, takes_some_samples
from crossfade.shard.batch_dims import growing_dims, grows_unevenly
from crossfade.shard.grouped_rows import counts_groups, ends_of_groups
from crossfade.shard.growing_numbers import FILLS, NO_POWER, SIZED, growing_numbers, is_number
from crossfade.shard.mixed_samples import is_mean, is_place, mixes_samples, operator_name, orders
from crossfade.shard.sample_places import Places

_aten = torch.ops.aten

COUNT, SCALED = "counts_whole_batch", "scaled_with_parts"
"""Metadata keys: the number of a count to be taken over the whole batch, with its power; and the argument of a product
or quotient to be scaled by the number of parts."""

NLL_BACKWARD = {
    _aten.nll_loss_forward.default: _aten.nll_loss_backward.default,
    _aten.nll_loss2d_forward.default: _aten.nll_loss2d_backward.default,
}
"""Losses that divide by a count of their own, each with its backward."""

BY_MEAN, BY_SUM = 1, 2
"""ATen's numbers for the ways to reduce a loss."""

MULTIPLIES = {_aten.mul.Tensor, _aten.mul.Scalar}
DIVIDES = {_aten.div.Tensor, _aten.div.Scalar}
ADDS = {_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar}
_PRODUCTS = {_aten.mm.default, _aten.mv.default, _aten.dot.default, _aten.vdot.default, _aten.bmm.default}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}

# fmt: off
_LINEAR = frozenset({
    "neg", "sum", "mean", "clone", "detach", "alias", "_to_copy", "expand", "cat", "stack", "select", "slice", "index",
    "gather", "index_select", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "t",
    "unbind", "split", "split_with_sizes", "chunk", "getitem", "wait_tensor", "all_reduce", "all_gather_into_tensor",
    "lift_fresh", "lift_fresh_copy", "constant_pad_nd", "masked_fill", "where", "copy", "flatten", "cumsum",
})
"""Operators that do to a total what they do to its parts. What they fill in must be zero, or totals alike."""

LIKE = frozenset({
    "new_ones", "new_zeros", "new_full", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like",
    "empty_like", "rand_like", "randn_like", "randint_like",
})
# fmt: on
"""Operators that look at the shape of what they are given, not at its values."""


class Holds(Enum):
    """What a value of one part holds: the same as in every other part, rows of samples, or a total over samples."""

    SAME = "same"
    SAMPLES = "samples"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Share:
    """What a part's value is to the whole batch's. With the power 0 a total of the whole batch is the sum of the parts'
    totals, with 1 their mean; a value of another kind is to be divided by the number of parts that often."""

    holds: Holds
    power: int = 0


UNPROVED = "losses of parts of the batch may not make up the loss of the whole batch"
UNPROVED_REMEDY = "reduce the loss by a sum or a mean over samples, or pass loss_is= to say how parts are put together"
_OTHERWISE = "is not computed in the same way on a batch of another size"
SAME, SAMPLES = Share(Holds.SAME), Share(Holds.SAMPLES)


@dataclass(frozen=True, slots=True)
class LossParts:
    """How losses of parts are put together; `unproved` says why that is not known to give the whole batch's loss."""

    loss_is: Literal["mean", "sum"] | None
    unproved: str = ""
    shared_numbers: tuple[str, ...] = ()
    """Inputs without a dim that the loss depends on: numbers that must be the same on every rank."""
    buffers: tuple[str, ...] = ()
    """Buffers whose new value for the whole batch does not follow from those of its parts, each with why."""

    def put_together(self, requested: str) -> Literal["mean", "sum"]:
        """How to put the losses of parts together: as found, else as requested."""
        return self.loss_is or ("sum" if requested == "sum" else "mean")

    def warning(self, requested: str) -> str:
        """What to warn of: the whole batch's loss does not follow from its parts', or is not what was requested."""
        if self.unproved:
            return f"{UNPROVED}: {self.unproved}. Remedy: {UNPROVED_REMEDY}." if requested == "auto" else ""
        if self.loss_is in (None, requested) or requested == "auto":
            return ""
        found = f"the captured loss is a {self.loss_is} over samples, and is put together as one"
        return f'loss_is="{requested}", but {found}. Remedy: leave loss_is out.'


class Unproved(Exception):
    """Why the whole batch's loss does not follow from those of its parts."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        line = source_line(node)
        operation = getattr(node.target, "__name__", node.target)
        super().__init__(f"{node.name} ({operation}{f', {line}' if line else ''}) {reason}")


class Again(Exception):
    """Something is to be counted or scaled that was not when the walk began."""


def find_loss_parts(
    program: Program, larger: Program, times: int, trained: Iterable[str], *, micro_batches: bool = False
) -> LossParts:
    """Find out how the losses of parts make up the whole batch's, and mark what has to be counted for that.

    `larger` is the same program on a batch `times` as large, or only its forward; by comparison the dims and numbers
    that grow with the batch are known. `trained` names the parameters that gradients are asked for. With
    `micro_batches`, parts run one after the other: what they count must follow from the batch alone.

        >>> from crossfade.graph.text import parse
        >>> text = '''
        ... x: f32[{0}, 2] = input("x")
        ... sum_1: f32[] = aten.sum(x)
        ... div: f32[] = aten.div.Tensor(sum_1, {0})
        ... return loss("loss", div)
        ... '''
        >>> find_loss_parts(parse(text.format(4)), parse(text.format(8)), 2, []).loss_is
        'mean'
    """
    walk = Walk(program, frozenset(trained), micro_batches)
    try:
        walk.compare(larger, times)
        share = walk.loss_share()
    except Unproved as reason:
        return LossParts(None, str(reason))
    walk.mark()
    shared = tuple(item.name for item, node in program.named_inputs() if walk.is_shared_number(item.kind, node))
    return LossParts("sum" if share == Share(Holds.TOTAL) else "mean", "", shared)


@dataclass
class Walk:
    """One walk from the batch to the loss."""

    program: Program
    trained: frozenset[str]
    micro_batches: bool
    grown: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    literal_powers: dict[tuple[fx.Node, int], int] = field(default_factory=dict)
    uneven: set[fx.Node] = field(default_factory=set)
    """What has more or fewer rows than samples: some are left out, or added."""
    blocks: dict[fx.Node, int | None] = field(default_factory=dict)
    shares: dict[fx.Node, Share] = field(default_factory=dict)
    learned: set[fx.Node] = field(default_factory=set)
    late: set[fx.Node] = field(default_factory=set)
    """What depends on more than the batch: it cannot be counted before the forward."""
    counts: dict[fx.Node, int] = field(default_factory=dict)
    """Totals to be taken over the whole batch, and own counts of losses, with the power of each."""
    scaled: dict[fx.Node, int] = field(default_factory=dict)
    """Products and quotients, and the argument to be scaled by the number of parts."""

    def __post_init__(self) -> None:
        self.kinds = {node: item for item, node in self.program.named_inputs()}
        self.updated = {out.name for out in self.program.outputs if out.kind is OutputKind.UPDATE}
        self.ends = self.ends_in(self.program)
        self.forward = with_ancestors(*self.ends)
        self.samples = 0

    def ends_in(self, program: Program) -> list[fx.Node]:
        """The values that are followed back to the batch."""
        return [loss_node(program)]

    def compare(self, larger: Program, times: int) -> None:
        """Note the dims and numbers that grow with the batch."""
        others = with_ancestors(*self.ends_in(larger))
        if len(self.forward) != len(others):
            raise Unproved(self.ends[0], _OTHERWISE)
        for node, other in zip(self.forward, others, strict=True):
            small, large = node.meta.get("val"), other.meta.get("val")
            if node.op != other.op or (node.op == "call_function" and node.target != other.target):
                raise Unproved(node, _OTHERWISE)
            if isinstance(small, Tensor) and small.dim() != getattr(large, "ndim", -1):
                raise Unproved(node, _OTHERWISE)
            if any(is_number(value) and value != other.kwargs.get(key) for key, value in node.kwargs.items()):
                raise Unproved(node, "uses a number that grows with the batch")
            self.grown[node] = growing_dims(small, large)
            if grows_unevenly(small, large, times):
                self.uneven.add(node)
            for place, power in growing_numbers((self.program, node), (larger, other), times):
                self.literal_powers[node, place] = power
        inputs = {node: None for node in self.forward if node in self.kinds and self.grown[node]}
        self.places = Places(self.program, self.grown, inputs.keys())
        self.samples = min((node.meta["val"].shape[self.grown[node][0]] for node in inputs), default=0)

    def loss_share(self) -> Share:
        """What a part's loss is to the whole batch's."""
        while True:
            try:
                share = self._walked()
            except Again:
                continue
            if share.holds is Holds.TOTAL and share.power not in (0, 1):
                raise Unproved(self.ends[0], "is divided by the number of samples more than once")
            return share

    def _walked(self) -> Share:
        for node in self.forward:
            self.visit(node)
        return self.shares[self.ends[0]]

    def visit(self, node: fx.Node) -> None:
        """Find the share of a node whose operands' shares are known."""
        item = self.kinds.get(node)
        if item is None:
            self._inherit(node)
            self.shares[node] = self.share_of(node) if node not in self.counts else self._counted(node)
            return
        holds_samples = item.kind is InputKind.INPUT and bool(node.meta["val"].dim())
        self._note_blocks(node)
        self.shares[node] = SAMPLES if holds_samples else SAME
        if item.kind is InputKind.PARAMETER and item.name in self.trained:
            self.learned.add(node)
        if item.name in self.updated:
            self.late.add(node)

    def _counted(self, node: fx.Node) -> Share:
        return SAMPLES if node.target in NLL_BACKWARD else SAME

    def _note_blocks(self, node: fx.Node) -> None:
        if len(self.grown[node]) == 1:
            self.blocks[node] = find_blocks(node, self.samples, self.grown.__getitem__, self.blocks.get)

    def _inherit(self, node: fx.Node) -> None:
        for marks in (self.learned, self.late):
            if any(source in marks for source in node.all_input_nodes):
                marks.add(node)
        if is_random(node):
            self.late.add(node)

    def share_of(self, node: fx.Node) -> Share:
        """The share of what is computed, from those of its operands."""
        self._note_blocks(node)
        given = [self.shares[source] for source in node.all_input_nodes]
        grown = self.grown[node]
        if len(grown) > 1 or mixes_samples(node, self.grown):
            raise Unproved(node, "compares samples of one part with each other")
        self.check_numbers(node)
        if node in self.uneven or takes_some_samples(node, self.grown.__getitem__, self.blocks.get):
            raise Unproved(node, "takes samples of one part by their places")
        if reason := self.places.reason_against(node):
            raise Unproved(node, reason)
        if not isinstance(node.meta.get("val"), Tensor):  # each of several results is looked at by itself
            return self._several(node, given)
        if node.target is operator.getitem and not grown and SAMPLES in given:
            return self._element(node)
        if operator_name(node.target) in LIKE:
            return Share(Holds.SAMPLES if grown else Holds.SAME, self._filled_power(node))
        if grown:
            self.make_whole(node)
            return Share(Holds.SAMPLES, self._power(node))
        if any(share.holds is Holds.SAMPLES for share in given):
            return self._added_up(node)
        if any(share.holds is Holds.TOTAL for share in given):
            return self._of_totals(node)
        return Share(Holds.SAME, self._power(node))

    def check_numbers(self, node: fx.Node, counted: frozenset[Any] = frozenset(MULTIPLIES | DIVIDES)) -> None:
        """Refuse numbers that grow with the batch but as sizes, and in what is `counted`."""
        if not node.all_input_nodes or node.target in counted or operator_name(node.target) in SIZED | LIKE:
            return
        if any((node, place) in self.literal_powers for place in range(len(node.args))):
            raise Unproved(node, "uses a number that grows with the batch")

    def _several(self, node: fx.Node, given: list[Share]) -> Share:
        """An operator with several results: their common share, if they have one."""
        if any(share.holds is Holds.SAMPLES for share in given):
            self.make_whole(node)
            return Share(Holds.SAMPLES, self._power(node))
        if any(share.holds is Holds.TOTAL for share in given):
            return self._of_totals(node)
        return Share(Holds.SAME, self._power(node))

    def _element(self, node: fx.Node) -> Share:
        """A result without samples of an operator on samples."""
        source: Any = node.args[0]
        if is_mean(node):
            return Share(Holds.TOTAL, 1)
        if source.target not in NLL_BACKWARD:
            raise Unproved(source, "reduces the samples of one part")
        reduction = arguments(source)["reduction"]
        if node.args[1] == 1 or reduction == BY_SUM:
            return Share(Holds.TOTAL)
        if self.micro_batches and arguments(source)["target"] in self.late:
            raise Unproved(source, "counts what is known only when a micro-batch has run")
        self.counts[source] = 1
        return Share(Holds.TOTAL, 1)

    def _added_up(self, node: fx.Node) -> Share:
        """Samples reduced to what has no dim of samples left."""
        self.make_whole(node)
        power, name, given = self._power_of_inputs(node), operator_name(node.target), arguments(node)
        if name == "mean" or given.get("reduction") == BY_MEAN:
            return Share(Holds.TOTAL, power + 1)
        adds = name in ("sum", "count_nonzero") or given.get("reduction") == BY_SUM or node.target in _PRODUCTS
        if adds or counts_groups(node, set(self.forward)):
            return Share(Holds.TOTAL, power)
        raise Unproved(node, "reduces the samples of one part")

    def _of_totals(self, node: fx.Node) -> Share:
        """What becomes of totals: totals again as long as nothing but sums and factors come to them."""
        if node.target in MULTIPLIES | DIVIDES and self._is_factor(node, 1):
            return Share(Holds.TOTAL, self._power(node))
        if node.target in MULTIPLIES and self._is_factor(node, 0):
            return Share(Holds.TOTAL, self._power(node))
        if node.target in ADDS or operator_name(node.target) in _LINEAR:
            return Share(Holds.TOTAL, self._sum_power(node))
        self.make_whole(node)
        return SAME

    def _is_factor(self, node: fx.Node, place: int) -> bool:
        """Whether an argument is, or can be counted to be, the same for all parts."""
        operand = node.args[place]
        if not isinstance(operand, fx.Node):
            return True
        if self._can_be_whole(operand):
            self._count(operand)
        return self.shares[operand].holds is Holds.SAME

    def _can_be_whole(self, node: fx.Node) -> bool:
        share = self.shares[node]
        known_early = node not in self.late or not self.micro_batches
        return share.holds is Holds.TOTAL and node not in self.learned and known_early and share.power in (0, 1)

    def make_whole(self, node: fx.Node) -> None:
        """Have the totals that a node uses counted over the whole batch; refuse it if that cannot be."""
        own = ends_of_groups(node)
        for source in node.all_input_nodes:
            if self.shares[source].holds is Holds.TOTAL and source is not own:
                if not self._can_be_whole(source):
                    raise Unproved(node, "uses a total over the samples of one part")
                self._count(source)

    def _count(self, node: fx.Node) -> None:
        self.counts[node] = self.shares[node].power
        raise Again

    def _power(self, node: fx.Node) -> int:
        """The power of a product is the sum of its factors'; nothing else mixes powers."""
        if node.target in MULTIPLIES:
            return self._operand_power(node, 0) + self._operand_power(node, 1) + (node in self.scaled)
        if node.target in DIVIDES:
            return self._operand_power(node, 0) - self._operand_power(node, 1) + (node in self.scaled)
        if is_place(node):
            return 0
        if node.target in ADDS or operator_name(node.target) in _LINEAR:
            return self._sum_power(node)
        if orders(node):
            return self.shares[node.all_input_nodes[0]].power
        return self._power_of_inputs(node)

    def _operand_power(self, node: fx.Node, place: int) -> int:
        operand = node.args[place]
        return self.shares[operand].power if isinstance(operand, fx.Node) else self._literal_power(node, place)

    def _literal_power(self, node: fx.Node, place: int) -> int:
        power = self.literal_powers.get((node, place), 0)
        if power == NO_POWER:
            raise Unproved(node, "uses a number that grows with the batch")
        return power

    def _power_of_inputs(self, node: fx.Node) -> int:
        """For operators that are not linear: nothing that they use may be short of a factor."""
        if node.target in _PRODUCTS or operator_name(node.target) in _LINEAR:
            return sum(self.shares[source].power for source in node.all_input_nodes)
        if any(self.shares[source].power for source in node.all_input_nodes):
            raise Unproved(node, "uses a number that grows with the batch")
        if node.all_input_nodes:
            return 0
        if operator_name(node.target) in FILLS:
            return self._filled_power(node)
        return 0 if self.grown[node] else self._literal_power(node, 0)

    def _filled_power(self, node: fx.Node) -> int:
        """The power of the number that a value is filled with."""
        place = FILLS.get(operator_name(node.target))
        return 0 if place is None else self._literal_power(node, place)

    def _sum_power(self, node: fx.Node) -> int:
        """The power that all terms of a sum have, made alike if possible; a number may be added to a mean only."""
        terms = [source for source in terms_of(node) if not is_zero(source)]
        parts = [term for term in terms if self.shares[term].holds is not Holds.SAME]
        powers = {self.shares[term].power for term in parts or terms}
        if powers == {0, 1}:
            for term in parts:
                self._raise_power(term)
            raise Again
        if len(powers) > 1 or (parts and any(self.shares[term].power for term in terms if term not in parts)):
            raise Unproved(node, "uses a number that grows with the batch")
        power = next(iter(powers), 0)
        is_total = any(self.shares[part].holds is Holds.TOTAL for part in parts)
        if parts and power != is_total and (len(parts) < len(terms) or adds_a_number(node)):
            raise Unproved(node, "adds a number to a sum over samples")
        return power

    def _raise_power(self, node: fx.Node) -> None:
        """Make a sum of parts a mean of them: scale a factor that is not trained, where it comes in, and backward."""
        share = self.shares[node]
        if share.power or share.holds is Holds.SAME or is_zero(node):
            return
        if (place := self._free_factor(node)) is not None:
            self._scale(node, place)
        elif node.target in ADDS or operator_name(node.target) in _LINEAR:
            for source in terms_of(node):
                self._raise_power(source)
        elif node.target in MULTIPLIES | DIVIDES:
            self._raise_power(next(term for term in terms_of(node) if self.shares[term].holds is not Holds.SAME))
        else:
            raise Unproved(node, "is a sum over samples, added to a mean of them")

    def _free_factor(self, node: fx.Node) -> int | None:
        """The argument of a product or quotient that no gradient is asked for, where the other depends on what is."""
        if node.target not in MULTIPLIES | DIVIDES:
            return None
        for place, other in ((1, 0),) if node.target in DIVIDES else ((1, 0), (0, 1)):
            factor, value = node.args[place], node.args[other]
            if isinstance(factor, fx.Node) and factor not in self.learned and value in self.learned:
                return place
        return None

    def _scale(self, node: fx.Node, place: int) -> None:
        factor: Any = node.args[place]
        forward = set(self.forward)
        for user in factor.users:
            if user in forward and user is not node and user in self.learned:
                raise Unproved(user, "shares a factor with a sum over samples that is added to a mean of them")
            if user is node or (user not in forward and user.target in MULTIPLIES | DIVIDES):
                self.scaled[user] = place if user is node else user.args.index(factor)

    def mark(self) -> None:
        """Mark the nodes that are to be counted and scaled."""
        for number, (node, power) in enumerate(self.counts.items()):
            node.meta[COUNT] = number, power
        for node, place in self.scaled.items():
            node.meta[SCALED] = place

    def is_shared_number(self, kind: InputKind, node: fx.Node) -> bool:
        """Whether an input is a number that the loss depends on."""
        return kind is InputKind.INPUT and node in self.shares and not node.meta["val"].dim()


def loss_node(program: Program) -> fx.Node:
    """The loss among the results of a program."""
    return next(value for out, value in program.named_results() if out.kind is OutputKind.LOSS)


def terms_of(node: fx.Node) -> list[fx.Node]:
    """What a linear operator puts together: its first argument or list of them; not what it is steered by."""
    if operator_name(node.target) == "copy":
        return [node.args[1]]  # type: ignore[list-item]
    if operator_name(node.target) == "where":
        return [value for value in node.args[1:] if isinstance(value, fx.Node)]
    if node.target is _aten.masked_fill.Tensor:
        return [node.args[0], node.args[2]]  # type: ignore[list-item]
    if node.target in ADDS | MULTIPLIES | DIVIDES:
        return [value for value in node.args[:2] if isinstance(value, fx.Node)]
    first = node.args[0]
    return [value for value in first if isinstance(value, fx.Node)] if isinstance(first, (list, tuple)) else [first]  # type: ignore[list-item]


def is_zero(node: fx.Node) -> bool:
    place = FILLS.get(operator_name(node.target))
    return node.target in _ZEROS or (place is not None and bool(node.args[place] == 0))


def adds_a_number(node: fx.Node) -> bool:
    """Whether a sum has a term, or a value a filling, that is a number other than zero."""
    if operator_name(node.target) in ("masked_fill", "constant_pad_nd"):
        filling = arguments(node)["value"]
        return is_number(filling) and bool(filling != 0)
    return node.target in ADDS and is_number(node.args[1]) and bool(node.args[1] != 0)
