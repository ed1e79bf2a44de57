"""A compilation held to what was expected of it: each verdict that falls short, in one error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from crossfade.errors import StrictError
from crossfade.graph import collectives
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.passes import Numerics, Outcome, Verdict
from crossfade.graph.program import InputKind, OutputKind, Program, source_line
from crossfade.report.data import PassVerdict, ReportData
from crossfade.report.expect import Expect

NO_RULE = "there is no rule for this operator"
_BUCKETS = {"gradients": ("bucket-all-reduces", "bucket-reduce-scatters"), "weights": ("bucket-all-gathers",)}
_UNDONE = (Outcome.LEFT, Outcome.EXPOSED)
_FOR_MEMORY = ("merge-duplicate-collectives", "raise-launches")
"""Passes that leave gathers where they are to hold less memory: a choice, not an oversight."""
_NONE_KNOWN = "none is known: change the program, or expect less"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One thing that is not as expected: what was expected, where, why, and what to do.

    >>> print(Shortfall("collectives<=1", "the program", reason="2 collectives", remedy="raise cap_mb"))
    collectives<=1: the program: 2 collectives (remedy: raise cap_mb)
    """

    expected: str
    subject: str
    source: str = ""
    reason: str = ""
    remedy: str = ""
    name: str = ""
    """The pass that said so, if one did."""

    @classmethod
    def of(cls, expected: str, name: str, verdict: Verdict, remedy: str = "") -> Shortfall:
        """Of a pass's verdict."""
        reason = f"{verdict.outcome}: {verdict.reason}" + (f": {verdict.detail}" if verdict.detail else "")
        return cls(expected, verdict.subject, verdict.source, reason, verdict.remedy or remedy or _NONE_KNOWN, name)

    def __str__(self) -> str:
        where = f" [{self.source}]" if self.source else ""
        said = f"{self.name}: " if self.name else ""
        return f"{self.expected}: {said}{self.subject}{where}: {self.reason} (remedy: {self.remedy})"


@dataclass(frozen=True)
class Judged:
    """What is held against what is expected: a report, the program before communication was put together and after, and
    verdicts that were given before the passes ran."""

    report: ReportData
    before: Program
    after: Program
    earlier: Sequence[PassVerdict] = ()

    @property
    def verdicts(self) -> Iterator[PassVerdict]:
        yield from self.earlier
        yield from self.report.verdicts

    @property
    def weights(self) -> set[str]:
        """The names of the program's parameters; a plain graph says of no input that it is one."""
        return {item.name for item in self.before.inputs if item.kind is InputKind.PARAMETER}

    @property
    def planned(self) -> bool:
        """Whether the sizes of buckets were chosen for a machine, so that none of them is an oversight."""
        return any(record.name == "overlap-communication" for record in self.report.records)


def hold(expect: Expect | None, judged: Judged) -> None:
    """Raise one error that lists everything short of what is expected; nothing if all is as expected."""
    if expect is not None:
        refuse(expect, shortfalls(expect, judged))


def refuse(expect: Expect, found: Sequence[Shortfall]) -> None:
    """Raise the error for these shortfalls, if there are any."""
    if found:
        lines = "".join(f"\n  {shortfall}" for shortfall in found)
        short = "1 thing short" if len(found) == 1 else f"{len(found)} things short"
        error = StrictError(
            f"{short} of what strict= expects:{lines}\n",
            expected=str(expect),
            remedy="follow the remedies above, or expect less",
        )
        error.shortfalls = tuple(found)
        raise error


def shortfalls(expect: Expect, judged: Judged) -> list[Shortfall]:
    """Everything that is not as expected, in the order of `Expect`'s fields."""
    return [
        *_exposed(expect, judged),
        *_limits(expect, judged),
        *_unbucketed(expect, judged),
        *_gathered(expect, judged),
        *_left(expect, judged),
        *_numbers(expect, judged),
        *_selected(expect, judged),
    ]


def _exposed(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    if expect.exposed_ms is None:
        return
    token, timeline = f"exposed<={expect.exposed_ms:g}ms", judged.report.predicted
    if timeline is None:
        remedy = 'pass machine= (a preset\'s name, a Machine, or "calibrate"); --machine on the command line'
        yield Shortfall(token, "the program", reason="no machine to predict exposed time for", remedy=remedy)
        return
    if timeline.exposed * 1e3 <= expect.exposed_ms:
        return
    said = {verdict.subject: (name, verdict) for name, verdict in judged.verdicts if verdict.outcome is Outcome.EXPOSED}
    total = f"{timeline.exposed * 1e3:.3f} ms exposed in all"
    nodes = {node.name: node for node in judged.after.graph.nodes}
    for travelled in sorted(timeline.communication, key=lambda travelled: -travelled.exposed):
        if travelled.exposed > 0:
            name, verdict = said.get(travelled.name, ("", Verdict(travelled.name, Outcome.EXPOSED, "")))
            why = f"{travelled.exposed * 1e3:.3f} ms of {total}" + (f": {verdict.reason}" if verdict.reason else "")
            source = verdict.source or (_source(nodes[travelled.name]) if travelled.name in nodes else "")
            yield Shortfall(token, travelled.name, source, why, verdict.remedy or _HIDE, name)


def _source(start: fx.Node) -> str:
    """Where a collective comes from, or what is packed in it does: the first source, and how many more there are."""
    packed = [source for given in start.all_input_nodes for source in given.all_input_nodes]
    found = [source_line(start)] if source_line(start) else map(source_line, packed)
    sources = list(dict.fromkeys(filter(None, found)))
    return sources[0] + (f" and {len(sources) - 1} more" if len(sources) > 1 else "") if sources else ""


_HIDE = "give it more to travel under (a larger batch, accumulate=), fewer bytes to carry, or a faster link"


def _limits(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    number, size = judged.report.total_after
    remedy = "raise cap_mb of the passes that make buckets"
    if expect.collectives is not None and number > expect.collectives:
        yield Shortfall(f"collectives<={expect.collectives}", "the program", "", f"{number} collectives", remedy)
    if expect.megabytes is not None and size > expect.megabytes * 1e6:
        remedy = "carry fewer bytes: another data_parallel mode, or a smaller dtype"
        yield Shortfall(f"sent<={expect.megabytes:g}MB", "the program", "", f"{size / 1e6:g} MB", remedy)


def _unbucketed(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    wanted = expect.bucketed
    if wanted is None:
        return
    token, weights = f"bucketed:{wanted}", judged.weights
    if wanted in _BUCKETS and not weights:
        yield _unknown_weights(token, "bucketed:all, or a pattern of source lines")
        return
    names = _BUCKETS.get(wanted, tuple(name for each in _BUCKETS.values() for name in each))
    ran = [record for record in judged.report.records if record.name in names]
    if not ran:
        remedy = f"add {' or '.join(names)} to the passes"
        yield Shortfall(token, "the program", reason=f"{' and '.join(names)} did not run", remedy=remedy)
    carrying = _carrying(judged, wanted) if wanted in _BUCKETS else set()
    for record in ran:
        about = [v for v in record.verdicts if v.subject in carrying or _is_asked_for(v, wanted, weights)]
        if not about and record.verdicts and len(ran) == 1:
            reason = f"no collective that {record.name} saw is known to carry {wanted}"
            yield Shortfall(token, "the program", reason=reason, remedy="write bucketed:all, or a pattern of sources")
        for verdict in about if len(record.verdicts) > 1 else ():
            if verdict.outcome is Outcome.LEFT:
                yield Shortfall.of(token, record.name, verdict)


def _is_asked_for(verdict: Verdict, wanted: str, weights: set[str]) -> bool:
    if wanted in _BUCKETS:
        return verdict.source in weights
    return wanted == "all" or fnmatchcase(verdict.source, wanted)


def _carrying(judged: Judged, wanted: str) -> set[str]:
    """The collectives of weights, or those whose results are gradients."""
    program = judged.before
    if wanted == "weights":
        return {gather.node.name for gather, names in _gathers(judged) if names & judged.weights}
    kinds = (OutputKind.GRADIENT, OutputKind.SHARD)
    results = [value for item, value in program.named_results() if item.kind in kinds]
    return {name for value in results if isinstance(value, fx.Node) and (name := _reduced_by(value))}


def _reduced_by(node: fx.Node) -> str:
    """The collective that a value comes from, by way of views, parts and conversions; empty if from none."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if collectives.is_wait(node):
            start = collectives.started_by(node)
            return start.name if start is not None else ""
        node = node.all_input_nodes[0]
    return ""


def _unknown_weights(token: str, instead: str) -> Shortfall:
    reason = "a plain graph does not say which of its inputs are weights"
    return Shortfall(token, "the program", reason=reason, remedy=f"write {instead}")


def _gathered(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    wanted, weights = expect.no_gather, judged.weights
    if wanted is None:
        return
    token = f"no-gather:{wanted}"
    if wanted == "weights" and not weights:
        yield _unknown_weights(token, "no-gather: with a pattern of their names")
        return
    for gather, names in _gathers(judged):
        met = names & weights if wanted == "weights" else {name for name in names if fnmatchcase(name, wanted)}
        if met:
            reason = f"{', '.join(sorted(met))} is gathered from all ranks of {gather.group}"
            yield Shortfall(token, gather.node.name, source_line(gather.node), reason, _WHOLE)


_WHOLE = 'keep it whole on every rank (data_parallel="replicate"), or split what it is multiplied with by a plan'


def _origin(node: fx.Node) -> fx.Node:
    """What a value is a view, part or conversion of: an input, or what is computed from several values."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _gathers(judged: Judged) -> Iterator[tuple[Collective, set[str]]]:
    """The all-gathers, with the names of what they gather: the inputs, and what they were made for."""
    names = {node: item.name for item, node in judged.before.named_inputs()}
    for collective in collectives.find(judged.before.graph):
        if collective.kind is Kind.ALL_GATHER:
            inputs = {names.get(_origin(source), "") for source in collective.inputs}
            yield collective, {*inputs, source_line(collective.node)} - {""}


def _left(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    for pattern in expect.no_left:
        token, records = f"no-left:{pattern}", judged.report.records
        if not any(fnmatchcase(record.name, pattern) for record in records):
            remedy = "add it to the passes, or pass the machine= that it needs"
            yield Shortfall(token, "the program", reason=f"no pass called {pattern} ran", remedy=remedy)
        for name, verdict in judged.verdicts:
            if fnmatchcase(name, pattern) and verdict.outcome is Outcome.LEFT:
                yield Shortfall.of(token, name, verdict)
    for name, verdict in judged.verdicts:
        if expect.rules and verdict.reason == NO_RULE:
            yield Shortfall.of("rules", name, verdict)
    for name, verdict in judged.verdicts if expect.no_remedies else ():
        chosen = name in _FOR_MEMORY or (judged.planned and name.startswith("bucket-"))
        if verdict.outcome in _UNDONE and verdict.bytes and verdict.remedy and not chosen:
            yield Shortfall.of("no-remedies", name, verdict)


def _numbers(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    for record in judged.report.records if expect.bitwise else ():
        if record.changed and record.numerics != Numerics.BITWISE:
            remedy = f'leave it out: passes=pipeline.without("{record.name}")'
            yield Shortfall("bitwise", "the program", "", f"it {record.numerics}", remedy, record.name)


def _selected(expect: Expect, judged: Judged) -> Iterator[Shortfall]:
    for like in expect.no:
        for name, verdict in judged.verdicts:
            if like.matches(name, verdict):
                yield Shortfall.of(f"no:{like}", name, verdict)
