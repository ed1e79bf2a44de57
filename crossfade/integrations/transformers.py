"""Hugging Face's `Trainer`, with forward, backward and exchange as one graph. Everything else is the Trainer's own.

from crossfade.integrations.transformers import Trainer  # in place of transformers.Trainer

trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
trainer.gradients.report.show()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crossfade.compile.gradients import Gradients, compile_gradients
from crossfade.errors import CrossfadeError
from crossfade.integrations.accelerate import check_kind, prepared_without_wrapping


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` on Crossfade instead of DDP.

    Accumulation, clipping, schedulers, precision, evaluation, checkpoints and resuming are as the arguments say. The
    model is not wrapped.

    Args:
        crossfade: options of `crossfade.compile_gradients`, such as `{"machine": "calibrate"}`.
        args, kwargs: those of `transformers.Trainer`.
    """

    def __init__(self, *args: Any, crossfade: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = {"batch": "local", **(crossfade or {})}
        self._compiled: Gradients | None = None
        check_kind(self.accelerator)
        _check_arguments(self.args, self._options)

    @property
    def gradients(self) -> Gradients:
        """What trains: its report, program and pipeline."""
        if self._compiled is None:
            raise CrossfadeError("nothing trained yet", remedy="call trainer.train() first")
        return self._compiled

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """In training the loss of all ranks' batches, compiled; in evaluation as the Trainer computes it."""
        if return_outputs or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._compiled is None or self._compiled.model is not model:
            self._compiled = self._compile(model)
        return self._compiled(*self._arguments(inputs, num_items_in_batch))

    def _compile(self, model: nn.Module) -> Gradients:
        ranks = self.accelerator.num_processes
        loss_fn = _called_by_trainer(self._own_loss(model)) if self._has_own_loss else _picked
        gradients = compile_gradients(model, loss_fn, {"dp": ranks} if ranks > 1 else None, **self._options)
        gradients.exchange_when(lambda: self.accelerator.sync_gradients)
        return gradients

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
        own = (inputs.pop("labels", None), items) if self._has_own_loss else ()
        if self.model_accepts_loss_kwargs and items is not None:
            inputs["num_items_in_batch"] = items
        return inputs, *own

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        return prepared_without_wrapping(self.accelerator, model)


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
