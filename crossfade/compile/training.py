"""`compile_step`: the training step of a plain model, compiled for a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from crossfade.capture.baked_in import BakedIn
from crossfade.capture.divide_batch import BatchIs
from crossfade.capture.optimizer import check_optimizer, parameter_names
from crossfade.capture.training import LossFunction, check_model
from crossfade.compile.compiler import StepCompiler
from crossfade.compile.habits import check_arguments, check_no_gradients, inside_compiled
from crossfade.compile.job import Job
from crossfade.compile.memory_budget import (
    Memory,
    Offload,
    Recompute,
    check_memory,
    check_offload,
    check_recompute,
)
from crossfade.compile.options import KeepWhole, Options, names_to_keep_whole
from crossfade.compile.phases import Phases
from crossfade.compile.pipeline import DataParallelMode, LossIs, Semantics
from crossfade.compile.place import Place
from crossfade.compile.planned import check_before, take
from crossfade.compile.reduce_dtype import ReduceDtype, sent_as
from crossfade.compile.step import Step
from crossfade.compile.step_plan import StepPlan
from crossfade.compile.tensor_parallel import check_not_split
from crossfade.cost.machine import Machine
from crossfade.errors import CrossfadeError, MeshError
from crossfade.execute.compile_regions import Execute
from crossfade.graph.passes import Pass
from crossfade.ranks.mesh import MeshLike
from crossfade.report.expect import Expect
from crossfade.shard.tensor.plan import Plan
from crossfade.tracebacks import users_frames


@users_frames
def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    mesh: MeshLike | Literal["auto"] = None,
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
    memory: Memory = None,
    recompute: Recompute = None,
    offload: Offload = None,
    memory_limit: int | None = None,
    reduce_dtype: ReduceDtype = None,
    passes: Sequence[Pass] | None = None,
    phases: Phases | None = None,
    check_every: int = 1,
    dynamic: bool | None = None,
    execute: Execute = "auto",
    timeout: float = 60.0,
    plan: str | Path | None = None,
    strict: Expect | Mapping[str, Any] | str | bool | None = None,
) -> Step:
    """One training step of a plain single-device model as one graph, data-parallel over a mesh.

    Args:
        model: any module; it is trained in place and stays usable for evaluation and checkpoints. Of one that
            `torch.compile` returned, the module inside is captured, without its kernels. Wrappers that exchange or
            split gradients themselves (DDP, FSDP, DeepSpeed) are refused.
        loss_fn: called as `loss_fn(model(inputs), *rest, **named)` for `step(inputs, *rest, **named)`; `inputs` may be
            a tensor, or a tuple or dict of arguments. With None the model is called on the whole batch and returns the
            loss: a tensor, an output with a `loss` as Hugging Face models return, a dict with one, or a tuple that
            begins with it. What is named goes to the model then, and also where there are no `inputs`:
            `step(**batch)`. A dict of tensors returned beside the loss, `return loss, {"accuracy": accuracy}`, is
            found in `step.outputs` after each step: of this rank's part of the batch.
        optimizer: any optimizer over the model's parameters, torch's or your own: its own `step()` is traced. Change
            its learning rates, betas, weight decay and other floats freely, e.g. by a scheduler. One that needs whole
            parameters (Muon, Adafactor) works where every rank holds them.
        mesh: a `DeviceMesh` with an axis `dp` (or only one), a mapping like `{"dp": 4}`, or None for one device. Axes
            `dp_replicate` and `dp_shard` split the batch over both, and what is sharded over the second only. An axis
            `ep`, alone or after `dp`, splits the batch too, and spreads routed experts: each rank keeps whole ones of
            its own (with `tensor_parallel`, its parts of them), and rows travel to them (docs/training.md).
            `"auto"`: found by simulation at the first batch, as `find_plan` does, by the first rank for all of them,
            together with the mode, what stays whole, the plan and the number of micro-batches: `step.found` says why.
        data_parallel: `"replicate"`: every rank holds all parameters. `"zero1"`: each rank holds and updates the
            optimizer's state of its rows of every parameter. `"zero2"`: parameters are split too, gathered for the
            forward and kept for the backward. `"zero3"`: gathered again for the backward instead. The model's
            parameters and the optimizer's state become DTensors; `step.gathered()` gives the whole model back for a
            while, `step.state_dict()` is for `torch.distributed.checkpoint`.
        keep_whole: with zero2 and zero3, parameters that every rank keeps whole: gathered as soon as they
            are updated, under the backward, instead of before their next use. A list of names, or patterns like
            `"blocks.0.*"`. With zero2 also `"auto"`: as many of those used first as make a step fastest on the
            machine, chosen at the first step, which splits the others. It costs memory: what is kept whole between
            steps, and at the end of one its new values beside it.
        tensor_parallel: a `Plan`, or a dict as `Plan` takes: the model is split by it over the mesh's axis `tp`, and
            its parameters and optimizer state become this rank's parts of them at the first step. `step.gathered()`,
            `step.save` and `step.state_dict()` give the whole again, and DTensors.
        batch: `"global"` if every rank passes the whole batch (each computes its part), `"local"` if each passes its
            own part, as under a distributed sampler, all of the same size. `"uneven"`: each passes its own part, of any
            number of samples or none; ranks tell each other the numbers at every step, and where these differ they
            gather the samples of all. A batch that does not divide by ranks and micro-batches is computed whole on
            every rank.
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
        memory: what a step may hold, everything counted: parameters, optimizer state, buckets, activations. Bytes
            (`80e9`), text (`"70GB"`, `"64GiB"`), or a share of what the device has (`0.8`). Where a step would hold
            more, values of the forward are computed again for the backward instead of being kept: those that take the
            least time for the bytes they free. `step.memory` tells which, and what more memory would save; the error
            for a budget that is too small names the least one that works. With `mesh="auto"` a plan is found that keeps
            within it. See docs/memory.md.
        recompute: with `"auto"`, what the model itself has computed again (`torch.utils.checkpoint`) is kept where
            there is room, as any other value. A mapping says of modules that what they make is computed again
            in any case, or kept: `{"blocks.*": "full", "head": "never"}`.
        offload: what moves to the host's memory (pinned, on CUDA) between its uses in the forward and in the backward,
            on streams of its own beside computation, bit for bit. `"auto"`, within a budget: values are kept, computed
            again or moved, whichever takes the least time. True: whatever the link carries under computation; on a CPU,
            which copies by itself, whatever is kept. A mapping says of modules that what they keep for the backward
            moves in any case, or stays: `{"blocks.*": "full", "head": "never"}`. `step.memory` tells what moved and
            what is exposed. None and False move nothing.
        memory_limit: bytes that may be alive beside inputs, parameters and optimizer state; with a machine only. The
            optimizer's small operators are then called one by one.
        reduce_dtype: send gradients in fewer bytes, for slow links: `torch.bfloat16` and `torch.float16` halve those of
            float32, added up in float32 and rounded once; `torch.int8` takes a quarter, and what rounding left out is
            added to the next step's gradient (error feedback). For some axes only: `{"dp_replicate": torch.int8}`.
            Parameters, the optimizer and small gradients stay as they are; see docs/compressed_gradients.md.
        passes: communication passes to use instead of `crossfade.compile.pipeline.communication()`.
        phases: the compiler itself, changed by name: `crossfade.compile.training_phases.TRAINING` without a phase, with
            another one, or with other passes. `print(step.pipeline)` shows what ran.
        check_every: every so many steps ranks compare samples of their batches (with `batch="global"`), learning rates
            and the optimizer's other numbers, and a sample of a parameter, another one each time, by numbers that
            travel with the loss. 0 compares only before the first step.
        dynamic: whether sizes of the batch are symbols, so that one program runs on many: None makes a size a symbol at
            the second batch that differs in it, True makes all symbols at once, False captures every size by itself.
            Where the model asks for a certain size, the log says in which line, and others are captured again.
        execute: how the computation between collectives is run. `"eager"`: operator by operator, as torch does.
            `"compiled"`: in regions that Inductor compiles, which changes last bits (fused operators round less often;
            Inductor's kernels add in another order); on a CPU, where a C++ compiler is needed, those regions that a
            measurement shows to be faster. `"exact"`: so too, rounding as eager torch does as far as Inductor can.
            `"auto"`: compiled on CUDA with Triton, eager elsewhere. On CUDA, unless eager, whatever can be is also
            recorded at the second step and replayed as a CUDA graph. The report says what became of each region.
        timeout: seconds after which a collective, or the check that all ranks run the same program, fails.
        plan: a file that `step.save_plan` wrote: the mesh, the modes, what stays whole and everything that was chosen
            for each program are taken from it, and nothing is measured or planned again. What is also given here must
            be the same, and so must the model, torch, the device and the batches: an error shows what differs.
        strict: what is expected of the compiled step, as `Expect` or a text like `"exposed<=5ms bucketed:gradients"`;
            True for `no-remedies rules`. The first step raises what falls short, on every rank, before it trains.

    Returns:
        A callable `step(*batch, **named) -> loss`. The first call on each shape of batch captures and compiles.

        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> losses = [float(step(torch.ones(4, 2), torch.zeros(4, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    if isinstance(mesh, str):
        raise _not_a_mesh(mesh)
    laid: MeshLike = mesh
    model = inside_compiled(model)
    check_arguments(model, loss_fn, optimizer)
    planned = None if plan is None else StepPlan.load(plan)
    if planned is not None:
        if passes is not None or phases is not None:
            raise CrossfadeError(
                f"{'passes' if passes is not None else 'phases'}= together with plan=",
                expected="the passes that the plan file has",
                remedy="leave one of the two out",
            )
        given = {"memory": memory, "recompute": recompute, "offload": offload or None}
        if named := next((name for name, value in given.items() if value is not None), ""):
            raise CrossfadeError(
                f"{named}= together with plan=",
                expected="the values to compute again and to move that the plan file has",
                remedy="leave one of the two out",
            )
        taken = take(
            planned,
            mesh=laid,
            data_parallel=data_parallel,
            keep_whole=keep_whole,
            tensor_parallel=tensor_parallel,
            machine=machine,
            memory_limit=memory_limit,
        )
        laid, data_parallel, keep_whole = taken["mesh"], taken["data_parallel"], taken["keep_whole"]
        tensor_parallel, memory_limit, dynamic = taken["tensor_parallel"], taken["memory_limit"], False
    expect = Expect.of(strict)
    options = Options(
        data_parallel=data_parallel,
        tensor_parallel=tensor_parallel,
        batch=batch,
        accumulate=accumulate,
        clip_grad_norm=clip_grad_norm,
        semantics=semantics,
        loss_is=loss_is,
        machine=machine,
        memory_limit=memory_limit,
        memory=check_memory(memory),
        recompute=check_recompute(recompute, memory, model),
        offload=check_offload(offload, memory, model),
        reduce_dtype=sent_as(reduce_dtype),
        passes=None if passes is None else tuple(passes),
        phases=phases,
        check_every=check_every,
        dynamic=dynamic,
        execute=execute,
        timeout=timeout,
        expect=expect,
        plan=planned,
    )
    options = replace(options, keep_whole=names_to_keep_whole(keep_whole, data_parallel, model, memory_limit))
    check_model(model)
    check_optimizer(optimizer, parameter_names(model))
    check_no_gradients(optimizer, parameter_names(model))
    check_not_split(model)
    if planned is not None:
        check_before(planned, model, optimizer, options)
    place = Place.open(model, loss_fn, optimizer, laid, options)
    compiler = StepCompiler(Job(model, loss_fn, optimizer, options, place, BakedIn([model], loss_fn)))
    return Step(model, optimizer, compiler, place)


def _not_a_mesh(mesh: str) -> MeshError:
    """What `crossfade.compile_step` has not replaced by a mesh."""
    return MeshError(
        f"mesh={mesh!r}",
        expected='a DeviceMesh, a mapping like {"dp": 4}, or "auto" for crossfade.compile_step',
        remedy="pass one of them",
    )
