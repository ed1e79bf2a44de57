"""Habits of training loops that a compiled step makes needless: each is taken as it is meant, or refused with what to
write instead."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from crossfade.errors import CrossfadeError, ModelError, OptimizerError
from crossfade.graph.private import module_inside_compiled
from crossfade.tracebacks import users_frames

log = logging.getLogger("crossfade")

_EACH_ITS_OWN = 'with batch="local" if each rank loads its own part of the batch'
_WRAPPERS = {
    "torch DistributedDataParallel": f"pass model.module, {_EACH_ITS_OWN}",
    "torch DataParallel": "pass model.module, and start a process for each device: crossfade launch, or torchrun",
    "torch FullyShardedDataParallel": 'leave FSDP out, and pass data_parallel="zero3" (SHARD_GRAD_OP is "zero2")',
    "torch FSDPModule": 'leave fully_shard out, and pass data_parallel="zero3" ("zero2" keeps what it gathers)',
    "deepspeed DeepSpeedEngine": 'leave deepspeed.initialize out, and pass data_parallel="zero1", "zero2" or "zero3"',
    "lightning _FabricModule": "pass the model that was given to fabric.setup: model.module",
}
"""Modules that exchange or split what the step does, by package and class, each with what to write instead."""
_OPTIMIZER_WRAPPERS = {
    "accelerate AcceleratedOptimizer": "pass optimizer.optimizer, or leave it out of accelerator.prepare",
    "torch ZeroRedundancyOptimizer": 'pass an optimizer of model.parameters(), and data_parallel="zero1"',
    "lightning LightningOptimizer": "pass optimizer.optimizer",
    "lightning _FabricOptimizer": "pass optimizer.optimizer",
}


def check_arguments(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Refuse what is not a plain model, a loss function and an optimizer, with what to pass instead."""
    check_model_and_loss(model, loss_fn)
    _check_optimizer(optimizer)


def check_model_and_loss(model: Any, loss_fn: Any) -> None:
    """Refuse what is not a plain model and a loss function."""
    _check_model(model)
    _check_loss(loss_fn)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"a {_kind(model)} as the model", expected="an nn.Module", remedy="pass the module itself")
    for path, module in model.named_modules():
        for name in _names(type(module)):
            if name in _WRAPPERS:
                where = f"{path} of the model" if path else "the model"
                raise ModelError(
                    f"{where} is wrapped in {name.split()[1]}",
                    expected="the plain model: the step exchanges gradients, and splits parameters, itself",
                    remedy=_WRAPPERS[name],
                )


def _check_loss(loss_fn: Any) -> None:
    if isinstance(loss_fn, Optimizer):
        raise CrossfadeError(
            "an optimizer as the loss function",
            expected="compile_step(model, loss_fn, optimizer, mesh)",
            remedy="pass the loss function second; None where the model returns its loss",
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise CrossfadeError(
            f"the class {loss_fn.__name__} as the loss function",
            expected="a function of the model's output and the rest of the batch",
            remedy=f"pass an object of it: {loss_fn.__name__}()",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CrossfadeError(
            f"a {_kind(loss_fn)} as the loss function",
            expected="a function of the model's output and the rest of the batch",
            remedy="pass one, e.g. torch.nn.functional.cross_entropy; None where the model returns its loss",
        )


def _check_optimizer(optimizer: Any) -> None:
    for name in _names(type(optimizer)):
        if name in _OPTIMIZER_WRAPPERS:
            raise OptimizerError(
                f"the optimizer is wrapped in {name.split()[1]}",
                expected="the plain optimizer, whose step is captured",
                remedy=_OPTIMIZER_WRAPPERS[name],
            )
    if isinstance(optimizer, Optimizer):
        return
    scheduled = isinstance(optimizer, LRScheduler) or "accelerate AcceleratedScheduler" in _names(type(optimizer))
    remedy = "pass the scheduler's optimizer, and call scheduler.step() after each step as before"
    raise OptimizerError(
        f"a {_kind(optimizer)} as the optimizer",
        expected="a torch.optim.Optimizer",
        remedy=remedy if scheduled else "pass e.g. torch.optim.AdamW(model.parameters())",
    )


def _kind(value: Any) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _names(kind: type) -> Iterable[str]:
    """A class and those it is made from, each as its package and name; none of these packages has to be imported.

    >>> list(_names(LRScheduler))
    ['torch LRScheduler', 'builtins object']
    """
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        yield f"{'lightning' if package.endswith(('lightning', 'lightning_fabric')) else package} {base.__name__}"


def inside_compiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given: the step is compiled as a whole, so that one is captured."""
    inside = module_inside_compiled(model)
    if inside is not model:
        log.info("the model comes from torch.compile: the module inside is captured, without the kernels made for it")
    return inside


def check_no_gradients(optimizer: Optimizer, names: dict[Tensor, str]) -> None:
    """Refuse gradients left by an earlier backward: torch would add to them, the step neither uses nor clears them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                raise OptimizerError(
                    f"parameter {names[parameter]} has a gradient left from an earlier backward",
                    expected="none: the step has its own, and would neither add to it nor clear it",
                    remedy="call optimizer.zero_grad(set_to_none=True) before compile_step",
                )


def already_stepped(loss: Tensor) -> Tensor:
    """The loss that a step returns: a plain tensor, except that its `backward()` says that there is nothing left to do.

    >>> import torch
    >>> loss = already_stepped(torch.tensor(0.5))
    >>> float(loss), type(loss).__name__, loss.requires_grad
    (0.5, 'Tensor', False)
    >>> loss.backward()
    Traceback (most recent call last):
    crossfade.errors.CrossfadeError: loss.backward() after a step that already ran it
    """
    vars(loss).update(_OF_A_LOSS)
    return loss


@users_frames
def _refuse_backward(*_: Any, **__: Any) -> None:
    raise CrossfadeError(
        "loss.backward() after a step that ran the backward and the optimizer already",
        remedy="leave out loss.backward(), optimizer.step() and optimizer.zero_grad(), and clip gradients by "
        "compile_step(..., clip_grad_norm=1.0); or keep them, with compile_gradients in place of compile_step",
    )


def _no_state() -> None:
    """Keeps `backward` out of files: a saved loss is a plain tensor, which `torch.load` reads without knowing us."""


_OF_A_LOSS = {"backward": _refuse_backward, "__getstate__": _no_state}
"""Set on the tensor, not in a class of its own: loggers and `f"{loss:.3f}"` ask for exactly a `torch.Tensor`."""
