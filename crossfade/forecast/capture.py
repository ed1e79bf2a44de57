"""A model's forward and backward as one rank of a tensor-parallel group runs them, on tensors without memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.side_effects import as_it_was
from crossfade.capture.training import LossFunction, capture_forward_backward, loss_of
from crossfade.compile.tensor_parallel import run_local
from crossfade.errors import CaptureError, CrossfadeError, PlanError
from crossfade.forecast.attention import FusedAttention
from crossfade.forecast.layers import Layers, find_layers, shortened
from crossfade.forecast.repeat import CannotRepeat, repeat_layers
from crossfade.graph.private import tree_map_only
from crossfade.graph.program import Program
from crossfade.shard.tensor.builder import RANK
from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.parts import Parts
from crossfade.shard.tensor.plan import Plan

TENSOR_AXIS = "tp"

log = logging.getLogger("crossfade")


@dataclass(frozen=True)
class Captured:
    """One micro-batch's forward and backward, and which layers were captured for all that are like them."""

    marked: Program
    """As it was captured, with the marks of layers."""
    layers: Layers | None

    @property
    def program(self) -> Program:
        """With all layers."""
        return self.with_layers(self.layers.count if self.layers is not None else 1)

    def with_layers(self, count: int) -> Program:
        """With another number of periods of equal layers, of at least two."""
        layers = replace(self.layers, count=count) if self.layers is not None else Layers("", 0, 1, 1)
        return repeat_layers(self.marked.copy(), layers)


def capture_model(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_fn: LossFunction | None = None,
    *,
    ranks: int = 1,
    plan: Plan | Mapping[str, object] | None = None,
    whole: bool = False,
) -> Captured:
    """Capture a model on a micro-batch, split over `ranks` by a plan (by default the one its graph suggests).

    Only shapes are used. Equal layers are captured twice and repeated, unless `whole`, or unless they share more than
    the tensor that they hand on.

        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        >>> found = capture_model(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.functional.mse_loss)
        >>> found.layers, sum(out.kind == "gradient" for out in found.program.outputs)
        (Layers(owner='', start=0, period=1, count=5), 10)
    """
    batch = tree_map_only(Tensor, lambda value: value.to("meta"), batch)
    layers = None if whole else find_layers(model)
    if layers is not None:
        try:
            found = Captured(_captured(_on_meta(model), batch, loss_fn, ranks, plan, layers), layers)
            found.with_layers(3)
            return found
        except CannotRepeat:  # what layers share is seen in the program only
            layers = None
    return Captured(_captured(_on_meta(model), batch, loss_fn, ranks, plan, None), None)


def _captured(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_fn: LossFunction | None,
    ranks: int,
    plan: Plan | Mapping[str, object] | None,
    layers: Layers | None,
) -> Program:
    layout = BatchLayout.of(batch, ranks=1, accumulate=1, given="local")
    with _named_errors(model), shortened(model, layers):
        run: Any = None
        if ranks > 1:
            model, run = _split(model, batch, loss_fn, ranks, plan)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        size = layout.micro_batch_size
        with FusedAttention(), as_it_was([model, loss_fn]):
            program = capture_forward_backward(
                model, loss_fn, batch, batch_size=size, trained=trained, layout=layout, forward=run, with_sources=False
            )
    program.groups = {TENSOR_AXIS: ranks} if ranks > 1 else {}
    return program


@contextlib.contextmanager
def _named_errors(model: nn.Module) -> Iterator[None]:
    """Whatever a model's code raises when it meets this batch, as an error of ours with its first line.

    Torch logs a traceback of what fails on tensors without memory: the error says it.
    """
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    try:
        fakes.disabled = True
        yield
    except CrossfadeError:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise CaptureError(
            f"{type(model).__name__} raised {type(error).__name__} while it was captured: {said}",
            expected="a model and a loss function that run on this batch",
            remedy="run both once on a batch of these shapes, and correct what that shows",
        ) from error
    finally:
        fakes.disabled = False


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without its numbers; modules are new, so that hooks and lists may be changed."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        )
    return copy.deepcopy(model, memo)


def plan_of_graph(model: nn.Module, batch: tuple[Any, ...], loss_fn: LossFunction | None = None) -> Plan:
    """The plan that a model's graph suggests for a batch, by shapes alone; empty where there is nothing to split.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> plan_of_graph(model, (torch.ones(4, 8), torch.ones(4, 8)), nn.functional.mse_loss)
    Plan({'0': 'colwise', '2': 'rowwise'})
    """
    bare, batch = _on_meta(model), tree_map_only(Tensor, lambda value: value.to("meta"), batch)
    layers = find_layers(bare)
    if layers is not None and layers.count * layers.period < len(list(bare.get_submodule(layers.owner).children())):
        layers = None  # a name with * would mean the others in the list too
    with shortened(bare, layers):
        return usual_plan(bare, _exported(bare, batch, loss_fn))


def _exported(model: nn.Module, batch: tuple[Any, ...], loss_fn: LossFunction | None) -> torch.export.ExportedProgram:
    """The model with its loss, exported; the model stays as it is."""
    called = model.forward

    def forward(module: nn.Module, *given: Any) -> Tensor:
        return loss_of(called, loss_fn, given)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    try:
        return torch.export.export(model, batch, strict=False)
    finally:
        del model.forward


def _split(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_fn: LossFunction | None,
    ranks: int,
    plan: Plan | Mapping[str, object] | None,
) -> tuple[nn.Module, Callable[..., Any]]:
    """The model with one rank's parts of its parameters, and how its local program is run."""
    exported = _exported(model, batch, loss_fn)
    chosen = usual_plan(model, exported) if plan is None else plan if isinstance(plan, Plan) else Plan(plan)
    if not len(chosen):
        raise PlanError(
            f"nothing in this {type(model).__name__} to split over {ranks} ranks",
            expected="linear layers one after the other, or a plan",
            remedy="pass plan={...}, or a mesh without tp",
        )
    resolved = chosen.resolve(exported, ranks)
    for note in resolved.notes:
        log.warning("%s", note)
    local = localize(exported, resolved, ranks, TENSOR_AXIS, Request())
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tied = {name: first[id(tensor)] for name, tensor in every}
    _keep_parts(model, local, resolved.aliases)
    return model, lambda state, values: run_local(local, state, values, tied)


def usual_plan(model: nn.Module, exported: torch.export.ExportedProgram) -> Plan:
    """What the graph suggests, and the vocabulary split where the embedding and the last layer have one in common."""
    found: dict[str, Any] = dict(Plan.megatron(exported))
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features in sizes}
    for name, head in heads.items():
        found[name] = "colwise"
        for other, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == head.out_features:
                found[other] = "rowwise"
    return Plan(found)


def _keep_parts(model: nn.Module, local: LocalProgram, aliases: Mapping[str, str]) -> None:
    """Make a model's tensors the first rank's parts, padded where sizes do not divide: all ranks compute as much."""
    parts = Parts(local.parameters, aliases, TENSOR_AXIS, "", 0, local.ranks, "meta")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = parts.part(name, tensor.data)
    model.register_buffer(RANK, torch.zeros((), dtype=torch.int64, device="meta"))
