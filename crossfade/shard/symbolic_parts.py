"""How losses of parts make up the whole batch's, and which dims hold samples, in programs of symbolic sizes.

Looked at with numbers in place of the symbols, once for a part and once for a larger batch, such a program is like two
captures; what is found there is noted on the program itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, fx

from crossfade.errors import NotYetError
from crossfade.graph.effects import is_random
from crossfade.graph.program import Program, source_line
from crossfade.graph.strides import plain_strides
from crossfade.graph.with_sizes import with_sizes
from crossfade.shard.batch_blocks import blocks_of
from crossfade.shard.batch_dims import BATCH_DIMS, batch_dims, mark_batch_dims, needs_batch_dims, of_whole_batch
from crossfade.shard.buffer_parts import OVER_RANKS, READS_WHOLE, TIMES_RANKS, with_buffer_parts
from crossfade.shard.loss_parts import COUNT, SCALED, LossParts, find_loss_parts


def find_symbolic_parts(
    program: Program,
    larger: Program | None,
    times: int,
    trained: Iterable[str],
    *,
    hints: Mapping[str, int],
    samples: str | None,
    several_ranks: bool,
    micro_batches: bool,
) -> LossParts:
    """What `find_loss_parts` finds; `larger` is the program on a batch `times` as large, None where it is the same one
    with the symbol `samples` so much larger."""
    small, copies = with_sizes(program, hints)
    more = hints if samples is None else {**hints, samples: hints[samples] * times}
    large, _ = with_sizes(program if larger is None else larger, more)
    marks = [COUNT, SCALED, OVER_RANKS, READS_WHOLE, TIMES_RANKS]
    if several_ranks and needs_batch_dims(program):
        mark_batch_dims(small, large)
        _check_draws(small, times)
        marks.append(BATCH_DIMS)
    parts = find_loss_parts(small, large, times, trained, micro_batches=micro_batches)
    if several_ranks:
        parts = with_buffer_parts(parts, small, large, times, micro_batches=micro_batches)
    for node, copy in copies.items():
        for key in marks:
            if key in copy.meta:
                node.meta[key] = copy.meta[key]
    return parts


def _check_draws(program: Program, times: int) -> None:
    """Refuse what `draw-globally` and `synchronize-batch-norm` can do only for sizes that are numbers."""
    for node in program.graph.nodes:
        if "batch_norm" in str(node.target):
            raise _not_yet(node, "batch statistics of several ranks")
        drawn = [node, *node.users] if is_random(node) else []
        for value in (value for value in drawn if isinstance(value.meta.get("val"), Tensor) and batch_dims(value)):
            dims, shape = batch_dims(value), value.meta["val"].shape
            larger = tuple(size * times if dim in dims else size for dim, size in enumerate(shape))
            whole = of_whole_batch(value)
            plain = whole is not None and whole.shape == larger and whole.strides == plain_strides(larger)
            if value.meta["val"].stride() != plain_strides(shape) or not plain or blocks_of(value) != 1:
                raise _not_yet(node, "random numbers that lie otherwise in memory than by sample")
            if value is node:
                break


def _not_yet(node: fx.Node, what: str) -> NotYetError:
    line = f" [{source_line(node)}]" if source_line(node) else ""
    return NotYetError(
        f"{what} with symbolic sizes: {node.name}{line}",
        remedy='pass dynamic=False, which captures every size by itself, or semantics="per-rank"',
    )
