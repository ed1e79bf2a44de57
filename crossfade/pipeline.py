"""The compiler, top to bottom: which stages and passes run, in which order. Only this file knows.

`compile_step` builds a training step; `optimize` improves a graph that already has collectives.
"""

from __future__ import annotations

import difflib
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.optim import Optimizer

from crossfade.capture.accumulate import accumulate as run_on_micro_batches
from crossfade.capture.batch import BatchIs, BatchLayout, batch_key
from crossfade.capture.optimizer import append_optimizer, check_optimizer, missing_state, options_key, parameter_names
from crossfade.capture.training import LossFunction, capture_forward_backward, check_model
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.lower_averages import LowerAverages
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.errors import CrossfadeError, NotYetError, PassError
from crossfade.graph.passes import Pass, fingerprint, run_passes
from crossfade.graph.private import tree_flatten, tree_unflatten
from crossfade.graph.program import OutputKind, Program, from_graph_module
from crossfade.report.report import Report
from crossfade.run.members import Members
from crossfade.run.mesh import Axis, MeshLike, data_parallel_axis
from crossfade.run.pack_in_place import PackInPlace
from crossfade.run.step import Built, Step
from crossfade.run.update_in_place import UpdateInPlace
from crossfade.shard.average_gradients import AverageGradients
from crossfade.shard.batch_dims import mark_batch_dims, needs_batch_dims
from crossfade.shard.broadcast_buffers import BroadcastBuffers
from crossfade.shard.draw_globally import RANK_INPUT, DrawGlobally
from crossfade.shard.synchronize_batch_norm import SynchronizeBatchNorm
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode

Semantics = Literal["global", "per-rank"]

_SUMS_ONLY = frozenset({"gloo"})
"""Backends without an averaging all-reduce."""


def simplification() -> list[Pass]:
    """Passes that make a captured graph smaller."""
    return [RemoveAliases(), RemoveDeadCode()]


def data_parallelism(axis: str, ranks: int, semantics: Semantics) -> list[Pass]:
    """Passes that split a program's batch over the ranks of an axis."""
    if semantics == "global":
        return [DrawGlobally(ranks), SynchronizeBatchNorm(axis, ranks), AverageGradients(axis)]
    return [BroadcastBuffers(axis), AverageGradients(axis)]


def communication() -> list[Pass]:
    """Passes that make collectives few, early to start and late to be waited for: the ones to add to or replace."""
    return [BucketAllReduces(), RaiseLaunches(), SinkWaits()]


def optimization() -> list[Pass]:
    """What `optimize` runs over a graph that already has collectives."""
    return [*simplification(), *communication()]


def known_passes() -> dict[str, type[Pass]]:
    """Every pass of this package, by name."""
    return {one.name: one for one in sorted(Pass.__subclasses__(), key=lambda one: one.name)}


def options_of(one: type[Pass]) -> list[str]:
    """A pass's options, their types and defaults, as text.

    >>> options_of(BucketAllReduces)
    ['cap_mb: float = 2.0', 'first_mb: float = 1.0']
    """
    return [f"{option.name}: {option.type} = {option.default!r}" for option in fields(one)]


def pass_from_spelling(spelling: str) -> Pass:
    """The pass that a `Pass.spelling` stands for.

    >>> pass_from_spelling("bucket-all-reduces(cap_mb=8)")
    BucketAllReduces(cap_mb=8.0, first_mb=1.0)
    """
    name, _, options = spelling.rstrip(")").partition("(")
    if name not in known_passes():
        near = difflib.get_close_matches(name, known_passes(), n=1)
        remedy = f"did you mean {near[0]}" if near else "`crossfade passes` lists them"
        raise PassError(f"the pass {name!r}", expected="a known pass", remedy=remedy)
    kind = known_passes()[name]
    defaults: dict[str, Any] = {option.name: option.default for option in fields(kind)}
    values = dict(item.split("=", 1) for item in options.split(",") if item)
    if unknown := values.keys() - defaults.keys():
        expected = ", ".join(options_of(kind)) or "no options"
        raise PassError(f"option {sorted(unknown)[0]!r} of {name}", expected=expected, remedy="correct the option")
    return kind(**{key: type(defaults[key])(value) for key, value in values.items()})


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
    names = parameter_names(model)
    check_model(model)
    check_optimizer(optimizer, names)
    axis = data_parallel_axis(mesh)
    compiler = _StepCompiler(
        model, loss_fn, optimizer, axis, batch, accumulate, clip_grad_norm, semantics,
        tuple(communication() if passes is None else passes),
    )  # fmt: skip
    members, group = axis.open(timeout) if axis is not None else (None, "")
    groups = {axis.name: group} if axis is not None else {}
    return Step(model, optimizer, lambda b: compiler.build(b, members), compiler.key, members, groups)


@dataclass(frozen=True)
class _StepCompiler:
    """The settings of one `compile_step`, and the way from a batch to a program."""

    model: nn.Module
    loss_fn: LossFunction | None
    optimizer: Optimizer
    axis: Axis | None
    batch: BatchIs
    accumulate: int
    clip_grad_norm: float | None
    semantics: Semantics
    passes: tuple[Pass, ...]

    def key(self, batch: tuple[Any, ...]) -> Any:
        """What a captured program depends on."""
        flags = tuple(module.training for module in self.model.modules())
        parameters = tuple((id(p), p.dtype, p.requires_grad) for p in self.model.parameters())
        return batch_key(batch), flags, parameters, options_key(self.optimizer)

    def build(self, batch: tuple[Any, ...], members: Members | None) -> Built:
        """Capture and compile for one shape of batch, and agree on the result with the other ranks."""
        try:
            built = self._build(batch)
        except CrossfadeError as error:
            if members is not None:
                members.fail(str(error))
            raise
        if members is not None:
            text = f"{self._stream(built.program)}\n{built.program}"
            members.agree(f"{fingerprint(built.program)} {self._stream(built.program)}", text)
        return built

    def _stream(self, program: Program) -> str:
        """What ranks that draw from one random stream must have in common beside the program."""
        if not any(item.name == RANK_INPUT for item in program.inputs):
            return "no random numbers shared by the ranks"
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        return f"random generator in state {state:08x}: call torch.manual_seed alike on every rank"

    def _build(self, batch: tuple[Any, ...]) -> Built:
        start = time.perf_counter()
        names = parameter_names(self.model)
        ranks = self.axis.size if self.axis else 1
        layout = BatchLayout.of(batch, ranks=ranks, accumulate=self.accumulate, given=self.batch)

        captured = self._capture(batch, layout, names)
        program = run_on_micro_batches(captured, self.accumulate)
        if self.axis is not None:
            program.groups = {self.axis.name: ranks}
            program = run_passes(program, data_parallelism(self.axis.name, ranks, self.semantics))
        program = append_optimizer(program, self.optimizer, names, clip_grad_norm=self.clip_grad_norm)
        before = program = run_passes(program, simplification())
        seconds = time.perf_counter() - start
        if self.axis is not None:
            program = run_passes(program, [*self.passes, *self._lowering()])
        program = run_passes(program, [PackInPlace(), UpdateInPlace()])

        report = Report.of(before, program, title=type(self.model).__name__, facts=self._facts(seconds, layout))
        stepped = {out.name for out in before.outputs if out.kind is OutputKind.UPDATE}
        return Built(program, layout, report, missing_state(self.optimizer, names, stepped))

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
        """What this backend needs; averages are lowered after bucketing, so that each bucket is divided once."""
        return [LowerAverages((self.axis.name,))] if self.axis and self.axis.backend in _SUMS_ONLY else []

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


@dataclass(frozen=True)
class Optimized:
    """An improved graph and the account of what was done."""

    module: fx.GraphModule
    report: Report


def optimize(
    module: fx.GraphModule, *, passes: Sequence[Pass] | None = None, groups: Mapping[str, int] | None = None
) -> Optimized:
    """Improve any FX graph of ATen ops and functional collectives; `module` is left as it is.

    The result takes the same inputs and returns the same structure. `groups` gives the sizes of process groups that
    the graph names; by default those that the graph's own ops say.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[2] = input("x")
        ... a: f32[2] = c10d.all_reduce(x, "sum", "0")
        ... wait_a: f32[2] = c10d.wait_tensor(a)
        ... b: f32[2] = c10d.all_reduce(x, "sum", "0")
        ... wait_b: f32[2] = c10d.wait_tensor(b)
        ... return output("a", wait_a), output("b", wait_b)
        ... ''', groups={"0": 2})
        >>> print(optimize(program.module()).report)
        Program: 2 collectives (16 B) became 1 (16 B)...
    """
    structure: Any = module.graph.output_node().args[0]
    _, spec = tree_flatten(structure)
    before = from_graph_module(module, groups=groups)
    after = run_passes(before, optimization() if passes is None else passes)
    report = Report.of(before, after, title=type(module).__name__)
    result = after.copy()
    result.output_node.args = (tree_unflatten(result.results, spec),)
    result.graph.set_codegen(module.graph._codegen)
    return Optimized(result.module(), report)
