"""What a capture reads, in terms that mean the same in another process: values by value, code by its bytes.

The walk is that of the guards (`reading`), which tells objects apart by numbers of this process. Here each is described
instead; what cannot be described is named, and nothing may be concluded from the rest.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import logging
import pathlib
import re
import types
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from crossfade.capture.reading import Reading
from crossfade.capture.tokens import ObjectToken, Serials, plain_token

_OF_THEIR_CLASS = frozenset(
    {"_abc._abc_data", "_thread.lock", "_thread.RLock", "builtins.object", "_collections._tuplegetter"}
    | {"collections._tuplegetter"}
    | {"dataclasses._MISSING_TYPE", "dataclasses._HAS_DEFAULT_FACTORY_CLASS", "dataclasses._KW_ONLY_TYPE"}
    | {"logging.Logger", "logging.RootLogger", "logging.StreamHandler", "logging.NullHandler"}
    | {"torch.autograd.grad_mode.no_grad", "torch.autograd.grad_mode.enable_grad"}
    | {"torch._dynamo.eval_frame.DisableContext", "warnings.catch_warnings"}
)
"""Objects that say nothing to a forward but what their class says: locks, marks, loggers, gradient modes."""
_BY_NAME = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def portable_lines(model: nn.Module, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """A line for each value that a capture may read, and what cannot be described: with any such, lines are not enough.

    `given` has by name what the capture runs beside the model: a loss function, parts of an optimizer.

    >>> lines, unknown = portable_lines(nn.Dropout(0.25), {})
    >>> [line for line in lines if line.startswith("model.p ")], unknown
    (["model.p (<class 'float'>, '0.25')"], [])
    >>> portable_lines(nn.Identity(), {"loss_fn": torch.Generator()})[1]
    ['loss_fn, a Generator']
    """
    described = _Described(model.parameters())
    reading = _PortableReading([model], dict(given), described)
    unknown, lines = [], []
    for found, token in reading.tokens.items():
        path = _OF_GIVEN.sub(r"\1", found)
        line = f"{path} {'of this process' if path.endswith(_OF_THIS_PROCESS) else _canonical(token)}"
        lines.append(line)
        if _UNKNOWN in line or _ADDRESS.search(line):
            words = token.words if isinstance(token, ObjectToken) else str(token)
            unknown.append(f"{path}, {words}")
    return lines, unknown


_UNKNOWN = "<not described>"
_OF_GIVEN = re.compile(r"^loss_fn\['(\w+)'\]")
_OF_THIS_PROCESS = ("._original_object_hash", "._torchdynamo_wrapper_id")
"""Numbers that are others in each process and mean nothing in a forward: the hash of a config's text, by which
transformers sees it change, and where the function lies in memory that torch.compile has wrapped."""


def _canonical(token: Any) -> str:
    """A token as text, sets in an order of their own: Python's differs between processes."""
    if isinstance(token, ObjectToken):
        return f"{token.words} {_canonical(tuple(token.facts))}"
    if isinstance(token, tuple) and token and token[0] is frozenset:
        return f"frozenset {sorted(map(_canonical, token[1:]))}"
    if isinstance(token, tuple):
        return f"({', '.join(map(_canonical, token))})"
    return repr(token)


class _Described(Serials):
    """Gives a description where others are given a number."""

    def __init__(self, parameters: Collection[torch.Tensor] | Any) -> None:
        super().__init__()
        self._own = {id(parameter) for parameter in parameters}

    def of(self, value: Any) -> Any:
        """What an object is, or that nobody knows."""
        if id(value) in self._own:
            return like(value)
        found = described(value)
        return _UNKNOWN if found is None else found


class _PortableReading(Reading):
    """The same walk; of tensors that are part of a program, the contents count and not where they lie."""

    def facts_of(self, tensor: torch.Tensor, contents: bytes | None, *, own: bool) -> tuple[Any, ...]:
        """What a tensor is; of one that is not the model's own, also what is in it."""
        return (like(tensor), contents) if own or contents is not None else (_UNKNOWN,)

    def _members(self, path: str, members: Collection[Any]) -> None:
        if isinstance(members, set | frozenset):
            members = sorted(members, key=lambda member: repr(plain_token(member) or described(member)))
        super()._members(path, members)


def like(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What a tensor is but for its numbers.

    >>> like(torch.ones(2, 3))
    ('Tensor', (2, 3), (3, 1), torch.float32, 'cpu', False)
    """
    where = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device), tensor.requires_grad
    return type(tensor).__name__, *where


def described(value: Any) -> Hashable | None:
    """Code by its bytes, definitions and objects of known classes by name; None for whatever else.

    >>> described(torch.relu), described(object())
    (('builtin_function_or_method', 'torch', '_VariableFunctionsClass.relu'), 'builtins.object')
    >>> described(torch.Generator()) is None
    True
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    match value:
        case types.CodeType():
            return digest_of_code(value)
        case types.ModuleType():
            return "module", value.__name__
        case type():
            return "class", value.__module__, value.__qualname__
        case types.FunctionType():
            return "function", value.__module__, value.__qualname__, digest_of_code(value.__code__)
        case pathlib.PurePath():
            return "path", type(value).__name__, str(value)
        case re.Pattern():
            return "pattern", value.pattern, value.flags
        case logging.Logger():
            return kind, value.name
        case contextvars.ContextVar():
            token = plain_token(value.get(None))
            return None if token is None else ("context", value.name, token)
        case _ if isinstance(value, _BY_NAME):
            return type(value).__name__, getattr(value, "__module__", None), value.__qualname__
        case torch.Tensor():
            return None
    return kind if kind in _OF_THEIR_CLASS else None


@functools.lru_cache(maxsize=16384)
def digest_of_code(code: types.CodeType) -> str:
    """A hash of what a piece of code does: of its instructions and of all that they name.

    >>> first, second = (eval(f"lambda x: x * {factor}") for factor in (2, 3))
    >>> digest_of_code(first.__code__) == digest_of_code(second.__code__)
    False
    """
    parts = (
        code.co_name,
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_exceptiontable,
        [_constant(value) for value in code.co_consts],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return digest_of_code(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"
