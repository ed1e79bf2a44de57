"""What passes say about a program: what became of each collective, and one record a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from crossfade.graph.metadata import MADE_FOR, source_line


class Outcome(StrEnum):
    """What became of one collective or candidate."""

    INSERTED = "inserted"
    FUSED = "fused"
    BUCKETED = "bucketed"
    MOVED = "moved"
    REMOVED = "removed"
    REPLACED = "replaced"
    HIDDEN = "hidden"
    EXPOSED = "exposed"
    LEFT = "left alone"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one collective or one candidate, and why; `remedy` says how to change it, where one can.

    `source` is where it comes from in the user's terms: a source line, or the parameter whose gradient it is.
    `reason` says why in words that are the same for all such cases, so that reports can group them; `detail` has the
    numbers and names of this one.

    >>> print(Verdict("all_reduce_3", Outcome.LEFT, "the only one of its group", remedy="none needed"))
    all_reduce_3: left alone: the only one of its group (remedy: none needed)
    """

    subject: str
    outcome: Outcome
    reason: str
    source: str = ""
    remedy: str = ""
    bytes: int = 0
    detail: str = ""

    @classmethod
    def of(
        cls, node: fx.Node, outcome: Outcome, reason: str, *, detail: str = "", remedy: str = "", bytes: int = 0
    ) -> Verdict:
        """A verdict about a node, with the node's source."""
        return cls(node.name, outcome, reason, source_line(node), remedy, bytes, detail)

    @classmethod
    def inserted(cls, start: fx.Node, reason: str, *, made_for: str | None, bytes: int) -> Verdict:
        """The verdict on a collective that a pass has put in, and marks with what it is for, where that is known."""
        if made_for is not None:
            start.meta[MADE_FOR] = made_for
        return cls.of(start, Outcome.INSERTED, reason, bytes=bytes)

    def __str__(self) -> str:
        where = f" [{self.source}]" if self.source else ""
        remedy = f" (remedy: {self.remedy})" if self.remedy else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.subject}{where}: {self.outcome}: {self.reason}{detail}{remedy}"


_SHOWN = 240


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One line of a program's history. Texts are empty where nothing changed or the program was too large to print."""

    name: str
    spelling: str
    numerics: str
    seconds: float
    changed: bool
    counts: Mapping[str, int]
    verdicts: tuple[Verdict, ...]
    nodes_before: int
    nodes_after: int
    before: str = ""
    after: str = ""
    decided: str | None = None
    """The spelling of a pass that does the same without knowing the machine; None where the pass cannot say."""
    looking: float = 0.0
    """Seconds beside those of the pass: the program was verified, hashed and printed."""

    @property
    def shown(self) -> str:
        """The spelling, cut where it is long: orders of whole programs are options too."""
        return self.spelling if len(self.spelling) <= _SHOWN else f"{self.spelling[: _SHOWN - 3]}..."
