"""Collectives in pieces: how large they may be along each group, and into how many one is cut."""

from __future__ import annotations

import math

import torch

from crossfade.communicate.bucket_plan import MB
from crossfade.errors import PassError
from crossfade.graph.collectives import Collective

Megabytes = float | tuple[float, ...]
"""The most of a piece: for all groups of a pass, or for each."""


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
    """Into how many pieces to cut a collective of one of the groups; what has no known size travels at once."""
    if isinstance(one.node.meta["val"].numel(), torch.SymInt):
        return 1
    piece = piece_mb[groups.index(one.group)] if isinstance(piece_mb, tuple) else piece_mb
    return max(1, math.ceil(one.bytes / (piece * MB)))
