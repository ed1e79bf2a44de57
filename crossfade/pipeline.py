"""The compiler, top to bottom: which stages and passes run, in which order. Only this file knows.

`compile_step` builds a training step; `optimize` improves a graph that already has collectives.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.optim import Optimizer

from crossfade.capture.accumulate import accumulate as run_on_micro_batches
from crossfade.capture.batch import BatchIs, BatchLayout, batch_key
from crossfade.capture.optimizer import append_optimizer, check_optimizer, initial_state, options_key, parameter_names
from crossfade.capture.training import LossFunction, capture_forward_backward, check_model
from crossfade.communicate.add_before_reducing import AddBeforeReducing
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.lower_averages import LowerAverages
from crossfade.communicate.lower_coalesced_gathers import LowerCoalescedGathers
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.errors import CrossfadeError
from crossfade.graph import collectives, packing
from crossfade.graph.effects import is_random
from crossfade.graph.passes import Pass, fingerprint, run_passes
from crossfade.graph.private import backend_of_group, tree_flatten, tree_unflatten
from crossfade.graph.program import OutputKind, Program, from_graph_module
from crossfade.report.report import Report
from crossfade.run.members import Members
from crossfade.run.mesh import DataParallel, MeshLike, backend_on, data_parallel_axes
from crossfade.run.pack_in_place import PackInPlace
from crossfade.run.shards import Shards
from crossfade.run.step import Built, Step
from crossfade.run.update_in_place import UpdateInPlace
from crossfade.shard.average_buffers import AverageBuffers
from crossfade.shard.average_gradients import AverageGradients
from crossfade.shard.batch_dims import mark_batch_dims, needs_batch_dims
from crossfade.shard.broadcast_buffers import BroadcastBuffers
from crossfade.shard.draw_globally import DrawGlobally
from crossfade.shard.gather_again import GatherAgain
from crossfade.shard.gather_parameters import GatherParameters
from crossfade.shard.gather_updates import GatherUpdates
from crossfade.shard.scatter_gradients import ScatterGradients
from crossfade.shard.synchronize_batch_norm import SynchronizeBatchNorm
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode

Semantics = Literal["global", "per-rank"]
LossIs = Literal["mean", "sum"]
DataParallelMode = Literal["replicate", "zero1", "zero2", "zero3"]


def simplification() -> list[Pass]:
    """Passes that make a captured graph smaller."""
    return [RemoveAliases(), RemoveDeadCode()]


def batch_parallelism(axis: str, ranks: int, semantics: Semantics, *, can_gather: bool = True) -> list[Pass]:
    """Passes that split a program's batch over the ranks of an axis: what the forward means then."""
    if semantics == "global":
        return [DrawGlobally(ranks), SynchronizeBatchNorm(axis, ranks, can_gather), AverageBuffers(axis)]
    return [BroadcastBuffers(axis)]


def parameter_sharding(mode: DataParallelMode, axis: str, ranks: int) -> tuple[list[Pass], list[Pass]]:
    """Passes that make parameters parts of themselves: before micro-batches are put together, and after.

    With zero3 each micro-batch gathers for itself, twice; with zero2 all use what was gathered once.

    >>> [[one.name for one in passes] for passes in parameter_sharding("zero3", "dp", 2)]
    [['gather-parameters', 'gather-again'], []]
    """
    gather: list[Pass] = [GatherParameters(axis, ranks)]
    each = [*gather, GatherAgain()] if mode == "zero3" else []
    return each, gather if mode == "zero2" else []


def gradient_exchange(mode: DataParallelMode, axes: DataParallel, loss_is: LossIs = "mean") -> list[Pass]:
    """Passes that put the ranks' gradients together: whole on every rank, or each rank's rows."""
    reduce_op = "avg" if loss_is == "mean" else "sum"
    if mode == "replicate":
        return [AverageGradients(axes.whole.name, reduce_op)]
    copies = axes.copies.name if axes.copies is not None else ""
    whole = mode == "zero1"
    return [ScatterGradients(axes.split.name, axes.split.size, reduce_op, whole, copies, axes.whole.name)]


def updates_gathered(mode: DataParallelMode, axes: DataParallel) -> list[Pass]:
    """Passes that give every rank the whole parameters, if each updated only its rows of them."""
    return [GatherUpdates(axes.split.name, axes.split.size)] if mode == "zero1" else []


def communication() -> list[Pass]:
    """Passes that make collectives few, early to start and late to be waited for: the ones to add to or replace."""
    fewer = [MergeDuplicateCollectives(), AddBeforeReducing(), ScatterSlicedReductions()]
    larger = [BucketAllGathers(), BucketReduceScatters(), BucketAllReduces()]
    return [*fewer, *larger, RaiseLaunches(), SinkWaits()]


def lowering(backends: Mapping[str, str]) -> list[Pass]:
    """Passes that say things as each group's backend does them best; after bucketing, so that each bucket is one thing.

    >>> [one.spelling for one in lowering({"dp": "gloo", "tp": "nccl"})]
    ['lower-averages', 'lower-reduce-scatters', 'lower-coalesced-gathers']
    """
    gloo = tuple(group for group, backend in backends.items() if backend == "gloo")
    return [LowerAverages(gloo), LowerReduceScatters(gloo), LowerCoalescedGathers(gloo)] if gloo else []


def optimization(backends: Mapping[str, str] | None = None) -> list[Pass]:
    """What `optimize` runs over a graph that already has collectives."""
    return [*simplification(), *communication(), *lowering(backends or {})]


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    mesh: MeshLike = None,
    *,
    data_parallel: DataParallelMode = "replicate",
    batch: BatchIs = "global",
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    semantics: Semantics = "global",
    loss_is: LossIs = "mean",
    passes: Sequence[Pass] | None = None,
    timeout: float = 60.0,
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
        batch: `"global"` if every rank passes the whole batch (each computes its part), `"local"` if each passes its
            own part, as under a distributed sampler.
        accumulate: number of micro-batches whose gradients are averaged before they are exchanged.
        clip_grad_norm: scale gradients down to this total norm; the norm itself is in `step.outputs["grad_norm"]`.
        semantics: `"global"`: the step computes what one device would on the whole batch; batch statistics span all
            ranks and dropout masks are those of the whole batch (all ranks need the same seed). `"per-rank"`: each
            rank normalises and draws for its own samples, as under torch's DDP.
        loss_is: whether the loss is a mean over samples or a sum: how parts of a batch are put together.
        passes: communication passes to use instead of `crossfade.pipeline.communication()`.
        timeout: seconds after which a collective, or the check that all ranks run the same program, fails.

    Returns:
        A callable `step(*batch) -> loss`. The first call on each shape of batch captures and compiles.

        >>> model = nn.Linear(2, 1)
        >>> step = compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> losses = [float(step(torch.ones(4, 2), torch.zeros(4, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    _check_options(data_parallel=(data_parallel, DataParallelMode))
    _check_options(batch=(batch, BatchIs), semantics=(semantics, Semantics), loss_is=(loss_is, LossIs))
    _check_numbers(accumulate, clip_grad_norm, timeout)
    names = parameter_names(model)
    check_model(model)
    check_optimizer(optimizer, names)
    axes = data_parallel_axes(mesh)
    mode: DataParallelMode = data_parallel if axes is not None else "replicate"
    members, groups = _open(axes, mode, timeout) if axes is not None else (None, {})
    shards = _sharded(model, optimizer, axes, mode, members) if axes is not None and members is not None else None
    compiler = _StepCompiler(
        model, tuple(model.modules()), loss_fn, optimizer, axes, mode, shards, batch, accumulate, clip_grad_norm,
        semantics, loss_is, tuple(communication() if passes is None else passes),
    )  # fmt: skip
    return Step(
        model, optimizer, lambda b: compiler.build(b, members), compiler.key, members, groups, shards,
        compiler.initial_state, shares_random_numbers=axes is None or semantics == "global",
    )  # fmt: skip


def _open(axes: DataParallel, mode: DataParallelMode, timeout: float) -> tuple[Members, dict[str, str]]:
    """Process groups of our own for each axis that the mode communicates along, by the axis's name."""
    members, group = axes.whole.open(timeout)
    groups = {axes.whole.name: group}
    if mode != "replicate" and axes.copies is not None:
        groups |= {axis.name: axis.open(timeout)[1] for axis in (axes.split, axes.copies)}
    return members, groups


def _sharded(
    model: nn.Module, optimizer: Optimizer, axes: DataParallel, mode: DataParallelMode, members: Members
) -> Shards | None:
    """The parts that this rank keeps, each of its own model: so all ranks must have built the same one."""
    if mode == "replicate":
        return None
    lines = _checksums(model, optimizer)
    members.agree(" ".join(lines), "\n".join(lines))
    device = next(model.parameters()).device.type
    return Shards(model, optimizer, axes.device_mesh(device), parameters=mode != "zero1")


def _check_options(**given: tuple[str, Any]) -> None:
    for name, (value, kind) in given.items():
        if value not in get_args(kind):
            expected = " or ".join(repr(one) for one in get_args(kind))
            raise CrossfadeError(f"{name}={value!r}", expected=expected, remedy="pass one of those")


def _check_numbers(accumulate: int, clip_grad_norm: float | None, timeout: float) -> None:
    if accumulate < 1:
        raise CrossfadeError(
            f"accumulate={accumulate}", expected="at least 1", remedy="pass the number of micro-batches"
        )
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise CrossfadeError(
            f"clip_grad_norm={clip_grad_norm}", expected="more than 0", remedy="pass None for no clipping"
        )
    if not timeout > 0:
        raise CrossfadeError(f"timeout={timeout}", expected="seconds, more than 0", remedy="pass how long to wait")


def _baked_in(module: nn.Module) -> tuple[Any, ...]:
    """What a module's forward bakes into a graph: its own numbers, words and switches (dropout's p, training), which
    parameters it has, and the shapes of its buffers. Asked at every step, so without walking the tree of modules."""
    plain = [item for item in vars(module).items() if type(item[1]) in _PLAIN]
    parameters = [(id(p), p.requires_grad, p.dtype) for p in module._parameters.values() if p is not None]
    buffers = [(b.shape, b.dtype) for b in module._buffers.values() if b is not None]
    return tuple(plain), tuple(parameters), tuple(buffers)


_PLAIN = (bool, int, float, str)


def _ambient() -> tuple[Any, ...]:
    """What torch itself bakes in: autocast and the default dtype."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return (*autocast, torch.get_default_dtype())


def _checksums(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """A line for every tensor that all ranks hold whole: parameters, buffers, optimizer state."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for parameter, name in parameter_names(model).items():
        entries = optimizer.state.get(parameter, {})
        tensors |= {f"{name}:{k}": v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    whole = {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "placements")}
    return [f"{name} with checksum {_checksum(tensor):08x}" for name, tensor in whole.items()]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class _StepCompiler:
    """The settings of one `compile_step`, and the way from a batch to a program."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
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
    passes: tuple[Pass, ...]

    def key(self, batch: tuple[Any, ...]) -> Any:
        """What a captured program depends on."""
        modules = tuple(_baked_in(module) for module in self.modules)
        return batch_key(batch), modules, options_key(self.optimizer), _ambient()

    def build(self, batch: tuple[Any, ...], members: Members | None) -> Built:
        """Capture and compile for one shape of batch, and agree on the result with the other ranks."""
        try:
            check_optimizer(self.optimizer, parameter_names(self.model))
            built = self._build(batch)
        except Exception as error:
            if members is not None:
                members.fail(f"{type(error).__name__}: {error}")
            raise
        if members is not None:
            common = [self._stream(built.program), *self._state()]
            members.agree(" ".join([fingerprint(built.program), *common]), "\n".join([*common, str(built.program)]))
        return built

    def _stream(self, program: Program) -> str:
        """What ranks that draw from one random stream must have in common beside the program."""
        if self.semantics == "per-rank" or not any(is_random(node) for node in program.graph.nodes):
            return "no random numbers shared by the ranks"
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        return f"random generator in state {state:08x}: call torch.manual_seed alike on every rank"

    def _state(self) -> list[str]:
        """A line for everything that ranks must start with alike: what each holds whole, and learning rates."""
        rates = [f"lr.{index} = {group['lr']}" for index, group in enumerate(self.optimizer.param_groups)]
        return _checksums(self.model, self.optimizer) + rates

    def _build(self, batch: tuple[Any, ...]) -> Built:
        start = time.perf_counter()
        names = parameter_names(self.model)
        ranks = self.axes.whole.size if self.axes else 1
        layout = BatchLayout.of(batch, ranks=ranks, accumulate=self.accumulate, given=self.batch)

        program = self._capture(batch, layout)
        program = self._data_parallel(program) if self.axes else self._on_micro_batches(program)
        split_over = self.axes.split.name if self.axes and self.shards else None
        program = append_optimizer(
            program, self.optimizer, names, clip_grad_norm=self.clip_grad_norm, split_over=split_over
        )
        gather = (
            [GatherUpdates(self.axes.split.name, self.axes.split.size)] if self.axes and self.mode == "zero1" else []
        )
        before = program = run_passes(program, [*gather, *simplification()])
        seconds = time.perf_counter() - start
        program = run_passes(program, [*self.passes, *self._lowering(), PackInPlace(), UpdateInPlace()])

        facts = self._facts(seconds, layout) | _copy_kernel(program)
        report = Report.of(before, program, title=type(self.model).__name__, facts=facts)
        stepped = {out.name for out in before.outputs if out.kind is OutputKind.UPDATE}
        return Built(program, layout, report, self.initial_state(stepped))

    def initial_state(self, stepped: Collection[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """What the optimizer would create at its first step for some parameters, by default all that are trained."""
        parts = self.shards.like_parts() if self.shards else {}
        names = parameter_names(self.model)
        return initial_state(self.optimizer, names, self._trained() if stepped is None else stepped, parts)

    def _trained(self) -> list[str]:
        names = parameter_names(self.model)
        return [names[p] for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _on_micro_batches(self, program: Program) -> Program:
        return run_on_micro_batches(program, self.accumulate, mean=self.loss_is == "mean")

    def _data_parallel(self, program: Program) -> Program:
        """The program of one rank: its part of the batch, its part of the parameters, everyone's gradients."""
        assert self.axes is not None
        whole, split = self.axes.whole, self.axes.split
        program.groups = {whole.name: whole.size}
        if self.shards is not None:
            program.groups |= {one.name: one.size for one in (split, self.axes.copies) if one is not None}
        can_gather = self._backend() != "gloo" or self._device() != "cuda"  # gloo's all-gather crashes on CUDA tensors
        each, once = parameter_sharding(self.mode, split.name, split.size)
        program = self._on_micro_batches(run_passes(program, each))
        batch = batch_parallelism(whole.name, whole.size, self.semantics, can_gather=can_gather)
        return run_passes(program, [*once, *batch, *gradient_exchange(self.mode, self.axes, self.loss_is)])

    def _capture(self, batch: tuple[Any, ...], layout: BatchLayout) -> Program:
        trained = self._trained()
        as_one_device = self.axes is not None and self.semantics == "global"

        def capture(size: int) -> Program:
            return capture_forward_backward(
                self.model,
                self.loss_fn,
                batch,
                batch_size=size,
                trained=trained,
                layout=layout,
                plain_norms=as_one_device,
            )

        program = capture(layout.micro_batch_size)
        if as_one_device and needs_batch_dims(program):
            mark_batch_dims(program, capture(layout.micro_batch_size_of_all_ranks))
        return program

    def _lowering(self) -> list[Pass]:
        if self.axes is None:
            return []
        axes = (self.axes.whole, self.axes.split, self.axes.copies)
        return lowering({axis.name: self._backend() for axis in axes if axis is not None})

    def _device(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def _backend(self) -> str:
        return backend_on(self._device(), self.axes.whole.backend) if self.axes else ""

    def _facts(self, seconds: float, layout: BatchLayout) -> dict[str, str]:
        axes = [self.axes.copies, self.axes.split] if self.axes else []
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in axes if axis is not None)
        return {
            "mesh": f"{sizes} over {axes[1].backend}" if axes and axes[1] else "one device",
            "data parallel": self.mode,
            "batch": f"{layout.size} samples ({layout.given}), {layout.accumulate} x {layout.micro_batch_size} a rank",
            "optimizer": type(self.optimizer).__name__,
            "semantics": self.semantics,
            "torch": torch.__version__,
            "capture": f"{seconds:.1f} s",
        }


def _copy_kernel(program: Program) -> dict[str, str]:
    """Which code packs a program's buckets, for its report."""
    packs = program.graph.find_nodes(op="call_function", target=packing.OPERATOR)
    used = {packing.implementation(pack.meta["val"].device) for pack in packs}
    return {"copy kernel": ", ".join(sorted(used))} if used else {}


def _backends_here(program: Program) -> dict[str, str]:
    """What each group of a program runs on in this process, where it exists here."""
    found = {}
    for one in collectives.find(program.graph):
        if one.group not in found and (configured := backend_of_group(one.group)) is not None:
            found[one.group] = backend_on(one.inputs[0].meta["val"].device.type, configured)
    return found


@dataclass(frozen=True)
class Optimized:
    """An improved graph and the account of what was done."""

    module: fx.GraphModule
    report: Report


def optimize(
    module: fx.GraphModule,
    *,
    passes: Sequence[Pass] | None = None,
    groups: Mapping[str, int] | None = None,
    backends: Mapping[str, str] | None = None,
) -> Optimized:
    """Improve any FX graph of ATen ops and functional collectives; `module` is left as it is.

    The result takes the same inputs and returns the same structure. `groups` gives the sizes of process groups that
    the graph names; by default those that the graph's own ops say. `backends` gives what each group runs on, by default
    as torch knows it in this process: gloo's reduce-scatters become all-to-alls and local sums, which is twice as fast;
    `backends={}` keeps them. With `passes`, exactly those run.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[2] = input("x")
        ... y: f32[2] = input("y")
        ... a: f32[2] = c10d.all_reduce(x, "sum", "0")
        ... wait_a: f32[2] = c10d.wait_tensor(a)
        ... b: f32[2] = c10d.all_reduce(y, "sum", "0")
        ... wait_b: f32[2] = c10d.wait_tensor(b)
        ... return output("a", wait_a), output("b", wait_b)
        ... ''', groups={"0": 2})
        >>> print(optimize(program.module()).report)
        Program: 2 collectives (16 B) became 1 (16 B)...
    """
    structure: Any = module.graph.output_node().args[0]
    _, spec = tree_flatten(structure)
    before = from_graph_module(module, groups=groups)
    if backends is None:
        backends = _backends_here(before)
    after = run_passes(before, optimization(backends) if passes is None else passes)
    report = Report.of(before, after, title=type(module).__name__, facts=_copy_kernel(after))
    result = after.copy()
    result.output_node.args = (tree_unflatten(result.results, spec),)
    result.graph.set_codegen(module.graph._codegen)
    return Optimized(result.module(), report)
