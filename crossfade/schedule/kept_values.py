"""Values that are kept from where they are made to a late use, or computed again there: what each choice takes, as
numbers.

A value may also move to the host and back meanwhile (`crossfade.schedule.host_moves`).

A value lives in a cell of memory (`crossfade.graph.memory`). Its uses are early or late, divided by the longest stretch
without any that ends outside of the forward. A cell that is chosen is freed after its early uses; what the late ones
read is computed again, each operator right before its first late use, from what is there or is computed again itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx

from crossfade.cost.machine_parts import HostLink
from crossfade.cost.timeline import Costs
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.effects import alias_roots, rewritten
from crossfade.graph.in_place import has_layout_of, in_place_form, update_chain
from crossfade.graph.memory import Storages
from crossfade.graph.program import OutputKind, Program, device_of
from crossfade.graph.value_numbering import is_function
from crossfade.schedule.host_moves import Move, Stay, timetable

NONE = -1


@dataclass(frozen=True)
class Choice:
    """What it takes to compute some values again, or to move them to the host.

    `picked` are the cells that are computed again, `cells`, and the numbers of moves (`KeptValues.move`), of which
    `moves` has those that free anything. `copies` has, for each operator that runs once more, the position before which
    it does and its own, in order. `curve` is the most live bytes at each position of the program, copies before it
    included.
    """

    picked: frozenset[int]
    cells: frozenset[int]
    copies: tuple[tuple[int, int], ...]
    seconds: float
    peak: int
    curve: Tensor = field(repr=False, compare=False)
    ends: Mapping[int, int] = field(repr=False, compare=False)
    """The last position that needs a cell as it was made first, where that is not its last use."""
    moves: tuple[Move, ...] = ()


class KeptValues:
    """A program's values as cells with early and late uses, each with what computing it again takes.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.exp(x)
    ... b: f32[4] = aten.neg(a)
    ... c: f32[2] = aten.slice.Tensor(b, 0, 0, 2)
    ... d: f32[2] = aten.neg(c)
    ... e: f32[4] = aten.cat([d, d])
    ... f: f32[4] = aten.mul.Tensor(e, a)
    ... return output("f", f)
    ... ''')
    >>> values = KeptValues(program, Costs({}, {}, {}))
    >>> natural = values.choose(())
    >>> again = values.choose(values.cells_named(["a"]))
    >>> natural.peak, again.peak, [program.graph.find_nodes(op="placeholder")[0].name]
    (40, 32, ['x'])
    >>> [(values.nodes[at].name, values.nodes[of].name) for at, of in again.copies]
    [('f', 'a')]
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        *,
        fixed: Collection[fx.Node] = (),
        forward: Collection[str] = (),
        divided: Mapping[str, str] | None = None,
        host: HostLink | None = None,
        stay: Collection[fx.Node] = (),
    ) -> None:
        """Of a program, in which operators take so long. Those in `fixed` do not run again.

        `forward` names the nodes whose uses are never late. Where it is known already what is to be computed again,
        `divided` names each such value, with its first late use or "". With a link to the `host`, values may move there
        that are not made by nodes in `stay`.
        """
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.storages = storages = Storages(self.nodes)
        self.size = list(storages.size)
        self.seconds = [costs.compute.get(node, 0.0) + costs.travel.get(node, 0.0) for node in self.nodes]
        self.inputs = [[self.position[source] for source in node.all_input_nodes] for node in self.nodes]
        self.users = [sorted(self.position[user] for user in node.users) for node in self.nodes]
        cells = [storages.cells_of(node) for node in self.nodes]
        self.is_list = [isinstance(node.meta.get("val"), (tuple, list)) for node in self.nodes]
        self.home = [own[0] if len(own) == 1 else NONE for own in cells]
        self.cells = cells
        self._find_uses()
        self._divide(forward, divided)
        self._forget_updates()
        self._find_repeatable(fixed)
        self.host, self.busy = host, torch.tensor([costs.compute.get(node, 0.0) for node in self.nodes]).double()
        self._find_movable(stay, forward)
        self._count_as_written()

    def _find_uses(self) -> None:
        """When each cell is touched, and by what it is made; a cell that another keeps is in use as long as that."""
        storages, count = self.storages, len(self.size)
        uses: list[list[int]] = [[] for _ in range(count)]
        for index, node in enumerate(self.nodes):
            for cell in storages.touches[node]:
                uses[cell].append(index)
        for cell in reversed(range(count)):  # a cell keeps only earlier ones
            for kept in storages.then[cell]:
                if uses[cell]:
                    uses[kept].append(max(uses[cell]))
        self.uses = [sorted(set(found)) for found in uses]
        self.first = [found[0] if found else NONE for found in self.uses]
        self.last = [found[-1] if found else NONE for found in self.uses]
        self.maker = [self.first[cell] for cell in range(count)]
        self.in_cell: list[list[int]] = [[] for _ in range(count)]
        for index, cell in enumerate(self.home):
            if cell != NONE:
                self.in_cell[cell].append(index)

    def _divide(self, forward: Collection[str], divided: Mapping[str, str] | None) -> None:
        """Where the late uses of each cell begin, if it has any, and where the early ones end."""
        self.early_end, self.late_start = list(self.last), [NONE] * len(self.size)
        if divided is not None:
            by_name = {node.name: index for index, node in enumerate(self.nodes)}
            for name, use in divided.items():
                if use:
                    cell, start = self.home[by_name[name]], by_name[use]
                    self.early_end[cell], self.late_start[cell] = max(u for u in self.uses[cell] if u < start), start
            return
        inside = [node.name in forward for node in self.nodes]
        for cell, found in enumerate(self.uses):
            pairs = itertools.pairwise(found)
            gaps = [(after - before, before, after) for before, after in pairs if not inside[after]]
            if gaps and (longest := max(gaps))[0] > 1:
                self.early_end[cell], self.late_start[cell] = longest[1:]

    def _forget_updates(self) -> None:
        """New values of inputs are written into these, in the end: they take no memory of their own."""
        inputs = self.program.input_nodes()
        self.is_update = set[int]()
        for out, value in self.program.named_results():
            if out.kind is OutputKind.UPDATE:
                for node in update_chain(value, inputs[out.name]):
                    cell = self.home[self.position[node]]
                    if cell != NONE:
                        self.size[cell] = 0
                        self.is_update.add(cell)

    def _find_repeatable(self, fixed: Collection[fx.Node]) -> None:
        """Which operators may run again, and which cells may be made again by them."""
        roots = alias_roots(self.nodes)
        changing = rewritten(self.nodes, roots)
        self.repeatable = [
            node not in fixed and _may_repeat(node) and not changing.intersection((node, *node.all_input_nodes))
            for node in self.nodes
        ]
        returned = set(self.storages.touches[self.program.output_node])
        self.eligible = []
        for cell, size in enumerate(self.size):
            makers = self.makers(cell)
            fits = size > 0 and cell not in returned and bool(makers)
            self.eligible.append(fits and all(self.repeatable[index] for index in makers))

    def _find_movable(self, stay: Collection[fx.Node], forward: Collection[str]) -> None:
        """Why each cell may not move to the host; empty where it may."""
        self.why_stays = [_NO_LINK] * len(self.size)
        if self.host is None:
            return
        changing = rewritten(self.nodes, alias_roots(self.nodes))
        returned = set(self.storages.touches[self.program.output_node])
        device = device_of(self.program).type
        for cell in range(len(self.size)):
            own = [self.nodes[index] for index in self.in_cell[cell]]
            if cell in returned or not own:
                self.why_stays[cell] = _RETURNED
            elif not self.size[cell] or not _lies_densely(own[0], self.size[cell], device):
                self.why_stays[cell] = _SPREAD
            elif not self.in_cell[cell][0] < self.late_start[cell] or (forward and own[0].name not in forward):
                self.why_stays[cell] = NOT_KEPT
            elif any(node in stay for node in own):
                self.why_stays[cell] = _ASKED
            elif not changing.isdisjoint(own):
                self.why_stays[cell] = _WRITTEN
            elif any(collectives.communicates(node.target) for node in own):
                self.why_stays[cell] = _SENT
            else:
                self.why_stays[cell] = "" if all(map(_may_repeat, own[1:])) else _WRITTEN

    def move(self, cell: int, *, at_once: bool = False) -> int:
        """The number that stands for a cell's move to the host: under computation, or at once, which that waits for."""
        return cell + len(self.size) * (2 if at_once else 1)

    def moved(self, picked: Iterable[int]) -> dict[int, bool]:
        """The cells that move to the host, and whether at once, among what is picked; not those computed again."""
        picked, count = set(picked), len(self.size)
        pairs = ((number % count, number >= 2 * count) for number in picked if number >= count)
        return {cell: at_once for cell, at_once in sorted(pairs) if cell not in picked}

    def stay_of(self, cell: int, late: int, at_once: bool) -> Stay:
        """What a timetable has to know of a cell that moves, needed back for a position."""
        made = self.in_cell[cell][0]
        return Stay(cell, made, max(made, self.early_end[cell]), late, self.size[cell], at_once)

    def ends(self, copies: Sequence[tuple[int, int]]) -> Tensor:
        """When each position ends, in seconds of computation."""
        busy = self.busy
        if copies:
            places, again = (torch.tensor([pair[which] for pair in copies]) for which in (0, 1))
            busy = busy.index_add(0, places, self.busy[again])
        return torch.cumsum(busy, 0)

    def makers(self, cell: int) -> list[int]:
        """The operators that make a cell's value, with all views of it."""
        own = self.in_cell[cell]
        if not own or self.first[cell] == own[0]:
            return own
        return [self.first[cell], *own]  # one that returns several

    def _count_as_written(self) -> None:
        """Which uses may overwrite what they read, so that both are never there at once."""
        self.overwrites = [NONE] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            if node.op == "call_function" and in_place_form(node) is not None:
                source = self.position[node.args[0]]  # type: ignore[index]
                cell, reads = self.home[source], [self.home[other] for other in self.inputs[index]]
                own = self.home[index]
                if (
                    cell != NONE
                    and own != NONE
                    and self.in_cell[own][0] == index
                    and reads.count(cell) == 1
                    and self.size[cell] == self.size[own]
                ):
                    self.overwrites[index] = cell

    def cells_named(self, names: Iterable[str]) -> list[int]:
        """The cells that nodes of these names make."""
        by_name = {node.name: index for index, node in enumerate(self.nodes)}
        return [self.home[by_name[name]] for name in names]

    def spelled(self, cell: int) -> str:
        """A cell for `recompute-values`: its name, with its first late use, if it has one."""
        late = self.late_start[cell]
        return self.name_of(cell) if late == NONE else f"{self.name_of(cell)}@{self.nodes[late].name}"

    def name_of(self, cell: int) -> str:
        """What `cells_named` knows a cell by."""
        return self.nodes[self.in_cell[cell][0]].name

    def reads(self, cell: int) -> list[int]:
        """The cells that are read to make one, without itself."""
        sources = [source for index in self.makers(cell) for source in self.inputs[index]]
        made = {self.maker[cell], *self.in_cell[cell]}
        return list(dict.fromkeys(c for s in sources if s not in made for c in self.cells[s] if c != cell))

    def choose(self, picked: Iterable[int]) -> Choice:
        """What happens if these cells are computed again for their late uses, or move (`move`), all others kept."""
        picked = frozenset(picked)
        chosen = frozenset(number for number in picked if number < len(self.size))
        at, read_at = self._copies(chosen)
        copies = sorted((place, index) for index, place in at.items())
        moves = self._moves(picked, copies)
        if picked != chosen:  # what would be on its way all the time is kept instead
            at_once = {cell for cell, now in self.moved(picked).items() if now}
            picked = chosen.union(self.move(move.cell, at_once=move.cell in at_once) for move in moves)
        curve, peak, ends = self._curve(chosen, copies, read_at, moves)
        seconds = sum(self.seconds[index] for _, index in copies) + sum(move.exposed for move in moves)
        return Choice(picked, chosen, tuple(copies), seconds, peak, curve, ends, moves)

    def _moves(self, picked: frozenset[int], copies: Sequence[tuple[int, int]]) -> tuple[Move, ...]:
        """When what moves does, which is to be back for what is computed again from it, too."""
        moved = self.moved(picked)
        if not moved or self.host is None:
            return ()
        late = {cell: self.late_start[cell] for cell in moved}
        for place, index in copies:
            for source in self.inputs[index]:
                for cell in self.cells[source]:
                    if cell in late and place > self.early_end[cell]:
                        late[cell] = min(late[cell], place)
        stays = [self.stay_of(cell, late[cell], at_once) for cell, at_once in moved.items()]
        return tuple(timetable(stays, self.ends(copies), self.host))

    def _copies(self, chosen: frozenset[int]) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Where each operator runs again, and the last of these that read each cell as it was made first."""
        inside = {index for cell in chosen for index in self.makers(cell) if index <= self.early_end[cell]}
        wanted: dict[int, int] = {}
        at: dict[int, int] = {}
        read_at: dict[int, tuple[int, int]] = {}
        for index in sorted(inside, reverse=True):
            cell = self.home[index]
            place = wanted.get(index)
            if cell in chosen:
                users, early = self.users[index], self.early_end[cell]
                late = bisect_right(users, early)
                if late < len(users):
                    place = users[late] if place is None else min(place, users[late])
            if place is None:
                continue
            at[index] = place
            for source in self.inputs[index]:
                home = self.home[source]
                if self.is_element(index, source) or (home in chosen and source <= self.early_end[home] < place):
                    wanted[source] = min(place, wanted.get(source, place))
                else:
                    for held in self.cells[source]:
                        read_at[held] = max((place, index), read_at.get(held, (NONE, NONE)))
        for index in at:  # a list of results is taken apart at once: it keeps all of them
            for source in self.inputs[index][:1]:
                if self.is_element(index, source):
                    at[index] = at[source]
        return at, read_at

    def is_read_late(self, place: int, source: int, choice: Choice) -> bool:
        """Whether what reads a value at a place takes it as it is computed again."""
        home = self.home[source]
        return home in choice.cells and source <= self.early_end[home] < place

    def is_element(self, index: int, source: int) -> bool:
        """Whether a node is one of the results that another makes in memory of their own."""
        return self.home[index] in self.cells[source][1:]

    def _curve(
        self,
        chosen: frozenset[int],
        copies: Sequence[tuple[int, int]],
        read_at: Mapping[int, tuple[int, int]],
        away: Sequence[Move] = (),
    ) -> tuple[Tensor, int, dict[int, int]]:
        count = len(self.nodes)
        begun, ended = self._natural
        places = torch.tensor([place for place, _ in copies], dtype=torch.int64)
        before = torch.bincount(places, minlength=count) if copies else torch.zeros(count, dtype=torch.int64)
        new = torch.arange(count) + torch.cumsum(before, 0)
        rank = {copy: copy[0] + number for number, copy in enumerate(copies)}
        change = torch.zeros(count + len(copies) + 1, dtype=torch.int64)
        change.index_add_(0, new, begun)
        change.index_add_(0, new + 1, -ended[0])
        change.index_add_(0, new, -ended[1])
        steps: list[tuple[int, int]] = []

        def moved(cell: int, start: int, end: int, early: bool) -> None:
            steps.append((start, self.size[cell]))
            steps.append((end + (0 if early and end > start else 1), -self.size[cell]))

        shifted = new.tolist()
        ends: dict[int, int] = {}
        for cell in {*chosen, *read_at}:
            if not self.size[cell]:
                continue
            last, early = self.last[cell], self._is_overwritten(cell)
            steps.append((shifted[last] + (0 if early else 1), self.size[cell]))  # it does not end there any more
            end = self.early_end[cell] if cell in chosen else last
            early = early if end == last else self._is_overwritten_at(cell, end)
            reader = read_at.get(cell)
            if reader is not None and reader[0] > end:
                ends[cell] = reader[0]
                steps.append((rank[reader] + 1, -self.size[cell]))
            else:
                ends[cell] = end
                steps.append((shifted[end] + (0 if early else 1), -self.size[cell]))
        self._add_copies(chosen, copies, rank, shifted, moved)
        for move in away:
            steps.append((shifted[move.left] + 1, -self.size[move.cell]))
            steps.append((shifted[move.back] + 1, self.size[move.cell]))
        if steps:
            where = torch.tensor([step[0] for step in steps])
            change.index_add_(0, where, torch.tensor([step[1] for step in steps]))
        live = torch.cumsum(change, 0)[:-1]
        owner = torch.empty(count + len(copies), dtype=torch.int64)
        owner[new] = torch.arange(count)
        if copies:
            owner[torch.tensor([rank[copy] for copy in copies])] = places
        curve = torch.zeros(count, dtype=torch.int64).scatter_reduce_(0, owner, live, "amax")
        return curve, int(live.max()) if len(live) else 0, ends

    def _add_copies(
        self,
        chosen: frozenset[int],
        copies: Sequence[tuple[int, int]],
        rank: Mapping[tuple[int, int], int],
        shifted: Sequence[int],
        moved: Callable[[int, int, int, bool], None],
    ) -> None:
        """The memory of what is computed again."""
        start: dict[int, int] = {}
        end: dict[int, tuple[int, bool]] = {}
        place_of = {index: (place, index) for place, index in copies}
        for copy in copies:
            index, now = copy[1], rank[copy]
            own = self.cells[index]
            for cell in own:
                if self.home[index] == cell or self.is_list[index]:
                    start.setdefault(cell, now)
                    end[cell] = max(end.get(cell, (now, False)), (now, False))
            for source in self.inputs[index]:
                if source in place_of and place_of[source] <= copy:
                    inside = [cell for cell in self.cells[source] if cell in start]
                    inside = inside[:1] if self.is_element(index, source) else inside
                    for cell in inside:
                        end[cell] = max(end[cell], (now, self.overwrites[index] == cell))
        for cell, begin in start.items():
            if not self.size[cell]:
                continue
            last, early = end[cell]
            if cell in chosen and self.late_start[cell] != NONE:
                use = self.last[cell]
                last, early = max((last, early), (shifted[use], self._is_overwritten(cell)))
            moved(cell, begin, last, early)

    @cached_property
    def _natural(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Bytes that begin at each position, and that end after it, or at it because it overwrites them."""
        begun, after, at = (torch.zeros(len(self.nodes), dtype=torch.int64) for _ in range(3))
        for cell, size in enumerate(self.size):
            if size and self.first[cell] != NONE:
                begun[self.first[cell]] += size
                (at if self._is_overwritten(cell) else after)[self.last[cell]] += size
        after[-1] = 0  # what is returned stays
        return begun, (after, at)

    def _is_overwritten(self, cell: int) -> bool:
        return self._is_overwritten_at(cell, self.last[cell])

    def _is_overwritten_at(self, cell: int, use: int) -> bool:
        return use != self.first[cell] and self.overwrites[use] == cell


def _may_repeat(node: fx.Node) -> bool:
    """Whether a node gives the same when it runs again; of what communicates, only a gather of one tensor does."""
    if node.op != "call_function":
        return False
    found = collectives.view(node)
    if found is not None:
        return found.kind is Kind.ALL_GATHER and found.plain
    return is_function(node)


_NO_LINK = "no values are to move to the host"
_RETURNED = "it is a result of the step"
_SPREAD = "it is no tensor on the device that fills its memory"
NOT_KEPT = "it is not kept from the forward for a late use"
_ASKED = "it is to stay on the device"
_WRITTEN = "its memory is written, or its views cannot be made again"
_SENT = "it is sent or received"


def _lies_densely(node: fx.Node, size: int, device: str) -> bool:
    """Whether a node's value is a tensor on the device that takes all of its memory, each element once."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != device or not has_layout_of(value, value):
        return False
    if any(isinstance(number, torch.SymInt) for number in value.shape):
        return False
    return value.numel() * value.element_size() == size
