"""The local program: every value becomes its part, every disagreement a collective, every size argument a local one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.operators import by_name, defaults_of
from crossfade.graph.private import schema_of
from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.builder import Builder
from crossfade.shard.tensor.factors import Decision
from crossfade.shard.tensor.placements import REPLICATE, Partial, Placement, Replicate, Shard, local_size, units_each
from crossfade.shard.tensor.propagate import Propagated, tensor_operands

aten = torch.ops.aten


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
        kept = whole.meta["val"] is source.meta["val"]
        made = self.builder.described_call(
            operator.getitem, (whole, node.args[1]), {}, node.meta["val"] if kept else None
        )
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
            target = node.target
            if target is aten.view.default and isinstance(decision.results[0], Shard):
                target = aten.reshape.default  # a part may lie otherwise than the whole does
            made = self.builder.described_call(target, args, kwargs, self._known(node, tensors, local, decision))
        results: Any = decision.results
        several = isinstance(node.meta.get("val"), (tuple, list))
        self._keep(node, results if several else (results[0] if results else REPLICATE), made)
        if not several and results:
            self._brought(node)

    def _known(self, node: fx.Node, tensors: list[fx.Node], local: list[fx.Node], decision: Decision) -> Any:
        """The description of a result where it need not be found by running: of symbolic sizes that is slow."""
        value = node.meta.get("val")
        if not isinstance(value, (Tensor, tuple, list)):
            return value  # a number read from a tensor: the same symbol, not another
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
            return builder.moved(conjugate.gather_enter if enters else conjugate.gather, local, given, value)
        if whole is None and isinstance(given, Partial) and isinstance(want, Shard) and not want.sizes:
            return builder.moved(conjugate.scatter, local, want, value)
        if whole is None:
            whole = forms[REPLICATE] = self._convert(forms, REPLICATE, value, False)
        if isinstance(want, Partial):
            return builder.call(conjugate.share, whole, builder.rank())
        return builder.moved(conjugate.split, whole, want, value)

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


_ASKED = (aten.sym_size.int, aten._assert_tensor_metadata.default, aten.sym_numel.default)
