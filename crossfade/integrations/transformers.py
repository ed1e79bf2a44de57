"""Hugging Face's `Trainer`, with forward, backward and exchange as one graph. Everything else is the Trainer's own.

from crossfade.integrations.transformers import Trainer  # in place of transformers.Trainer

trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
trainer.gradients.report.show()
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crossfade.capture.code_names import names_in
from crossfade.compile.gradients import Gradients, compile_gradients
from crossfade.errors import CrossfadeError
from crossfade.integrations.accelerate import check_kind, prepared_without_wrapping
from crossfade.integrations.pad_alike import padded_alike
from crossfade.integrations.unknown import Unknown


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` on Crossfade instead of DDP.

    Accumulation, clipping, schedulers, precision, evaluation, checkpoints and resuming are as the arguments say, and a
    subclass may have a `compute_loss` of its own. The model is not wrapped. Batches that a collator has padded to other
    lengths on other ranks are padded to the longest.

    Args:
        crossfade: options of `crossfade.compile_gradients`, such as `{"machine": "calibrate"}`.
        args, kwargs: those of `transformers.Trainer`.
    """

    def __init__(self, *args: Any, crossfade: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        users = frozenset(vars(self))
        super().__init__(*args, **kwargs)
        self._of_the_library = frozenset(vars(self)) - users
        self._options = {"batch": "local", **(crossfade or {})}
        self._compiled: Gradients | None = None
        self._trained: nn.Module | None = None
        self._exchanged = False
        self._plainly: Callable[..., Any] = self.compute_loss
        setattr(self, "compute_loss", self._loss_of)  # noqa: B010  whoever calls it, and whatever a subclass has there
        self.add_callback(_ExchangeCheck(self))
        check_kind(self.accelerator)
        _check_arguments(self.args, self._options)

    @property
    def gradients(self) -> Gradients:
        """What trains: its report, program and pipeline."""
        if self._compiled is None:
            raise CrossfadeError("nothing trained yet", remedy="call trainer.train() first")
        return self._compiled

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """In training the loss of all ranks' batches, compiled; in evaluation as the Trainer computes it."""
        if not model.training or not torch.is_grad_enabled():
            return self._plainly(model, inputs, *args, **kwargs)
        given = dict(zip(("return_outputs", "num_items_in_batch"), args, strict=False)) | kwargs
        if given.get("return_outputs"):
            raise CrossfadeError(
                "compute_loss(..., return_outputs=True) in training",
                expected="a call for the loss alone: outputs stay inside the compiled step",
                remedy="compute what you need of the outputs in a compute_loss of your own",
            )
        if self._compiled is None or self._trained is not model:
            self._compiled, self._trained = self._compile(model), model
        self._exchanged = True
        if isinstance(self._compiled.model, _OwnLoss):
            self._compiled.model.read_again()
        if self.accelerator.num_processes > 1:
            inputs = padded_alike(inputs, self._pad, left=getattr(self.processing_class, "padding_side", "") == "left")
        return self._compiled(*self._arguments(inputs, given.get("num_items_in_batch")))

    def _compile(self, model: nn.Module) -> Gradients:
        ranks = self.accelerator.num_processes
        mesh = {"dp": ranks} if ranks > 1 else None
        if self._is_overridden:
            gradients = compile_gradients(_OwnLoss(model, self), None, mesh, **self._options)
        else:
            loss_fn = _called_by_trainer(self._own_loss(model)) if self._has_own_loss else _picked
            gradients = compile_gradients(model, loss_fn, mesh, **self._options)
        gradients.exchange_when(lambda: self.accelerator.sync_gradients)
        return gradients

    @property
    def _is_overridden(self) -> bool:
        """Whether a subclass computes the loss in a way of its own."""
        return type(self).compute_loss is not transformers.Trainer.compute_loss

    @property
    def _pad(self) -> int:
        """The token that batches are padded with."""
        known = (
            getattr(source, "pad_token_id", None)
            for source in (self.processing_class, getattr(self.model, "config", None))
        )
        return next((token for token in known if isinstance(token, int)), 0)

    @property
    def _has_own_loss(self) -> bool:
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _own_loss(self, model: nn.Module) -> Callable[..., Tensor]:
        if self.compute_loss_func is not None:
            function: Callable[..., Tensor] = self.compute_loss_func
            return function
        inner = getattr(model, "get_base_model", lambda: model)()  # inside peft's
        shifts = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return functools.partial(self.label_smoother, shift_labels=shifts)

    def _arguments(self, inputs: dict[str, Any], items: Tensor | int | None) -> tuple[Any, ...]:
        """A batch as the compiled function takes it."""
        inputs = dict(inputs)
        if self._is_overridden:
            return inputs, items
        own = (inputs.pop("labels", None), items) if self._has_own_loss else ()
        if self.model_accepts_loss_kwargs and items is not None:
            inputs["num_items_in_batch"] = items
        return inputs, *own

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        return prepared_without_wrapping(self.accelerator, model)


class _OwnLoss(nn.Module):
    """A model whose output is the loss that a subclass's `compute_loss` computes with it.

    Guards see what that code reads of the subclass (`read`), which is brought up to date at every step, not the
    Trainer: much of that is another at every step, and refused.
    """

    def __init__(self, model: nn.Module, trainer: Trainer) -> None:
        super().__init__()
        self.model, self._trainer = model, weakref.ref(trainer)
        self.read: dict[str, Any] = {}
        self._names = _names_read_by(type(trainer))

    def forward(self, inputs: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """The loss of one rank's batch."""
        trainer = self._trainer()
        assert trainer is not None and self.read is not None
        with _standing_still(trainer):
            loss: Tensor = trainer._plainly(self.model, dict(inputs), num_items_in_batch=items)
            return loss

    def read_again(self) -> None:
        """Look up what the code reads; what is the same stays in its place."""
        trainer = self._trainer()
        library = trainer._of_the_library if trainer is not None else frozenset()
        now = {name: getattr(trainer, name) for name in self._names - library if hasattr(trainer, name)}
        now = {name: value for name, value in now.items() if not isinstance(value, types.MethodType | nn.Module)}
        if self.read.keys() != now.keys() or any(self.read[name] is not value for name, value in now.items()):
            self.read.clear()
            self.read.update(now)


def _names_read_by(kind: type) -> frozenset[str]:
    """The attributes that the code of a subclass of ours reads."""
    classes = kind.__mro__[: kind.__mro__.index(Trainer)]
    functions = (value for each in classes for value in vars(each).values() if isinstance(value, types.FunctionType))
    return frozenset(name for function in functions for name in names_in(function.__code__).attributes)


@contextlib.contextmanager
def _standing_still(trainer: Trainer) -> Iterator[None]:
    """A Trainer without what is another at every step, and without the library's factor for DDP, which averages."""
    attributes: dict[str, Any] = vars(trainer)  # type: ignore[assignment]
    moving = {name: attributes[name] for name in _MOVING if name in attributes}
    scaled = trainer.args.average_tokens_across_devices
    attributes.update({name: Unknown("compute_loss", f"the Trainer's {name}") for name in moving})
    trainer.args.average_tokens_across_devices = False
    try:
        yield
    finally:
        attributes.update(moving)
        trainer.args.average_tokens_across_devices = scaled


_MOVING = ("state", "control", "optimizer", "lr_scheduler")


class _ExchangeCheck(transformers.TrainerCallback):  # type: ignore[misc]
    """Refuses steps whose gradients nobody has exchanged: ranks would train models of their own."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Called by the Trainer when gradients are there."""
        trainer = self._trainer()
        if trainer is not None and not trainer._exchanged and trainer.accelerator.num_processes > 1:
            raise CrossfadeError(
                "gradients of a loss that did not come from compute_loss: ranks have not exchanged them",
                remedy="compute the loss in compute_loss, and call self.compute_loss from a training_step of your own",
            )
        if trainer is not None:
            trainer._exchanged = False


def _picked(output: Any) -> Tensor:
    """The loss that the model has computed."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def _called_by_trainer(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss function of the user's, called as the Trainer calls it."""

    def loss_fn(output: Any, labels: Tensor | None, items: Tensor | int | None) -> Tensor:
        return function(output, labels, num_items_in_batch=items)

    return loss_fn


def _check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    if args.n_gpu > 1:
        raise CrossfadeError(
            f"{args.n_gpu} GPUs in one process",
            expected="a process for each: the Trainer's DataParallel is not used",
            remedy="start with torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES to one GPU",
        )
    if args.torch_compile:
        raise CrossfadeError("torch_compile in the arguments", remedy="leave it out: the step is compiled by Crossfade")
    if options.get("data_parallel", "replicate") != "replicate":
        raise CrossfadeError(
            f"data_parallel={options['data_parallel']!r} in a Trainer",
            expected='"replicate": the Trainer saves and evaluates whole models',
            remedy="use compile_step or compile_gradients in a loop of your own for zero2 and zero3",
        )
