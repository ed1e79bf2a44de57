"""Products that could be one product."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from crossfade.cost.machine import Machine
from crossfade.graph.changed_strides import Strides, replace_strided
from crossfade.graph.contraction import Contraction
from crossfade.graph.effects import alias_roots, written_owners
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.private import has_schema, schema_of, statically_equal
from crossfade.graph.program import Program
from crossfade.graph.splice import insert_call
from crossfade.simplify.products import (
    VIEW,
    WORTH_IT,
    CallCost,
    CostComparison,
    copy_of,
    product_of_sizes,
    sizes_of,
)

_aten = torch.ops.aten
_ACROSS: dict[Any, int] = {_aten.mm.default: 1, _aten.addmm.default: 1, _aten.linear.default: 0}
"""Products by their operator: the dim of the weight that has one place for each column of the result."""


@dataclass(frozen=True)
class GroupLinears(Pass):
    """Make products of one input one product by all their weights, and small ones of one shape a batch of products.

    Weights are concatenated at every run, which costs reading and writing them; with `folds_constants`, those that are
    constants count as concatenated beforehand. With a `machine`, groups are formed where all of that is faster there;
    without one, where it needs no more bytes and no more calls, and nothing is batched. Only products that do not need
    one another are put together. Results that the program returns keep memory of their own. Sums may be taken in
    another order.

    Not in a default pipeline: concatenating weights at every step seldom pays in training. For inference, where q, k
    and v share an input: `simplification().after("simplify-nodes", GroupLinears())`.

    Also known as: Inductor's `group_batch_fusion`; XLA's `dot-merger`; Megatron's fused `linear_qkv`.

    Before:
        x: f32[64, 8] = input("x")
        q: f32[8, 2] = parameter("q")
        k: f32[8, 2] = parameter("k")
        v: f32[8, 2] = parameter("v")
        mm: f32[64, 2] = aten.mm(x, q)
        mm_1: f32[64, 2] = aten.mm(x, k)
        mm_2: f32[64, 2] = aten.mm(x, v)
        mul: f32[64, 2] = aten.mul.Tensor(mm, mm_1)
        add: f32[64, 2] = aten.add.Tensor(mul, mm_2)
        return output("y", add)

    After:
        x: f32[64, 8] = input("x")
        q: f32[8, 2] = parameter("q")
        k: f32[8, 2] = parameter("k")
        v: f32[8, 2] = parameter("v")
        cat: f32[8, 6] = aten.cat([q, k, v], 1)
        mm_3: f32[64, 6] = aten.mm(x, cat)
        split_with_sizes: (f32[64, 2], f32[64, 2], f32[64, 2]) = aten.split_with_sizes(mm_3, [2, 2, 2], 1)
        getitem: f32[64, 2] = split_with_sizes[0]
        getitem_1: f32[64, 2] = split_with_sizes[1]
        getitem_2: f32[64, 2] = split_with_sizes[2]
        mul: f32[64, 2] = aten.mul.Tensor(getitem, getitem_1)
        add: f32[64, 2] = aten.add.Tensor(mul, getitem_2)
        return output("y", add)
    """

    name = "group-linears"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()
    folds_constants: bool = False

    def run(self, program: Program) -> PassResult:
        """First the products of one input, then, on what is left, those of one shape."""
        verdicts: list[Verdict] = []
        counts = {"concatenated": self._group(program, _of_one_input, Concatenation, verdicts)}
        if self.machine is not None:
            counts["batched"] = self._group(program, self._of_one_shape, Batch, verdicts)
        return PassResult(any(counts.values()), counts, tuple(verdicts))

    def _group(self, program: Program, key: Any, form: type[Group], verdicts: list[Verdict]) -> int:
        order = _StrictOrder(program.graph)
        candidates = _candidates(program, order.nodes, key, verdicts)
        formed, strides = [], Strides(program)
        for members in _independent(order, candidates):
            group = form(tuple(members), self.folds_constants)
            if (verdict := self._verdict(group, strides)).outcome is Outcome.FUSED:
                formed.append(group)
            verdicts.append(verdict)
        if formed:
            _bring_together(program, order, formed)
            for group in formed:
                group.refreshed().carry_out(program)
        return sum(len(group.members) for group in formed)

    def _verdict(self, group: Group, strides: Strides) -> Verdict:
        first = group.members[0].node
        if len(group.members) == 1:
            return Verdict.of(first, Outcome.LEFT, "it needs the result of another one like it")
        numbers = f"{len(group.members)} products: {group.compared().on(self.machine)}"
        reason = group.compared().reason_against(self.machine) or group.seen_difference(strides)
        if reason is not None:
            return Verdict.of(first, Outcome.LEFT, reason, detail=numbers)
        return Verdict.of(first, Outcome.FUSED, group.why, detail=numbers)

    def _of_one_shape(self, linear: Linear) -> Hashable:
        """What products in a batch have in common; None for those that no batch would make faster."""
        assert self.machine is not None
        if linear.node.target is not _aten.mm.default or not all(type(n) is int for n in (*linear.shape, linear.inner)):
            return None
        alone = linear.call()
        share = CallCost(alone.flops, alone.bytes + copy_of(linear.input, linear.weight).bytes, alone.dtype)
        if share.seconds(self.machine) - self.machine.overhead > WORTH_IT * alone.seconds(self.machine):
            return None
        return *linear.shape, linear.inner, linear.like


@dataclass(frozen=True)
class Linear:
    """A product: its call, what is multiplied by which weight, and what is added."""

    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> Linear | None:
        """The product that a node is, if it is a plain one: unscaled, its bias one number for each column."""
        if node.op != "call_function" or node.target not in _ACROSS:
            return None
        given = arguments(node)
        if node.target is _aten.mm.default:
            return cls(node, given["self"], given["mat2"], None)
        if node.target is _aten.linear.default:
            found = cls(node, given["input"], given["weight"], given["bias"])
            return found if found.weight.meta["val"].dim() == 2 else None
        plain = given["beta"] == 1 and given["alpha"] == 1
        found = cls(node, given["mat1"], given["mat2"], given["self"])
        return found if plain and statically_equal(tuple(given["self"].meta["val"].shape), (found.columns,)) else None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of the result, as the metadata has them."""
        return tuple(self.node.meta["val"].shape)

    @property
    def inner(self) -> Any:
        """How many products each sum has."""
        return self.input.meta["val"].shape[-1]

    @property
    def columns(self) -> Any:
        """How many columns the result has."""
        return self.weight.meta["val"].shape[_ACROSS[self.node.target]]

    @property
    def like(self) -> Hashable:
        """What products must have in common to become one, beside their input or sizes."""
        value = self.weight.meta["val"]
        return self.node.target, self.bias is None, value.dtype, value.device

    def call(self) -> CallCost:
        """What it costs."""
        *rows, columns = sizes_of(self.node)
        return product_of_sizes(math.prod(rows), sizes_of(self.input)[-1], columns, self.node.meta["val"])


@dataclass(frozen=True)
class Group:
    """Products to be made one."""

    members: tuple[Linear, ...]
    folds_constants: bool

    why: ClassVar[str]

    def compared(self) -> CostComparison:
        """The products apart, and as one."""
        return CostComparison(tuple(member.call() for member in self.members), self.calls())

    def calls(self) -> tuple[CallCost, ...]:
        """What computing all at once takes."""
        raise NotImplementedError

    def build(self, program: Program, before: fx.Node) -> fx.Node:
        """Insert the one product; return the list of its parts."""
        raise NotImplementedError

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """The members' results as parts of the one product."""
        raise NotImplementedError

    def whole_shape(self) -> tuple[Any, ...]:
        """The sizes of the one product."""
        raise NotImplementedError

    def seen_difference(self, strides: Strides) -> str | None:
        """Why the results may not be parts of one piece of memory, laid out as such."""
        with strides.program.fake_mode:
            whole = self.members[0].node.meta["val"].new_empty(self.whole_shape())
            parts = self.parts(whole)
        return strides.take({member.node: part for member, part in zip(self.members, parts, strict=True)})

    def refreshed(self) -> Group:
        """The group after others were carried out, whose results its members may read."""
        now = (Linear.of(member.node) for member in self.members)
        return replace(self, members=tuple(linear for linear in now if linear is not None))

    def carry_out(self, program: Program) -> None:
        """Replace the members, which stand together."""
        first = self.members[0].node
        parts = self.build(program, first)
        new = {
            member.node: insert_call(program, operator.getitem, parts, index, before=first, like=member.node)
            for index, member in enumerate(self.members)
        }
        replace_strided(program, new)
        for member in self.members:
            program.graph.erase_node(member.node)


class Concatenation(Group):
    """One input multiplied by all weights side by side."""

    why = "one product by all weights is cheaper"

    def calls(self) -> tuple[CallCost, ...]:
        """Copies of what is not concatenated beforehand, the product, its parts."""
        first = self.members[0]
        *rows, _ = sizes_of(first.node)
        columns = sum(sizes_of(member.node)[-1] for member in self.members)
        whole = product_of_sizes(math.prod(rows), sizes_of(first.input)[-1], columns, first.node.meta["val"])
        weights = [member.weight for member in self.members]
        biases = [member.bias for member in self.members if member.bias is not None]
        copies = [copy_of(*nodes) for nodes in (weights, biases) if nodes and not self._is_folded(nodes)]
        return (*copies, whole, VIEW)

    def _is_folded(self, nodes: list[fx.Node]) -> bool:
        return self.folds_constants and all(node.op == "get_attr" for node in nodes)

    def whole_shape(self) -> tuple[Any, ...]:
        """All columns side by side."""
        return (*self.members[0].shape[:-1], sum(member.columns for member in self.members))

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """Some columns each."""
        return torch.split(whole, [member.columns for member in self.members], dim=-1)

    def build(self, program: Program, before: fx.Node) -> fx.Node:
        """Concatenate, multiply, split."""

        def insert(target: Any, *args: Any) -> fx.Node:
            return insert_call(program, target, *args, before=before, like=before)

        first = self.members[0]
        target, weights = first.node.target, [member.weight for member in self.members]
        weight = insert(_aten.cat.default, weights, _ACROSS[target])
        biases = [member.bias for member in self.members]
        bias = insert(_aten.cat.default, biases) if first.bias is not None else None
        if target is _aten.addmm.default:
            whole = insert(target, bias, first.input, weight)
        else:
            whole = insert(target, first.input, weight, *([bias] if bias is not None else []))
        columns = [member.columns for member in self.members]
        return insert(_aten.split_with_sizes.default, whole, columns, len(first.shape) - 1)


class Batch(Group):
    """Products of one shape, stacked."""

    why = "one batch of products is faster on this machine"

    def calls(self) -> tuple[CallCost, ...]:
        """Two stacks, the batch, its parts."""
        first, count = self.members[0], len(self.members)
        inputs, weights = ([getattr(member, name) for member in self.members] for name in ("input", "weight"))
        (rows, columns), inner = sizes_of(first.node), sizes_of(first.input)[1]
        batch = product_of_sizes(rows, inner, columns, first.node.meta["val"], stack=count)
        return copy_of(*inputs), copy_of(*weights), batch, VIEW

    def whole_shape(self) -> tuple[Any, ...]:
        """One after another."""
        return (len(self.members), *self.members[0].shape)

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """One matrix each."""
        return torch.unbind(whole)

    def build(self, program: Program, before: fx.Node) -> fx.Node:
        """Stack, multiply, take apart."""

        def insert(target: Any, *args: Any) -> fx.Node:
            return insert_call(program, target, *args, before=before, like=before)

        inputs = insert(_aten.stack.default, [member.input for member in self.members])
        weights = insert(_aten.stack.default, [member.weight for member in self.members])
        whole = insert(_aten.bmm.default, inputs, weights)
        return insert(_aten.unbind.int, whole)


def _of_one_input(linear: Linear) -> Hashable:
    return (linear.input, linear.like) if type(linear.columns) is int else None


_SHOWN = "its memory is returned, written to, or looked at by strides"
_READS_WRITTEN = "what it reads is written to"


def _candidates(
    program: Program, nodes: list[fx.Node], key: Any, verdicts: list[Verdict]
) -> dict[fx.Node, tuple[Hashable, Linear]]:
    """Products that share their key with another one and whose memory nothing looks at, by node."""
    roots = alias_roots(nodes)
    written = written_owners(nodes, roots)
    shown = {roots[value] for value in program.results if isinstance(value, fx.Node)} | written
    shown |= {roots[source] for node in nodes if _goes_by_strides(node.target) for source in node.all_input_nodes}
    found: dict[fx.Node, tuple[Hashable, Linear]] = {}
    for node in nodes:
        linear = Linear.of(node)
        if linear is not None and (shared := key(linear)) is not None:
            found[node] = shared, linear
    for node in _not_alone(found):
        seen = _SHOWN if node in shown else None
        reads = _READS_WRITTEN if any(roots[source] in written for source in node.all_input_nodes) else None
        if (reason := seen or reads) is not None:
            verdicts.append(Verdict.of(node, Outcome.LEFT, reason))
            del found[node]
    return _not_alone(found)


def _not_alone(found: dict[fx.Node, tuple[Hashable, Linear]]) -> dict[fx.Node, tuple[Hashable, Linear]]:
    """Those that share their key with another one."""
    count = Counter(shared for shared, _ in found.values())
    return {node: entry for node, entry in found.items() if count[entry[0]] > 1}


@remembered
def _goes_by_strides(target: Any) -> bool:
    """Whether an operator looks at memory beyond the value it is given, or asks where in memory that lies."""
    name = schema_of(target).name if has_schema(target) else ""
    return "as_strided" in name or "storage_offset" in name


def _independent(order: Order, candidates: dict[fx.Node, tuple[Hashable, Linear]]) -> list[list[Linear]]:
    """The candidates of each key in groups in which none needs another, not even through other groups."""
    units, current = Contraction(order), dict[Hashable, int]()
    groups: dict[int, list[Linear]] = {}
    for node in order.nodes:
        units.walk(node)
        if node not in candidates:
            continue
        key, linear = candidates[node]
        unit = current.get(key)
        if unit is not None and units.may_join(node, unit):
            units.join(node, unit)
        else:
            unit = current[key] = units.open(node)
        groups.setdefault(unit, []).append(linear)
    return list(groups.values())


def _bring_together(program: Program, order: Order, groups: list[Group]) -> None:
    """Let the members of each group stand side by side, below all that they need."""
    units = Contraction(order)
    head = {member.node: group.members[0].node for group in groups for member in group.members}
    for node in order.nodes:
        units.walk(node)
        if head.get(node) is node:
            units.open(node)
        elif node in head:
            units.join(node, units.unit_of[head[node]])
    reorder(program.graph, units.sorted())


class _StrictOrder(Order):
    """The order in which collectives of one group stay as they are: nothing that is put together here communicates."""

    def predecessors(self, node: fx.Node, *, within_group: bool = True) -> list[fx.Node]:
        """What must come before a node."""
        return super().predecessors(node)

    def successors(self, node: fx.Node, *, within_group: bool = True) -> list[fx.Node]:
        """What must come after a node."""
        return super().successors(node)
