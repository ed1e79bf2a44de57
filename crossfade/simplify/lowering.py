"""The walk of the passes that lower higher-order operators."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from torch import fx

from crossfade.graph.passes import Outcome, PassResult, Verdict
from crossfade.graph.program import Program
from crossfade.simplify.needless_clones import drop_needless_clones


def lower_calls(
    program: Program, operators: Collection[str], why: str, lower: Callable[[fx.Node], str | None]
) -> PassResult:
    """Lower each call of the operators; `lower` returns a reason where it left the call alone."""
    verdicts = []
    for node in list(program.graph.nodes):
        if node.op == "call_function" and str(node.target) in operators:
            verdict = Verdict.of(node, Outcome.REPLACED, why)  # before the node is erased
            reason = lower(node)
            verdicts.append(verdict if reason is None else replace(verdict, outcome=Outcome.LEFT, reason=reason))
    return PassResult.of(verdicts, Outcome.REPLACED, done="lowered", left="left")


def lower_wrappers(
    program: Program,
    operators: Collection[str],
    why: str,
    reason_against: Callable[[Program, fx.Node], str | None],
    lower: Callable[[Program, fx.Node], list[fx.Node]],
) -> PassResult:
    """Lower wrappers to clones and calls that write them; `lower` returns the clones.

    Clones are made everywhere first: which of them are needless is seen in the graph that has them all.
    """
    clones: list[fx.Node] = []

    def lowered(node: fx.Node) -> str | None:
        reason = reason_against(program, node)
        clones.extend(lower(program, node) if reason is None else ())
        return reason

    result = lower_calls(program, operators, why, lowered)
    dropped = drop_needless_clones(program, clones)
    return replace(result, counts={**result.counts, "clones": len(clones) - dropped, "dropped": dropped})
