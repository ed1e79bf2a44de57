"""The program of one micro-batch of a step, and how the losses of such parts make up the whole batch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from crossfade.capture.baked_in import BakedIn
from crossfade.capture.batch import BatchIs, BatchLayout
from crossfade.capture.constants import check_constants
from crossfade.capture.optimizer import parameter_names
from crossfade.capture.training import LossFunction, capture_forward_backward, resized
from crossfade.compile.pipeline import Semantics
from crossfade.compile.tensor_parallel import TensorParallel
from crossfade.graph.program import Program
from crossfade.shard.batch_dims import mark_batch_dims, needs_batch_dims
from crossfade.shard.loss_parts import LossParts, find_loss_parts


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the parameters that the optimizer trains."""
    names = parameter_names(model)
    return [names[p] for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class Capturing:
    """What a capture follows from: the model and the loss, and how a batch is divided among `ranks`."""

    model: nn.Module
    baked_in: BakedIn
    loss_fn: LossFunction | None
    optimizer: Optimizer
    ranks: int
    batch: BatchIs
    accumulate: int
    semantics: Semantics
    tensor: TensorParallel | None = None

    def layout(self, batch: tuple[Any, ...]) -> BatchLayout:
        """How a batch is divided."""
        return BatchLayout.of(batch, ranks=self.ranks, accumulate=self.accumulate, given=self.batch)

    def capture(self, batch: tuple[Any, ...], layout: BatchLayout) -> tuple[Program, LossParts]:
        """Forward, loss and backward on one micro-batch of one rank.

        Where it is to mean what one device would compute on the whole batch, it is captured once more on a larger
        batch: by comparison it is known which dims hold samples, and how the loss is reduced.
        """
        trained, size = trained_parameters(self.model, self.optimizer), layout.micro_batch_size
        program = self._captured(batch, layout, size, trained)
        check_constants(program.constants, self.model, self.baked_in.path_of)
        times = layout.ranks if layout.ranks > 1 else layout.accumulate
        if times == 1 or self.semantics == "per-rank":
            return program, LossParts(None)
        needed = layout.ranks > 1 and needs_batch_dims(program)
        larger = self._captured(batch, layout, size * times, trained if needed else ())
        if needed:
            mark_batch_dims(program, larger)
        return program, find_loss_parts(program, larger, times, trained, micro_batches=self.accumulate > 1)

    def _captured(self, batch: tuple[Any, ...], layout: BatchLayout, size: int, trained: Sequence[str]) -> Program:
        return capture_forward_backward(
            self.model,
            self.loss_fn,
            batch,
            batch_size=size,
            trained=trained,
            layout=layout,
            plain_norms=layout.ranks > 1 and self.semantics == "global",
            forward=self.tensor.forward(resized(batch, size, layout)) if self.tensor is not None else None,
        )
