"""Which memory a program writes, asked by rules that look further than a node's own inputs."""

from __future__ import annotations

from torch import fx

from crossfade.graph.aliasing import Aliasing
from crossfade.graph.rewrite import Match

REASON = "its memory, or memory it is computed from, is written to"


class Writes:
    """Whether memory behind values is written anywhere: found in one walk, at the first question about a program.

    Rules make no writes and replace nothing that is written, so the answer stays true while they are applied.
    """

    def __init__(self) -> None:
        self._asked: tuple[object, Aliasing] | None = None

    def touch(self, match: Match, *nodes: fx.Node) -> bool:
        """Whether any of these values is read from memory that some node writes."""
        if self._asked is None or self._asked[0] is not match.program:
            self._asked = match.program, Aliasing(match.program)
        return any(map(self._asked[1].is_written, nodes))
