"""Tensors that a captured program holds as constants: they may be neither trained nor written."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crossfade.capture.tracing import users_line
from crossfade.errors import CaptureError
from crossfade.graph.operators import by_name
from crossfade.graph.private import TorchDispatchMode, schema_of

TAKEN_IN = (
    "let one module own the model and what has the tensor (the loss, a teacher), and return the loss from its forward: "
    "`self.model, self.loss = model, loss`, `return self.loss(self.model(x), y)`, and loss_fn=None"
)
"""How tensors that are not the model's become the model's."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def check_constants(constants: Mapping[str, Any], model: nn.Module, name_of: Callable[[Tensor], str]) -> None:
    """Refuse constants that eager training would change: the model's own parameters, read where it does not keep them,
    and others that require a gradient. `name_of` says where a tensor was found.

        >>> model = nn.Linear(2, 1)
        >>> check_constants({"c": model.weight}, model, lambda tensor: "loss_fn.weight")
        Traceback (most recent call last):
        crossfade.errors.CaptureError: parameter weight is read from loss_fn.weight...
    """
    own = {_memory(parameter): name for name, parameter in model.named_parameters() if type(parameter) in _PLAIN}
    for constant in constants.values():
        if not isinstance(constant, Tensor) or type(constant) not in _PLAIN:
            continue
        where = name_of(constant)
        if (name := own.get(_memory(constant))) is not None:
            raise CaptureError(
                f"parameter {name} is read from {where or 'a list, a closure or a view'}",
                expected="parameters read from the modules that own them, as it is these that are trained",
                remedy=f"read model.{name} in the forward or the loss, or pass what you need of it from the forward",
            )
        if constant.requires_grad:
            raise CaptureError(
                f"{where or f'a tensor of shape {tuple(constant.shape)}'} requires a gradient and is not the model's",
                expected="parameters that the optimizer trains, or tensors that stay as they are",
                remedy="make it a part of the model (loss_fn=None: the model returns the loss itself), or freeze it "
                "with requires_grad_(False)",
            )


def _memory(tensor: Tensor) -> Any:
    """What tensors over the same memory have in common."""
    return tensor.untyped_storage().data_ptr() or id(tensor) if tensor.layout is torch.strided else id(tensor)


class NoWrites(TorchDispatchMode):
    """Refuses to write to tensors that a forward finds in a plain attribute or a closure: the capture would do so too,
    and no checkpoint would have it. `name_of` says where a tensor was found."""

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        super().__init__()
        self._name_of = name_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if schema_of(func).is_mutable:
            given = by_name(func, args, kwargs or {})
            for argument in schema_of(func).arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    _check_written(func, given.get(argument.name), self._name_of)
        return func(*args, **(kwargs or {}))


def _check_written(func: Any, value: Any, name_of: Callable[[Tensor], str]) -> None:
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if type(tensor) in _PLAIN:
            where = name_of(tensor)
            of_model = "register it with register_buffer(name, tensor)"
            remedy = of_model if where.startswith("model.") else TAKEN_IN if where else f"{of_model}, or {TAKEN_IN}"
            raise CaptureError(
                f"{where}{', ' if where else ''}a tensor of shape {tuple(tensor.shape)}, neither parameter nor buffer "
                f"of the model, is changed in place by {func}{users_line(traceback.extract_stack())}",
                expected="state that the model keeps in buffers",
                remedy=f"{remedy}; or change it between steps",
            )
