"""The names that a piece of code may read: of globals, and of attributes of whatever it is given."""

from __future__ import annotations

import argparse
import dis
import operator
import sys
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

_NOT_LOOKED_INTO = frozenset({"torch", "numpy", "functorch", *sys.stdlib_module_names})
_COMPUTED = frozenset(
    {"getattr", "vars", "__dict__", "eval", "exec", "globals", "locals", "attrgetter", "methodcaller"}
    | {"asdict", "astuple", "copy", "deepcopy", "replace", "fields", "__getattribute__"}
)
"""Ways to read attributes whose names stand nowhere in the code."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
"""Classes of the standard library that are nothing but what they hold."""


class Names(NamedTuple):
    """What code reads by name; `computed` says that it may read attributes by names that it makes up."""

    globals: frozenset[str]
    attributes: frozenset[str]
    computed: bool


@lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> Names:
    """What a function's code, and that of the functions inside it, reads. What it only writes is no part of it.

    >>> def forward(self, x):
    ...     self.last = x * self.scale * FACTOR
    ...     return self.last_one("loud")
    >>> names = names_in(forward.__code__)
    >>> sorted(names.globals), sorted(names.attributes), names.computed
    (['FACTOR'], ['last_one', 'loud', 'scale'], False)
    """
    read_globally: set[str] = set()
    attributes: set[str] = set()
    for instruction in (one for part in _with_parts(code) for one in dis.get_instructions(part)):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read_globally.add(instruction.argval)
        elif instruction.opcode in dis.hasname and not instruction.opname.startswith(("STORE_", "DELETE_")):
            attributes.add(instruction.argval)
        elif isinstance(instruction.argval, str) and instruction.opcode in dis.hasconst:
            attributes |= {instruction.argval} if instruction.argval.isidentifier() else set()
    computed = not _COMPUTED.isdisjoint(read_globally | attributes)
    return Names(frozenset(read_globally), frozenset(attributes), computed)


def _with_parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_parts(constant)


@lru_cache(maxsize=8192)
def _is_known(name: str) -> bool:
    return name.partition(".")[0] in _NOT_LOOKED_INTO


def is_looked_into(thing: Any) -> bool:
    """Whether the insides of a class, function or Python module are the user's, or a library's that we know nothing of.

    >>> from torch import nn
    >>> is_looked_into(nn.Linear), is_looked_into(types), is_looked_into(is_looked_into)
    (False, False, True)
    """
    if isinstance(thing, types.FunctionType):  # a decorator's says `__module__` of what it is around
        name = thing.__globals__.get("__name__")
    else:
        name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and not _is_known(name)


def is_open(kind: type) -> bool:
    """Whether attributes of a class's objects may be read by other names than their own, or all of them at once.

    >>> is_open(types.SimpleNamespace), is_open(int)
    (True, False)
    """
    if issubclass(kind, _OPEN):
        return True
    readers = (base for base in kind.__mro__ if "__getattr__" in vars(base) or "__getattribute__" in vars(base))
    return any(is_looked_into(base) for base in readers)


def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class's objects keep outside of a dict."""
    return tuple(
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType) and is_looked_into(base)
    )


def names_of_getter(thing: Any) -> frozenset[str] | None:
    """The attributes that an `operator.attrgetter` or `methodcaller` reads; None for anything else.

    >>> names_of_getter(operator.attrgetter("config.scale")) == {"config", "scale"}
    True
    """
    if not isinstance(thing, operator.attrgetter | operator.methodcaller):
        return None
    given = thing.__reduce__()[1]
    return frozenset(part for name in given if isinstance(name, str) for part in name.split("."))
