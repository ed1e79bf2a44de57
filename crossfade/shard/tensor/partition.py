"""The local program: every value becomes its part, every disagreement a collective, every size argument a local one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from crossfade.errors import PlanError
from crossfade.graph.operators import by_name, defaults_of
from crossfade.graph.private import FakeTensorMode, schema_of, size_expression
from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.devices import like
from crossfade.shard.tensor.factors import Decision
from crossfade.shard.tensor.placements import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    block_sizes,
    is_multiple,
    local_size,
    units_each,
)
from crossfade.shard.tensor.propagate import Propagated, tensor_operands

RANK = "crossfade_rank"
"""The name of the buffer that tells a rank its index on the axis: all else in the program is alike on all ranks."""

aten = torch.ops.aten


class Builder:
    """Makes the nodes of the local graph, each described by running it on the parts' descriptions."""

    def __init__(self, mode: FakeTensorMode, ranks: int, group: str, state: frozenset[str]) -> None:
        self.graph = fx.Graph()
        self.state = state
        self.mode, self.ranks, self.group = mode, ranks, group
        self.meta: dict[str, Any] = {}
        self._rank: fx.Node | None = None
        self._padding: dict[Any, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One call, with the provenance of the node that it stands for."""
        return self.described_call(target, args, kwargs, None)

    def described_call(self, target: Any, args: Any, kwargs: Any, known: Any) -> fx.Node:
        """A call whose result is known, or else found by running it without data."""
        node = self.graph.call_function(target, args, kwargs)
        if known is None:
            values, named = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
            with self.mode, torch.no_grad():
                known = target(*values, **named)
        node.meta = {**self.meta, "val": known}
        return node

    def placeholder(self, like: fx.Node, value: Any) -> fx.Node:
        """An input of the same name."""
        node = self.graph.placeholder(like.name)
        node.name, node.target = like.name, like.target  # a builtin's name too, which fx would change
        node.meta = {**like.meta, "val": value}
        return node

    def rank(self) -> fx.Node:
        """The input that holds this rank's index."""
        if self._rank is None:
            with self.graph.inserting_before(self._first_activation()):
                self._rank = self.graph.placeholder(f"b_{RANK}")
            with self.mode:
                self._rank.meta = {"val": torch.empty((), dtype=torch.int64, device=self._device())}
        return self._rank

    def _device(self) -> torch.device:
        """Where the program computes."""
        values = (node.meta.get("val") for node in self.graph.find_nodes(op="placeholder"))
        return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))

    def _first_activation(self) -> fx.Node:
        """Where the index goes: after all parameters and buffers, as in every exported program."""
        return next(node for node in self.graph.nodes if node.name not in self.state)

    def padding(self, shard: Shard, size: int, rank: int) -> fx.Node:
        """Which places along a padded dim of this size hold nothing, for a value of so many dims behind it."""
        key = replace(shard, dim=rank), size
        if key not in self._padding:
            places = []
            for block in block_sizes(shard, size):
                unit, each = block // shard.units, units_each(shard.units, self.ranks)
                steps = self.call(aten.arange.default, each * unit, device=self._device(), pin_memory=False)
                own = self.call(aten.floor_divide.default, steps, unit) if unit > 1 else steps
                first = self.call(aten.mul.Tensor, self.rank(), each)
                places.append(self.call(aten.ge.Scalar, self.call(aten.add.Tensor, own, first), shard.units))
            found = self.call(aten.cat.default, places) if len(places) > 1 else places[0]
            self._padding[key] = self.call(aten.view.default, found, [-1, *([1] * rank)]) if rank else found
        return self._padding[key]

    def blanked(self, local: fx.Node, shard: Shard, size: Any, fill: float = 0.0) -> fx.Node:
        """A part whose padding is zero."""
        padding = self.padding(shard, size, local.meta["val"].dim() - 1 - shard.dim)
        return self.call(aten.masked_fill.Scalar, local, padding, fill)

    @property
    def knows_rank(self) -> bool:
        """Whether the program asks for its rank."""
        return self._rank is not None

    def local(self, value: Tensor, placement: Placement) -> Tensor:
        """The description of a part: one dim shrinks, and with it the steps between whatever lies outside of it."""
        if not isinstance(placement, Shard):
            return value
        sizes, strides = list(value.shape), list(value.stride())
        step = strides[placement.dim]
        whole = step * sizes[placement.dim]
        sizes[placement.dim] = local_size(placement, sizes[placement.dim], self.ranks)
        around = [dim for dim in range(len(sizes)) if dim != placement.dim and is_multiple(strides[dim], whole)]
        for dim in around:
            padded = placement.units > 0
            strides[dim] = strides[dim] // whole * step * sizes[placement.dim] if padded else strides[dim] // self.ranks
        with self.mode:
            part = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return like(part, value)


class Partitioner:
    """Writes the local graph of a placed one, node by node."""

    def __init__(self, graph: fx.Graph, placed: Propagated, builder: Builder) -> None:
        self.old, self.placed, self.builder = graph, placed, builder
        self.forms: dict[fx.Node, dict[Any, fx.Node]] = {}
        self.scalars: dict[fx.Node, Any] = {}

    def run(self) -> None:
        """Everything but the output node."""
        for node in self.old.nodes:
            self.builder.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._keep(node, REPLICATE, self.builder.graph.get_attr(str(node.target)))
                self.forms[node][REPLICATE].meta = dict(node.meta)
            elif node.op == "call_function":
                self._call(node)

    def _placeholder(self, node: fx.Node) -> None:
        placement = self.placed.placements[node]
        value = node.meta.get("val")
        local = self.builder.local(value, placement) if isinstance(value, Tensor) else value
        made = self.builder.placeholder(node, local)
        if isinstance(value, Tensor):
            self._keep(node, placement, made)
        else:
            self.scalars[node] = made

    def _keep(self, node: fx.Node, placement: Any, made: fx.Node) -> None:
        self.forms.setdefault(node, {})[placement] = made

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.forms:
            self._element(node)
        elif node in self.placed.decisions:
            self._operator(node, self.placed.decisions[node])
        else:
            args, kwargs = self._arguments(node, iter(()), {}, set(), None)
            made = self.builder.graph.create_node("call_function", node.target, args, kwargs)
            made.meta = dict(node.meta)  # whole on every rank
            if isinstance(node.meta.get("val"), (Tensor, tuple, list)):
                self._keep(node, self.placed.placements.get(node, REPLICATE), made)
            else:
                self.scalars[node] = made

    def _element(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        (whole,) = self.forms[source].values()
        made = self.builder.call(operator.getitem, whole, node.args[1])
        held = self.placed.placements[source]
        index: Any = node.args[1]
        self._keep(node, held[index] if isinstance(held, tuple) else held, made)
        self._brought(node)

    def _operator(self, node: fx.Node, decision: Decision) -> None:
        tensors = tensor_operands(node)
        if node.target in _ASKED:
            self._question(node, tensors[0])
            return
        enters = any(isinstance(want, (Shard, Partial)) for want in decision.wants)
        local = [
            self.form(source, want, enters=enters and isinstance(want, Replicate))
            for source, want in zip(tensors, decision.wants, strict=True)
        ]
        for index in decision.blank:
            shard: Any = decision.wants[index]
            local[index] = self.builder.blanked(local[index], shard, tensors[index].meta["val"].shape[shard.dim])
        divide = dict(decision.divide)
        split = next((place for place in decision.results if isinstance(place, Shard)), None)
        args, kwargs = self._arguments(node, iter(local), divide, set(tensors), split)
        if decision.emit is not None:
            named = {**defaults_of(node.target), **by_name(node.target, args, kwargs)}
            made = decision.emit(self.builder, node, named)
        else:
            made = self.builder.described_call(node.target, args, kwargs, self._known(node, tensors, local, decision))
        results: Any = decision.results
        several = isinstance(node.meta.get("val"), (tuple, list))
        self._keep(node, results if several else (results[0] if results else REPLICATE), made)
        if not several and results:
            self._brought(node)

    def _known(self, node: fx.Node, tensors: list[fx.Node], local: list[fx.Node], decision: Decision) -> Any:
        """The description of a result where it need not be found by running: of symbolic sizes that is slow."""
        value = node.meta.get("val")
        if all(part.meta["val"] is source.meta["val"] for part, source in zip(local, tensors, strict=True)):
            return value
        if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            return self.builder.local(value, decision.results[0])
        return None

    def _question(self, node: fx.Node, source: fx.Node) -> None:
        """A size of the whole value, asked of a part: as often as there are ranks where it is split."""
        placement, local = next(iter(self.forms[source].items()))
        counts = node.target is aten.sym_numel.default
        if not counts and node.target is not aten.sym_size.int:
            if isinstance(placement, Replicate):
                self.builder.call(node.target, local, *node.args[1:], **node.kwargs)
            return  # what else is asserted of a part was asserted when the whole was traced
        made = self.builder.call(node.target, local, *node.args[1:])
        if isinstance(placement, Shard) and (counts or placement.dim == node.args[1]):
            if placement.units:
                made = self.builder.call(operator.floordiv, made, units_each(placement.units, self.builder.ranks))
            made = self.builder.call(operator.mul, made, placement.units or self.builder.ranks)
        self.scalars[node] = made

    def _brought(self, node: fx.Node) -> None:
        wanted = self.placed.brought.get(node)
        if wanted is not None:
            self.forms[node] = {wanted: self.form(node, wanted)}

    def form(self, node: fx.Node, want: Placement, *, enters: bool = False) -> fx.Node:
        """A value in the placement wanted, made once; `enters` if ranks go on to use it differently."""
        forms = self.forms[node]
        value = node.meta["val"]
        differentiable = value.dtype.is_floating_point or value.dtype.is_complex
        key: Any = (want, "enters") if enters and differentiable else want
        if key not in forms:
            forms[key] = self._convert(forms, want, value, isinstance(key, tuple))
        return forms[key]

    def _convert(self, forms: dict[Any, fx.Node], want: Placement, value: Any, enters: bool) -> fx.Node:
        builder = self.builder
        if want in forms:  # whole already, but not yet entered
            return builder.call(conjugate.enter, forms[want], builder.group)
        given, local = next(iter(forms.items()))
        whole = forms.get(REPLICATE)
        if isinstance(want, Replicate):
            if isinstance(given, Partial):
                forms[want] = builder.call(conjugate.reduce, local, "sum", builder.group)
                return builder.call(conjugate.enter, forms[want], builder.group) if enters else forms[want]
            return self._moved(conjugate.gather_enter if enters else conjugate.gather, local, given, value)
        if whole is None and isinstance(given, Partial) and isinstance(want, Shard) and not want.sizes:
            return self._moved(conjugate.scatter, local, want, value)
        if whole is None:
            whole = forms[REPLICATE] = self._convert(forms, REPLICATE, value, False)
        if isinstance(want, Partial):
            return builder.call(conjugate.share, whole, builder.rank())
        return self._moved(conjugate.split, whole, want, value)

    def _moved(self, collective: Any, local: fx.Node, shard: Any, value: Any) -> fx.Node:
        """A value brought from or to a split; `value` describes the whole of it."""
        builder = self.builder
        if isinstance(shard, Shard) and shard.sizes:
            return self._moved_by_blocks(collective, local, shard, value)
        if shard.units:
            return self._moved_padded(collective, local, shard, value)
        outer = self._blocks_of(local, shard)
        return builder.call(collective, local, shard.dim, outer, builder.rank(), builder.ranks, builder.group)

    def _moved_padded(self, collective: Any, local: fx.Node, shard: Shard, value: Any) -> fx.Node:
        """Blocks that do not divide: padded before they are cut, and cut off after they are put together."""
        builder, dim = self.builder, shard.dim
        apart = shard.outer != 1
        if apart:
            blocks = self._blocks_of(local, shard)
            local = builder.call(aten.unflatten.int, local, dim, [blocks, -1])
            dim += 1
        size = int(sympy.cancel(size_expression(value.shape[shard.dim]) / size_expression(shard.outer)))
        lacking = local_size(replace(shard, outer=1), size, builder.ranks) * builder.ranks - size
        if collective in _CUTS:
            behind = local.meta["val"].dim() - 1 - dim
            local = builder.call(aten.constant_pad_nd.default, local, [*([0, 0] * behind), 0, lacking])
        local = builder.call(collective, local, dim, 1, builder.rank(), builder.ranks, builder.group)
        if collective not in _CUTS:
            local = builder.call(aten.slice.Tensor, local, dim, 0, size)
        return builder.call(aten.flatten.using_ints, local, dim - 1, dim) if apart else local

    def _blocks_of(self, local: fx.Node, shard: Shard) -> Any:
        """How many blocks a value's split dim has: a number, or counted in the value where that is open."""
        if isinstance(shard.outer, int):
            return shard.outer
        step = sympy.cancel(size_expression(local.meta["val"].shape[shard.dim]) / shard.outer)
        if not step.is_Integer:
            raise PlanError(
                f"{local.name} is {shard} and has to be moved between ranks",
                expected="blocks of a size that is known",
                remedy="export without merging a dynamic dim with the split one, or with static sizes",
            )
        size = self.builder.call(aten.sym_size.int, local, shard.dim)
        return self.builder.call(operator.floordiv, size, int(step))

    def _moved_by_blocks(self, collective: Any, local: fx.Node, shard: Shard, value: Any) -> fx.Node:
        """Blocks of different sizes, one by one."""
        builder = self.builder
        sizes = [size if collective in _CUTS else local_size(shard, size, builder.ranks) for size in shard.sizes]
        pieces = builder.call(aten.split_with_sizes.default, local, sizes, shard.dim)
        moved = []
        for index, size in enumerate(shard.sizes):
            piece = builder.call(operator.getitem, pieces, index)
            block = value.narrow(shard.dim, 0, size)
            moved.append(self._moved(collective, piece, Shard(shard.dim, units=shard.units), block))
        return builder.call(aten.cat.default, moved, shard.dim)

    def _arguments(
        self,
        node: fx.Node,
        local: Iterator[fx.Node],
        divide: dict[str, int | None],
        tensors: set[fx.Node],
        split: Shard | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with local tensors, global scalars, and sizes along the split dim divided."""

        def mapped(source: fx.Node) -> Any:
            if source in tensors:
                return next(local)
            return self.scalars[source] if source in self.scalars else next(iter(self.forms[source].values()))

        args, kwargs = fx.map_arg((node.args, node.kwargs), mapped)
        if not divide:
            return args, kwargs
        schema = [item.name for item in schema_of(node.target).arguments]
        args = tuple(self._divided(arg, schema[index], divide, split) for index, arg in enumerate(args))
        return args, {name: self._divided(arg, name, divide, split) for name, arg in kwargs.items()}

    def _divided(self, value: Any, name: str, divide: dict[str, int | None], split: Shard | None) -> Any:
        if name not in divide:
            return value
        if isinstance(value, (tuple, list)):
            only = divide[name]
            chosen = [only is None or index == only for index in range(len(value))]
            return [self._part(item, split) if own else item for item, own in zip(value, chosen, strict=True)]
        return self._part(value, split)

    def _part(self, size: Any, split: Shard | None) -> Any:
        if isinstance(size, int):
            return size if size < 0 else local_size(split or Shard(0), size, self.builder.ranks)
        if split is not None and split.units:  # an open number of blocks
            unit = self.builder.call(operator.floordiv, size, split.units)
            return self.builder.call(operator.mul, unit, units_each(split.units, self.builder.ranks))
        return self.builder.call(operator.floordiv, size, self.builder.ranks)


_CUTS = (conjugate.split, conjugate.scatter)
"""What takes a part of a whole value."""

_ASKED = (aten.sym_size.int, aten._assert_tensor_metadata.default, aten.sym_numel.default)
