"""Candidates: the ways to lay a training step over so many ranks, by mesh and by data-parallel mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crossfade.compile.pipeline import DataParallelMode
from crossfade.cost.machine import Machine
from crossfade.cost.presets import PRESETS
from crossfade.ranks.mesh import COPY_AXIS, SPLIT_AXIS, Axis, DataParallel

DATA_AXIS, TENSOR_AXIS = "dp", "tp"
_SPLITTING: tuple[DataParallelMode, ...] = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Candidate:
    """One way to lay a step over ranks, as `compile_step` is told of it."""

    mesh: Mapping[str, int] = field(hash=False)
    mode: DataParallelMode = "replicate"
    accumulate: int = 1
    keeps_whole: bool = False
    """Whether the parameters that are used first stay whole where the others are split."""
    memory_limit: int | None = None
    """Bytes within which the schedule keeps what is alive, where it needs more without."""

    @property
    def data(self) -> int:
        """The ranks that a batch is split over."""
        return math.prod(size for axis, size in self.mesh.items() if axis != TENSOR_AXIS)

    @property
    def tensor(self) -> int:
        """The ranks that the model is split over by a plan."""
        return self.mesh.get(TENSOR_AXIS, 1)

    @property
    def splits(self) -> int:
        """The ranks that parameters or the optimizer's state are split over by rows."""
        return 1 if self.mode == "replicate" else self.mesh.get(SPLIT_AXIS, self.data)

    def axes(self, backend: str) -> DataParallel | None:
        """The data-parallel axes as the first rank sees them; None where the batch is not split."""
        if self.data == 1:
            return None

        def axis(name: str, size: int) -> Axis:
            return Axis(name, tuple(range(size)), 0, backend)

        whole = axis(DATA_AXIS, self.data)
        if SPLIT_AXIS not in self.mesh:
            return DataParallel(whole, whole)
        return DataParallel(whole, axis(SPLIT_AXIS, self.mesh[SPLIT_AXIS]), axis(COPY_AXIS, self.mesh[COPY_AXIS]))

    def groups(self) -> dict[str, int]:
        """The ranks along each axis that its program communicates along."""
        found = {TENSOR_AXIS: self.tensor} if self.tensor > 1 else {}
        if self.data > 1:
            found[DATA_AXIS] = self.data
            found |= {axis: size for axis, size in self.mesh.items() if axis in (SPLIT_AXIS, COPY_AXIS)}
        return found

    def lies_on(self, machine: Machine) -> Machine:
        """The machine with a fabric for each axis, by where its ranks lie."""
        laid = machine.on_mesh(self.mesh)
        if machine.network is None or SPLIT_AXIS not in self.mesh:
            return laid
        together = {DATA_AXIS: self.data, **({TENSOR_AXIS: self.tensor} if self.tensor > 1 else {})}
        whole = machine.on_mesh(together).fabrics
        return replace(laid, fabrics={**laid.fabrics, DATA_AXIS: whole[DATA_AXIS]})

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        mode = "" if self.data == 1 else f" {self.mode}"
        whole = ", the first parameters whole" if self.keeps_whole else ""
        times = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        limited = ", within a memory limit" if self.memory_limit is not None else ""
        return f"{mesh}{mode}{whole}{times}{limited}"


def meshes(ranks: int, most_tensor: int, per_node: int | None = None) -> Iterator[dict[str, int]]:
    """The meshes of so many ranks: tensor parallelism inside nodes over at most `most_tensor`, hybrid ones where the
    split axis fits a node, or is the middle divisor where nothing is known of nodes.

    >>> list(meshes(4, 2))
    [{'dp': 4}, {'dp_replicate': 2, 'dp_shard': 2}, {'dp': 2, 'tp': 2}]
    >>> list(meshes(16, 1, per_node=8))
    [{'dp': 16}, {'dp_replicate': 2, 'dp_shard': 8}]
    """
    for tensor in _divisors(ranks):
        if tensor > most_tensor or (per_node is not None and tensor > per_node):
            continue
        data, inner = ranks // tensor, {TENSOR_AXIS: tensor} if tensor > 1 else {}
        yield {**({DATA_AXIS: data} if data > 1 else {}), **inner}
        split = [size for size in _divisors(data) if 1 < size < data]
        if per_node is not None:
            split = [size for size in split if size * tensor <= per_node][-1:]
        else:
            split = split[len(split) // 2 :][:1]
        for size in split:
            yield {COPY_AXIS: data // size, SPLIT_AXIS: size, **inner}


def modes(mesh: Mapping[str, int]) -> Iterator[tuple[DataParallelMode, bool]]:
    """The modes to try on a mesh, and whether the parameters used first stay whole.

    >>> list(modes({"dp_replicate": 2, "dp_shard": 2}))
    [('zero1', False), ('zero2', False), ('zero2', True), ('zero3', False)]
    """
    if SPLIT_AXIS not in mesh:
        yield "replicate", False
    if DATA_AXIS in mesh or SPLIT_AXIS in mesh:
        for mode in _SPLITTING:
            yield mode, False
            if mode == "zero2":
                yield mode, True


def micro_batches(samples: int, data: int) -> list[int]:
    """Into how many micro-batches a rank's part of a batch may be cut: 1, 2, 4, ..., as far as it divides.

    >>> micro_batches(24, 2), micro_batches(9, 2)
    ([1, 2, 4], [])
    """
    if samples % data:
        return []
    part, found = samples // data, [1]
    while part % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def call_text(options: Mapping[str, Any]) -> str:
    """A call of `compile_step` with these options, to paste.

    >>> print(call_text({"mesh": {"dp": 4}, "data_parallel": "zero1"}))
    step = cf.compile_step(
        model, loss_fn, optimizer,
        mesh={'dp': 4},
        data_parallel='zero1',
    )
    """
    lines = [f"    {name}={_written(value)}," for name, value in options.items()]
    return "\n".join(["step = cf.compile_step(", "    model, loss_fn, optimizer,", *lines, ")"])


def _written(value: Any) -> str:
    """A value as text: a machine that has no name of its own is the reader's variable."""
    if not isinstance(value, Machine):
        return repr(value)
    return repr(value.name) if PRESETS.get(value.name) == value else "machine"
