"""Sizes of a batch as symbols, so that one program runs on batches of many sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossfade.capture.divide_batch import BatchLayout, is_split
from crossfade.graph.private import conditions_on_sizes, range_of_size, symbolic_size, tree_flatten
from crossfade.graph.strides import plain_strides

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SymbolicSizes:
    """The sizes of each tensor of a micro-batch, numbers and symbols, and what each symbol was when they were chosen.

    Dims share a symbol if they had the same size in all batches that were seen; samples have their own.

        >>> seen = [((8, 16), (8, 16)), ((8, 24), (8, 24))]
        >>> SymbolicSizes.that_vary(seen).shapes
        ((8, 's0'), (8, 's0'))
        >>> SymbolicSizes.that_vary([*seen, ((4, 24), (4, 20))]).shapes
        (('s0', 's1'), ('s0', 's2'))
        >>> SymbolicSizes.that_vary([((8, 16), (8,))], every=True).shapes
        (('s0', 's1'), ('s0',))
    """

    shapes: tuple[tuple[int | str, ...], ...]
    hints: Mapping[str, int]

    @classmethod
    def that_vary(
        cls,
        seen: Sequence[Sequence[Shape]],
        part: Sequence[Shape] | None = None,
        *,
        every: bool = False,
        samples: bool = False,
    ) -> SymbolicSizes:
        """Symbols for the sizes that differ between batches, of which the last is at hand; or for `every` size.

        With `samples` also for the number of samples. What is captured is a `part` of a batch, with fewer samples. A
        size below 2 stays a number: torch computes with these in other ways.
        """
        names: dict[Any, str] = {}
        hints: dict[str, int] = {}
        shapes = []
        for tensor, shape in enumerate(seen[-1] if part is None else part):
            found: list[int | str] = []
            for dim, size in enumerate(shape):
                column = tuple(batch[tensor][dim] for batch in seen)
                varies = every or len(set(column)) > 1 or (samples and dim == 0)
                if not varies or size < 2:
                    found.append(size)
                    continue
                found.append(name := names.setdefault((dim == 0, column), f"s{len(names)}"))
                hints[name] = size
            shapes.append(tuple(found))
        return cls(tuple(shapes), hints)

    @property
    def samples(self) -> str | None:
        """The symbol of the number of samples, if that is one."""
        return next((shape[0] for shape in self.shapes if shape and isinstance(shape[0], str)), None)

    def fixed(self, symbols: Mapping[str, int]) -> SymbolicSizes:
        """The same with numbers in place of some symbols."""
        shapes = tuple(
            tuple(symbols.get(size, size) if isinstance(size, str) else size for size in shape) for shape in self.shapes
        )
        return SymbolicSizes(shapes, {name: hint for name, hint in self.hints.items() if name not in symbols})

    def times_as_many(self, times: int) -> SymbolicSizes:
        """The same for batches of so many times the samples, where their number is no symbol."""
        larger = [
            (shape[0] * times, *shape[1:]) if shape and isinstance(shape[0], int) else shape for shape in self.shapes
        ]
        return SymbolicSizes(tuple(larger), self.hints)

    def fakes(self, mode: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors without data of these sizes."""
        symbols = {name: symbolic_size(mode.shape_env, name, hint) for name, hint in self.hints.items()}
        with mode:
            return [
                torch.zeros(
                    [symbols[s] if isinstance(s, str) else s for s in shape], dtype=like.dtype, device=like.device
                )
                for shape, like in zip(self.shapes, tensors, strict=True)
            ]

    def bound(self, shapes: Sequence[Shape]) -> dict[str, int] | None:
        """What each symbol is for a batch of these sizes; None if they do not fit."""
        values: dict[str, int] = {}
        for wanted, shape in zip(self.shapes, shapes, strict=True):
            for name, size in zip(wanted, shape, strict=True):
                if (values.setdefault(name, size) if isinstance(name, str) else name) != size:
                    return None
        return values


@dataclass
class SymbolicCapture:
    """The sizes that one capture is to leave open, less those that the model turned out to fix, and where it did."""

    sizes: SymbolicSizes
    lines: dict[str, str] = field(default_factory=dict)
    """The line of the user's code that asked for each condition, by its text."""
    fixed: list[str] = field(default_factory=list)
    """What the model fixes, in words."""

    def fix(self, known: Mapping[str, int]) -> None:
        """Let symbols be numbers."""
        self.fixed += [f"a size of {number}{self._line_about(name, number)}" for name, number in known.items()]
        self.sizes = self.sizes.fixed(known)

    def _line_about(self, name: str, number: int) -> str:
        """The line that fixed a size, or else the first that asked anything about it."""
        about = [line for text, line in self.lines.items() if name in re.findall(r"\w+", text)]
        return self.lines.get(f"Eq({name}, {number})", about[0] if about else "")


@dataclass(frozen=True)
class Guard:
    """A condition on symbols, as a sympy expression, and the line of the user's code that asked for it."""

    condition: Any
    where: str

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it holds for these values."""
        import sympy

        known = {symbol: sympy.Integer(values[str(symbol)]) for symbol in self.condition.free_symbols}
        return bool(self.condition.xreplace(known))


@dataclass(frozen=True)
class FittingSizes:
    """Which batches a captured program is right for: its sizes, and the conditions that tracing met on the way.

    `at_once` is how many parts as large as one rank's micro-batch the whole batch has: what is compared with one device
    must be computed alike on all of them.
    """

    sizes: SymbolicSizes
    guards: tuple[Guard, ...]
    ranges: Mapping[str, tuple[int, int]]
    at_once: int = 1

    @classmethod
    def of(cls, sizes: SymbolicSizes, mode: Any, at_once: int, where: Mapping[str, str]) -> FittingSizes:
        """What holds for a program whose tracing and passes are over; `where` has the lines of conditions by text."""
        guards = [
            Guard(condition, where.get(str(condition), ""))
            for condition in conditions_on_sizes(mode)
            if all(str(symbol) in sizes.hints for symbol in condition.free_symbols)
        ]
        return cls(sizes, tuple(guards), {name: range_of_size(mode, name) for name in sizes.hints}, at_once)

    def why_not(self, shapes: Sequence[Shape]) -> str:
        """Why a micro-batch of these sizes needs another program; empty if this one is right for it."""
        values = self.sizes.bound(shapes)
        if values is None:
            return "sizes that were the same so far"
        samples = self.sizes.samples
        larger = {**values, samples: values[samples] * self.at_once} if samples is not None else values
        for chosen in (values, larger):
            for guard in self.guards:
                if not guard.holds(chosen):
                    return f"{guard.condition}, assumed{guard.where}, does not hold"
            for name, (low, high) in self.ranges.items():
                if not low <= chosen[name] <= high:
                    return f"a size of {chosen[name]}, where {low} to {high} was assumed"
        return ""


def micro_batch_shapes(batch: tuple[Any, ...], layout: BatchLayout) -> tuple[Shape, ...]:
    """The sizes of one rank's micro-batch of each tensor.

    >>> batch = torch.ones(8, 3), torch.ones(())
    >>> micro_batch_shapes(batch, BatchLayout.of(batch, ranks=2, accumulate=2, given="global"))
    ((2, 3), ())
    """
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return tuple(
        (tensor.shape[0] * layout.micro_batch_size // layout.size, *tensor.shape[1:]) if is_split(tensor) else ()
        for tensor in tensors
    )


def is_plain(batch: tuple[Any, ...]) -> bool:
    """Whether all tensors of a batch lie in memory in the order of their dims."""
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return all(tensor.stride() == plain_strides(tensor.shape) for tensor in tensors)
