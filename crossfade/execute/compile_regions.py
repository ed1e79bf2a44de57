"""The computation between collectives, compiled: which regions a program has, what runs each, and why or why not."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from crossfade.cost.sample import SampleMemory, seconds_of
from crossfade.errors import CrossfadeError
from crossfade.execute.codegen import compile_program
from crossfade.execute.inductor import CompiledRegion, Inductor
from crossfade.execute.outline import Staged, outlined, with_calls
from crossfade.execute.regions import Region, Regions, regions_of
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.effects import written_inputs
from crossfade.graph.history import Outcome, PassRecord, Verdict
from crossfade.graph.passes import Numerics
from crossfade.graph.program import Program, device_of

Execute = Literal["auto", "eager", "compiled", "exact"]
"""How a program's computation is run; see `compile_step`."""

NAME = "compile-regions"

_COMPILED = "compiled by Inductor: operators fused, called once"
_SLOWER = "measured: compiled it is no faster here"
_RUNS = 5
_ARENA = 2**27
"""Bytes of made-up numbers of one kind: more than any cache holds."""


@dataclass(frozen=True)
class CompiledRegions:
    """What runs the regions of a program, and the record of it for the report."""

    chosen: Regions
    calls: Mapping[Region, CompiledRegion | EagerRegion]
    record: PassRecord
    device: torch.device

    def called_by(self, program: Program, *, host_first: bool = False) -> Program:
        """The program with a call for each compiled region; see `with_calls`."""
        return with_calls(program, self.chosen, self.calls, self.device, host_first=host_first)

    def measured(self) -> dict[CompiledRegion | EagerRegion, float]:
        """The seconds that each distinct region takes here, on numbers made up."""
        memory, taken = SampleMemory(_ARENA), dict[CompiledRegion | EagerRegion, float]()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
            for region, call in self.calls.items():
                if call not in taken:
                    taken[call] = self._seconds(region, call, memory)
        return taken

    def _seconds(self, region: Region, call: CompiledRegion | EagerRegion, memory: SampleMemory) -> float:
        staged = isinstance(call, CompiledRegion)
        written = {source for node in region.nodes for source in written_inputs(node)}
        samples = []
        for _ in range(_RUNS + 1):
            values = [memory.value(node.meta.get("val"), node in written) for node in region.inputs]
            numbers = [value for value in values if staged and not isinstance(value, Tensor)]
            given = [value for value in values if not staged or isinstance(value, Tensor)]
            given += [Staged(self.device)(*numbers)] if numbers else []
            samples.append(seconds_of(call, [(tuple(given), {})], self.device.type))
        return statistics.median(samples[1:])


def why_eager(execute: Execute, device: str) -> str:
    """Why nothing is compiled, in words; empty if it is. What was asked for and cannot be had is refused."""
    if execute == "eager":
        return 'execute="eager" was asked for'
    if execute == "auto" and device != "cuda":
        return 'on a CPU compiling takes longer than it saves as a rule: execute="compiled" tries and measures'
    missing = Inductor.missing(device)
    if missing and execute != "auto":
        raise CrossfadeError(
            f"execute={execute!r}, but {missing}", expected="what Inductor needs", remedy='pass execute="eager"'
        )
    return missing


def compile_regions(
    program: Program,
    *,
    exact: bool = False,
    alike: bool = False,
    shared: Callable[[Callable[[], Any]], Any] = lambda decide: decide(),
) -> CompiledRegions:
    """Choose the regions of a program and compile them; on a CPU those that a measurement shows to be faster so.

    `shared` makes all ranks take the decision of one: what runs must round alike on all of them. So must kernels: of
    all regions if `alike`, else of those that compute with the result of an all-reduce, such as updates of replicas.
    """
    start, device = time.perf_counter(), device_of(program)
    chosen = regions_of(program)
    parts = {region: outlined(program, region) for region in chosen.regions}
    inductor = Inductor(device, exact=exact)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # kernels are tried on random numbers
        same = set(chosen.regions) if alike else _after_reductions(program, chosen.regions)
        compiled = {region: inductor.compile(part, alike=region in same) for region, part in parts.items()}
        calls = _those_that_pay(compiled, parts, shared) if device.type == "cpu" else dict(compiled)
    record = _record(program, chosen, calls, time.perf_counter() - start)
    return CompiledRegions(chosen, calls, record, device)


def _after_reductions(program: Program, regions: Sequence[Region]) -> set[Region]:
    """The regions that compute with what all ranks have alike: the result of an all-reduce, or what follows."""
    after: set[fx.Node] = set()
    for node in program.graph.nodes:
        found = collectives.view(node)
        if (found is not None and found.kind is Kind.ALL_REDUCE) or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return {region for region in regions if not after.isdisjoint(region.nodes)}


def _those_that_pay(
    calls: dict[Region, CompiledRegion],
    parts: Mapping[Region, Program],
    shared: Callable[[Callable[[], Any]], Any],
) -> dict[Region, CompiledRegion | EagerRegion]:
    """What runs each region: compiled where one rank has measured that to be faster."""
    examples = {call: parts[region] for region, call in calls.items()}
    pays = shared(lambda: [_pays(call, example) for call, example in examples.items()])
    kept = {call for call, faster in zip(examples, pays, strict=True) if faster}
    return {region: call if call in kept else EagerRegion(parts[region]) for region, call in calls.items()}


class EagerRegion:
    """Runs a region operator by operator."""

    __name__ = "eagerly"

    def __init__(self, region: Program) -> None:
        self._function = compile_program(region).function

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run on the region's inputs."""
        return self._function(list(inputs))


def _pays(compiled: CompiledRegion, region: Program) -> bool:
    """Whether a compiled region is faster than its operators one by one, on numbers made up."""
    eager = compile_program(region).function
    values = [node.meta.get("val") for node in region.placeholders]
    tensors = [_example(value) for value in values if isinstance(value, Tensor)]
    inputs = iter(tensors)
    given = [next(inputs) if isinstance(value, Tensor) else 0.5 for value in values]
    numbers = [value for value in given if not isinstance(value, Tensor)]
    staged = [Staged(torch.device("cpu"))(*numbers)] if numbers else []
    times: dict[str, list[float]] = {"eager": [], "compiled": []}
    with torch.no_grad():
        for _ in range(_RUNS + 1):
            times["eager"].append(_seconds(lambda: eager(list(given))))
            times["compiled"].append(_seconds(lambda: compiled(*tensors, *staged)))
    return statistics.median(times["compiled"][1:]) < statistics.median(times["eager"][1:])


def _example(like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.uniform_(0.5, 1.5) if like.dtype.is_floating_point else made.zero_()


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _record(
    program: Program, chosen: Regions, calls: Mapping[Region, CompiledRegion | EagerRegion], seconds: float
) -> PassRecord:
    nodes = len(program.graph.nodes)
    compiled = {region: call for region, call in calls.items() if isinstance(call, CompiledRegion)}
    counts = {
        "regions": len(chosen.regions),
        "compiled": len(compiled),
        "distinct": len(set(compiled.values())),
        "operators": sum(len(region.nodes) for region in compiled),
    }
    numerics = str(Numerics.REASSOCIATES)
    verdicts = tuple(_verdicts(chosen, calls))
    return PassRecord(NAME, NAME, numerics, seconds, bool(compiled), counts, verdicts, nodes, nodes)


def _verdicts(chosen: Regions, calls: Mapping[Region, CompiledRegion | EagerRegion]) -> Sequence[Verdict]:
    """One for each distinct region, and one for each reason why operators are in none."""
    said = []
    times = Counter(calls.values())
    first_of: dict[CompiledRegion | EagerRegion, Region] = {}
    for region, call in calls.items():
        first_of.setdefault(call, region)
    for call, region in first_of.items():
        outcome, reason = (Outcome.FUSED, _COMPILED) if isinstance(call, CompiledRegion) else (Outcome.LEFT, _SLOWER)
        again = f", in {times[call]} places" if times[call] > 1 else ""
        said.append(Verdict.of(region.nodes[0], outcome, reason, detail=f"{len(region.nodes)} operators{again}"))
    first = {reason: node for node, reason in reversed(list(chosen.left.items()))}
    for reason, count in Counter(chosen.left.values()).items():
        detail = f"{first[reason].target}" + (f" and {count - 1} more" if count > 1 else "")
        said.append(Verdict.of(first[reason], Outcome.LEFT, reason, detail=detail))
    return said
