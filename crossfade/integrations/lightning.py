"""PyTorch Lightning: a `Strategy` that trains with forward, backward and exchange as one graph.

from crossfade.integrations.lightning import CrossfadeStrategy

trainer = lightning.Trainer(devices=2, strategy=CrossfadeStrategy())
trainer.fit(module, loader)
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from crossfade.compile.gradients import Gradients, compile_gradients
from crossfade.errors import CaptureError, CrossfadeError
from crossfade.integrations.unknown import Unknown

_RETURNED = "returned: "


class CrossfadeStrategy(DDPStrategy):  # type: ignore[misc]
    """Crossfade instead of DDP; everything else is Lightning's, as its arguments say.

    `training_step` is captured once for each shape of batch: what it logs by `self.log` is logged at every step, and
    what it returns beside the loss reaches `on_train_batch_end`, but it may read neither `batch_idx` nor the trainer,
    nor update a metric.

    Args:
        crossfade: options of `crossfade.compile_gradients`, such as `{"machine": "calibrate"}`.
        kwargs: those of `lightning.pytorch.strategies.DDPStrategy` that are not DDP's own.
    """

    def __init__(self, crossfade: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"batch": "local", **(crossfade or {})}
        self._step: _TrainingStep | None = None
        self._gradients: Gradients | None = None
        self._accumulates = False

    @property
    def gradients(self) -> Gradients:
        """What trains: its report, program and pipeline."""
        if self._gradients is None:
            raise CrossfadeError("nothing trained yet", remedy="call trainer.fit first")
        return self._gradients

    def configure_ddp(self) -> None:
        """Leave the module as it is, with the first rank's values on all ranks, as DDP does."""
        module = self.lightning_module
        assert module is not None
        _check(module, self._options)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, 0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of one batch by the captured step, whose `backward()` Lightning calls."""
        module = self.lightning_module
        assert module is not None
        if self._step is None or self._gradients is None or self._step.module is not module:
            self._step = _TrainingStep(module)
            ranks = dist.get_world_size()
            self._gradients = compile_gradients(self._step, None, {"dp": ranks} if ranks > 1 else None, **self._options)
            self._gradients.exchange_when(lambda: not self._accumulates)
        batch, *_ = (*args, *kwargs.values())  # and its number, where training_step takes one
        with self.precision_plugin.train_step_context():
            loss = self._gradients(batch)
        self._step.log(self._gradients.outputs)
        return self._step.returned(loss, self._gradients.outputs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients wait for the next batch's: Lightning enters this for all but the last that it adds up."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def teardown(self) -> None:
        """Give back what training held."""
        if self._gradients is not None:
            self._gradients.close()
        super().teardown()


class _TrainingStep(nn.Module):
    """A module's training step as a model that returns its loss, and what it logs beside it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._log = _Log(module)

    def forward(self, *batch: Any, **named: Any) -> Any:
        """The loss and the tensors that were logged; for tracing. A batch that is a dict comes by name."""
        batch = (named,) if named else batch
        more: dict[str, Tensor] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            more.update(self._log.asked_for(name, value, args, kwargs))

        def log_dict(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            for name, value in values.items():
                log(name, value, *args, **kwargs)

        kept = _lengths_of_lists(self.module)
        with _traced(self.module, log, log_dict):
            index = (Unknown("training_step", "batch_idx"),) if _takes_index(self.module) else ()
            returned = self.module.training_step(*batch, *index)
        for name, length in _lengths_of_lists(self.module).items():
            if length != kept.get(name, length):
                raise CaptureError(
                    f"training_step appends to self.{name}, which a captured step would do once",
                    expected="a step that changes nothing but the module's parameters and buffers",
                    remedy=f"append to self.{name} in on_train_batch_end, from its outputs",
                )
        if returned is None:
            raise CaptureError(
                "training_step returned None", expected="a loss", remedy="leave such batches out of the loader"
            )
        if not isinstance(returned, dict):
            return returned, more
        beside = {name: value for name, value in returned.items() if name != "loss"}
        self._log.returned = {name: value for name, value in beside.items() if not isinstance(value, Tensor)}
        tensors = {name: value.detach() for name, value in beside.items() if isinstance(value, Tensor)}
        return returned["loss"], more | {f"{_RETURNED}{name}": value for name, value in tensors.items()}

    def watched(self) -> Any:
        """What guards look at beside the names in the user's code: `hparams` is a property of Lightning's."""
        return self.module._hparams

    def log(self, values: dict[str, Tensor]) -> None:
        """Log what the last step computed, as its code asked for."""
        self._log.write(values)

    def returned(self, loss: Tensor, values: dict[str, Tensor]) -> Any:
        """What `training_step` returned, with the last step's numbers: the loss, or a dict with more."""
        tensors = {name.removeprefix(_RETURNED): value for name, value in values.items() if name.startswith(_RETURNED)}
        return {"loss": loss, **self._log.returned, **tensors} if tensors or self._log.returned else loss


class _Log:
    """What a training step has asked to be logged, and how: kept beside the module, which tracing leaves as it was."""

    def __init__(self, module: LightningModule) -> None:
        self._module = weakref.ref(module)
        self._asked: dict[str, tuple[float | None, dict[str, Any]]] = {}
        self.returned: dict[str, Any] = {}
        """What the step returned beside tensors."""

    def asked_for(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Remember a call of `self.log`; what of it is computed at every step."""
        if not isinstance(value, Tensor | int | float):
            raise CaptureError(
                f"self.log({name!r}, ...) of a {type(value).__name__} in training_step",
                expected="tensors and numbers",
                remedy="log metrics in on_train_batch_end, from what training_step returns beside the loss",
            )
        named = [n for n in inspect.signature(LightningModule.log).parameters if n not in ("self", "name", "value")]
        how = dict(zip(named, args, strict=False)) | kwargs
        self._asked[name] = None if isinstance(value, Tensor) else value, how
        return {name: value.detach()} if isinstance(value, Tensor) else {}

    def write(self, values: dict[str, Tensor]) -> None:
        """Log the values of one step."""
        module = self._module()
        assert module is not None
        for name, (number, how) in self._asked.items():
            if name in values or number is not None:
                module.log(name, values.get(name, number), **how)


@contextlib.contextmanager
def _traced(module: LightningModule, log: Any, log_dict: Any) -> Iterator[None]:
    """A module that logs elsewhere, and does not know its trainer."""
    trainer, metrics = module._trainer, _metrics_of(module)
    before = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        vars(metric).update(forward=_no_metric, update=_no_metric)
    vars(module).update(log=log, log_dict=log_dict, _trainer=Unknown("training_step", "the trainer"))
    try:
        yield
    finally:
        del vars(module)["log"], vars(module)["log_dict"]
        module._trainer = trainer
        for metric, attributes in zip(metrics, before, strict=True):
            vars(metric).clear()
            vars(metric).update(attributes)


def _metrics_of(module: LightningModule) -> list[nn.Module]:
    """The metrics of the torchmetrics library that a module has."""
    return [
        each
        for each in module.modules()
        if any(kind.__module__ == "torchmetrics.metric" for kind in type(each).__mro__)
    ]


def _no_metric(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "training_step updates a metric, whose state is not the model's",
        expected="a step that depends on its batch and the module",
        remedy='return what the metric needs, {"loss": loss, "preds": preds}, and update it in on_train_batch_end',
    )


def _lengths_of_lists(module: LightningModule) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}


def _takes_index(module: LightningModule) -> bool:
    """Whether Lightning passes the number of a batch too: by any name, as the second argument."""
    parameters = inspect.signature(module.training_step).parameters
    return "batch_idx" in parameters or len(parameters) > 1


def _check(module: LightningModule, options: dict[str, Any]) -> None:
    if not module.automatic_optimization:
        raise CrossfadeError(
            "a module with automatic_optimization=False",
            expected="one whose backward and optimizer Lightning calls",
            remedy="call cf.compile_gradients in training_step yourself, with the strategy ddp left out",
        )
    if options.get("data_parallel", "replicate") != "replicate":
        raise CrossfadeError(
            f"data_parallel={options['data_parallel']!r} in Lightning",
            expected='"replicate": Lightning saves and evaluates whole modules',
            remedy="use compile_step or compile_gradients in a loop of your own for zero2 and zero3",
        )
