"""What a profiled step has measured: this rank's timeline and, on the first rank, those of all ranks."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass

from crossfade.compile.built import Built
from crossfade.compile.place import Place
from crossfade.cost.timeline import Timeline
from crossfade.execute.stopwatch import Stopwatch
from crossfade.graph.memory import alive_at_peak, live_by_name
from crossfade.graph.private import group_named
from crossfade.graph.program import Program
from crossfade.ranks.groups import gather_objects, ranks_of
from crossfade.report.rank_timelines import RankTimeline
from crossfade.report.report import Report


@dataclass(frozen=True)
class Profiled:
    """What the last profile measured, and of which program."""

    program: Program
    timeline: Timeline
    ranks: tuple[RankTimeline, ...]
    memory: tuple[tuple[str, int], ...]
    alive: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, built: Built, stopwatch: Stopwatch, place: Place, together: AbstractContextManager[None]) -> Profiled:
        """Gather on the first rank what all have measured of the same step; all must call it, inside `together`."""
        groups = {axis: tuple(ranks_of(group)) for axis, group in place.groups.items()}
        everyone = place.everyone
        rank = everyone.ranks[everyone.rank] if everyone is not None else 0
        own = RankTimeline(rank, stopwatch.timeline, stopwatch.started, socket.gethostname(), groups)
        ranks = [own]
        if everyone is not None and not everyone.alone and place.everyones_group is not None:
            with together:
                ranks = gather_objects(own, group_named(place.everyones_group), everyone.ranks[0]) or ranks
        program = built.program
        memory, alive = tuple(live_by_name(program)), tuple(alive_at_peak(program))
        return cls(program, stopwatch.timeline, tuple(ranks), memory, alive)

    def added_to(self, built: Built) -> Report:
        """The report of a built step, with what was measured if it was measured of that step."""
        if self.program is not built.program:
            return built.report
        measured: Report = built.report.with_timelines(
            measured=self.timeline, memory=self.memory, alive=self.alive, ranks=self.ranks
        )
        return measured
