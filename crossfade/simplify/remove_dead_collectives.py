"""Collectives whose results are not used."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from crossfade.graph import collectives
from crossfade.graph.collectives import Collective
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import is_erased
from crossfade.graph.program import Program
from crossfade.graph.splice import erase_if_dead

_WRITES = "it writes into memory that others may read"
_PARTLY = "another of its results is used"
_OWN_PROGRAMS = "the program also communicates in ways of its own, and another rank's may use the result"
_UNKNOWN_GROUP = "the size of its group is not known"


@dataclass(frozen=True)
class RemoveDeadCollectives(Pass):
    """Remove collectives whose results are waited for and then not used.

    A collective goes on all ranks or on none, or they hang. It goes on all where their programs are the same but for
    constants and the order of computation, which every pass over collectives stands on; a compiled step compares its
    programs, `optimize` does not. Programs with sends, or with whatever else is no collective known here, may differ
    from rank to rank and keep theirs. A collective called only so that ranks meet goes too.

    Not in a default pipeline: it relies on all ranks having the same program, which `optimize` does not check. Where
    they have: `optimization().before("merge-duplicate-collectives", RemoveDeadCollectives())`.

    Also known as: none; dead code elimination that includes collectives.

    Before:
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        y: f32[4] = aten.neg(x)
        return output("y", y)

    After:
        x: f32[4] = input("x")
        y: f32[4] = aten.neg(x)
        return output("y", y)
    """

    name = "remove-dead-collectives"
    numerics = Numerics.BITWISE

    def run(self, program: Program) -> PassResult:
        """One walk from the end, so that what only a dead collective read is dead when it is reached."""
        differs = any(map(_is_own_communication, program.graph.nodes))
        verdicts = []
        for node in reversed(list(program.graph.nodes)):
            collective = None if is_erased(node) else collectives.view(node)
            if collective is None or not _has_dead_result(collective):
                continue
            reason = _OWN_PROGRAMS if differs else _reason_against(collective, program)
            outcome = Outcome.LEFT if reason is not None else Outcome.REMOVED
            verdicts.append(Verdict.of(node, outcome, reason or "its result is not used", bytes=collective.bytes))
            if reason is None:
                _remove(program, collective)
        return PassResult.of(reversed(verdicts), Outcome.REMOVED, done="removed", left="left")


def _is_own_communication(node: fx.Node) -> bool:
    """Whether a node communicates in a way that is not one collective of all ranks."""
    return collectives.group_of(node) is not None and not collectives.is_collective(node)


def _has_dead_result(collective: Collective) -> bool:
    return any(all(map(_is_dead_wait, result.users)) for result in collective.results)


def _is_dead_wait(node: fx.Node) -> bool:
    return collectives.is_wait(node) and not node.users


def _reason_against(collective: Collective, program: Program) -> str | None:
    if collective.in_place or collective.out is not None:
        return _WRITES
    if not all(_is_dead_wait(user) for result in collective.results for user in result.users):
        return _PARTLY
    return None if program.groups.get(collective.group) else _UNKNOWN_GROUP


def _remove(program: Program, collective: Collective) -> None:
    inputs = collective.node.all_input_nodes
    for node in reversed(collective.nodes):
        program.graph.erase_node(node)
    for source in inputs:
        if not collectives.is_wait(source):  # the collective that it waits for is still to come
            erase_if_dead(source)
