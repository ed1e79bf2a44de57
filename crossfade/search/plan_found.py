"""What a search has found: a table of all candidates, why each loser lost, and the winner's call to paste."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfade.cost.machine import Machine
from crossfade.search.candidates import Candidate, call_text
from crossfade.search.figures import Figures

COLUMNS = ("", "candidate", "step ms", "exposed ms", "memory GB", "why not")
GB = 10**9


@dataclass(frozen=True)
class Row:
    """One candidate: what is simulated of it, and why it is not the one taken."""

    candidate: Candidate
    figures: Figures | None = None
    """None where it was refused, or is not worth a simulation."""
    why_not: str = ""
    is_sketch: bool = False
    """Whether its figures are those of few layers, with what each further one adds, and of one bucket size."""
    kept_whole: tuple[str, ...] = ()
    """What stays whole, as `keep_whole` takes it; of a sketch it is not known."""

    def fits(self, memory: int | None) -> bool:
        """Whether it can run within so many bytes."""
        return self.figures is not None and (memory is None or self.figures.memory <= memory)

    def cells(self, place: int | None) -> tuple[str, ...]:
        """As the cells of a table."""
        number = "" if place is None else str(place)
        if self.figures is None:
            return number, str(self.candidate), "", "", "", self.why_not
        about = "~" if self.is_sketch else ""
        found = self.figures
        return (
            number,
            str(self.candidate),
            f"{about}{found.seconds * 1e3:,.1f}",
            f"{about}{found.exposed * 1e3:,.1f}",
            f"{about}{found.memory / GB:,.3g}",
            self.why_not or "taken",
        )


@dataclass(frozen=True)
class FoundPlan:
    """The plan that was found, and what it was chosen from. `rows` are sorted: the one taken, then the fastest."""

    model: str
    machine: Machine
    ranks: int
    memory: int | None
    rows: Sequence[Row]
    plan: Mapping[str, Any] | None
    """What splits the model where the mesh has an axis `tp`."""
    seconds: float
    """What the search took."""

    @property
    def best(self) -> Row:
        """The one taken."""
        return self.rows[0]

    @property
    def options(self) -> dict[str, Any]:
        """The winner's keywords of `compile_step`."""
        return self.options_of(self.best)

    @property
    def call(self) -> str:
        """The winner's call of `compile_step`, as text to paste."""
        return call_text(self.options)

    def options_of(self, row: Row) -> dict[str, Any]:
        """The keywords of `compile_step` for any row."""
        candidate = row.candidate
        options: dict[str, Any] = {"mesh": dict(candidate.mesh) or None}
        if candidate.data > 1 and candidate.mode != "replicate":
            options["data_parallel"] = candidate.mode
        if candidate.keeps_whole:
            options["keep_whole"] = list(row.kept_whole) or "auto"
        if candidate.tensor > 1:
            options["tensor_parallel"] = self.plan
        if candidate.accumulate > 1:
            options["accumulate"] = candidate.accumulate
        if candidate.memory_limit is not None:
            options["memory_limit"] = candidate.memory_limit
        return {**options, "machine": self.machine}

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return {
            "model": self.model,
            "machine": self.machine.name,
            "ranks": self.ranks,
            "memory_bytes": self.memory,
            "search_seconds": self.seconds,
            "tensor_parallel": self.plan,
            "call": self.call,
            "candidates": [
                {
                    "mesh": dict(row.candidate.mesh),
                    "data_parallel": row.candidate.mode,
                    "accumulate": row.candidate.accumulate,
                    "keeps_whole": row.candidate.keeps_whole,
                    "memory_limit": row.candidate.memory_limit,
                    "figures": None if row.figures is None else dataclasses.asdict(row.figures),
                    "is_sketch": row.is_sketch,
                    "why_not": row.why_not,
                    "kept_whole": row.kept_whole,
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], machine: Machine) -> FoundPlan:
        """What `to_dict` gave, perhaps on another rank, for the same machine."""

        def row(found: Mapping[str, Any]) -> Row:
            modes = found["data_parallel"], found["accumulate"], found["keeps_whole"], found["memory_limit"]
            figures = None if found["figures"] is None else Figures(**found["figures"])
            return Row(Candidate(dict(found["mesh"]), *modes), figures, found["why_not"], found["is_sketch"],
                       tuple(found["kept_whole"]))  # fmt: skip

        rows = [row(found) for found in plain["candidates"]]
        return cls(
            plain["model"], machine, plain["ranks"], plain["memory_bytes"], rows, plain["tensor_parallel"],
            plain["search_seconds"],
        )  # fmt: skip

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        limit = f", {self.memory / GB:,.3g} GB each" if self.memory is not None else ""
        title = f"{self.model} on {self.ranks} ranks of {self.machine.name}{limit}: {len(self.rows)} candidates in "
        places: list[int | None] = []
        for row in self.rows:
            places.append(len([place for place in places if place]) + 1 if row.fits(self.memory) else None)
        cells = [COLUMNS, *(row.cells(place) for row, place in zip(self.rows, places, strict=True))]
        widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
        lines = [f"{title}{self.seconds:.0f} s", ""]
        for line in cells:
            padded = [cell.ljust(width) if column in (1, 5) else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(line, widths, strict=True))]  # fmt: skip
            lines.append("  ".join(padded).rstrip())
        about = ["", "~ a sketch: of few layers, with what each further one adds, and of one bucket size"]
        return "\n".join([*lines, *(about if any(row.is_sketch for row in self.rows) else []), "", self.call])


def why_slower(row: Figures, best: Figures) -> str:
    """What a candidate spends its time on that the best one does not.

    >>> best = Figures(1.0, 1.0, {}, 0, 0)
    >>> why_slower(Figures(1.5, 1.1, {"dp all_reduce": 0.4}, 0, 0), best)
    '500.0 ms longer: waits 400.0 ms for dp all_reduce'
    >>> why_slower(Figures(1.5, 1.5, {}, 0, 0), best)
    '500.0 ms longer: computes 500.0 ms more'
    """
    longer = row.seconds - best.seconds
    causes = {f"waits {seconds * 1e3:,.1f} ms for {cause}": seconds - best.waits.get(cause, 0.0)
              for cause, seconds in row.waits.items()}  # fmt: skip
    more = row.computes - best.computes
    causes[f"computes {more * 1e3:,.1f} ms more"] = more
    launches = (row.seconds - row.computes - row.exposed) - (best.seconds - best.computes - best.exposed)
    causes[f"waits {launches * 1e3:,.1f} ms more for its host to launch operators"] = launches
    return f"{longer * 1e3:,.1f} ms longer: {max(causes, key=causes.__getitem__)}"
