"""Hugging Face's `Trainer`, with forward, backward and exchange as one graph. Everything else is the Trainer's own.

from crossfade.integrations.transformers import Trainer  # in place of transformers.Trainer

trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
trainer.gradients.report.show()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn

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
        loss_fn = _PickedLoss() if not self._has_own_loss else _OwnLoss(self._own_loss(model))
        return compile_gradients(model, loss_fn, {"dp": ranks} if ranks > 1 else None, **self._options)

    @property
    def _has_own_loss(self) -> bool:
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _own_loss(self, model: nn.Module) -> Any:
        if self.compute_loss_func is not None:
            return self.compute_loss_func
        raise CrossfadeError(
            "label_smoothing_factor in the arguments",
            expected="a loss that the model or compute_loss_func computes",
            remedy="pass compute_loss_func with torch.nn.functional.cross_entropy(..., label_smoothing=...)",
        )

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


class _PickedLoss:
    """The loss that the model has computed."""

    def __call__(self, output: Any) -> Tensor:
        loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
        return loss


class _OwnLoss:
    """A loss function of the user's, called as the Trainer calls it."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, output: Any, labels: Tensor | None, items: Tensor | int | None) -> Tensor:
        loss: Tensor = self.function(output, labels, num_items_in_batch=items)
        return loss


def _check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    if args.torch_compile:
        raise CrossfadeError("torch_compile in the arguments", remedy="leave it out: the step is compiled by Crossfade")
    if options.get("data_parallel", "replicate") != "replicate":
        raise CrossfadeError(
            f"data_parallel={options['data_parallel']!r} in a Trainer",
            expected='"replicate": the Trainer saves and evaluates whole models',
            remedy="use compile_step or compile_gradients in a loop of your own for zero2 and zero3",
        )
