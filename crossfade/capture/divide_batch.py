"""How a user's batch is laid out: which tensors are split over ranks and micro-batches, and what one rank gets."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from crossfade.errors import BatchError
from crossfade.graph.private import tree_flatten, tree_flatten_with_path, tree_keystr
from crossfade.graph.strides import plain_strides, strides_for

BatchIs = Literal["global", "local", "uneven"]


class Keywords(NamedTuple):
    """The keyword arguments of a step, as the last element of its batch."""

    named: dict[str, Any]


def as_batch(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a step as one batch. What a tokenizer returns is taken as the dict in it.

    >>> as_batch((1, UserDict(x=2)), {"alpha": 3})
    (1, {'x': 2}, Keywords(named={'alpha': 3}))
    """
    batch = [
        dict(value) if type(value) is not Tensor and isinstance(value, UserDict) else value for value in positional
    ]
    return (*batch, Keywords(named)) if named else tuple(batch)


def arguments_of(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a batch was made of.

    >>> arguments_of((1, Keywords({"alpha": 3})))
    ((1,), {'alpha': 3})
    """
    return (batch[:-1], batch[-1].named) if batch and isinstance(batch[-1], Keywords) else (batch, {})


@dataclass(frozen=True)
class BatchLayout:
    """The structure of one batch and how it is divided. Tensors with a dim are split along dim 0, others passed on.

    With `given="global"` every rank is given the whole batch and takes its part; with `"local"`, as under a
    distributed sampler, each rank is given its own; so with `"uneven"`, whose parts may differ in size, as long as they
    do not. Micro-batch `j` of a rank is its part of micro-batch `j` of the
    whole batch, so that accumulation means the same on any number of ranks.

        >>> import torch
        >>> batch = (torch.zeros(8, 3), {"mask": torch.ones(8)})
        >>> layout = BatchLayout.of(batch, ranks=2, accumulate=2, given="global")
        >>> layout.names
        ('batch[0]', "batch[1]['mask']")
        >>> layout.micro_batch_size, layout.micro_batch_size_of_all_ranks
        (2, 4)

    A whole batch that does not divide is computed whole on every rank, as the last one of an epoch may be: that is
    exact whatever the model does with its samples. A rank's own that does not divide is one micro-batch.

        >>> layout = BatchLayout.of((torch.zeros(7, 3),), ranks=2, accumulate=2, given="global")
        >>> layout.ranks, layout.accumulate, layout.undivided
        (1, 1, '7 samples do not divide by 4 (2 data-parallel ranks times 2 micro-batches)')
    """

    spec: Any
    names: tuple[str, ...]
    size: int
    ranks: int
    accumulate: int
    given: BatchIs
    undivided: str = ""
    """Why every rank computes all that it is given at once, where the batch does not divide."""

    @classmethod
    def of(cls, batch: tuple[Any, ...], *, ranks: int, accumulate: int, given: BatchIs) -> BatchLayout:
        """Describe an example batch, refusing one that cannot be divided."""
        pairs, spec = tree_flatten_with_path(batch)
        names = tuple(f"batch{tree_keystr(path)}" for path, _ in pairs)
        sizes = {name: leaf.shape[0] for name, (_, leaf) in zip(names, pairs, strict=True) if is_split(leaf)}
        first = next(iter(sizes.values()), 0)
        layout = cls(spec, names, first, ranks, accumulate, given)
        parts = layout._parts
        if parts > 1:
            _check_common_size(sizes)
            if not layout.size:
                raise BatchError("a batch of 0 samples", expected="at least one", remedy="skip the step on all ranks")
        if layout.size % parts == 0:
            return layout
        why = f"{layout.size} samples do not divide by {parts} ({layout._parts_in_words()})"
        return replace(layout, ranks=1 if given == "global" else ranks, accumulate=1, undivided=why)

    @property
    def whole(self) -> bool:
        """Whether every rank computes the whole batch."""
        return bool(self.undivided) and self.given == "global"

    @property
    def micro_batch_size(self) -> int:
        """Samples that one rank computes at a time."""
        return self.size // self._parts

    @property
    def micro_batch_size_of_all_ranks(self) -> int:
        """Samples that all ranks together compute at a time."""
        return self.micro_batch_size * self.ranks

    def take(self, batch: tuple[Any, ...], rank: int) -> list[Tensor]:
        """This rank's part of the batch's tensors, micro-batches one after the other, laid out as they are given."""
        leaves, _ = tree_flatten(batch)
        return [self._part(leaf, rank) if is_split(leaf) else leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _part(self, tensor: Tensor, rank: int) -> Tensor:
        own = self._own_rows(tensor, rank)
        if tensor.stride() == plain_strides(tensor.shape):
            return own.reshape(-1, *tensor.shape[1:])
        rows = own.shape[0] * own.shape[1]
        strides = strides_for(tensor, rows)
        if own.shape[0] == 1 and own.stride()[1:] == strides:
            return own[0]
        like = torch.empty_strided((rows, *own.shape[2:]), strides, dtype=own.dtype, device=own.device)
        like.unflatten(0, own.shape[:2]).copy_(own)
        return like

    def _own_rows(self, tensor: Tensor, rank: int) -> Tensor:
        """A view of this rank's rows of every micro-batch."""
        if self.given != "global" or self.ranks == 1:
            return tensor.unsqueeze(0)
        return tensor.unflatten(0, (self.accumulate, self.ranks, self.micro_batch_size))[:, rank]

    @property
    def _parts(self) -> int:
        return self.accumulate * (self.ranks if self.given == "global" else 1)

    def _parts_in_words(self) -> str:
        over_ranks = f"{self.ranks} data-parallel ranks" if self.given == "global" else "this rank's own batch"
        return over_ranks + (f" times {self.accumulate} micro-batches" if self.accumulate > 1 else "")


def is_split(leaf: Any) -> bool:
    """Whether a leaf of the batch is divided: every tensor that has a dim is."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def batch_key(batch: tuple[Any, ...]) -> tuple[str, tuple[Hashable, ...]]:
    """What a captured step depends on: the structure, dtypes, shapes and layouts of tensors, and all other values."""
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple(_described(leaf) if isinstance(leaf, Tensor) else _checked(leaf) for leaf in leaves)


def _checked(leaf: Any) -> Hashable:
    """A value that is no tensor; refused where it may hold tensors, which would neither be split nor change."""
    inside = getattr(leaf, "__dict__", None)
    holds_tensors = inside is not None and any(isinstance(value, Tensor) for value in inside.values())
    if holds_tensors or not isinstance(leaf, Hashable):
        kind = type(leaf).__name__
        raise BatchError(
            f"a {kind} in the batch hides its numbers",
            expected="tensors in tuples, lists and dicts",
            remedy=f"pass {_how_to_pass(leaf)}",
        )
    return type(leaf), leaf  # 1, 1.0 and True are equal, and may mean different programs


def _how_to_pass(leaf: Any) -> str:
    if isinstance(leaf, Mapping):
        return "dict(batch)"
    return (
        "torch.as_tensor of it" if hasattr(leaf, "__array__") else f"the tensors of the {type(leaf).__name__} in a dict"
    )


class Described(NamedTuple):
    """What a captured step depends on of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None
    """None for those of a new tensor."""


def _described(leaf: Tensor) -> Described:
    plain = leaf.stride() == plain_strides(leaf.shape)
    return Described(tuple(leaf.shape), leaf.dtype, leaf.device, None if plain else strides_for(leaf, leaf.shape[0]))


def _check_common_size(sizes: dict[str, int]) -> None:
    if not sizes:
        raise BatchError("the batch has no tensor to split", remedy="pass at least one tensor with a batch dim")
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size:
            raise BatchError(
                f"{name} with {other} rows beside {first} with {size}",
                expected="the same number of samples along dim 0 of every tensor in the batch",
                remedy="make tensors that all samples share (masks, tables) buffers of the model",
            )
