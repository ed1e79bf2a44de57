"""What can be wrong between ranks, as sentences; and the result of a check."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from crossfade.graph.launches import Launch


class FindingKind(StrEnum):
    """What was found."""

    MEMBERS = "members"
    MISMATCH = "mismatch"
    NUMBER = "number"
    DEADLOCK = "deadlock"
    NCCL = "may deadlock on NCCL"
    UNPROVED = "cannot be proved"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's side of a problem: its node, the node's source line, and what it does there.

    >>> print(RankPlace(1, "done", "model.py:12", "waits for all_reduce(sum) of f32[4] on dp"))
    rank 1 waits for all_reduce(sum) of f32[4] on dp (node done [model.py:12])
    """

    rank: int
    node: str
    source: str
    does: str

    @classmethod
    def of(cls, rank: int, launch: Launch, does: str = "") -> RankPlace:
        """A rank that starts something."""
        return cls(rank, launch.node, launch.source, does or f"starts {launch}")

    def __str__(self) -> str:
        line = f" [{self.source}]" if self.source else ""
        return f"rank {self.rank} {self.does}" + (f" (node {self.node}{line})" if self.node else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: what it is, and what each rank in it does.

    >>> print(Finding(FindingKind.NUMBER, "dp", "too few collectives", (RankPlace(0, "a", "", "starts a 2nd"),)))
    number: too few collectives: rank 0 starts a 2nd (node a)
    """

    problem: FindingKind
    group: str
    what: str
    places: tuple[RankPlace, ...] = ()

    def __str__(self) -> str:
        places = f": {'; '.join(map(str, self.places))}" if self.places else ""
        return f"{self.problem}: {self.what}{places}"


@dataclass(frozen=True)
class Compatibility:
    """Whether the ranks' schedules fit: `ok` if every wait is met; otherwise the findings, the shortest first.

    >>> print(Compatibility(ranks=4, groups=3, collectives=128))
    128 collectives of 3 groups on 4 ranks: every wait is met.
    """

    ranks: int
    groups: int
    collectives: int
    messages: int = 0
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it was proved that no rank waits for ever and everyone means the same collective."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    @property
    def size(self) -> str:
        """What was looked at, in words."""
        of = [_plural(self.collectives, "collective")] if self.collectives or not self.messages else []
        of += [_plural(self.messages, "message")] if self.messages else []
        return f"{' and '.join(of)} of {_plural(self.groups, 'group')} on {_plural(self.ranks, 'rank')}"

    def to_json(self) -> str:
        """The result as JSON; the keys are the fields' names, and `ok`."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        said = "every wait is met." if self.ok else "\n" + "\n".join(f"  {finding}" for finding in self.findings)
        assumed = "".join(f"\n  assuming that {assumption}" for assumption in self.assumptions)
        return f"{self.size}: {said}{assumed}" if self.ok else f"{self.size}:{said}{assumed}"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
