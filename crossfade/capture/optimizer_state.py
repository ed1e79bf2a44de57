"""What an optimizer's own first step puts into its state: it must be there before it can be an input of a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from crossfade.capture.numbers import is_plain_number
from crossfade.capture.shadow import give_groups, shadow_of, take_step
from crossfade.errors import OptimizerError
from crossfade.graph.private import FakeTensor

ELEMENTWISE = frozenset({SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, NAdam, RAdam, Adamax, ASGD, Rprop})
"""Optimizers of torch that update each element by itself, from a state that is known before the first step; with
dampening, SGD is the exception to that."""


def _sgd_state(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    if not group["momentum"]:
        return {}
    return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}


def _adam_state(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in moments}
    return {"step": torch.tensor(0.0, dtype=torch.get_default_dtype()), **zeros}


_KNOWN: dict[type[Optimizer], Callable[[Mapping[str, Any], Tensor], dict[str, Any]]] = {
    SGD: _sgd_state,
    Adam: _adam_state,
    AdamW: _adam_state,
}
"""The same without a run, for the optimizers that most use."""


@dataclass(frozen=True)
class FirstState:
    """The state of one parameter before its first step."""

    entries: Mapping[str, Any]
    follows_parameter: bool = False
    """Whether it depends on the parameter's value."""
    from_gradient: bool = False
    """Whether it depends on the gradient, or the first step does not do what others do on it. `entries` are then zeros
    in the place of what that step leaves."""


def initial_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    stepped: Collection[str],
    parts: Mapping[str, Tensor] | None = None,
    values: Callable[[str], Tensor] | None = None,
) -> dict[str, dict[str, Any]]:
    """The state that the optimizer would create at its first step, for each of the parameters `stepped`.

    `parts` has tensors like those that the optimizer works on, for parameters of which a rank updates only a part;
    `values` gives the part itself, for optimizers whose state follows the parameter.
    """
    return {name: dict(first.entries) for name, first in first_states(optimizer, names, stepped, parts, values).items()}


def first_states(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    stepped: Collection[str],
    parts: Mapping[str, Tensor] | None = None,
    values: Callable[[str], Tensor] | None = None,
) -> dict[str, FirstState]:
    """As `initial_state`, with what it depends on. Parameters alike in shape and group are tried once."""
    found: dict[str, FirstState] = {}
    tried: dict[Any, FirstState] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            if name not in stepped:
                continue
            like = (parts or {}).get(name, parameter)
            if type(optimizer) in _KNOWN and not _is_dampened(optimizer, group):
                entries = _KNOWN[type(optimizer)](group, like)
                found[name] = FirstState(_placed(entries, group, like))
                continue
            key = index, like.shape, like.stride(), like.dtype, like.device
            first = tried.get(key) or _tried(optimizer, index, like)
            tried.setdefault(key, first)
            if first.follows_parameter:
                value = values(name) if values is not None and name in (parts or {}) else like
                first = FirstState(_run(optimizer, index, _real(value), None).first, follows_parameter=True)
            copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in first.entries.items()}
            entries = _placed(copies, group, like)
            found[name] = FirstState(entries, first.follows_parameter, first.from_gradient)
    return found


def lacking_state(optimizer: Optimizer, names: Mapping[Tensor, str], stepped: Collection[str]) -> list[str]:
    """The parameters whose state is not there yet, or may not have all entries, as after `amsgrad` was switched on."""
    known = type(optimizer) in _KNOWN
    return [
        names[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if names[parameter] in stepped and (known or not has_state(optimizer, parameter))
    ]


def has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether an optimizer has a state of a parameter already."""
    return any(value is not None for value in optimizer.state.get(parameter, {}).values())


def counters_in(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Tensor]) -> set[str]:
    """The entries of a parameter's state that are one floating-point number whatever the parameter's shape is."""
    single = {key for key, value in state.items() if not value.dim() and value.is_floating_point()}
    if parameter.dim() or not single:
        return single
    groups = enumerate(optimizer.param_groups)
    index = next(index for index, group in groups if any(parameter is member for member in group["params"]))
    first = _run(optimizer, index, torch.zeros(1, dtype=parameter.dtype, device=parameter.device), None).first
    return {key for key in single if isinstance(value := first.get(key), Tensor) and not value.dim()}


def _is_dampened(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return type(optimizer) is SGD and bool(group["momentum"]) and bool(group["dampening"])


def _placed(entries: dict[str, Any], group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Single numbers where `fused` and `capturable` code of torch keeps them: on the parameter's device."""
    if not (group.get("fused") or group.get("capturable")) or like.device.type == "cpu":
        return entries
    return {k: v.to(like.device) if isinstance(v, Tensor) and not v.dim() else v for k, v in entries.items()}


def _real(like: Tensor) -> Tensor:
    """The numbers of a tensor if it has any, else zeros in their place."""
    from torch.distributed.tensor import DTensor  # here, since importing it is slow

    if isinstance(like, DTensor):
        like = like.to_local()
    if isinstance(like, FakeTensor) or like.device.type == "meta":
        device = like.device if like.device.type != "meta" else torch.device("cpu")
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()
    return like.detach().clone()


@dataclass(frozen=True)
class _Ran:
    """A first step: the state as it was put there, and all that it left."""

    first: dict[str, Any]
    parameter: Tensor
    left: dict[str, Any]


def _tried(optimizer: Optimizer, index: int, like: Tensor) -> FirstState:
    """Find out what the state is by running the first step; of optimizers that torch does not bring, more than once."""
    value = _real(like)
    if type(optimizer) in ELEMENTWISE and not _is_dampened(optimizer, optimizer.param_groups[index]):
        return FirstState(_run(optimizer, index, torch.zeros_like(value), None).first)
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        some, other = _drawn(value), _drawn(value)
        gradient, other_gradient = _drawn(value), _drawn(value)

        def run(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any] | None = None) -> _Ran:
            torch.manual_seed(1)
            return _run(optimizer, index, parameter, gradient, state)

        ran = run(some, gradient)
        again = run(some, gradient, ran.first)
        same = _alike(ran.left, again.left) and _alike({"": ran.parameter}, {"": again.parameter})
        same = same and all(
            isinstance(ran.left[key], Tensor) == isinstance(ran.first[key], Tensor) for key in ran.first
        )
        if not same or not _alike(ran.first, run(some, other_gradient).first):
            zeros = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in ran.left.items()}
            return FirstState(zeros, from_gradient=True)
        return FirstState(ran.first, follows_parameter=not _alike(ran.first, run(other, gradient).first))


def _drawn(like: Tensor) -> Tensor:
    return torch.randn_like(like) if like.is_floating_point() or like.is_complex() else torch.zeros_like(like)


def _run(
    optimizer: Optimizer, index: int, value: Tensor, gradient: Tensor | None, state: Mapping[str, Any] | None = None
) -> _Ran:
    """One step of one parameter by itself, on copies."""

    shadow = shadow_of(optimizer)
    parameter = torch.nn.Parameter(value.detach().clone())
    parameter.grad = torch.zeros_like(value) if gradient is None else gradient.clone()
    groups = range(len(optimizer.param_groups))
    give_groups(shadow, optimizer, [[parameter] if other == index else [] for other in groups])
    if state is not None:
        shadow.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    take_step(shadow)
    entries: Any = shadow.state.get(parameter, {})
    first = dict(getattr(entries, "first", {}))
    _check_entries(optimizer, first)
    return _Ran(first, parameter.detach(), dict(entries))


def _check_entries(optimizer: Optimizer, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if not (value is None or isinstance(value, Tensor | bool | str) or is_plain_number(value)):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} in its state, under {key!r}",
                expected="tensors and numbers",
                remedy="keep each tensor under a key of its own",
            )


def _alike(entries: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    if entries.keys() != others.keys():
        return False
    for key, value in entries.items():
        other = others[key]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if type(value) is not type(other) or value != other:
                return False
        elif value.shape != other.shape or not torch.allclose(value, other, rtol=1e-5, atol=1e-8, equal_nan=True):
            return False
    return True
