"""The compiler of a training step: `TRAINING` lists its phases, from a batch to the program that runs.

It reads top to bottom; each function below is one phase. What a phase decides, it decides alike on all ranks, or shares
what the first one decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from crossfade.capture.accumulate import accumulate as repeat_on_micro_batches
from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.numbers import StepNumbers
from crossfade.capture.optimizer import parameter_names, trace_optimizer
from crossfade.capture.symbolic_sizes import SymbolicCapture
from crossfade.communicate.exchange_factors import ExchangeFactors
from crossfade.compile.agreement import meeting
from crossfade.compile.captured import Captured
from crossfade.compile.finishing import finishing
from crossfade.compile.fit_memory import (
    BY_NODES,
    IN_GRAPHS,
    IN_REGIONS,
    Accounting,
    Fitted,
    StepMemory,
    fit,
    told,
    usual_machine,
)
from crossfade.compile.job import Job
from crossfade.compile.kept_whole import parameters_to_keep_whole
from crossfade.compile.memory_budget import budget_in_bytes
from crossfade.compile.overlap import measured_operators, plan_overlap, predicted, predicted_with_regions
from crossfade.compile.phases import Compilation, Phase, Phases
from crossfade.compile.pipeline import (
    batch_parallelism,
    collective_matmuls,
    communication,
    gradient_exchange,
    lowering,
    parameter_sharding,
    simplification,
    spelled_out,
    updates_gathered,
)
from crossfade.compile.planned import run_as_planned
from crossfade.compile.reduce_dtype import compression
from crossfade.compile.spread_experts import keep_own_experts, spreading
from crossfade.cost.measure import measure
from crossfade.cost.timeline import Timeline
from crossfade.execute.codegen import native
from crossfade.execute.compile_regions import CompiledRegions, compile_regions, why_eager
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import OutputKind, Program
from crossfade.ranks.alike import RankComparison
from crossfade.ranks.compared import comparisons
from crossfade.shard.add_earlier_gradients import AddEarlierGradients
from crossfade.shard.compare_ranks import CompareRanks
from crossfade.shard.count_globally import CountGlobally
from crossfade.shard.loss_parts import LossParts
from crossfade.simplify.merge_common_subexpressions import MergeCommonSubexpressions
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from crossfade.simplify.spell_out_slow_operators import SpellOutSlowOperators, slow_operators


@dataclass(kw_only=True)
class StepCompilation(Compilation):
    """A training step on its way through the phases."""

    job: Job
    batch: tuple[Any, ...]
    captured: Captured | None = None
    """What tracing has made, where that is known already."""
    layout: BatchLayout | None = None
    """How the batch is divided among ranks and micro-batches."""
    loss_parts: LossParts | None = None
    """How the losses of the parts make up that of the whole batch."""
    numbers: StepNumbers = field(default_factory=StepNumbers)
    """The numbers that the optimizer's step takes."""
    compared: list[RankComparison] | None = None
    """What ranks compare at every step."""
    plain: Program | None = None
    """The program before its communication was improved: what the report compares with."""
    timeline: Timeline | None = None
    """What the final program should do when."""
    is_scheduled: bool = False
    symbolic: SymbolicCapture | None = None
    """The sizes that are symbols."""
    fitted: Fitted | None = None
    """How it was made to fit the memory budget, if there is one."""
    budget: int | None = None
    regions: CompiledRegions | None = None
    """What is compiled of the program."""

    @property
    def is_planned(self) -> bool:
        """Whether there are a machine to plan for and ranks to share the plan with, and no passes of the user's."""
        place = self.job.place
        return self.job.options.passes is None and place.machine is not None and place.everyone is not None

    @property
    def context(self) -> dict[str, Any]:
        """What passes may ask for."""
        place = self.job.place
        if not self.is_planned or place.machine is None:
            return super().context
        return {**super().context, "machine": place.carriers.planned_for(place.machine)}

    def memory(self) -> StepMemory | None:
        """How the step fits its memory budget, if it has one."""
        if self.fitted is None or self.plain is None:
            return None
        return told(self.made(), self.plain, self.fitted, self.budget, self.accounting)

    @property
    def accounting(self) -> Accounting:
        """How the memory of the step is counted."""
        if _computed_eagerly(self):
            return BY_NODES
        return IN_GRAPHS if self.job.place.device == "cuda" else IN_REGIONS

    def parts(self) -> LossParts:
        """How losses are put together."""
        assert self.loss_parts is not None
        return self.loss_parts

    def divided(self) -> BatchLayout:
        """How the batch is divided."""
        assert self.layout is not None
        return self.layout


def choose_whole(step: StepCompilation) -> None:
    """Choose the parameters to keep whole (`keep_whole="auto"`) by a capture of its own, and split the others."""
    job, place = step.job, step.job.place
    everyone, axes, machine = place.everyone, place.axes, step.context["machine"]
    assert everyone is not None and axes is not None
    step.layout = job.layout(step.batch)
    captured, parts = job.capture(step.batch, step.layout)
    captured.groups = place.sizes
    repeated = repeat_on_micro_batches(captured, step.layout.accumulate, mean=_loss_is(step, parts) == "mean")
    whole = run_passes(repeated, step.edited(simplification()))
    here = measured_operators(
        whole, _may_spell_out(step), compiled=not _computed_eagerly(step)
    )  # on all ranks at once, as in a step
    split = axes.split
    chosen = everyone.share(lambda: parameters_to_keep_whole(whole, machine, here, split.name, split.size))
    with meeting(everyone):
        everyone.agree(" ".join(chosen), "\n".join(chosen))
    place.split_all_but(chosen)


def capture(step: StepCompilation) -> None:
    """Forward, loss and backward on one micro-batch of this rank."""
    step.layout = step.job.layout(step.batch)
    captured = step.captured
    if captured is None:
        traced = step.job.capture(step.batch, step.layout, step.symbolic)
        captured = Captured.of(traced, step.job.model, step.symbolic)
    step.captured, step.program, step.loss_parts = captured, captured.program.copy(), captured.loss_parts
    step.program.groups = step.job.place.sizes


def accumulate(step: StepCompilation) -> None:
    """Repeat the program on micro-batches; with zero3 each gathers parameters for itself."""
    place, times = step.job.place, step.divided().accumulate
    if place.axes is not None:
        split = place.axes.split
        step.run(parameter_sharding(place.mode, split.name, split.size, place.kept_whole)[0])
    mean = _loss_is(step, step.parts()) == "mean"
    step.program = repeat_on_micro_batches(step.made(), times, mean=mean)
    if place.axes is None and times > 1:
        step.run([CountGlobally("", 1, times, step.parts().unproved)])


def add_earlier(step: StepCompilation) -> None:
    """The gradients that this rank has kept of earlier micro-batches, for one exchange of all."""
    step.run([AddEarlierGradients()])


def shard_data(step: StepCompilation) -> None:
    """One rank's program: its part of the batch, its part of the parameters, everyone's gradients."""
    options, place, parts = step.job.options, step.job.place, step.parts()
    axes = place.axes
    assert axes is not None
    gathered_once = parameter_sharding(place.mode, axes.split.name, axes.split.size, place.kept_whole)[1]
    divided, experts = step.divided(), keep_own_experts(step.made(), step.job.model, place)
    batch = batch_parallelism(
        axes.whole.name, axes.whole.size, options.semantics, can_gather=place.can_gather,
        micro_batches=divided.accumulate, whole=divided.whole, unproved=parts.unproved, buffers=parts.buffers,
    )  # fmt: skip
    exchange = gradient_exchange(
        place.mode, axes, _loss_is(step, parts), place.kept_whole, experts=experts,
        gathers_rows=place.can_gather and place.machine is not None, gradients=options.exchange != "later",
    )  # fmt: skip
    step.run([*gathered_once, *batch, *spreading(experts, place), *exchange, *compression(place.reduce_dtypes)])


def compare_ranks(step: StepCompilation) -> None:
    """Let numbers travel with the loss by which ranks see that they have not diverged."""
    step.compared = compared_by(step.job, step.divided(), step.parts(), step.made())
    step.run([CompareRanks(each.group, each.reduce_op, each.numbers) for each in step.compared])


def compared_by(
    job: Job, layout: BatchLayout, parts: LossParts, program: Program, *, draws: bool | None = None
) -> list[RankComparison]:
    """What the ranks of a job compare at every step; whether it `draws` is seen in the program, or given."""
    options, place = job.options, job.place
    among = [(place.axes.whole.name, place.members, False)] if place.axes else []
    among += [(place.tensor.axis.name, place.tensor.members, True)] if place.tensor else []
    return comparisons(
        job.model,
        job.optimizer,
        program,
        among,
        every=options.check_every,
        reduce_op="avg" if loss_of_parts_is(job, layout, parts) == "mean" else "sum",
        whole_batch=options.batch == "global",
        replicated=place.mode == "replicate",
        one_stream=options.semantics == "global",
        numbers=parts.shared_numbers,
        draws=draws,
    )


def optimizer(step: StepCompilation) -> None:
    """The optimizer's own `step()`, traced onto the gradients; what was updated by rows is gathered again."""
    job, place = step.job, step.job.place
    job.check_split()
    traced = trace_optimizer(
        step.made(),
        job.optimizer,
        parameter_names(job.model),
        clip_grad_norm=job.options.clip_grad_norm,
        split_over=job.split_over(),
        learned=job.learned,
        begins=job.begins(),
    )
    step.program, step.numbers = traced.program, traced.numbers
    if place.axes is not None:
        step.run(updates_gathered(place.mode, place.axes, place.kept_whole))
    step.plain = step.made()


def keep_gradients(step: StepCompilation) -> None:
    """The gradients themselves as results, for an optimizer outside of the step."""
    results = [(out, value) for out, value in step.made().named_results() if out.kind is not OutputKind.SHARD]
    step.made().set_results([value for _, value in results], tuple(out for out, _ in results))
    step.plain = step.made()


def simplify(step: StepCompilation) -> None:
    """Fewer nodes, bit for bit."""
    step.run(simplification())
    step.plain = step.made()


def as_planned(step: StepCompilation) -> None:
    """What a plan file says: its passes, with the decisions that were taken when it was made."""
    plan = step.job.options.plan
    assert plan is not None
    step.take(run_as_planned(plan, step.job, step.batch, step.made()))


def exchange_factors(step: StepCompilation) -> None:
    """Exchange factors of gradients where they arrive sooner than their products."""
    axes = step.job.place.axes
    assert axes is not None
    step.run([ExchangeFactors(group=axes.split.name)])


def measure_operators(step: StepCompilation) -> None:
    """Time operators, and the parts of those that may be spelled out, on all ranks at once as in a step."""
    place = step.job.place
    assert place.everyone is not None
    here = measured_operators(step.made(), _may_spell_out(step), compiled=not _computed_eagerly(step))
    step.measured = place.everyone.share(lambda: here)


def spell_out(step: StepCompilation) -> None:
    """Operators as their parts where these were measured to be faster."""
    step.run([SpellOutSlowOperators()])


def collective_matmul(step: StepCompilation) -> None:
    """Matmuls and the collectives beside them in one another's time."""
    place = step.job.place
    assert place.tensor is not None
    alike, axis = place.tensor.alike(step.made()), place.tensor.axis.name
    step.run(collective_matmuls(place.carriers.backends, alike=alike, groups=(axis,)))


def schedule(step: StepCompilation) -> None:
    """Buckets and order chosen together: a few bucket sizes, each scheduled and simulated, the fastest kept."""
    machine, limit = step.context["machine"], step.job.options.memory_limit
    narrow = step.job.place.carriers.summed_here
    step.take(plan_overlap(step.made(), machine, step.measured, limit, edited=step.edited, narrow=narrow).program)
    step.is_scheduled = True


def communicate(step: StepCompilation) -> None:
    """Collectives few, early to start and late to be waited for, without a machine; or the user's own passes."""
    own, narrow = step.job.options.passes, step.job.place.carriers.summed_here
    step.run(communication(narrow) if own is None else [*own, *spelled_out(narrow)])


def lower(step: StepCompilation) -> None:
    """Collectives as each group's backend does them best."""
    step.run(lowering(step.job.place.carriers, step.made().groups, step.job.options.memory_limit))


def fit_memory(step: StepCompilation) -> None:
    """Values computed again for the backward, or moved to the host until then, where a step would hold more than the
    budget, or as rules ask for."""
    options, device, budget = step.job.options, step.job.place.device, None
    if options.memory is not None:
        asked = options.memory
        budget = _of_first_rank(step, lambda: budget_in_bytes(asked, device), "memory")
    if options.recompute == "auto":
        step.run([MergeCommonSubexpressions(held_bytes=2**62), RemoveDeadCode()])
    rules = () if options.recompute == "auto" else options.recompute
    costs = step.context.get("machine") or usual_machine(device), dict(step.measured or {})

    def finished(program: Program, lean: bool) -> Program:
        return run_passes(program, step.edited(_finishing(step, lean)), context=step.context)

    assert step.plain is not None
    step.budget = budget
    step.fitted = fit(step.made(), step.plain, budget, rules, costs, finished, options.offload, step.accounting)
    step.run(step.fitted.passes(costs))


def finish(step: StepCompilation) -> None:
    """Buckets in kept memory, updates in place, several small operators in a call."""
    step.run(_finishing(step, step.fitted is not None and step.fitted.lean))


def _finishing(step: StepCompilation, lean: bool) -> list[Pass]:
    device, limited = step.job.place.device, step.job.options.memory_limit is not None
    fused = device == "cpu" and step.is_planned and not limited
    return finishing(device, lean=lean or limited, compiled=not _computed_eagerly(step), fused=fused)


def compile_computation(step: StepCompilation) -> None:
    """The computation between collectives, compiled by Inductor; equal regions once."""
    program = step.made()

    def of_first_rank(decide: Callable[[], Any]) -> Any:
        return _of_first_rank(step, decide, "regions")

    exact, by_plan = step.job.options.execute == "exact", step.job.place.tensor is not None
    step.regions = compile_regions(program, exact=exact, alike=by_plan, shared=of_first_rank)
    program.history += (step.regions.record,)
    step.records.append(step.regions.record)


def _of_first_rank(step: StepCompilation, decide: Callable[[], Any], what: str) -> Any:
    """What one rank decides, on all of them."""
    everyone = step.job.place.everyone
    if everyone is None:
        return decide()
    with meeting(everyone):
        everyone.agree(what, what, to=f"choose {_CHOSEN[what]}")
    return everyone.share(decide)


_CHOSEN = {"regions": "what is compiled", "memory": "what to keep in memory"}


def predict(step: StepCompilation) -> None:
    """What the final program should do when, by what this rank takes for its operators."""
    place, program = step.job.place, step.made()
    assert place.machine is not None
    machine, known = place.carriers.run_on(place.machine), step.measured or {}
    if step.regions is not None:
        step.timeline = predicted_with_regions(program, step.regions, machine, known)
    else:
        step.timeline = predicted(program, machine, {**known, **measure(program, binding=native)})


def _loss_is(step: StepCompilation, parts: LossParts) -> Literal["mean", "sum"]:
    return loss_of_parts_is(step.job, step.divided(), parts)


def loss_of_parts_is(job: Job, layout: BatchLayout, parts: LossParts) -> Literal["mean", "sum"]:
    """How losses of ranks are put together. Where each has the whole batch's, they are alike, and so is their mean."""
    return "mean" if layout.whole else parts.put_together(job.options.loss_is)


def _may_spell_out(step: StepCompilation) -> bool:
    """Whether operators may be written as their parts, which hold more memory."""
    return step.job.place.device == "cpu" and step.job.options.memory_limit is None


def _nothing_to_choose(step: StepCompilation) -> str:
    shards = step.job.place.shards
    return "" if shards is not None and shards.will_split else 'keep_whole="auto" was not asked for'


def _one_device(step: StepCompilation) -> str:
    return "" if step.job.place.axes is not None else "the batch is not split over ranks"


def _none_earlier(step: StepCompilation) -> str:
    return "" if step.job.options.exchange == "with-earlier" else "no gradients wait for this exchange"


def _no_plan_file(step: StepCompilation) -> str:
    return "" if step.job.options.plan is not None else "no plan file is given"


def _no_budget(step: StepCompilation) -> str:
    options = step.job.options
    asked = options.memory is not None or options.recompute or options.offload
    return _plan_file(step) or ("" if asked else "no budget is given")


def _plan_file(step: StepCompilation) -> str:
    return "a plan file says what to do instead" if step.job.options.plan is not None else ""


def _unplanned(step: StepCompilation) -> str:
    if why_not := _plan_file(step):
        return why_not
    if step.job.options.passes is not None:
        return "passes= says what to do instead"
    if step.job.place.everyone is None:
        return "one device has nothing to plan"
    return "" if step.is_planned else "no machine is planned for"


def _planned(step: StepCompilation) -> str:
    return _plan_file(step) or ("the phase schedule has chosen buckets and order" if step.is_scheduled else "")


def _nothing_split(step: StepCompilation) -> str:
    replicated = step.job.place.axes is None or step.job.place.mode == "replicate"
    return _unplanned(step) or ("gradients are not split by rows" if replicated else "")


def _nothing_slow(step: StepCompilation) -> str:
    if why_not := _unplanned(step):
        return why_not
    if not _may_spell_out(step):
        return "parts hold more memory than the limit allows, or are no faster on this device"
    return "" if slow_operators(step.made()) else "no operator is known to be slower than its parts"


def _computed_eagerly(step: StepCompilation) -> str:
    if step.symbolic is not None:
        return "its sizes are symbols"
    return why_eager(step.job.options.execute, step.job.place.device)


def _no_plan(step: StepCompilation) -> str:
    return _unplanned(step) or ("" if step.job.place.tensor is not None else "no tensor-parallel plan")


TRAINING = Phases(
    [
        Phase("choose-whole", choose_whole, ("batch",), (), _nothing_to_choose),
        Phase("capture", capture, ("batch",), ("program", "layout", "loss_parts")),
        Phase("accumulate", accumulate, ("program", "loss_parts")),
        Phase("shard-data", shard_data, ("program", "loss_parts"), why_not=_one_device),
        Phase("compare-ranks", compare_ranks, ("program", "loss_parts"), ("program", "compared")),
        Phase("optimizer", optimizer, gives=("program", "plain")),
        Phase("simplify", simplify, gives=("program", "plain")),
        Phase("as-planned", as_planned, why_not=_no_plan_file),
        Phase("exchange-factors", exchange_factors, why_not=_nothing_split),
        Phase("measure", measure_operators, gives=("measured",), why_not=_unplanned),
        Phase("spell-out", spell_out, ("program", "measured"), why_not=_nothing_slow),
        Phase("collective-matmul", collective_matmul, ("program", "measured"), why_not=_no_plan),
        Phase("schedule", schedule, ("program", "measured"), why_not=_unplanned),
        Phase("communicate", communicate, why_not=_planned),
        Phase("lower", lower, why_not=_plan_file),
        Phase("fit-memory", fit_memory, ("program", "plain"), ("program",), why_not=_no_budget),
        Phase("finish", finish, why_not=_plan_file),
        Phase("compile-regions", compile_computation, gives=("program", "regions"), why_not=_computed_eagerly),
        Phase("predict", predict, ("program", "measured"), ("timeline",), _unplanned),
    ]
)
"""The compiler. `compile_step(..., phases=TRAINING.without_pass("simplify-nodes"))` changes it by name."""

GRADIENTS = (
    TRAINING.without("optimizer")
    .before("shard-data", Phase("add-earlier", add_earlier, why_not=_none_earlier))
    .before("simplify", Phase("gradients", keep_gradients, gives=("program", "plain")))
)
"""The compiler of `compile_gradients`: the same without the optimizer, and with gradients of earlier micro-batches."""
