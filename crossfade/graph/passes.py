"""The contract of a pass, what it returns, and the runner that treats every pass the same."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import fx

from crossfade.errors import CrossfadeError, MemoryLimitError, PassError
from crossfade.graph.history import Outcome, PassRecord, Verdict
from crossfade.graph.nested import closed, nested_graphs, node_count, opened, why_closed
from crossfade.graph.operators import remembered
from crossfade.graph.private import FakeTensor, has_schema
from crossfade.graph.program import Program, attribute, source_line
from crossfade.graph.text import render, render_type
from crossfade.graph.verify import verify, verify_given

TEXT_LIMIT = 20_000
"""Programs with more nodes than this keep no before/after text unless asked: printing would cost more than the pass."""


class Numerics(StrEnum):
    """What a pass may do to the numbers that a program computes."""

    BITWISE = "bitwise"
    REASSOCIATES = "reassociates"
    CHANGES_DTYPE = "changes-dtype"


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did: whether it changed the program, what it counted, and its verdicts. `decided` is a pass that does
    the same to the same program without knowing the machine, of one that asked for that."""

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    decided: Pass | None = None

    @classmethod
    def of(cls, verdicts: Iterable[Verdict], did: Outcome, *, done: str, left: str = "") -> PassResult:
        """The result of a pass that changed something for each verdict of one outcome: these are counted as `done`, and
        the others as `left`, if that has a name.

        >>> PassResult.of([Verdict("a", Outcome.LEFT, "it is alone")], Outcome.MOVED, done="moved", left="left")
        PassResult(changed=False, counts={'moved': 0, 'left': 1}, verdicts=(Verdict(subject='a', ...
        """
        given = tuple(verdicts)
        count = sum(verdict.outcome is did for verdict in given)
        return cls(bool(count), {done: count} | ({left: len(given) - count} if left else {}), given)


@dataclass(frozen=True)
class Pass:
    """Base of all passes: a frozen dataclass whose fields are its options.

    A subclass sets `name` (by effect, in kebab case) and `numerics`, says what it `requires` and `provides`, shows a
    small program before and after in its docstring, and implements `run`, which may change the program given.
    It touches no process group, device, clock or environment variable.
    """

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    nested: ClassVar[bool] = False
    """Whether the runner gives the pass, after the program, the graphs that its higher-order operators call."""

    def run(self, program: Program) -> PassResult:
        """Transform `program` in place and account for it."""
        raise NotImplementedError

    @property
    def spelling(self) -> str:
        """The pass and its non-default options as one token: heading in reports, form on the command line.

        >>> from crossfade.communicate.sink_waits import SinkWaits
        >>> SinkWaits().spelling
        'sink-waits'
        """
        given = {option.name: getattr(self, option.name) for option in option_fields(self)}
        spelled = [f"{o.name}={_spelled(given[o.name])}" for o in option_fields(self) if given[o.name] != o.default]
        return f"{self.name}({','.join(spelled)})" if spelled else self.name


_FROM_CONTEXT = "from context"


def from_context(default: Any = None) -> Any:
    """A field that the runner fills in from its context: what is measured or known about the machine.

    It is no option: it is neither spelled nor compared. A value given by hand stays.

        >>> from crossfade.schedule.overlap_communication import OverlapCommunication
        >>> [option.name for option in option_fields(OverlapCommunication)]
        ['memory_limit']
    """
    return field(default=default, compare=False, metadata={_FROM_CONTEXT: True})


def option_fields(of: Pass | type[Pass]) -> list[Field]:
    """The fields of a pass that a user sets and its spelling shows.

    >>> from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
    >>> [option.name for option in option_fields(MergeDuplicateCollectives)]
    ['hold', 'near']
    """
    return [option for option in fields(of) if _FROM_CONTEXT not in option.metadata]


def _filled_in(given: Pass, context: Mapping[str, Any]) -> Pass:
    """The pass with what the context knows, where nothing was given by hand."""
    known = {
        slot.name: context[slot.name]
        for slot in fields(given)
        if _FROM_CONTEXT in slot.metadata and slot.name in context and getattr(given, slot.name) is slot.default
    }
    return replace(given, **known) if known else given


def _spelled(value: Any) -> str:
    """An option's value as one token that parses back; functions by name, passes by spelling."""
    match value:
        case Pass():
            return repr(value.spelling)
        case tuple():
            return f"({','.join(map(_spelled, value))}{',' if len(value) == 1 else ''})"
        case float() if math.isinf(value):
            return "1e999" if value > 0 else "-1e999"  # `inf` is no literal
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    *,
    context: Mapping[str, Any] | None = None,
    keep_text: bool | None = None,
    checked: bool = True,
) -> Program:
    """Run `passes` over a copy of `program`; the result's history has a record of each.

    The runner times each pass, verifies the program after it, compares the `changed` it reports with a hash of the
    graph, and wraps whatever goes wrong with the pass's name; a program that was broken before is a `VerifyError`.
    `context` has what passes may ask for: the `machine` to plan for, `measured` seconds of operators. `keep_text`
    forces the before/after texts on or off. Without `checked`, nothing is verified, compared or recorded: for programs
    that are only simulated, of which a search builds hundreds.

        >>> from crossfade.graph.text import parse
        >>> from crossfade.simplify.remove_dead_code import RemoveDeadCode
        >>> program = parse('''
        ... x: f32[4] = input("x")
        ... unused: f32[4] = aten.relu(x)
        ... return output("x", x)
        ... ''')
        >>> run_passes(program, [RemoveDeadCode()]).history[0].counts
        {'removed': 1}
    """
    check_requirements(program.facts, passes)
    done, look = program.copy(), _Look()
    for pass_ in passes:
        if not checked:
            _run_unchecked(done, _filled_in(pass_, context or {}))
            continue
        try:
            look = _run_recorded(done, _filled_in(pass_, context or {}), keep_text, look)
        except PassError:
            verify_given(program)  # was it broken before?
            raise
    return done


def _run_unchecked(program: Program, pass_: Pass) -> None:
    """Run a pass, on the graphs inside a program too, and look at nothing."""
    if nested_graphs(program):
        _run_recorded(program, pass_, False, _Look())
    else:
        pass_.run(program)
        program.facts |= pass_.provides


def check_requirements(facts: Iterable[str], passes: Sequence[Pass]) -> None:
    """Refuse an order in which a pass lacks what it requires, before anything runs."""
    known = set(facts)
    for index, pass_ in enumerate(passes):
        if missing := pass_.requires - known:
            providers = [p.name for p in passes[index + 1 :] if missing & p.provides]
            where = f"move {providers[0]} before it" if providers else "add a pass that provides it, or remove it"
            raise PassError(
                f"pass {pass_.name} at position {index}, where {', '.join(sorted(missing))} does not hold yet",
                expected="each pass after those that provide what it requires",
                remedy=where,
            )
        known |= pass_.provides


def fingerprint(program: Program) -> str:
    """A hash of everything that decides what the program computes: equal for equal programs, on every rank.

    Node names do not count; the order of nodes does.
    """
    types = [render_type(node.meta.get("val")) for node in program.placeholders]
    border = (program.inputs, types, program.outputs, sorted(program.groups.items()), _described(program.constants))
    digest = hashlib.sha256(repr(border).encode())
    for line in _lines(program.graph, program.constants.get):
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _described(constants: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Constants by name and value; large ones, which no pass makes, by type: they are hashed before and after each."""
    found = []
    for name, value in sorted(constants.items()):
        text = render_type(value) if isinstance(value, torch.Tensor) else ""
        if isinstance(value, torch.Tensor) and type(value) is not FakeTensor and value.device.type == "cpu":
            small = value.layout == torch.strided and value.numel() * value.element_size() <= _SMALL_CONSTANT
            text += _numbers_of(value) if small else ""
        found.append((name, text))
    return found


_SMALL_CONSTANT = 2**16


def _numbers_of(value: torch.Tensor) -> str:
    """A hash of a tensor's numbers: printing them takes longer than many a pass."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


_NESTING = (list, tuple, dict, slice)
"""What may have nodes inside, as an argument."""


def _lines(graph: fx.Graph, constant: Callable[[str], Any]) -> Iterator[str]:
    """What a graph computes, line by line, nodes by their positions; nested graphs where they are named."""
    position: dict[fx.Node, Any] = {}
    for index, node in enumerate(graph.nodes):
        position[node] = b"%d" % index  # bytes, which no argument is, since these print fast
        args, kwargs = node.args, node.kwargs
        if kwargs or any(isinstance(argument, _NESTING) for argument in args):
            arguments: Any = fx.map_arg((args, kwargs), position.__getitem__)
        else:
            arguments = tuple([position[item] if isinstance(item, fx.Node) else item for item in args]), {}
        name = _called(node.target) if node.op == "call_function" else "" if node.op == "placeholder" else node.target
        yield f"{node.op} {name} {arguments}\n"
        if node.op == "get_attr" and isinstance(module := constant(str(node.target)), fx.GraphModule):
            types = [render_type(node.meta.get("val")) for node in module.graph.find_nodes(op="placeholder")]
            yield f"{types} {{\n"
            yield from _lines(module.graph, functools.partial(attribute, module))
            yield "}\n"


@remembered
def _called(target: Any) -> str:
    """The name of what a node calls, without the address that a Python function prints with."""
    return str(target) if has_schema(target) else getattr(target, "__name__", str(target))


@dataclass(frozen=True, slots=True)
class _Look:
    """What a program looked like after the last pass, which is how the next one finds it; empty if nobody looked."""

    hash: str = ""
    text: str = ""


def _run_recorded(program: Program, pass_: Pass, keep_text: bool | None, look: _Look) -> _Look:
    """Run a pass and write its record; returns how the program looks afterwards."""
    nodes_before = node_count(program)
    texts = keep_text if keep_text is not None else nodes_before <= TEXT_LIMIT
    begun = time.perf_counter()
    before = (look.text or render(program)) if texts else ""
    start = time.perf_counter()
    result, checking, hash_after = _run_checked(program, pass_, look.hash)
    seconds = time.perf_counter() - start - checking
    after = render(program) if texts and result.changed else ""
    looking = time.perf_counter() - begun - seconds
    program.facts |= pass_.provides
    program.history += (
        PassRecord(
            pass_.name,
            pass_.spelling,
            str(pass_.numerics),
            seconds,
            result.changed,
            dict(result.counts),
            result.verdicts,
            nodes_before,
            node_count(program),
            before if result.changed else "",
            after,
            _decided(pass_, result),
            looking,
        ),
    )
    return _Look(hash_after, after or before)


def _decided(pass_: Pass, result: PassResult) -> str | None:
    """How to have what a pass did again, without the context that it had."""
    if result.decided is not None:
        return result.decided.spelling
    asks = any(_FROM_CONTEXT in slot.metadata for slot in fields(pass_))
    return None if asks and result.changed else pass_.spelling


def _hash_if_ordered(program: Program) -> str:
    """The hash of a program; of one so broken that it has none, the empty text: what is wrong is said by `verify`."""
    try:
        return fingerprint(program)
    except KeyError:  # of a node that is used above its definition, or is gone
        return ""


def _content(program: Program) -> list[Any]:
    """The objects that a program without nested graphs is made of: one that has the same ones was not touched.

    Comparing them is cheaper than hashing what they say.
    """
    found = [program.inputs, program.outputs, *program.groups, *program.groups.values(), *program.constants.values()]
    found += [node.meta.get("val") for node in program.placeholders]
    for node in program.graph.nodes:
        found += (node, node.target, node.args, node.kwargs)
    return found


def _run_checked(program: Program, pass_: Pass, hash_before: str = "") -> tuple[PassResult, float, str]:
    """Run a pass on a program, then on the graphs inside it.

    Also says how many seconds went into watching it, and the hash of the program afterwards if it is known. A program
    that is as the pass before left it, `hash_before`, was verified then.
    """
    start = time.perf_counter()
    verified, graphs_before = hash_before, nested_graphs(program)
    hash_before, content_before = hash_before or fingerprint(program), _content(program)
    checking = time.perf_counter() - start
    try:
        result = pass_.run(program)
    except MemoryLimitError:  # the pass did its work: there is no such order
        raise
    except Exception as error:
        raise _blame(pass_, "failed", error) from error
    start = time.perf_counter()
    content = [] if graphs_before else _content(program)
    untouched = len(content) == len(content_before) and all(map(operator.is_, content, content_before))
    try:
        hash_after = hash_before if untouched else _hash_if_ordered(program)
        verify(program, nested=False, known=bool(verified) and hash_after == verified)
        for name, module in nested_graphs(program).items():
            if graphs_before.get(name) is not module and (inside := opened(module, program)) is not None:
                verify(inside)
    except Exception as error:
        raise _blame(pass_, "left a broken program", error) from error
    changed = hash_after != hash_before
    if changed != result.changed:
        truth = "did change" if changed else "did not change"
        raise PassError(
            f"pass {pass_.name} reporting changed={result.changed} on a graph that {truth}",
            remedy=f"return the truth from {type(pass_).__name__}.run",
        )
    checking += time.perf_counter() - start
    if not pass_.nested:
        return result, checking, hash_after
    result, checking = _run_inside(program, pass_, result, checking)
    return result, checking, "" if nested_graphs(program) else hash_after  # what is inside may have changed since


def _run_inside(program: Program, pass_: Pass, result: PassResult, checking: float) -> tuple[PassResult, float]:
    """Run a pass on each graph inside a program once, whatever its names, and add to what it did outside."""
    counts, changed, verdicts = Counter(result.counts), result.changed, list(result.verdicts)
    done: dict[fx.GraphModule, fx.GraphModule] = {}
    for name, module in nested_graphs(program).items():
        inside = opened(module, program)
        if inside is None:
            verdicts.append(Verdict(name, Outcome.LEFT, "its graph is not one of operators with metadata"))
            continue
        if (reason := why_closed(program, name)) is not None:
            verdicts.append(Verdict(name, Outcome.LEFT, reason))
            continue
        if module not in done:
            deeper, seconds, _ = _run_checked(inside, pass_)
            checking += seconds
            counts.update(deeper.counts)
            verdicts += [replace(verdict, subject=f"{name}.{verdict.subject}") for verdict in deeper.verdicts]
            changed |= deeper.changed
            done[module] = closed(inside, module) if deeper.changed else module
        program.constants = {**program.constants, name: done[module]}
    return PassResult(changed, dict(counts), tuple(verdicts)), checking


def _blame(pass_: Pass, what: str, error: Exception) -> PassError:
    node: Any = getattr(error, "node", None)
    line = source_line(node) if isinstance(node, fx.Node) else ""
    where = f" at node {node.name}" + (f" [{line}]" if line else "") if isinstance(node, fx.Node) else ""
    if isinstance(error, CrossfadeError) and what == "failed":  # raised on purpose: what to do is known better there
        found = f"pass {pass_.spelling} which {what}{where}: {type(error).__name__}: {error.found}"
        return PassError(found, expected=error.expected, remedy=error.remedy)
    message = re.sub(r"\s+", " ", str(error)).rstrip(".")
    return PassError(
        f"pass {pass_.spelling} which {what}{where}: {type(error).__name__}: {message}",
        remedy=f"leave {pass_.name} out of the pipeline, and report the program it failed on",
    )
