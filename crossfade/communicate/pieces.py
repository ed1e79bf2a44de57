"""Collectives in pieces: how large they may be along each group, into how many one is cut, and where they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from crossfade.communicate.bucket_plan import MB
from crossfade.errors import PassError
from crossfade.graph.collectives import Collective
from crossfade.graph.program import Program
from crossfade.graph.splice import Replacements, splice

Megabytes = float | tuple[float, ...]
"""The most of a piece: for all groups of a pass, or for each."""


def ranks_of(one: Collective) -> int:
    """The ranks of a gather's or scatter's group."""
    assert one.group_size is not None  # every one of them says it
    return one.group_size


def finish_at_its_wait(
    program: Program, one: Collective, started: Sequence[fx.Node], finish: Callable[..., Tensor], replaced: Replacements
) -> None:
    """Let pieces that were started take a collective's place: `finish` waits for them where its first wait stood."""
    result = splice(program, finish, *started, before=min(one.waits), like=one.node)
    for wait in one.waits:
        replaced.replace(wait, result)
    replaced.drop(one.node)


def check_pieces(name: str, groups: tuple[str, ...], piece_mb: Megabytes) -> None:
    """Refuse pieces of nothing, and as many sizes as there are no groups for."""
    given = piece_mb if isinstance(piece_mb, tuple) else (piece_mb,) * len(groups)
    if len(given) != len(groups) or not all(piece > 0 for piece in given):
        raise PassError(
            f"{name}(piece_mb={piece_mb}) for {len(groups)} groups",
            expected="numbers larger than 0, one for all groups or one for each",
            remedy="pass megabytes a piece",
        )


def number_of_pieces(one: Collective, groups: tuple[str, ...], piece_mb: Megabytes) -> int:
    """Into how many pieces of about the size asked for to cut a collective of one of the groups.

    What has no known size travels at once; and what is a little larger than a piece too: to cut it means to copy it.
    """
    if isinstance(one.node.meta["val"].numel(), torch.SymInt):
        return 1
    piece = piece_mb[groups.index(one.group)] if isinstance(piece_mb, tuple) else piece_mb
    return max(1, round(one.bytes / (piece * MB)))
