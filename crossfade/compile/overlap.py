"""Buckets and order chosen together: operators are measured, some bucket sizes are tried, each scheduled and predicted,
the best taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from crossfade.compile.pipeline import overlap
from crossfade.cost.estimate import Estimator, estimate
from crossfade.cost.fusion import fused_kernels
from crossfade.cost.keys import Keys
from crossfade.cost.machine import Machine
from crossfade.cost.measure import measure, measured_as_run
from crossfade.cost.presets import preset
from crossfade.cost.timeline import Timeline, simulate
from crossfade.errors import MemoryLimitError
from crossfade.execute.codegen import native
from crossfade.execute.compile_regions import CompiledRegions, EagerRegion
from crossfade.execute.inductor import CompiledRegion
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import Program
from crossfade.schedule.planned_bucket_sizes import SWEEP_LIMIT, BucketSize, choose_sizes
from crossfade.simplify.spell_out_slow_operators import SpellOutSlowOperators, slow_operators

_SCALES = (1.0, 0.5, 2.0)
"""Bucket sizes to try, as shares of those that arithmetic gives."""
_AS_FAST = 0.01
"""Plans within this share of the fastest count as equal, since predictions are no better: the one of the fewest
collectives is taken. Each ties the ranks together once more, and takes a processor longer than a model of it says."""
_SMALLEST = 1 / 16
"""The share to try where nothing larger fits the memory limit."""


@dataclass(frozen=True)
class OverlapPlan:
    """The program with its buckets, in the order to run it; the buckets' sizes, and what is predicted."""

    program: Program
    sizes: Mapping[Kind, BucketSize]
    timeline: Timeline


def plan_overlap(
    program: Program,
    machine: Machine,
    measured: Mapping[str, float] | None = None,
    memory_limit: int | None = None,
    *,
    edited: Callable[[Sequence[Pass]], Sequence[Pass]] = lambda passes: passes,
    narrow: Sequence[str] = (),
    scales: Sequence[float] | None = None,
    checked: bool = True,
) -> OverlapPlan:
    """The plan of the least predicted time among a few bucket sizes, within the memory limit: of those about as fast,
    the one with the fewest collectives. The same on all ranks. `edited` makes a user's changes to the passes;
    `narrow` names the groups whose sums of 16 bits are split in two. `scales` are the shares to try of the sizes that
    arithmetic gives, by default three, and for very large programs one. `checked` is as for `run_passes`.

    Raises `MemoryLimitError`, which names the least limit that works, if none fits.

        >>> from crossfade.cost.presets import preset
        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[64] = input("x")
        ... a: f32[64] = c10d.all_reduce(x, "sum", "dp")
        ... wait_a: f32[64] = c10d.wait_tensor(a)
        ... neg: f32[64] = aten.neg(x)
        ... b: f32[64] = c10d.all_reduce(neg, "sum", "dp")
        ... wait_b: f32[64] = c10d.wait_tensor(b)
        ... return output("a", wait_a), output("b", wait_b)
        ... ''', groups={"dp": 2})
        >>> plan = plan_overlap(program, preset("ethernet-1gbit"))
        >>> plan.timeline.seconds < 0.01
        True
    """
    sizes = choose_sizes(program, machine, measured)
    if scales is None:
        scales = _SCALES if len(program.graph.nodes) <= SWEEP_LIMIT else _SCALES[:1]
    plans: list[OverlapPlan] = []
    refusals: list[MemoryLimitError] = []
    for scale in (*scales, _SMALLEST):
        if plans and scale == _SMALLEST:
            break
        try:
            scaled = {kind: size.scaled(scale) for kind, size in sizes.items()}
            passes, context = edited(overlap(scaled, memory_limit, narrow)), {"machine": machine, "measured": measured}
            built = run_passes(program, passes, context=context, checked=checked)
            plans.append(OverlapPlan(built, scaled, predicted(built, machine, measured)))
        except MemoryLimitError as refused:
            refusals.append(refused)
    if not plans:
        raise min(refusals, key=lambda refused: refused.least)
    return _best(plans)


def _best(plans: Sequence[OverlapPlan]) -> OverlapPlan:
    fast = min(plan.timeline.seconds for plan in plans) * (1 + _AS_FAST)
    good = [plan for plan in plans if plan.timeline.seconds <= fast]
    return min(good, key=lambda plan: (len(plan.timeline.communication), plan.timeline.seconds))


def predicted(program: Program, machine: Machine, measured: Mapping[str, float] | None = None) -> Timeline:
    """What a program does when, as it stands, on a machine."""
    return simulate(program, estimate(program, machine, measured), f"predicted for {machine.name}")


def predicted_with_regions(
    program: Program, regions: CompiledRegions, machine: Machine, measured: Mapping[str, float]
) -> Timeline:
    """What a program does when, its regions compiled, with what these and the other operators take here."""
    called = regions.called_by(program, host_first=True)
    costs = estimate(called, machine, {**measured, **measure(called, binding=native)})
    taken = regions.measured()
    compute = dict(costs.compute)
    for node in called.graph.nodes:
        if isinstance(node.target, CompiledRegion | EagerRegion):
            compute[node] = taken[node.target]
    return simulate(called, replace(costs, compute=compute), f"predicted for {machine.name}")


def measured_operators(program: Program, may_spell_out: bool, *, compiled: bool = False) -> dict[str, float]:
    """The seconds of the program's operators here, and of the parts of those that may be spelled out.

    If they will be `compiled`, elementwise operators that follow each other share what they read and write.
    """
    found: dict[str, float] = measured_as_run(program, [UpdateInPlace()], binding=native)
    if compiled:
        found = _as_fused(program, found)
    if not may_spell_out or not slow_operators(program):
        return found
    parts = run_passes(program, [SpellOutSlowOperators()])
    return measured_as_run(parts, [UpdateInPlace()], binding=native, known=found) | found


def _as_fused(program: Program, measured: dict[str, float]) -> dict[str, float]:
    """Seconds of operators as if compiled: of elementwise ones the share of their traffic that fused kernels have."""
    keys = Keys()
    estimator = Estimator(program, preset("loopback-gloo"), {}, keys)
    kernels = fused_kernels(program, estimator.is_view, keys)
    inside = [node for kernel in kernels for node in kernel.nodes]
    alone = sum(map(estimator.traffic, inside))
    share = min(1.0, sum(kernel.bytes for kernel in kernels) / alone) if alone else 1.0
    fused = {key: measured[key] * share for key in map(keys.of, inside) if key in measured}
    return {**measured, **fused}
