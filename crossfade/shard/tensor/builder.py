"""Makes the nodes of a local program: calls, parts' descriptions, and the ways between a part and the whole."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from crossfade.errors import PlanError
from crossfade.graph.private import FakeTensorMode, size_expression
from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.devices import like
from crossfade.shard.tensor.placements import Placement, Shard, block_sizes, is_multiple, local_size, units_each

RANK = "crossfade_rank"
"""The name of the buffer that tells a rank its index on the axis: all else in the program is alike on all ranks."""

aten = torch.ops.aten

_CUTS = (conjugate.split, conjugate.scatter)
"""What takes a part of a whole value."""


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

    def whole_size(self, local: fx.Node, value: Tensor, split: Shard, dim: int) -> Any:
        """The size of a whole value's dim: a number, or asked of a part where it is open."""
        if isinstance(value.shape[dim], int):
            return value.shape[dim]
        size = self.call(aten.sym_size.int, local, dim)
        return self.call(operator.mul, size, self.ranks) if dim == split.dim else size

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

    def moved(self, collective: Any, local: fx.Node, shard: Any, value: Any) -> fx.Node:
        """A value brought from or to a split; `value` describes the whole of it."""
        if isinstance(shard, Shard) and shard.sizes:
            return self._moved_by_blocks(collective, local, shard, value)
        if shard.units:
            return self._moved_padded(collective, local, shard, value)
        outer = self._blocks_of(local, shard)
        return self.call(collective, local, shard.dim, outer, self.rank(), self.ranks, self.group)

    def _moved_padded(self, collective: Any, local: fx.Node, shard: Shard, value: Any) -> fx.Node:
        """Blocks that do not divide: padded before they are cut, and cut off after they are put together."""
        dim = shard.dim
        apart = shard.outer != 1
        if apart:
            blocks = self._blocks_of(local, shard)
            local = self.call(aten.unflatten.int, local, dim, [blocks, -1])
            dim += 1
        size = int(sympy.cancel(size_expression(value.shape[shard.dim]) / size_expression(shard.outer)))
        lacking = local_size(replace(shard, outer=1), size, self.ranks) * self.ranks - size
        if collective in _CUTS:
            behind = local.meta["val"].dim() - 1 - dim
            local = self.call(aten.constant_pad_nd.default, local, [*([0, 0] * behind), 0, lacking])
        local = self.call(collective, local, dim, 1, self.rank(), self.ranks, self.group)
        if collective not in _CUTS:
            local = self.call(aten.slice.Tensor, local, dim, 0, size)
        return self.call(aten.flatten.using_ints, local, dim - 1, dim) if apart else local

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
        size = self.call(aten.sym_size.int, local, shard.dim)
        return self.call(operator.floordiv, size, int(step))

    def _moved_by_blocks(self, collective: Any, local: fx.Node, shard: Shard, value: Any) -> fx.Node:
        """Blocks of different sizes, one by one."""
        sizes = [size if collective in _CUTS else local_size(shard, size, self.ranks) for size in shard.sizes]
        pieces = self.call(aten.split_with_sizes.default, local, sizes, shard.dim)
        moved = []
        for index, size in enumerate(shard.sizes):
            piece = self.call(operator.getitem, pieces, index)
            block = value.narrow(shard.dim, 0, size)
            moved.append(self.moved(collective, piece, Shard(shard.dim, units=shard.units), block))
        return self.call(aten.cat.default, moved, shard.dim)
