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

_FRAMEWORKS = frozenset({"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"})
"""Whose trainers hold loops, loggers and callbacks; what a model reads of them is for their integration to watch."""
_NOT_LOOKED_INTO = frozenset({"torch", "numpy", "functorch", *_FRAMEWORKS, *sys.stdlib_module_names})
_COMPUTED = frozenset(
    {"getattr", "vars", "__dict__", "eval", "exec", "globals", "locals", "attrgetter", "methodcaller"}
    | {"asdict", "astuple", "copy", "deepcopy", "replace", "fields", "__getattribute__"}
)
"""Ways to read attributes whose names stand nowhere in the code."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
"""Classes of the standard library that are nothing but what they hold."""


class CodeNames(NamedTuple):
    """What code reads by name; `computed` says that it may read attributes by names that it makes up."""

    globals: frozenset[str]
    attributes: frozenset[str]
    computed: bool


@lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> CodeNames:
    """What a function's code, and that of the functions inside it, reads. What it writes first is no part of it.

    >>> def forward(self, x):
    ...     self.last = x * self.scale * FACTOR
    ...     return self.louder(self.last, "loud")
    >>> names = names_in(forward.__code__)
    >>> sorted(names.globals), sorted(names.attributes), names.computed
    (['FACTOR'], ['loud', 'louder', 'scale'], False)
    """
    read_globally: set[str] = set()
    attributes: set[str] = set()
    for part in _with_parts(code):
        instructions = list(dis.get_instructions(part))
        read_globally |= {op.argval for op in instructions if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        attributes |= _attributes_read(instructions, straight=not part.co_exceptiontable)
        words = (op.argval for op in instructions if op.opcode in dis.hasconst and isinstance(op.argval, str))
        attributes |= {word for word in words if word.isidentifier()}
    computed = not _COMPUTED.isdisjoint(read_globally | attributes)
    return CodeNames(frozenset(read_globally), frozenset(attributes), computed)


def _attributes_read(instructions: list[dis.Instruction], *, straight: bool) -> set[str]:
    """The names of attributes that are read, unless the same was written to the same variable before, in any case.

    What is not `straight` may leave off anywhere for an exception's handler.
    """
    replaced = _variables_stored(instructions)
    conditional_until = -1
    written: set[tuple[str, str]] = set()
    read: set[str] = set()
    for before, op in zip([None, *instructions], instructions, strict=False):
        if op.opcode in (*dis.hasjrel, *dis.hasjabs):
            conditional_until = max(conditional_until, int(op.argval))
        if op.opcode not in dis.hasname or op.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        owner = _variable_loaded(before)
        if straight and op.opname == "STORE_ATTR" and owner not in replaced and op.offset >= conditional_until:
            written.add((owner, op.argval))
        elif not op.opname.startswith(("STORE_", "DELETE_")) and (owner, op.argval) not in written:
            read.add(op.argval)
    return read


def _variable_loaded(instruction: dis.Instruction | None) -> str:
    """The local variable that an instruction puts on the stack last; empty if it does something else."""
    if instruction is None or not instruction.opname.startswith("LOAD_FAST"):
        return ""
    return instruction.argval[-1] if isinstance(instruction.argval, tuple) else str(instruction.argval)


def _variables_stored(instructions: list[dis.Instruction]) -> set[str]:
    """Local variables that change their meaning on the way; the empty name, of none, among them."""
    given = [op.argval for op in instructions if "STORE_FAST" in op.opname or op.opname == "DELETE_FAST"]
    return {"", *(name for value in given for name in (value if isinstance(value, tuple) else (value,)))}


def _with_parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_parts(constant)


@lru_cache(maxsize=8192)
def _is_known(name: str) -> bool:
    return name.partition(".")[0] in _NOT_LOOKED_INTO or name.startswith("crossfade.integrations.")


def is_looked_into(definition: Any) -> bool:
    """Whether the insides of a class, function or Python module are the user's, or a library's that we know nothing of.

    >>> from torch import nn
    >>> is_looked_into(nn.Linear), is_looked_into(types), is_looked_into(is_looked_into)
    (False, False, True)
    """
    if isinstance(definition, types.FunctionType):  # a decorator's says `__module__` of what it is around
        name = definition.__globals__.get("__name__")
    else:
        is_module = isinstance(definition, types.ModuleType)
        name = definition.__name__ if is_module else getattr(definition, "__module__", None)
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


def names_of_getter(getter: Any) -> frozenset[str] | None:
    """The attributes that an `operator.attrgetter` or `methodcaller` reads; None for anything else.

    >>> names_of_getter(operator.attrgetter("config.scale")) == {"config", "scale"}
    True
    """
    if not isinstance(getter, operator.attrgetter | operator.methodcaller):
        return None
    given = getter.__reduce__()[1]
    return frozenset(part for name in given if isinstance(name, str) for part in name.split("."))
