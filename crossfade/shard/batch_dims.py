"""Which dims of which values hold samples: found by capturing the program at two batch sizes and comparing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from crossfade.errors import CaptureError
from crossfade.graph.effects import is_random
from crossfade.graph.program import InputKind, Program
from crossfade.graph.strides import dense_strides
from crossfade.shard.batch_blocks import mark_blocks

BATCH_DIMS = "batch_dims"
WHOLE = "whole_batch"


@dataclass(frozen=True)
class Whole:
    """The sizes of a value of the whole batch, and its strides without gaps: how one device would lay it out."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def needs_batch_dims(program: Program) -> bool:
    """Whether anything in the program means something else on a part of the batch: random draws, batch statistics."""
    return any(is_random(node) or "batch_norm" in str(node.target) for node in program.graph.nodes)


def mark_batch_dims(program: Program, larger: Program) -> None:
    """Note on every node the dims that grow with the batch, by comparison with the same program on a larger batch."""
    nodes, others = list(program.graph.nodes), list(larger.graph.nodes)
    for node, other in zip(nodes, others, strict=False):
        if (node.target != other.target and node.op == "call_function") or node.op != other.op:
            raise _differs(node, other)
        node.meta[BATCH_DIMS] = growing_dims(node.meta.get("val"), other.meta.get("val"))
        node.meta[WHOLE] = _whole(other.meta.get("val"))
    if len(nodes) != len(others):
        raise _differs(nodes[-1], others[-1])
    mark_blocks(program.graph, _samples(program), batch_dims)


def batch_dims(node: fx.Node) -> tuple[int, ...]:
    """The dims of a node's value that grow with the batch (empty if none, or if never marked)."""
    return node.meta.get(BATCH_DIMS, ())


def of_whole_batch(node: fx.Node) -> Whole | None:
    """How a node's value lies in memory when it is that of the whole batch; None if never marked, or no tensor."""
    return node.meta.get(WHOLE)


def growing_dims(small: Any, large: Any) -> tuple[int, ...]:
    """The dims in which a value differs from the same value of a larger batch; none if it is no tensor."""
    if not isinstance(small, Tensor) or not isinstance(large, Tensor):
        return ()
    return tuple(dim for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b)


def grows_unevenly(small: Any, large: Any, times: int) -> bool:
    """Whether a value has more or fewer rows than `times` as many on a batch `times` as large, where it grows.

    >>> import torch
    >>> grows_unevenly(torch.ones(3), torch.ones(7), 2), grows_unevenly(torch.ones(4, 1), torch.ones(8, 1), 2)
    (True, False)
    """
    dims = growing_dims(small, large)
    return any(large.shape[dim] != times * small.shape[dim] for dim in dims)


def _whole(large: Any) -> Whole | None:
    value = large[0] if isinstance(large, (tuple, list)) and large else large
    if not isinstance(value, Tensor):
        return None
    return Whole(tuple(value.shape), dense_strides(value))


def _samples(program: Program) -> int:
    """How many samples the program is for: the rows of its smallest input that is a part of a batch."""
    inputs = [node for item, node in program.named_inputs() if item.kind is InputKind.INPUT and batch_dims(node)]
    return min((node.meta["val"].shape[batch_dims(node)[0]] for node in inputs), default=1)


def _differs(node: fx.Node, other: fx.Node) -> CaptureError:
    return CaptureError(
        f"the model computes differently on batches of different sizes ({node.target} against {other.target})",
        expected="the same operations for one rank's samples and for all of them",
        remedy='remove the dependence on the batch size, or pass semantics="per-rank"',
    )
