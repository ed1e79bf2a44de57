"""A training step, compiled: from a model and a batch to a program that all ranks agree on."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from crossfade.capture.accumulate import accumulate as run_on_micro_batches
from crossfade.capture.baked_in import BakedIn, ambient
from crossfade.capture.batch import BatchIs, BatchLayout, batch_key
from crossfade.capture.optimizer import append_optimizer, check_optimizer, initial_state, options_key, parameter_names
from crossfade.capture.training import LossFunction, check_model, loss_of
from crossfade.communicate.exchange_factors import ExchangeFactors
from crossfade.compile.agreement import agree, agree_on_batch, hold_together, telling
from crossfade.compile.capturing import Capturing, trained_parameters
from crossfade.compile.carriers import Carriers
from crossfade.compile.kept_whole import parameters_to_keep_whole
from crossfade.compile.overlap import measured_operators, plan_overlap, predicted, spelled_out
from crossfade.compile.pipeline import (
    DataParallelMode,
    LossIs,
    Semantics,
    batch_parallelism,
    collective_matmuls,
    communication,
    copy_kernel,
    gradient_exchange,
    lowering,
    parameter_sharding,
    simplification,
    updates_gathered,
)
from crossfade.compile.setup import (
    KeepWhole,
    agree_on_settings,
    capturing,
    check_numbers,
    check_options,
    check_tensor_parallel,
    check_wholeness,
    machine_for,
    names_to_keep_whole,
    open_groups,
    shards_of,
)
from crossfade.compile.step import Built, Step
from crossfade.compile.tensor_parallel import TensorParallel, check_not_split
from crossfade.cost.machine import Machine
from crossfade.cost.measure import measure
from crossfade.cost.presets import preset
from crossfade.cost.timeline import Timeline
from crossfade.errors import CrossfadeError
from crossfade.execute.codegen import native
from crossfade.finish.collect_small_operators import CollectSmallOperators
from crossfade.finish.fuse_adam_updates import FuseAdamUpdates
from crossfade.finish.group_small_operators import GroupSmallOperators
from crossfade.finish.pack_in_place import PackInPlace
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.effects import is_random
from crossfade.graph.events import events_of
from crossfade.graph.memory import live_by_name
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.program import OutputKind, Program
from crossfade.ranks.alike import RankComparison
from crossfade.ranks.checkpoint import checksum, checksums, random_state
from crossfade.ranks.compared import comparisons, cost_of_comparing
from crossfade.ranks.groups import Lease
from crossfade.ranks.members import Members
from crossfade.ranks.mesh import DataParallel, MeshLike, backend_on, data_parallel_axes
from crossfade.ranks.shards import Shards
from crossfade.report.expect import Expect
from crossfade.report.report import PassVerdict, Report
from crossfade.report.strict import Judged, Shortfall, shortfalls
from crossfade.shard.compare_ranks import CompareRanks
from crossfade.shard.count_globally import CountGlobally
from crossfade.shard.loss_parts import LossParts
from crossfade.shard.tensor.plan import Plan


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    mesh: MeshLike = None,
    *,
    data_parallel: DataParallelMode = "replicate",
    keep_whole: KeepWhole = (),
    tensor_parallel: Plan | Mapping[str, object] | None = None,
    batch: BatchIs = "global",
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    semantics: Semantics = "global",
    loss_is: LossIs = "auto",
    machine: Machine | str | None = None,
    memory_limit: int | None = None,
    passes: Sequence[Pass] | None = None,
    check_every: int = 1,
    timeout: float = 60.0,
    strict: Expect | Mapping[str, Any] | str | bool | None = None,
) -> Step:
    """One training step of a plain single-device model as one graph, data-parallel over a mesh.

    Args:
        model: any module; it is trained in place and stays usable for evaluation and checkpoints.
        loss_fn: called as `loss_fn(model(inputs), *rest)` for `step(inputs, *rest)`; `inputs` may be a tensor, or a
            tuple or dict of arguments. With None the model is called on the whole batch and returns the loss itself.
        optimizer: SGD, Adam or AdamW over the model's parameters. Change its learning rates freely, e.g. by a
            scheduler.
        mesh: a `DeviceMesh` with an axis `dp` (or only one), a mapping like `{"dp": 4}`, or None for one device. Axes
            `dp_replicate` and `dp_shard` split the batch over both, and what is sharded over the second only.
        data_parallel: `"replicate"`: every rank holds all parameters. `"zero1"`: each rank holds and updates the
            optimizer's state of its rows of every parameter. `"zero2"`: parameters are split too, gathered for the
            forward and kept for the backward. `"zero3"`: gathered again for the backward instead. The model's
            parameters and the optimizer's state become DTensors; `step.gathered()` gives the whole model back for a
            while, `step.state_dict()` is for `torch.distributed.checkpoint`.
        keep_whole: with zero2 and zero3, parameters that every rank keeps whole all the same: gathered as soon as they
            are updated, under the backward, instead of before their next use. A list of names, or patterns like
            `"blocks.0.*"`. With zero2 also `"auto"`: as many of those used first as make a step fastest on the
            machine, chosen at the first step, which splits the others. It costs memory: what is kept whole between
            steps, and at the end of one its new values beside it.
        tensor_parallel: a `Plan`, or a dict as `Plan` takes: the model is split by it over the mesh's axis `tp`, and
            its parameters and optimizer state become this rank's parts of them at the first step. `step.gathered()`,
            `step.save` and `step.state_dict()` give the whole again, and DTensors.
        batch: `"global"` if every rank passes the whole batch (each computes its part), `"local"` if each passes its
            own part, as under a distributed sampler.
        accumulate: number of micro-batches whose gradients are averaged before they are exchanged.
        clip_grad_norm: scale gradients down to this total norm; the norm itself is in `step.outputs["grad_norm"]`.
        semantics: `"global"`: the step computes what one device would on the whole batch; batch statistics span all
            ranks and dropout masks are those of the whole batch (all ranks need the same seed). `"per-rank"`: each
            rank normalises and draws for its own samples, as under torch's DDP.
        loss_is: how the losses of a batch's parts (ranks, micro-batches) are put together: `"auto"` finds out in the
            captured loss whether it is a mean over samples, tokens or weights, or a sum, and counts what it divides by
            over the whole batch. Where that cannot be found, a warning says so, and `"mean"` (taken by default) or
            `"sum"` tells.
        machine: what communication and computation cost, for planning: a `Machine`, a preset's name, or `"calibrate"`
            to measure it now, which takes some seconds. The sizes of buckets, what is gathered how early, and the
            order of everything follow from it, and on a CPU which operators are written as their parts
            (`spell-out-slow-operators`: the last bits differ). None plans without, with buckets of fixed sizes; for
            the modes that gather parameters, a preset is taken.
        memory_limit: bytes that may be alive beside inputs, parameters and optimizer state; with a machine only. The
            optimizer's small operators are then called one by one.
        passes: communication passes to use instead of `crossfade.compile.pipeline.communication()`.
        check_every: every so many steps ranks compare samples of their batches (with `batch="global"`), learning rates,
            and a sample of a parameter, another one each time, by numbers that travel with the loss. 0 compares only
            before the first step.
        timeout: seconds after which a collective, or the check that all ranks run the same program, fails.
        strict: what is expected of the compiled step, as `Expect` or a text like `"exposed<=5ms bucketed:gradients"`;
            True for `no-remedies rules`. The first step raises what falls short, on every rank, before it trains.

    Returns:
        A callable `step(*batch) -> loss`. The first call on each shape of batch captures and compiles.

        >>> model = nn.Linear(2, 1)
        >>> step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> losses = [float(step(torch.ones(4, 2), torch.zeros(4, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    expect = Expect.of(strict)
    check_options(data_parallel=(data_parallel, DataParallelMode))
    check_options(batch=(batch, BatchIs), semantics=(semantics, Semantics), loss_is=(loss_is, LossIs))
    check_numbers(accumulate, clip_grad_norm, timeout, check_every)
    names = parameter_names(model)
    kept_whole = names_to_keep_whole(keep_whole, data_parallel, model, memory_limit)
    check_model(model)
    check_optimizer(optimizer, names)
    check_not_split(model)
    lease = Lease(model)
    settings = {
        "data_parallel": data_parallel, "keep_whole": "auto" if kept_whole is None else list(kept_whole),
        "tensor_parallel": tensor_parallel is not None, "batch": batch, "accumulate": accumulate,
        "clip_grad_norm": clip_grad_norm, "semantics": semantics, "loss_is": loss_is, "machine": machine,
        "memory_limit": memory_limit, "check_every": check_every, "strict": strict,
        "passes": None if passes is None else [one.name for one in passes],
    }  # fmt: skip
    present = agree_on_settings(mesh, lease, timeout, settings)
    tensor: TensorParallel | None = None
    if tensor_parallel is not None:
        check_tensor_parallel(data_parallel)

        def loss(call: Callable[..., Any], batch: tuple[Any, ...]) -> torch.Tensor:
            return loss_of(call, loss_fn, batch)

        tensor, mesh = TensorParallel.of(tensor_parallel, mesh, model, optimizer, loss, timeout, lease, present)
    axes = data_parallel_axes(mesh)
    mode: DataParallelMode = data_parallel if axes is not None else "replicate"
    check_wholeness(model, mode, kept_whole)
    members, groups = open_groups(axes, mode, timeout, lease) if axes is not None else (None, {})
    machine = preset(machine) if isinstance(machine, str) and machine != "calibrate" else machine
    everyone = tensor.everyone if tensor else (members, groups.get(axes.whole.name) if axes else None)
    groups |= {tensor.axis.name: tensor.group} if tensor else {}
    with everyone[0].together("calibrate the machine") if everyone[0] is not None else contextlib.nullcontext():
        planned_for = machine_for(machine, mode, axes, groups, everyone[1], model) if passes is None else None
    if memory_limit is not None and (passes is not None or (machine is None and planned_for is None)):
        raise CrossfadeError(
            f"memory_limit={memory_limit} without a machine to plan for",
            expected="machine= too, and no passes of one's own",
            remedy='pass machine="calibrate", or the name of a preset',
        )
    if kept_whole is None and axes is not None and planned_for is None:
        raise CrossfadeError(
            'keep_whole="auto" without a machine to plan for',
            expected="no passes of one's own",
            remedy="leave them out, or name the parameters to keep whole",
        )
    shards = shards_of(model, optimizer, axes, mode, members, kept_whole) if axes and members else None
    compiler = _StepCompiler(
        model, BakedIn([model], loss_fn), loss_fn, optimizer, axes, mode, shards, batch, accumulate, clip_grad_norm,
        semantics, loss_is, None if passes is None else tuple(passes), planned_for, memory_limit, tensor, check_every,
        expect,
    )  # fmt: skip
    return Step(
        model, optimizer, lambda b: compiler.build(b, members), compiler.key, everyone[0],
        groups, shards, compiler.initial_state,
        compiler.state_keys, shares_random_numbers=axes is None or semantics == "global",
        part_of_batch=members.rank if members else 0, tensor=tensor, everyone=everyone[1], lease=lease,
    )  # fmt: skip


@dataclass(frozen=True)
class _StepCompiler:
    """The settings of one `compile_step`, and the way from a batch to a program."""

    model: nn.Module
    baked_in: BakedIn
    loss_fn: LossFunction | None
    optimizer: Optimizer
    axes: DataParallel | None
    mode: DataParallelMode
    shards: Shards | None
    batch: BatchIs
    accumulate: int
    clip_grad_norm: float | None
    semantics: Semantics
    loss_is: LossIs
    passes: tuple[Pass, ...] | None
    machine: Machine | None
    memory_limit: int | None
    tensor: TensorParallel | None = None
    check_every: int = 1
    expect: Expect | None = None

    def key(self, batch: tuple[Any, ...]) -> Any:
        """What a captured program depends on."""
        return batch_key(batch), self.baked_in.number(), options_key(self.optimizer), ambient()

    def build(self, batch: tuple[Any, ...], members: Members | None) -> Built:
        """Capture and compile for one shape of batch, and agree on the result with the other ranks."""
        with capturing(self.baked_in, self.tensor.everyone[0] if self.tensor is not None else members):
            return self._build_together(batch, members)

    def _build_together(self, batch: tuple[Any, ...], members: Members | None) -> Built:
        split = self.tensor
        beyond = split.beyond if split is not None else None
        with telling(members, beyond):
            if split is not None:
                split.agree()
        for together in (split.members if split else None, members if self.batch == "global" else None):
            if together is not None:
                with telling(beyond):
                    agree_on_batch(together, batch, by_plan=together is not members)
        if members is not None and self.shards is not None and self.shards.will_split:
            self._choose_what_stays_whole(batch, members)
        with telling(members, beyond, split.members if split else None):
            check_model(self.model)  # hooks may have been put on its parameters
            check_optimizer(self.optimizer, parameter_names(self.model))
            built = self._build(batch, members)
        with telling(members, beyond):
            if split is not None:
                agree(split.members, built, [self._stream(built.program), *self._rates()])
        with telling(beyond):
            if members is not None:
                alone = self.semantics == "per-rank"
                stream = "random numbers of each rank's own" if alone else self._stream(built.program)
                state = [*checksums(self.model, self.optimizer), *self._rates()]
                agree(members, built, [stream, *state], [f"planned for {self.machine}"])
        if beyond is not None:
            agree(beyond, built, [])
        if self.expect is not None:
            hold_together(self.expect, built, split.everyone[0] if split is not None else members)
        return built

    def _stream(self, program: Program) -> str:
        """What ranks that draw from one random stream must have in common beside the program."""
        if not any(is_random(node) for node in program.graph.nodes):
            return "no random numbers shared by the ranks"
        state = " and ".join(f"{checksum(one):08x}" for one in random_state(self.model).values())
        return f"random generator in state {state}: call torch.manual_seed alike on every rank"

    def _rates(self) -> list[str]:
        return [f"lr.{index} = {group['lr']}" for index, group in enumerate(self.optimizer.param_groups)]

    @property
    def _kept_whole(self) -> tuple[str, ...]:
        """The parameters that every rank keeps whole where the others are split."""
        return (self.shards.whole or ()) if self.shards is not None else ()

    @property
    def _capturing(self) -> Capturing:
        return Capturing(
            self.model, self.baked_in, self.loss_fn, self.optimizer, self.axes.whole.size if self.axes else 1,
            self.batch, self.accumulate, self.semantics, self.tensor,
        )  # fmt: skip

    def _build(self, batch: tuple[Any, ...], members: Members | None) -> Built:
        start = time.perf_counter()
        names, layout = parameter_names(self.model), self._capturing.layout(batch)
        program, parts = self._capturing.capture(batch, layout)
        if (warning := parts.warning(self.loss_is)) and (members is None or members.rank == 0):
            warnings.warn(warning, stacklevel=7)
        program.groups = {self.tensor.axis.name: self.tensor.axis.size} if self.tensor else {}
        program = self._data_parallel(program, parts) if self.axes else self._on_micro_batches(program, parts)
        compared = self._comparisons(program, parts, members)
        program = run_passes(program, [CompareRanks(one.group, one.reduce_op, one.numbers) for one in compared])
        split_over = self._split_over(names)
        clip = self.clip_grad_norm
        program = append_optimizer(program, self.optimizer, names, clip_grad_norm=clip, split_over=split_over)
        gathering = updates_gathered(self.mode, self.axes, self._kept_whole) if self.axes else []
        before = run_passes(program, [*gathering, *simplification()])
        seconds = time.perf_counter() - start
        scheduled, measured = self._communicating(before, members)
        lowered = lowering(self._carriers(), scheduled.groups, self.memory_limit)
        program = run_passes(
            scheduled, [*lowered, self._packing(), UpdateInPlace(), *self._fewer_calls(measured is not None)]
        )
        timeline = self._predicted(program, measured) if measured is not None else None

        told = cost_of_comparing(compared, batch) | self.baked_in.facts()
        facts = self._facts(seconds, layout) | copy_kernel(program) | told
        report = Report.of(before, program, title=type(self.model).__name__, facts=facts)
        report = report.with_timelines(predicted=timeline, memory=live_by_name(program)) if timeline else report
        stepped = {out.name for out in before.outputs if out.kind is OutputKind.UPDATE}
        exchanges, short = tuple(events_of(before).launches), self._shortfalls(report, before, program)
        return Built(program, layout, report, self.state_keys(stepped), compared, exchanges, short)

    def _comparisons(self, program: Program, parts: LossParts, members: Members | None) -> list[RankComparison]:
        """What ranks compare at every step: those that train parts of a batch, and those that hold parts of a model."""
        among = [(self.axes.whole.name, members, False)] if self.axes else []
        among += [(self.tensor.axis.name, self.tensor.members, True)] if self.tensor else []
        return comparisons(
            self.model, self.optimizer, program, among, every=self.check_every,
            reduce_op="avg" if parts.put_together(self.loss_is) == "mean" else "sum",
            whole_batch=self.batch == "global", replicated=self.mode == "replicate",
            one_stream=self.semantics == "global", numbers=parts.shared_numbers,
        )  # fmt: skip

    def _shortfalls(self, report: Report, before: Program, program: Program) -> tuple[Shortfall, ...]:
        earlier = [PassVerdict("shard", one) for one in self.tensor.verdicts] if self.tensor is not None else []
        judged = Judged(report, before, program, earlier)
        return tuple(shortfalls(self.expect, judged)) if self.expect is not None else ()

    def _packing(self) -> Pass:
        """Within a memory limit nothing is kept from step to step beside buckets."""
        return PackInPlace() if self.memory_limit is None else PackInPlace(math.inf)

    def _fewer_calls(self, planned: bool) -> list[Pass]:
        """Passes that do more in a call; none within a memory limit: what is done together lives longer.

        Updates are fused in planned steps only: their last bits are others than those of torch's default.
        """
        if self.memory_limit is not None:
            return []
        collecting: list[Pass] = [CollectSmallOperators()] if self._device() == "cuda" else []
        fusing: list[Pass] = [FuseAdamUpdates()] if self._device() == "cpu" and planned else []
        return [*fusing, *collecting, GroupSmallOperators()]

    def _split_over(self, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
        """The parameters of which this rank has a part, with the axis that the parts are spread over."""
        if self.tensor is not None:
            return self.tensor.split_over()
        if self.axes is None or self.shards is None:
            return {}
        return {name: self.axes.split.name for parameter, name in names.items() if parameter.dim()}

    def _communicating(self, before: Program, members: Members | None) -> tuple[Program, dict[str, float] | None]:
        """The program with its collectives fused, bucketed and in order; and the seconds that was planned by, if so."""
        everyone = self.tensor.everyone[0] if self.tensor is not None else members
        if self.passes is not None or self.machine is None or everyone is None:
            return run_passes(before, communication() if self.passes is None else self.passes), None
        machine = self._carriers().planned_for(self.machine)
        if self.axes is not None and self.mode != "replicate":
            before = run_passes(before, [ExchangeFactors(machine, self.axes.split.name)])
        here = measured_operators(
            before, self._may_spell_out, self._device()
        )  # on all ranks at once, as they compute in a step
        measured = everyone.share(lambda: here)
        before = spelled_out(before, measured) if self._may_spell_out else before
        if self.tensor is not None:
            alike, axis = self.tensor.alike(before), self.tensor.axis.name
            passes = collective_matmuls(
                machine, self._carriers().backends, alike=alike, groups=(axis,), measured=measured
            )
            before = run_passes(before, passes)
        return plan_overlap(before, machine, measured, self.memory_limit).program, measured

    @property
    def _may_spell_out(self) -> bool:
        """Whether operators may be written as their parts, which hold more memory."""
        return self._device() == "cpu" and self.memory_limit is None

    def _predicted(self, program: Program, measured: dict[str, float]) -> Timeline:
        """What the final program should do, by what this rank takes for its operators."""
        assert self.machine is not None
        more = measure(program, binding=native) if self._device() == "cpu" else {}
        return predicted(program, self._carriers().run_on(self.machine), {**measured, **more})

    def _carriers(self) -> Carriers:
        axes = [self.axes.whole, self.axes.split, self.axes.copies] if self.axes else []
        axes += [self.tensor.axis] if self.tensor else []
        backends = {axis.name: backend_on(self._device(), axis.backend) for axis in axes if axis is not None}
        return Carriers(backends, self.machine)

    def initial_state(self, stepped: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
        """What the optimizer would create at its first step for some parameters."""
        parts = self.shards.like_parts() if self.shards else {}
        return initial_state(self.optimizer, parameter_names(self.model), stepped, parts)

    def state_keys(self, stepped: Collection[str] | None = None) -> dict[str, list[str]]:
        """The entries of the optimizer's state for some parameters, by default all that are trained."""
        names = parameter_names(self.model)
        without_memory = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p, name in names.items()}
        chosen = trained_parameters(self.model, self.optimizer) if stepped is None else stepped
        return {name: list(one) for name, one in initial_state(self.optimizer, names, chosen, without_memory).items()}

    def _on_micro_batches(self, program: Program, parts: LossParts) -> Program:
        repeated = run_on_micro_batches(program, self.accumulate, mean=parts.put_together(self.loss_is) == "mean")
        if self.axes is not None or self.accumulate == 1:
            return repeated
        return run_passes(repeated, [CountGlobally("", 1, self.accumulate, parts.unproved)])

    def _choose_what_stays_whole(self, batch: tuple[Any, ...], members: Members) -> None:
        """Split parameters, as `keep_whole="auto"` left for the first step, once ranks agree on those to keep whole."""
        assert self.shards is not None and self.axes is not None and self.machine is not None
        split, machine = self.axes.split, self._carriers().planned_for(self.machine)
        with telling(members):
            capturing = self._capturing
            captured = self._on_micro_batches(*capturing.capture(batch, capturing.layout(batch)))
            whole = run_passes(captured, simplification())
            here = measured_operators(
                whole, self._may_spell_out, self._device()
            )  # on all ranks at once, as they compute in a step
            chosen = members.share(lambda: parameters_to_keep_whole(whole, machine, here, split.name, split.size))
        members.agree(" ".join(chosen), "\n".join(chosen))
        self.shards.split_all_but(chosen)

    def _data_parallel(self, program: Program, parts: LossParts) -> Program:
        """The program of one rank: its part of the batch, its part of the parameters, everyone's gradients."""
        assert self.axes is not None
        whole, split = self.axes.whole, self.axes.split
        program.groups = {**program.groups, whole.name: whole.size}
        if self.shards is not None:
            program.groups |= {one.name: one.size for one in (split, self.axes.copies) if one is not None}
        can_gather = self._backend() != "gloo" or self._device() != "cuda"  # gloo's all-gather crashes on CUDA tensors
        each, once = parameter_sharding(self.mode, split.name, split.size, self._kept_whole)
        program = self._on_micro_batches(run_passes(program, each), parts)
        batch = batch_parallelism(
            whole.name, whole.size, self.semantics,
            can_gather=can_gather, micro_batches=self.accumulate, unproved=parts.unproved,
        )  # fmt: skip
        loss_is, gathers_rows = parts.put_together(self.loss_is), can_gather and self.machine is not None
        exchange = gradient_exchange(self.mode, self.axes, loss_is, self._kept_whole, gathers_rows=gathers_rows)
        return run_passes(program, [*once, *batch, *exchange])

    def _device(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def _backend(self) -> str:
        return backend_on(self._device(), self.axes.whole.backend) if self.axes else ""

    def _facts(self, seconds: float, layout: BatchLayout) -> dict[str, str]:
        axes = [self.axes.copies, self.axes.split] if self.axes else []
        axes += [self.tensor.axis] if self.tensor else []
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in axes if axis is not None)
        split = {"split by the plan": self.tensor.said()} if self.tensor else {}
        spared = "no gather in pieces, no small operators grouped: both need more"
        limited = {"memory limit": f"{self.memory_limit:,} bytes; {spared}"} if self.memory_limit is not None else {}
        kept = {"kept whole": f"{len(self._kept_whole)} parameters"} if self.mode in ("zero2", "zero3") else {}
        return {**split, **limited, **kept} | {
            "mesh": f"{sizes} over {axes[-1].backend}" if axes and axes[-1] else "one device",
            "data parallel": self.mode,
            "planned for": self.machine.name if self.machine else "no machine in particular",
            "batch": f"{layout.size} samples ({layout.given}), {layout.accumulate} x {layout.micro_batch_size} a rank",
            "optimizer": type(self.optimizer).__name__,
            "semantics": self.semantics,
            "torch": torch.__version__,
            "capture": f"{seconds:.1f} s",
        }
