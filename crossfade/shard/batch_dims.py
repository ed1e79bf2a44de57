"""Which dims of which values hold samples: found by capturing the program at two batch sizes and comparing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from crossfade.errors import CaptureError
from crossfade.graph.effects import is_random
from crossfade.graph.program import Program

BATCH_DIMS = "batch_dims"


def needs_batch_dims(program: Program) -> bool:
    """Whether anything in the program means something else on a part of the batch: random draws, batch statistics."""
    return any(is_random(node) or "batch_norm" in str(node.target) for node in program.graph.nodes)


def mark_batch_dims(program: Program, larger: Program) -> None:
    """Note on every node the dims that grow with the batch, by comparison with the same program on a larger batch."""
    nodes, others = list(program.graph.nodes), list(larger.graph.nodes)
    for node, other in zip(nodes, others, strict=False):
        if (node.target != other.target and node.op == "call_function") or node.op != other.op:
            raise _differs(node, other)
        node.meta[BATCH_DIMS] = _growing_dims(node.meta.get("val"), other.meta.get("val"))
    if len(nodes) != len(others):
        raise _differs(nodes[-1], others[-1])


def batch_dims(node: fx.Node) -> tuple[int, ...]:
    """The dims of a node's value that grow with the batch (empty if none, or if never marked)."""
    return node.meta.get(BATCH_DIMS, ())


def _growing_dims(small: Any, large: Any) -> tuple[int, ...]:
    if not isinstance(small, Tensor) or not isinstance(large, Tensor):
        return ()
    return tuple(dim for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b)


def _differs(node: fx.Node, other: fx.Node) -> CaptureError:
    return CaptureError(
        f"a model that computes differently on batches of different size ({node.target} against {other.target})",
        expected="the same operations for one rank's samples and for all of them",
        remedy='remove the dependence on the batch size, or pass semantics="per-rank"',
    )
