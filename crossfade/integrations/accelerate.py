"""Hugging Face Accelerate: the same loop, with forward, backward and exchange as one graph.

accelerator = Accelerator()
gradients = compile_gradients(accelerator, model, loss_fn)  # in place of accelerator.prepare(model)
optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
for inputs, targets in loader:
    loss = gradients(inputs, targets)  # in place of loss_fn(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, DistributedType
from torch import nn

from crossfade.capture.training import LossFunction
from crossfade.compile.gradients import Gradients
from crossfade.compile.gradients import compile_gradients as compile_plainly
from crossfade.errors import CrossfadeError

_ONE_RANK_A_DEVICE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def compile_gradients(
    accelerator: Accelerator, model: nn.Module, loss_fn: LossFunction | None = None, **options: Any
) -> Gradients:
    """`crossfade.compile_gradients` on an accelerator's ranks, device and precision, for batches of its loaders.

    The model is prepared here (moved, run in the accelerator's mixed precision, saved by `accelerator.save_state`), but
    not wrapped: evaluate it as it is. Inside `accelerator.accumulate`, gradients are exchanged where it steps.
    Options are those of `crossfade.compile_gradients`.
    """
    check_kind(accelerator)
    prepared = prepared_without_wrapping(accelerator, model)
    ranks = accelerator.num_processes
    mesh = {"dp": ranks} if ranks > 1 else None
    gradients = compile_plainly(prepared, loss_fn, mesh, **{"batch": "local", **options})
    if options.get("data_parallel", "replicate") == "replicate":
        gradients.exchange_when(lambda: accelerator.sync_gradients)
    return gradients


def prepared_without_wrapping(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """A model on the accelerator's device, in its precision and among what it saves, as Accelerate's own for one
    process; another `prepare` leaves it as it is."""
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    prepared._is_accelerate_prepared = True  # type: ignore[assignment]
    return prepared


def check_kind(accelerator: Accelerator) -> None:
    """Refuse accelerators that split models by other means."""
    kind = accelerator.distributed_type
    if kind not in _ONE_RANK_A_DEVICE:
        raise CrossfadeError(
            f"an Accelerator for {kind.value}",
            expected="plain ranks, one a device",
            remedy="leave DeepSpeed, FSDP and Megatron plugins out, and pass data_parallel= here instead",
        )
