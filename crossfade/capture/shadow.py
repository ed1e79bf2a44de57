"""A stand-in for the user's optimizer: its own code and options, over tensors that are not the user's."""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import inspect
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from crossfade.capture.numbers import Number, is_plain_number, own_attributes
from crossfade.capture.python_draws import refuse_draws
from crossfade.errors import OptimizerError
from crossfade.graph.private import tree_flatten

_ABSENT = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Recorder(dict):
    """A parameter's state that remembers what each entry was when it was first put there.

    >>> state = Recorder()
    >>> state["sum"] = torch.zeros(2)
    >>> _ = state["sum"].add_(1)
    >>> state.first
    {'sum': tensor([0., 0.])}
    """

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(entries or {})

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dict's, remembering what is put there."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        """As a dict's, remembering what is put there."""
        for key, value in dict(*others, **entries).items():
            self[key] = value


class States(dict):
    """An optimizer's `state`: a `Recorder` for each parameter that it looks up or sets."""

    def __missing__(self, key: Any) -> Recorder:
        self[key] = Recorder()
        return self[key]  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value if isinstance(value, Recorder) else Recorder(value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As a dict's."""
        if key not in self:
            self[key] = default or {}
        return self[key]


def shadow_of(optimizer: Optimizer) -> Optimizer:
    """A stand-in without parameters and state; what its step does to plain attributes stays its own."""
    shadow: Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "step"):
            vars(shadow)[key] = copy.deepcopy(value) if _is_plain(value) else value
    shadow.state, shadow.param_groups = States(), []  # type: ignore[assignment]
    return shadow


def _is_plain(value: Any) -> bool:
    leaves, _ = tree_flatten(value)
    return all(isinstance(leaf, _PLAIN) for leaf in leaves)


def give_groups(
    shadow: Optimizer, optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]], *, capturable: bool = False
) -> None:
    """Give a stand-in the optimizer's groups over other parameters, for each group a list of them.

    One update a parameter is what is captured: `foreach` and `fused` compute the same numbers. `capturable` code
    computes on tensors what other code asks about in Python.
    """
    shadow.param_groups.clear()
    for group, chosen in zip(optimizer.param_groups, parameters, strict=True):
        changed: dict[str, Any] = {"params": list(chosen)}
        changed |= {key: False for key in ("foreach", "fused") if key in group}
        if "capturable" in group:
            changed["capturable"] = capturable or (group["capturable"] and _on_accelerator(group))
        shadow.param_groups.append({**group, **changed})


def _on_accelerator(group: Mapping[str, Any]) -> bool:
    return any(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])


def put_number(shadow: Optimizer, number: Number, value: Any, state: dict[str, Any]) -> None:
    """Put a value in a stand-in where the optimizer has a number."""
    kind, where, key = number.place
    if kind == "state":
        state[key] = value
    elif kind == "attribute":
        vars(shadow)[key] = value
    else:
        group, (name, element) = shadow.param_groups[where], key
        if element is None:
            group[name] = value
        else:
            group[name] = type(group[name])(value if i == element else v for i, v in enumerate(group[name]))


def take_step(shadow: Optimizer) -> None:
    """Run the optimizer's own step, of its class: schedulers put another into the instance.

    What its module's code calls on symbolic numbers that Python would ask for their values (`min`, `max`, `math.sqrt`)
    becomes a value of the graph.
    """
    steps = [inspect.unwrap(vars(kind)["step"]) for kind in type(shadow).__mro__ if "step" in vars(kind)]
    namespaces = {id(step.__globals__): step.__globals__ for step in steps}
    with torch.no_grad(), refuse_draws(f"the step of {type(shadow).__name__}"), contextlib.ExitStack() as stack:
        for namespace in namespaces.values():
            stack.enter_context(_symbolic_functions(namespace))
        type(shadow).step(shadow)


@contextlib.contextmanager
def _symbolic_functions(namespace: dict[str, Any]) -> Iterator[None]:
    own = {"min": functools.partial(_extreme, "min"), "max": functools.partial(_extreme, "max")}
    added = {name: function for name, function in own.items() if name not in namespace}
    replaced: dict[str, Any] = {name: _SYMBOLIC_MATH for name, value in namespace.items() if value is math}
    for function, symbolic in _OF_MATH.items():
        replaced |= {name: symbolic for name, value in namespace.items() if value is getattr(math, function)}
    before = {name: namespace[name] for name in replaced}
    namespace.update({**added, **replaced})
    try:
        yield
    finally:
        namespace.update(before)
        for name in added:
            del namespace[name]


def is_any_number(value: Any) -> bool:
    """Whether a value is a number, symbolic or not, and no bool."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)


def _sqrt(value: Any) -> Any:
    return value**0.5 if _is_symbolic(value) else math.sqrt(value)


def _exp(value: Any) -> Any:
    return math.e**value if _is_symbolic(value) else math.exp(value)


def _pow(base: Any, exponent: Any) -> Any:
    return base**exponent if _is_symbolic(base) or _is_symbolic(exponent) else math.pow(base, exponent)


_OF_MATH = {"sqrt": _sqrt, "exp": _exp, "pow": _pow}
_SYMBOLIC_MATH = types.SimpleNamespace(**{**vars(math), **_OF_MATH})


def _extreme(name: str, *values: Any, **options: Any) -> Any:
    single = [value for value in values if isinstance(value, Tensor) and value.numel() == 1]
    if not (single or any(_is_symbolic(value) for value in values)) or len(values) < 2 or options:
        return getattr(builtins, name)(*values, **options)
    numbers = [value for value in values if not isinstance(value, Tensor)]
    if len(single) + len(numbers) < len(values):  # of many elements: Python would ask which is larger
        return getattr(builtins, name)(*values, **options)
    of_tensors, of_numbers = (torch.minimum, torch.sym_min) if name == "min" else (torch.maximum, torch.sym_max)
    if not single:
        return functools.reduce(of_numbers, numbers)
    tensor = functools.reduce(of_tensors, single)
    if not numbers:
        return tensor
    number = functools.reduce(of_numbers, numbers)
    return tensor.clamp(max=number) if name == "min" else tensor.clamp(min=number)


def check_shadowed(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose code cannot run on a stand-in: what it keeps elsewhere would be the user's own."""
    signature = inspect.signature(type(optimizer).step)
    closure = signature.parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{type(optimizer).__name__} calls the loss from within its step",
            expected="an optimizer whose step() takes no closure",
            remedy="use another optimizer; the compiled step computes the loss once",
        )
    for key, value in own_attributes(optimizer).items():
        leaves, _ = tree_flatten(value)
        if any(isinstance(leaf, Optimizer) for leaf in leaves):
            raise OptimizerError(
                f"{type(optimizer).__name__} wraps another optimizer, in its attribute {key}",
                remedy="pass the optimizer that it wraps, or write its update as an optimizer of its own",
            )
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps tensors in its attribute {key}",
                expected="tensors in optimizer.state[parameter], where they are saved too",
                remedy="keep them there",
            )


def check_unchanged(shadow: Optimizer, optimizer: Optimizer, numbers: Mapping[str, Number]) -> set[str]:
    """What a step has changed that is no input: the names of numbers, to be made inputs. Refuses anything else."""
    changing: set[str] = set()
    for index, (after, before) in enumerate(zip(shadow.param_groups, optimizer.param_groups, strict=True)):
        for key in {**after, **before}:
            if key in ("params", "foreach", "fused", "capturable"):
                continue
            changing |= _changed(f"{key}.{index}", after.get(key), before.get(key), numbers, optimizer)
    was = own_attributes(optimizer)
    for key, value in own_attributes(shadow).items():
        changing |= _changed(f"optimizer.{key}", value, was.get(key, _ABSENT), numbers, optimizer)
    if strangers := [key for key in shadow.state if not isinstance(key, Tensor)]:
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps state under {strangers[0]!r}",
            expected="state of parameters",
            remedy="keep it in optimizer.state[parameter], or as a number in optimizer.param_groups",
        )
    return changing


def _changed(name: str, after: Any, before: Any, numbers: Mapping[str, Number], optimizer: Optimizer) -> set[str]:
    is_input = name in numbers or any(known.startswith(f"{name.rsplit('.', 1)[0]}[") for known in numbers)
    if after is before or is_input or (_is_plain(after) and _is_plain(before) and after == before):
        return set()
    if (before is None or is_plain_number(before)) and is_any_number(after):
        return {name}
    if isinstance(before, Tensor) and after is before:
        return set()
    raise OptimizerError(
        f"the step of {type(optimizer).__name__} changes {name}",
        expected="a step that changes parameters, tensors and numbers in their state, and numbers in groups",
        remedy=f"keep {name} as a number, or as a tensor in optimizer.state[parameter]",
    )
