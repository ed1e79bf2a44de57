"""A step within a memory budget: which values are computed again or moved to the host, and what to tell of it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from crossfade.compile.memory_budget import in_words, rule_for
from crossfade.cost.estimate import estimate
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import MemoryLimitError
from crossfade.execute.region_memory import alive_at_peak_in_regions, live_in_regions
from crossfade.graph import offload
from crossfade.graph.lasting import LASTING
from crossfade.graph.memory import Storages, alive_at_peak, memory_curve
from crossfade.graph.modules import by_module
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import InputKind, Program
from crossfade.schedule.choose_recompute import SMALL_MOVE, Frontier, frontier
from crossfade.schedule.host_moves import Room
from crossfade.schedule.kept_values import NONE, NOT_KEPT, Choice, KeptValues
from crossfade.schedule.offload_values import OffloadValues
from crossfade.schedule.recompute_values import RecomputeValues

Finish = Callable[[Program, bool], Program]
"""What makes the program that runs of one, with or without what is faster and holds more memory."""

CostsOf = tuple[Machine, Mapping[str, float]]
"""What operators take: on a machine, and as far as it was measured."""

Rules = Sequence[tuple[str, str]]

Offloading = Rules | Literal["auto", "all"]
"""What may move to the host: as rules say of modules in any case; what is chosen; or whatever the link has room for."""

Rows = Sequence[tuple[str, int, float]]
"""Values that are computed again, as `recompute-values` takes them, or moved, as `offload-values` does, each with its
bytes and milliseconds."""

_FORWARD = "forward"
_BUSY = "the link is busy meanwhile"
_NEARBY = 8
"""Choices that are tried beside the leanest one, where that does not fit."""
_SHOWN = 5
_SOME_MORE = " and a tenth more (the order, and so the least, follows measured times)"


@dataclass(frozen=True)
class Accounting:
    """How memory is counted: the bytes beside inputs during each node, and what is alive when these are most.

    With `replayed` CUDA graphs keep copies of what comes in at each step; not of a program that offloads.
    """

    during: Callable[[Program], tuple[int, ...]]
    alive: Callable[[Program], list[tuple[str, int]]]
    replayed: bool = False

    def live(self, program: Program) -> tuple[int, ...]:
        """Bytes during each node, inputs and constants included."""
        held = Storages(program.graph.nodes).held + self.copied(program)
        return tuple(size + held for size in self.during(program))

    def copied(self, program: Program) -> int:
        """The bytes of the copies that CUDA graphs keep."""
        if not self.replayed or offload.has(program.graph):
            return 0
        return sum(Storages([node]).held for item, node in program.named_inputs() if item.kind not in LASTING)

    def held(self, program: Program) -> dict[str, int]:
        """The bytes of inputs, constants and copies of these, by what they are, the largest first."""
        copied = {"copies for CUDA graphs": self.copied(program)} if self.copied(program) else {}
        return dict(Counter({**held_by_kind(program), **copied}).most_common())

    def peak_by_module(self, program: Program, places: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
        """What is alive beside inputs when most is, by module, the largest first."""
        sizes = Counter[str]()
        for name, size in self.alive(program):
            sizes[places.get(name, "")] += size
        return tuple(sizes.most_common())


BY_NODES = Accounting(lambda program: memory_curve(program).during, alive_at_peak)
IN_REGIONS = Accounting(live_in_regions, alive_at_peak_in_regions)
IN_GRAPHS = Accounting(
    functools.partial(live_in_regions, fused=True),
    functools.partial(alive_at_peak_in_regions, fused=True),
    replayed=True,
)
"""Of steps that run node by node; of those whose regions may be compiled; and of those on CUDA, whose regions all are,
and are replayed."""


@dataclass(frozen=True)
class Again:
    """A value that is computed again: its name, its module, the bytes that are free meanwhile, and what it takes."""

    name: str
    module: str
    bytes: int
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.name} of {self.module or 'the model'}: {in_words(self.bytes)} for {self.milliseconds:.3f} ms"


@dataclass(frozen=True)
class Moved(Again):
    """A value that moves to the host and back: its name, its module, its bytes, and how long that is waited for."""

    def __str__(self) -> str:
        hidden = "hidden" if not self.milliseconds else f"exposed for {self.milliseconds:.3f} ms"
        return f"{self.name} of {self.module or 'the model'}: {in_words(self.bytes)} to the host, {hidden}"


@dataclass(frozen=True)
class StepMemory:
    """What a step holds, and what that costs; all bytes with parameters, state and whatever else is given to it.

    `before` and `after` are live bytes during each node of the program without and with what was chosen; `held` is what
    inputs take of it, by kind; `at_peak` what is alive beside them at the peak, by module. `again` are the values that
    are computed again, `moved` those that move to the host, `on_host` the most bytes there; `left` counts by reason
    what was asked to move and stays. `ladder` has the budgets at which a step takes less time, with that, in seconds
    above the least.

    >>> ladder = (700, 1e-3), (900, 0.0)
    >>> memory = StepMemory(1000, (400, 900), (700,), {"parameter": 400}, (("forward up", 300),), (), ladder, 1e-3)
    >>> memory.peak_before, memory.peak
    (900, 700)
    >>> print(memory)
    peak 700 B of 1.00 kB, 900 B without a budget: 400 B of parameter, 300 B made by the step
    alive at the peak: forward up 300 B
    computed again: nothing
    more memory: with 200 B more: 1.000 ms less; with 200 B more nothing is computed again
    """

    budget: int | None
    before: tuple[int, ...] = field(repr=False)
    after: tuple[int, ...] = field(repr=False)
    held: dict[str, int]
    at_peak: tuple[tuple[str, int], ...]
    again: tuple[Again, ...]
    ladder: tuple[tuple[int, float], ...]
    seconds: float = 0.0
    """What computing again, and waiting for what moves, takes."""
    moved: tuple[Moved, ...] = ()
    on_host: int = 0
    left: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max(self.after, default=0)

    @property
    def peak_before(self) -> int:
        """The most bytes at any time, were nothing computed again."""
        return max(self.before, default=0)

    @property
    def next(self) -> tuple[int, float] | None:
        """By how many bytes a budget would have to be larger for a faster step, and the seconds that it saves."""
        better = [(size, seconds) for size, seconds in self.ladder if seconds < self.seconds and size > self.peak]
        if not better:
            return None
        size, seconds = min(better)
        return size - self.peak, self.seconds - seconds

    def lines(self) -> dict[str, str]:
        """What a report tells, by what it is about."""
        kinds = ", ".join(f"{in_words(size)} of {kind}" for kind, size in self.held.items() if size)
        made = self.peak - sum(self.held.values())
        of = "" if self.budget is None else f" of {in_words(self.budget)}"
        sums = f"{kinds}, {in_words(made)} made by the step" if kinds else f"{in_words(made)} made by the step"
        modules = ", ".join(f"{module or 'elsewhere'} {in_words(size)}" for module, size in self.at_peak[:_SHOWN])
        freed = sum(each.bytes for each in self.again)
        taken = sum(each.milliseconds for each in self.again)
        count = f"{len(self.again)} values, {in_words(freed)}, for {taken:.3f} ms a step"
        found = {
            "memory": f"peak {in_words(self.peak)}{of}, {in_words(self.peak_before)} without a budget: {sums}",
            "alive at the peak": modules or "nothing",
            "computed again": count if self.again else "nothing",
        }
        if self.moved or self.left:
            found["moved to the host"] = self._said_of_moves()
        most = max((size for size, _ in self.ladder), default=0)
        if (following := self.next) is not None:
            more, saved = following
            last = f"; with {in_words(most - self.peak)} more nothing is computed again"
            found["more memory"] = f"with {in_words(more)} more: {1e3 * saved:.3f} ms less{last}"
        return found

    def _said_of_moves(self) -> str:
        exposed = sum(each.milliseconds for each in self.moved)
        size = sum(each.bytes for each in self.moved)
        waits = f"exposed for {exposed:.3f} ms a step" if exposed else "hidden"
        moved = f"{len(self.moved)} values, {in_words(size)}, at most {in_words(self.on_host)} at once, {waits}"
        left = [f"{count} left: {reason}" for reason, count in self.left]
        return "; ".join([moved if self.moved else "nothing", *left])

    def moves(self) -> list[tuple[str, str, float, float]]:
        """Each value that moves to the host, as `rows`."""
        found = sorted(self.moved, key=lambda each: (-each.bytes, each.name))
        return [(each.name, each.module, each.bytes / 1e6, each.milliseconds) for each in found]

    def rows(self) -> list[tuple[str, str, float, float]]:
        """Each value that is computed again: its name, its module, megabytes, milliseconds; the largest first."""
        found = sorted(self.again, key=lambda each: (-each.bytes, each.name))
        return [(each.name, each.module, each.bytes / 1e6, each.milliseconds) for each in found]

    def __str__(self) -> str:
        return "\n".join(f"{about}: {text}" if about != "memory" else text for about, text in self.lines().items())


@dataclass(frozen=True)
class Fitted:
    """What to compute again, by name, and whether the rest of the compiler is to spare memory; with what is to tell."""

    again: Rows
    lean: bool
    ladder: tuple[tuple[int, float], ...]
    before: tuple[int, ...]
    moves: Rows = ()
    left: tuple[str, ...] = ()
    """What was asked to move and stays, as `value: reason`."""

    def passes(self, costs: CostsOf) -> list[Pass]:
        """What carries it out."""
        return _passes(_spelled(self.again), _spelled(self.moves), costs, self.left)


def _spelled(rows: Rows) -> tuple[str, ...]:
    return tuple(spelled for spelled, _, _ in rows)


def _passes(again: tuple[str, ...], moves: tuple[str, ...], costs: CostsOf, left: tuple[str, ...] = ()) -> list[Pass]:
    passes: list[Pass] = [RecomputeValues(again, *costs)] if again else []
    return [*passes, OffloadValues(moves, left, *costs)] if moves or left else passes


def usual_machine(device: str) -> Machine:
    """By whose figures time is weighed against memory where no machine is given.

    >>> usual_machine("cpu").name
    'loopback-gloo'
    """
    return preset("h200-nvlink-node" if device == "cuda" else "loopback-gloo")


def fit(
    program: Program,
    plain: Program,
    budget: int | None,
    rules: Rules,
    costs: CostsOf,
    finish: Finish,
    moving: Offloading = (),
    accounting: Accounting = BY_NODES,
) -> Fitted:
    """The fastest choice within a budget; what rules ask for is computed again, or moved, in any case.

    Without a budget only what rules ask for. Raises `MemoryLimitError` if nothing fits.
    """
    known = by_module(plain)
    places = by_module(program, known)
    forward = {name for name, place in known.items() if place.startswith(_FORWARD)}
    stay = _kept(program, places, () if isinstance(moving, str) else moving)
    link = costs[0].host_link() if moving else None
    seconds = estimate(program, *costs)
    fixed = _kept(program, places, rules)
    values = KeptValues(program, seconds, fixed=fixed, forward=forward, host=link, stay=stay)
    always, said = _always(values, places, rules), tuple[str, ...]()
    if moving and moving != "auto":
        moved, said = _moved(values, places, moving, set(always))
        always += moved
    natural = finish(program, False)
    before = accounting.live(natural)
    if not always and (budget is None or max(before) <= budget):
        return Fitted((), False, ((max(before), 0.0),), before, (), said)
    if budget is None:
        choice = values.choose(always)
        return Fitted(_rows(values, choice), False, (), before, _moves(values, choice), said)
    found = frontier(values, always)
    sizes = _Sizes(values, found, costs, finish, accounting)
    at = sizes.first_within(budget)
    if at is None:
        leanest = sizes.program(len(found.choices) - 1)
        raise _too_small(budget, leanest, min(sizes.known.values()), known, accounting, is_measured=bool(costs[1]))
    held = max(before) - memory_curve(natural).peak  # and what regions hold longer
    ladder = [(choice.peak + held, choice.seconds) for choice in found.choices]
    ladder += [(max(before), 0.0)] if not always else []
    choice = found.choices[at]
    return Fitted(_rows(values, choice), True, tuple(ladder), before, _moves(values, choice), said)


def _moved(
    values: KeptValues, places: Mapping[str, str], moving: Offloading, again: Container[int]
) -> tuple[list[int], tuple[str, ...]]:
    """What moves to the host in any case, and why the rest of what was asked for stays.

    What rules name moves, under computation if the link has room for it; of everything, only what then is hidden.
    """
    link, natural = values.host, values.choose(())
    assert link is not None
    room, everything = Room(values.ends(()), link), moving == "all"
    asked = set(_inside(values, places, () if isinstance(moving, str) else moving))
    wanted = [c for c in range(len(values.size)) if c not in again and (everything or c in asked)]
    wanted = [c for c in wanted if values.late_start[c] != NONE and values.size[c] * SMALL_MOVE >= natural.peak]
    found, left = list[int](), list[str]()
    for cell in sorted(wanted, key=lambda cell: (-values.size[cell], cell)):
        if why_not := values.why_stays[cell]:
            if why_not != NOT_KEPT:
                left.append(f"{values.name_of(cell)}: {why_not}")
        elif not link.apart or room.taken_by(values.stay_of(cell, values.late_start[cell], False)) is None:
            if everything and link.apart:
                left.append(f"{values.name_of(cell)}: {_BUSY}")
            else:
                found.append(values.move(cell, at_once=True))
        else:
            found.append(values.move(cell))
    return found, tuple(left)


class _Sizes:
    """What choices really take, once all passes have run; found out for as few as possible."""

    def __init__(
        self, values: KeptValues, found: Frontier, costs: CostsOf, finish: Finish, accounting: Accounting
    ) -> None:
        self.values, self.found, self.costs, self.finish, self.accounting = values, found, costs, finish, accounting
        self.known: dict[int, int] = {}

    def program(self, at: int) -> Program:
        """The program of a choice as it will run."""
        choice = self.found.choices[at]
        passes = _passes(_names(self.values, choice), _spelled(_moves(self.values, choice)), self.costs)
        return self.finish(run_passes(self.values.program, passes), True)

    def of(self, at: int) -> int:
        """The bytes of a choice, inputs included."""
        if at not in self.known:
            self.known[at] = max(self.accounting.live(self.program(at)))
        return self.known[at]

    def first_within(self, budget: int) -> int | None:
        """The fastest choice within a budget: choices become leaner one by one."""
        low, high = 0, len(self.found.choices) - 1
        if self.of(high) > budget:
            # passes and regions hold a little more or less than what choices are made by: another may be leaner
            reach = self.found.least.peak * (1.05 if self.accounting is BY_NODES else 1.25)
            fitting = [at for at in range(high) if self.found.choices[at].peak <= reach]
            spread = fitting[:: max(1, len(fitting) // _NEARBY)]
            return next((at for at in spread if self.of(at) <= budget), None)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.of(middle) <= budget else (middle + 1, high)
        return low


def _names(values: KeptValues, choice: Choice) -> tuple[str, ...]:
    return tuple(sorted(values.spelled(cell) for cell in choice.cells))


def _rows(values: KeptValues, choice: Choice) -> Rows:
    """The values that a choice computes again, each operator counted once."""
    ran, rows = {index for _, index in choice.copies}, []
    for cell in sorted(choice.cells):
        made = ran.intersection(values.makers(cell))
        ran -= made
        rows.append((values.spelled(cell), values.size[cell], 1e3 * sum(values.seconds[index] for index in made)))
    return tuple(sorted(rows))


def _moves(values: KeptValues, choice: Choice) -> Rows:
    """The values that a choice moves."""
    names = [node.name for node in values.nodes]
    return tuple(
        (
            f"{values.name_of(move.cell)}@{names[move.left]}@{names[move.back]}",
            values.size[move.cell],
            1e3 * move.exposed,
        )
        for move in choice.moves
    )


def live_bytes(program: Program) -> tuple[int, ...]:
    """Bytes during each node of a program that runs node by node, inputs and constants included."""
    return BY_NODES.live(program)


def _kept(program: Program, places: Mapping[str, str], rules: Rules) -> Collection[fx.Node]:
    """What is not to be computed again."""
    return {
        node
        for node in program.graph.nodes
        if node.name in places and rule_for(places[node.name].partition(" ")[2], rules)[0] == "never"
    }


def _always(values: KeptValues, places: Mapping[str, str], rules: Rules) -> list[int]:
    """Cells to compute again in any case: what the forward of a named module makes, but what goes out of it."""
    return [cell for cell in _inside(values, places, rules) if values.eligible[cell]]


def _inside(values: KeptValues, places: Mapping[str, str], rules: Rules) -> list[int]:
    """What the forward of modules makes for itself of which rules say "full"."""
    if not any(word == "full" for _, word in rules):
        return []
    inside: dict[int, str] = {}
    forward: set[int] = set()
    for index, node in enumerate(values.nodes):
        phase, _, module = places.get(node.name, "").partition(" ")
        if phase == _FORWARD:
            forward.add(index)
            word, path = rule_for(module, rules)
            if word == "full":
                inside[index] = path
    found = []
    for cell in range(len(values.size)):
        own = values.makers(cell)
        paths = {inside.get(index, "") for index in own}
        users = {user for index in values.in_cell[cell] for user in values.users[index]} - set(own)
        leaves = any(user in forward and inside.get(user, "") not in paths for user in users)
        if own and "" not in paths and not leaves:
            found.append(cell)
    return found


def _too_small(
    budget: int,
    leanest: Program,
    least: int,
    known: Mapping[str, str],
    accounting: Accounting,
    *,
    is_measured: bool,
) -> MemoryLimitError:
    """Why nothing fits: what fills the leanest program there is.

    Where costs were measured, the next compilation may plan another order, which holds more or less.
    """
    held = accounting.held(leanest)
    biggest = [f"{in_words(size)} of {kind}" for kind, size in held.items() if size]
    at_peak = accounting.peak_by_module(leanest, by_module(leanest, known))
    modules = [f"{in_words(size)} in {module or 'values of no module'}" for module, size in at_peak]
    error = MemoryLimitError(
        f"a step needs {least:,} bytes ({in_words(least)}) even with everything computed again that may be: "
        f"{', '.join(biggest)}; beside these at the peak {', '.join(modules[:_SHOWN])}",
        expected=f"at most memory={budget:,}",
        remedy=f"pass at least memory={least}{_SOME_MORE if is_measured else ''}, shard more (zero3), or use a smaller "
        "batch or accumulate=",
    )
    error.least = least
    return error


def told(
    program: Program, plain: Program, fitted: Fitted, budget: int | None, accounting: Accounting = BY_NODES
) -> StepMemory:
    """What is to be told of a step, of the program that runs; `plain` knows modules as they were captured."""
    places = by_module(program, by_module(plain))
    rows = ((spelled.partition("@")[0], size, taken) for spelled, size, taken in fitted.again)
    again = tuple(Again(name, places.get(name, ""), size, taken) for name, size, taken in rows)
    rows = ((spelled.partition("@")[0], size, waited) for spelled, size, waited in fitted.moves)
    moved = tuple(Moved(name, places.get(name, ""), size, waited) for name, size, waited in rows)
    seconds = sum(each.milliseconds for each in (*again, *moved)) / 1e3
    at_peak = accounting.peak_by_module(program, places)
    left = tuple(Counter(entry.partition(": ")[2] for entry in fitted.left).most_common())
    after, held, on_host = accounting.live(program), accounting.held(program), offload.most_on_host(program.graph)
    return StepMemory(budget, fitted.before, after, held, at_peak, again, fitted.ladder, seconds, moved, on_host, left)


def held_by_kind(program: Program) -> dict[str, int]:
    """The bytes of a program's inputs and constants, by what they are, the largest first."""
    by_kind = Counter[str]()
    for item, node in program.named_inputs():
        by_kind[_WORDS.get(item.kind, str(item.kind))] += Storages([node]).held
    by_kind["constants"] += memory_curve(program).held - sum(by_kind.values())
    return dict(by_kind.most_common())


_WORDS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.OPTIMIZER_STATE: "optimizer state",
    InputKind.INPUT: "batch",
    InputKind.WORKSPACE: "buckets",
}
