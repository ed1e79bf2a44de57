"""What the passes that lower collectives share: their loop, and collectives in pieces (how many, where they end)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from crossfade.communicate.bucket_plan import MB
from crossfade.errors import PassError
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Outcome, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice

Megabytes = float | tuple[float, ...]
"""The most of a piece: for all groups of a pass, or for each."""


def lower_each(
    program: Program,
    kind: Kind,
    reason_against: Callable[[Collective], str | None],
    lower: Callable[[Collective, Replacements], tuple[str, str]],
) -> PassResult:
    """Lower each collective of a kind that nothing speaks against; `lower` returns the verdict's reason and detail."""
    verdicts = []
    replaced = Replacements(program)
    for node in list(program.graph.nodes):
        collective = collectives.view(node)  # only now: its input may be a result that was replaced before
        if collective is None or collective.kind is not kind:
            continue
        outcome, reason, detail = Outcome.LEFT, reason_against(collective), ""
        if reason is None:
            outcome, (reason, detail) = Outcome.REPLACED, lower(collective, replaced)
        verdicts.append(Verdict.of(node, outcome, reason, detail=detail, bytes=collective.bytes))
    replaced.finish()
    return PassResult.of(verdicts, Outcome.REPLACED, done="lowered", left="left")


def ranks_of(collective: Collective) -> int:
    """The ranks of a gather's or scatter's group."""
    assert collective.group_size is not None  # every gather and scatter says it
    return collective.group_size


def finish_at_its_wait(
    program: Program,
    whole: Collective,
    pieces: Sequence[fx.Node],
    finish: Callable[..., Tensor],
    replaced: Replacements,
) -> None:
    """Let pieces that were started take a collective's place: `finish` waits for them where its first wait stood."""
    result = splice(program, finish, *pieces, before=min(whole.waits), like=whole.node)
    for wait in whole.waits:
        replaced.replace(wait, result)
    replaced.drop(whole.node)


def check_pieces(name: str, groups: tuple[str, ...], piece_mb: Megabytes) -> None:
    """Refuse sizes that are not positive, and more or fewer sizes than groups."""
    sizes = piece_mb if isinstance(piece_mb, tuple) else (piece_mb,) * len(groups)
    if len(sizes) != len(groups) or not all(size > 0 for size in sizes):
        raise PassError(
            f"{name}(piece_mb={piece_mb}) for {len(groups)} groups",
            expected="sizes larger than 0: a number for all groups, or a tuple with one for each",
            remedy="pass the megabytes of a piece",
        )


def number_of_pieces(collective: Collective, groups: tuple[str, ...], piece_mb: Megabytes) -> int:
    """Into how many pieces of about the size asked for to cut a collective of one of the groups.

    What has no known size travels at once; and what is a little larger than a piece too: to cut it means to copy it.
    """
    if isinstance(collective.node.meta["val"].numel(), torch.SymInt):
        return 1
    piece = piece_mb[groups.index(collective.group)] if isinstance(piece_mb, tuple) else piece_mb
    return max(1, round(collective.bytes / (piece * MB)))
