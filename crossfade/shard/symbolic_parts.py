"""How losses of parts make up the whole batch's, and which dims hold samples, in programs of symbolic sizes.

Looked at with numbers in place of the symbols, once for a part and once for a larger batch, such a program is like two
captures; what is found there is noted on the program itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from crossfade.errors import NotYetError
from crossfade.graph.program import Program
from crossfade.graph.with_sizes import with_sizes
from crossfade.shard.batch_dims import needs_batch_dims
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
    if several_ranks and needs_batch_dims(program):
        raise NotYetError(
            "random draws or batch statistics among ranks with symbolic sizes",
            remedy='pass dynamic=False, or semantics="per-rank"',
        )
    small, copies = with_sizes(program, hints)
    more = hints if samples is None else {**hints, samples: hints[samples] * times}
    large, _ = with_sizes(program if larger is None else larger, more)
    parts = find_loss_parts(small, large, times, trained, micro_batches=micro_batches)
    for node, copy in copies.items():
        for key in (COUNT, SCALED):
            if key in copy.meta:
                node.meta[key] = copy.meta[key]
    return parts
