"""The compiler, top to bottom: which stages and passes run, in which order. Only this file knows.

`compile_step` builds a training step; `optimize` improves a graph that already has collectives.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

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
from crossfade.communicate.buckets import BucketPass
from crossfade.communicate.lower_averages import LowerAverages
from crossfade.communicate.lower_coalesced_gathers import LowerCoalescedGathers
from crossfade.communicate.lower_reduce_scatters import LowerReduceScatters
from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.errors import CrossfadeError, NotYetError, PassError
from crossfade.graph import collectives, packing
from crossfade.graph.effects import is_random
from crossfade.graph.passes import Pass, fingerprint, run_passes
from crossfade.graph.private import backend_of_group, tree_flatten, tree_unflatten
from crossfade.graph.program import OutputKind, Program, from_graph_module
from crossfade.report.report import Report
from crossfade.run.members import Members
from crossfade.run.mesh import Axis, MeshLike, backend_on, data_parallel_axis
from crossfade.run.pack_in_place import PackInPlace
from crossfade.run.step import Built, Step
from crossfade.run.update_in_place import UpdateInPlace
from crossfade.shard.average_buffers import AverageBuffers
from crossfade.shard.average_gradients import AverageGradients
from crossfade.shard.batch_dims import mark_batch_dims, needs_batch_dims
from crossfade.shard.broadcast_buffers import BroadcastBuffers
from crossfade.shard.draw_globally import DrawGlobally
from crossfade.shard.synchronize_batch_norm import SynchronizeBatchNorm
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode

Semantics = Literal["global", "per-rank"]
LossIs = Literal["mean", "sum"]


def simplification() -> list[Pass]:
    """Passes that make a captured graph smaller."""
    return [RemoveAliases(), RemoveDeadCode()]


def data_parallelism(
    axis: str, ranks: int, semantics: Semantics, loss_is: LossIs = "mean", *, can_gather: bool = True
) -> list[Pass]:
    """Passes that split a program's batch over the ranks of an axis."""
    exchange = AverageGradients(axis, "avg" if loss_is == "mean" else "sum")
    if semantics == "global":
        return [DrawGlobally(ranks), SynchronizeBatchNorm(axis, ranks, can_gather), AverageBuffers(axis), exchange]
    return [BroadcastBuffers(axis), exchange]


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


def known_passes() -> dict[str, type[Pass]]:
    """Every pass of this package, by name."""
    found, families = [], [Pass]
    while families:
        below = [one for one in families.pop().__subclasses__() if one.__module__.startswith("crossfade.")]
        families += below
        found += [one for one in below if hasattr(one, "name")]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def options_of(one: type[Pass]) -> list[str]:
    """A pass's options, their types and defaults, as text.

    >>> options_of(LowerReduceScatters)
    ["groups: tuple[str, ...] = ('dp',)", 'piece_mb: float = 1.0']
    """
    kinds = get_type_hints(one)
    return [f"{option.name}: {_spelled_type(kinds[option.name])} = {option.default!r}" for option in fields(one)]


def _spelled_type(kind: Any) -> str:
    plain = kind.__name__ if type(kind) is type else str(kind)
    return re.sub(r"\b(typing|collections\.abc)\.", "", plain)


def passes_as_markdown() -> str:
    """docs/passes.md: every pass with its options and its example, from the docstrings."""
    parts = ["# Passes\n\nGenerated by `crossfade passes --markdown`; the examples are tests.\n"]
    parts.append(f"\n## Options of every bucketing pass\n\n{inspect.cleandoc(BucketPass.__doc__ or '')}\n")
    for name, one in known_passes().items():
        text, before, example = inspect.cleandoc(one.__doc__ or "").partition("Before:")
        options = "".join(f"- `{option}`\n" for option in options_of(one))
        parts.append(f"\n## {name}\n\n*{one.numerics}*\n\n{text.strip()}\n\n{options and options + chr(10)}")
        parts.append(f"```\n{(before + example).strip()}\n```\n")
    return "".join(parts)


def pass_from_spelling(spelling: str) -> Pass:
    """The pass that a `Pass.spelling` stands for.

    >>> pass_from_spelling("bucket-all-reduces(cap_mb=8)").cap_mb
    8.0
    """
    name, _, options = spelling.partition("(")
    if name not in known_passes():
        near = difflib.get_close_matches(name, known_passes(), n=1)
        remedy = f"did you mean {near[0]}" if near else "`crossfade passes` lists them"
        raise PassError(f"the pass {name!r}", expected="a known pass", remedy=remedy)
    kind = known_passes()[name]
    defaults: dict[str, Any] = {option.name: option.default for option in fields(kind)}
    try:
        call: Any = ast.parse(f"options({options}" if options else "options()", mode="eval").body
        values = {item.arg: ast.literal_eval(item.value) for item in call.keywords}
        kinds = get_type_hints(kind)
        return kind(**{key: _as_option(kinds[key], defaults[key], value) for key, value in values.items()})
    except (SyntaxError, ValueError, KeyError) as error:
        expected = ", ".join(options_of(kind)) or "no options"
        raise PassError(f"the options of {spelling}", expected=expected, remedy="correct them") from error


def _as_option(kind: Any, default: Any, value: Any) -> Any:
    """A value from the command line as the option's type; only a whole number for a float is not yet that."""
    if value is None and type(None) in get_args(kind):
        return None
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is not None and not isinstance(value, (type(default), tuple)):
        raise ValueError(value)
    return value


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer,
    mesh: MeshLike = None,
    *,
    data_parallel: str = "replicate",
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
        mesh: a `DeviceMesh` with an axis `dp` (or only one), a mapping like `{"dp": 4}`, or None for one device.
        data_parallel: `"replicate"`: every rank holds all parameters.
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
    if data_parallel != "replicate":
        raise NotYetError(
            f"data_parallel={data_parallel!r}", expected='"replicate"', remedy='pass data_parallel="replicate"'
        )
    _check_options(batch=(batch, BatchIs), semantics=(semantics, Semantics), loss_is=(loss_is, LossIs))
    _check_numbers(accumulate, clip_grad_norm, timeout)
    names = parameter_names(model)
    check_model(model)
    check_optimizer(optimizer, names)
    axis = data_parallel_axis(mesh)
    compiler = _StepCompiler(
        model, tuple(model.modules()), loss_fn, optimizer, axis, batch, accumulate, clip_grad_norm, semantics, loss_is,
        tuple(communication() if passes is None else passes),
    )  # fmt: skip
    members, group = axis.open(timeout) if axis is not None else (None, "")
    groups = {axis.name: group} if axis is not None else {}
    return Step(model, optimizer, lambda b: compiler.build(b, members), compiler.key, members, groups)


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


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class _StepCompiler:
    """The settings of one `compile_step`, and the way from a batch to a program."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    loss_fn: LossFunction | None
    optimizer: Optimizer
    axis: Axis | None
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
        """A line for everything that replicas must start with alike: parameters, buffers, optimizer state, rates."""
        names = parameter_names(self.model)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for parameter, name in names.items():
            entries = self.optimizer.state.get(parameter, {})
            tensors |= {f"{name}:{k}": v for k, v in entries.items() if isinstance(v, torch.Tensor)}
        lines = [f"{name} with checksum {_checksum(tensor):08x}" for name, tensor in tensors.items()]
        return lines + [f"lr.{index} = {group['lr']}" for index, group in enumerate(self.optimizer.param_groups)]

    def _build(self, batch: tuple[Any, ...]) -> Built:
        start = time.perf_counter()
        names = parameter_names(self.model)
        ranks = self.axis.size if self.axis else 1
        layout = BatchLayout.of(batch, ranks=ranks, accumulate=self.accumulate, given=self.batch)

        captured = self._capture(batch, layout, names)
        program = run_on_micro_batches(captured, self.accumulate, mean=self.loss_is == "mean")
        if self.axis is not None:
            program.groups = {self.axis.name: ranks}
            # gloo's all-gather crashes on CUDA tensors
            can_gather = self._backend() != "gloo" or self._device() != "cuda"
            sharding = data_parallelism(self.axis.name, ranks, self.semantics, self.loss_is, can_gather=can_gather)
            program = run_passes(program, sharding)
        program = append_optimizer(program, self.optimizer, names, clip_grad_norm=self.clip_grad_norm)
        before = program = run_passes(program, simplification())
        seconds = time.perf_counter() - start
        program = run_passes(program, [*self.passes, *self._lowering(), PackInPlace(), UpdateInPlace()])

        facts = self._facts(seconds, layout) | _copy_kernel(program)
        report = Report.of(before, program, title=type(self.model).__name__, facts=facts)
        stepped = {out.name for out in before.outputs if out.kind is OutputKind.UPDATE}
        return Built(program, layout, report, initial_state(self.optimizer, names, stepped))

    def _capture(self, batch: tuple[Any, ...], layout: BatchLayout, names: Mapping[Any, str]) -> Program:
        trained = [names[p] for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        as_one_device = self.axis is not None and self.semantics == "global"

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
        return lowering({self.axis.name: self._backend()}) if self.axis else []

    def _device(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def _backend(self) -> str:
        return backend_on(self._device(), self.axis.backend) if self.axis else ""

    def _facts(self, seconds: float, layout: BatchLayout) -> dict[str, str]:
        mesh = f"{self.axis.name}={self.axis.size} over {self.axis.backend}" if self.axis else "one device"
        return {
            "mesh": mesh,
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
