"""All-to-alls in pieces, each computed on while others travel: tokens to experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from crossfade.communicate.collective_matmul import (
    HIDDEN,
    IN_PIECES,
    counted_as_hidden,
    current,
    least_saved,
    left,
    raise_above,
)
from crossfade.communicate.exchange_regions import NO_COMBINE, NO_PRODUCT, Region, Regions, Shape, shapes_around
from crossfade.cost.estimate import estimate
from crossfade.cost.exchange_pieces import most_saved, seconds_of
from crossfade.cost.hidden import Overlap
from crossfade.cost.keys import Keys
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.errors import PassError
from crossfade.graph import collectives, in_pieces, per_token
from crossfade.graph.collectives import Collective, Kind
from crossfade.graph.order import Order
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict, from_context
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.splice import Replacements, splice
from crossfade.graph.strides import laid_out

SLOWER = "no cut into pieces is predicted to be faster by enough"
BESIDE = "it is in pieces already, with the all-to-all before it"
CLASH = "another region in pieces reads what it makes, or makes what it reads, and stands in its way"
NOT_CHOSEN = "it is not among those that are to be cut"

Chosen = tuple[str, str, int, int]
"""The name of an exchange, and which region around it: `Shape.way`, `Shape.outer`, `Shape.pieces`."""


@dataclass(frozen=True)
class PipelineAllToAlls(Pass):
    """Exchange in pieces what products read or make, and compute on each piece while others travel.

    Between the all-to-all that brings tokens to experts and the one that takes them away, the exchanged values are cut
    along a dim in which all calls are independent: rows of every rank's block, places in every expert's buffer, whole
    experts, or columns. All pieces are sent at once; each is computed on when it has arrived, and leaves at once.
    Products after one exchange, or before one, are too. What is read elsewhere is put together. There are as many of
    `pieces` as are predicted to be fastest on the runner's machine, if that saves enough, less what other computation
    hides; `chosen` names instead what is cut, and how.

    Also known as: Tutel's adaptive pipelining, FasterMoE's smart scheduling, Megatron's MoE overlap.

    Before:
        x: f32[2, 256, 512] = input("x")
        w: f32[2, 512, 512] = parameter("w")
        s: f32[2, 256, 512] = c10d.all_to_all_single(x, [1, 1], [1, 1], "ep")
        t: f32[2, 256, 512] = c10d.wait_tensor(s)
        h: f32[2, 256, 512] = aten.bmm(t, w)
        b: f32[2, 256, 512] = c10d.all_to_all_single(h, [1, 1], [1, 1], "ep")
        y: f32[2, 256, 512] = c10d.wait_tensor(b)
        return output("y", y)

    After:
        x: f32[2, 256, 512] = input("x")
        w: f32[2, 512, 512] = parameter("w")
        slice_1: f32[2, 128, 512] = aten.slice.Tensor(x, 1, 0, 128)
        clone: f32[2, 128, 512] = aten.clone(slice_1, memory_format=contiguous_format)
        all_to_all_single: f32[2, 128, 512] = c10d.all_to_all_single(clone, [1, 1], [1, 1], "ep")
        slice_2: f32[2, 128, 512] = aten.slice.Tensor(x, 1, 128, 256)
        clone_1: f32[2, 128, 512] = aten.clone(slice_2, memory_format=contiguous_format)
        all_to_all_single_1: f32[2, 128, 512] = c10d.all_to_all_single(clone_1, [1, 1], [1, 1], "ep")
        wait_tensor: f32[2, 128, 512] = c10d.wait_tensor(all_to_all_single)
        bmm: f32[2, 128, 512] = aten.bmm(wait_tensor, w)
        all_to_all_single_2: f32[2, 128, 512] = c10d.all_to_all_single(bmm, [1, 1], [1, 1], "ep")
        wait_tensor_1: f32[2, 128, 512] = c10d.wait_tensor(all_to_all_single_1)
        bmm_1: f32[2, 128, 512] = aten.bmm(wait_tensor_1, w)
        all_to_all_single_3: f32[2, 128, 512] = c10d.all_to_all_single(bmm_1, [1, 1], [1, 1], "ep")
        wait_tensor_2: f32[2, 128, 512] = c10d.wait_tensor(all_to_all_single_2)
        wait_tensor_3: f32[2, 128, 512] = c10d.wait_tensor(all_to_all_single_3)
        cat: f32[2, 256, 512] = aten.cat([wait_tensor_2, wait_tensor_3], 1)
        return output("y", cat)
    """

    name = "pipeline-all-to-alls"
    numerics = Numerics.REASSOCIATES

    machine: Machine | None = from_context()
    pieces: tuple[int, ...] = (2, 4, 8)
    chosen: tuple[Chosen, ...] | None = None
    measured: Mapping[str, float] | None = from_context()

    def __post_init__(self) -> None:
        if not self.pieces or min(self.pieces) < 2:
            raise PassError(
                f"{self.name}(pieces={self.pieces})",
                expected="at least one number, none less than 2",
                remedy="pass the numbers of pieces to try, as in (2, 4, 8)",
            )

    def run(self, program: Program) -> PassResult:
        """Plan, then apply."""
        regions, verdicts = plan_pieces(program, self)
        replaced = Replacements(program)
        for region in regions:
            apply_pieces(program, region, replaced)
        replaced.finish()
        chosen = tuple(
            (region.exchanges[0].node.name, region.shape.way, region.shape.outer, region.shape.pieces)
            for region in regions
        )
        result = PassResult.of(verdicts, Outcome.FUSED, done="in pieces", left="left")
        return replace(result, decided=replace(self, chosen=chosen))


def plan_pieces(program: Program, options: PipelineAllToAlls) -> tuple[list[Region], list[Verdict]]:
    """The regions that are to be computed in pieces, and a verdict on every all-to-all; the program stays as it is."""
    exchanges = [found for found in collectives.find(program.graph) if found.kind is Kind.ALL_TO_ALL]
    if not exchanges:
        return [], []
    planner = _Planner(program, options)
    for exchange in exchanges:
        planner.consider(exchange)
    return planner.regions, planner.verdicts


@dataclass(frozen=True)
class _Candidate:
    """A region with what is predicted of it as it stands and in pieces, and what other computation hides anyway."""

    region: Region
    plain: float
    seconds: float
    hides: float
    counted: float

    @property
    def saved(self) -> float:
        return self.plain - self.seconds

    def __str__(self) -> str:
        pieces = f"{self.region.shape.pieces} pieces"
        return f"{pieces}: {_ms(self.seconds)} instead of {_ms(self.plain)}"


class _Planner:
    """Decides exchange by exchange, in the order of the program; what is in one region is in no other."""

    def __init__(self, program: Program, options: PipelineAllToAlls) -> None:
        self.program, self.options = program, options
        self.machine = options.machine if options.machine is not None else preset("ethernet-1gbit")
        self.measured = dict(options.measured or {})
        self.given = (
            None
            if options.chosen is None
            else {name: Shape(way, outer, pieces) for name, way, outer, pieces in options.chosen}
        )
        self.found = Regions(Order(program.graph))
        self.costs = estimate(program, self.machine, self.measured) if self.given is None else None
        self.overlap = Overlap(program, self.costs) if self.costs is not None else None
        self.keys = Keys(None)
        self.known: dict[Any, tuple[float, float]] = {}
        self.made: dict[fx.Node, Region] = {}
        self.read: dict[fx.Node, list[Region]] = {}
        self.raised: set[fx.Node] = set()
        self.regions: list[Region] = []
        self.verdicts: list[Verdict] = []

    def consider(self, exchange: Collective) -> None:
        """Take the best region that begins or ends with an exchange, or say why none is taken."""
        if exchange.node in self.made:
            return
        reason = self.found.reason_against(exchange)
        if reason is None and self.given is not None and exchange.node.name not in self.given:
            reason = NOT_CHOSEN
        if reason is not None:
            self.verdicts.append(left(exchange, reason))
            return
        found, why = self._regions_around(exchange)
        if not found:
            self.verdicts.append(left(exchange, why))
        elif self.given is not None:
            self._take(found[0], "as asked for")
        else:
            self._weigh(exchange, found)

    def _regions_around(self, exchange: Collective) -> tuple[list[Region], str]:
        found, reasons = [], list[str]()
        for shape in self._shapes(exchange):
            region = self.found.region(exchange, shape)
            if isinstance(region, str):
                reasons.append(region)
            elif why := self._in_the_way(region):
                reasons.append(why)
            else:
                found.append(region)
        if collectives.counts_rows_as_it_runs(exchange.node):
            return found, in_pieces.ROWS
        if collectives.equal_parts(exchange.node) is None:
            return found, in_pieces.UNEVEN
        telling = [reason for reason in reasons if reason not in (NO_PRODUCT, NO_COMBINE)]
        return found, (*telling, NO_PRODUCT)[0]

    def _in_the_way(self, region: Region) -> str | None:
        """Why a region cannot be beside those that are taken: each computes and puts together all at its place."""
        if any(node in self.made for node in region.nodes):
            return BESIDE
        position, readers = self.found.order.position, [user for node in region.nodes for user in node.users]
        place = position[region.place]
        if not self.raised.isdisjoint((*readers, region.place)):
            return CLASH
        if any(position[self.made[node].place] > place for node in region.reads if node in self.made):
            return CLASH
        earlier = [other for node in region.nodes for other in self.read.get(node, ())]
        return CLASH if any(place >= position[other.place] for other in earlier) else None

    def _shapes(self, exchange: Collective) -> Iterator[Shape]:
        if self.given is not None:
            yield self.given[exchange.node.name]
            return
        for outer, pieces in shapes_around(exchange, self.options.pieces):
            for way in ("around", "after", "before"):
                yield Shape(way, outer, pieces)

    def _weigh(self, exchange: Collective, found: Sequence[Region]) -> None:
        candidates = [self._priced(region) for region in found]
        priced = [candidate for candidate in candidates if candidate is not None]
        best = max(priced, key=lambda candidate: candidate.saved - candidate.counted, default=None)
        assert self.costs is not None
        if best is None:
            travel, computed = self.costs.travel[exchange.node], max(map(self._computed, found))
            detail = f"{_ms(travel)} of travel, {_ms(computed)} of computation beside it"
            self.verdicts.append(left(exchange, SLOWER, detail))
            return
        least = least_saved(self.machine, best.plain, best.region.shape.pieces)
        if best.saved < least:
            self.verdicts.append(left(exchange, SLOWER, str(best)))
        elif best.saved - best.counted < least:
            detail = f"{_ms(best.hides)} hidden, pieces would save {_ms(best.saved)}"
            self.verdicts.append(left(exchange, HIDDEN, detail))
        else:
            self._take(best.region, str(best))

    def _computed(self, region: Region) -> float:
        assert self.costs is not None
        return sum(self.costs.compute.get(node, 0.0) for node in region.calls)

    def _priced(self, region: Region) -> _Candidate | None:
        """What is predicted; None if there is too little to hide, or to hide it under, to be worth a look."""
        assert self.costs is not None and self.overlap is not None
        starts = [exchange.node for exchange in region.exchanges]
        if most_saved(self.costs, starts, region.calls) < least_saved(self.machine, 0.0, region.shape.pieces):
            return None
        key = region.key()
        if key not in self.known:
            self.known[key] = self._seconds(region)
        hides = {start: self.overlap.hidden(start) for start in starts}
        counted = sum(counted_as_hidden(hidden, self.costs.travel[start]) for start, hidden in hides.items())
        return _Candidate(region, *self.known[key], sum(hides.values()), counted)

    def _seconds(self, region: Region) -> tuple[float, float]:
        whole, _ = _by_itself(self.program, region)
        plain = seconds_of(whole, self.machine, self.measured, keys=self.keys)
        cut, again = _by_itself(self.program, region)
        replaced = Replacements(cut)
        apply_pieces(cut, again, replaced)
        replaced.finish()
        return plain, seconds_of(cut, self.machine, self.measured, of=whole, keys=self.keys)

    def _take(self, region: Region, detail: str) -> None:
        names = ", ".join(node.name for node in region.products)
        self.regions.append(region)
        self.made |= dict.fromkeys(region.nodes, region)
        for node in region.reads:
            self.read.setdefault(node, []).append(region)
        self.raised |= {*region.raises}
        if self.overlap is not None:
            self.overlap.take(region.exchanges[-1].node, region.calls)
        for exchange in region.exchanges:
            said = f"{detail}, with {names}"
            self.verdicts.append(Verdict.of(exchange.node, Outcome.FUSED, IN_PIECES, detail=said, bytes=exchange.bytes))


def _by_itself(program: Program, region: Region) -> tuple[Program, Region]:
    """A region as a program: what it is given, what it makes for others, and itself, placed there."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in region.given:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in region.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    waits = region.exit.waits if region.exit is not None else ()
    results = tuple(known[node] for node in (*region.whole, *waits))
    end = graph.output(results)
    inputs = tuple(Input(InputKind.INPUT, node.name) for node in region.given)
    outputs = tuple(Output(OutputKind.OUTPUT, str(index)) for index in range(len(results)))
    place = known[region.exit.node] if region.exit is not None else end
    return Program(graph, inputs, outputs, groups=program.groups), region.among(known, place)


def apply_pieces(program: Program, region: Region, replaced: Replacements) -> None:
    """Send, compute and put together the pieces of a region; what it reads may have been replaced by another's."""
    place = region.place
    raise_above(place, region.raises)
    region = region.among({node: current(replaced, node) for node in (*region.given, *region.nodes)}, place)
    started = _start_pieces(program, region)
    like = region.exchanges[0].node
    leaving, wholes = splice(program, _computing(region), started, list(region.given), before=place, like=like)
    _drop(region, dict(zip(region.whole, wholes, strict=True)), replaced)
    if region.exit is not None:
        wait = region.exit.waits[0]
        strides, where = wait.meta["val"].stride(), region.places[wait]

        def finish(*pieces: Tensor) -> Tensor:
            return laid_out(where.together([collectives.wait(piece) for piece in pieces]), strides)

        replaced.replace(wait, splice(program, finish, *leaving, before=wait, like=region.exit.node))


def _start_pieces(program: Program, region: Region) -> list[fx.Node]:
    """Start all pieces of what comes in where the whole started."""
    if region.entry is None:
        return []
    exchange, start = region.entry, region.entry.node
    how, pieces = region.how[start], region.shape.pieces
    place = how.cut[exchange.inputs[0]]

    def launch(values: Sequence[Any]) -> list[Tensor]:
        known, sent, going = dict(zip(start.all_input_nodes, values, strict=True)), exchange.inputs[0], []
        for index in range(pieces):
            part = place.take(known[sent], pieces, index).contiguous()
            going.append(in_pieces.on_piece(start, how, {**known, sent: part}, pieces, index))
        return going

    found: list[fx.Node] = splice(program, launch, list(start.all_input_nodes), before=start, like=start)
    return found


def _computing(region: Region) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    """The function that computes piece after piece: what leaves, and what is put together."""
    pieces, last = region.shape.pieces, region.exit

    def compute(started: Sequence[Tensor], given: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        leaving, parts = [], dict[fx.Node, list[Tensor]]()
        for index in range(pieces):
            known = dict(zip(region.given, given, strict=True))
            if region.entry is not None:
                known[region.entry.waits[0]] = collectives.wait(started[index])
            for node in region.calls:
                known[node] = in_pieces.on_piece(node, region.how[node], known, pieces, index)
            if last is not None:
                known[last.inputs[0]] = known[last.inputs[0]].contiguous()
                leaving.append(in_pieces.on_piece(last.node, region.how[last.node], known, pieces, index))
            for node in region.whole:
                parts.setdefault(node, []).append(known[node])
        wholes = [
            laid_out(region.places[node].together(parts[node]), node.meta["val"].stride()) for node in region.whole
        ]
        return leaving, wholes

    return compute


def _drop(region: Region, wholes: Mapping[fx.Node, fx.Node], replaced: Replacements) -> None:
    """Put what was put together in the place of what was made at once; views of that stay for those who read them."""
    own = {*region.calls, *(node for exchange in region.exchanges for node in exchange.nodes)}
    going = {region.exit.node} if region.exit is not None else set()
    waits = region.entry.waits if region.entry is not None else ()
    kept: list[fx.Node] = []
    for node in (*reversed(region.calls), *waits):
        stays = node not in wholes and any(user not in own or user in kept for user in node.users)
        if stays and per_token.is_view(node.target):
            kept.append(node)
        else:
            going.add(node)
    for node in reversed(kept):
        region.place.prepend(node)
    for node, whole in wholes.items():
        replaced.replace(node, whole)
    starts = [exchange.node for exchange in region.exchanges if exchange is region.entry]
    for node in sorted(going - wholes.keys(), reverse=True):
        replaced.drop(node)
    for node in starts:
        replaced.drop(node)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
