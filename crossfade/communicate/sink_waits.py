"""Results of collectives waited for as late as they can be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from crossfade.communicate.sinking import HELD, Sinking, stays
from crossfade.graph import collectives
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.program import Program, paused_garbage_collection


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move each wait, and the views that take its result apart, down to just before the first real use.

    Copies that take a result apart, such as those of `bucket-all-gathers`, sink with its wait, and no further: made one
    by one, they would keep the whole result alive until the last of them. What a collective reads while it travels is
    held until its wait: no wait sinks so far that more is alive at some time than the program held at its peak. What
    nothing uses is waited for at the end.

    Also known as: Inductor's sink_waits.

    Before:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        exp: f32[4] = aten.exp(x)
        neg: f32[2, 2] = aten.neg(v)
        return output("a", exp), output("b", neg)

    After:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        exp: f32[4] = aten.exp(x)
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        neg: f32[2, 2] = aten.neg(v)
        return output("a", exp), output("b", neg)
    """

    name = "sink-waits"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """From the end up: each wait goes to right before the first node that keeps it up, or as far as fits."""
        with paused_garbage_collection():
            return self._run(program)

    def _run(self, program: Program) -> PassResult:
        waits = collectives.waits(program.graph)
        if all(map(stays, waits)):
            return PassResult(False, {"sunk": 0}, tuple(_verdict(wait) for wait in waits))
        sinking = Sinking(program.graph)
        sinking.sink()
        order = sinking.order
        stay_above = list(accumulate((node not in sinking.gaps for node in order.nodes), initial=0))
        verdicts = []
        for wait in waits:
            end = sinking.first_behind(wait)
            passed = stay_above[order.position[end]] - stay_above[order.position[wait]]
            verdicts.append(_verdict(wait, end, passed, wait in sinking.held))
        moved = sinking.apply()
        return PassResult(moved, {"sunk": sum(v.outcome is Outcome.MOVED for v in verdicts)}, tuple(verdicts))


def _verdict(wait: fx.Node, end: fx.Node | None = None, passed: int = 0, held: bool = False) -> Verdict:
    start = collectives.started_by(wait)
    subject = start if start is not None else wait
    if end is None or not passed:
        return Verdict.of(subject, Outcome.LEFT, HELD if held else "its result is needed at once")
    reason = "waited for just before its first use" if wait.users else "nothing uses its result: waited for at the end"
    reason = "waited for as late as the peak of live memory allows" if held else reason
    return Verdict.of(subject, Outcome.MOVED, reason, detail=f"{passed} nodes later, before {end.name}")
