"""What a capture of a model and a loss function may read: everything within reach of the code that it runs.

A walk begins with the modules and the loss function. It looks into modules, containers, functions and the user's own
objects, and follows the attributes and globals whose names the code within reach reads: what only a training loop reads
(counters, loggers, averages) is no part of it. Torch, numpy and the standard library are not looked into: their objects
count as changed when they are replaced.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any

import numpy as np
import torch
from torch import nn

from crossfade.capture.code_names import CodeNames, is_looked_into, is_open, names_in, names_of_getter, slots_of
from crossfade.capture.interest import Interest
from crossfade.capture.python_draws import is_generator
from crossfade.capture.tokens import ObjectToken, Serials, Token, digest, memory_of, plain_token
from crossfade.capture.watch import Watch, is_filled, state_of_constant
from crossfade.graph.private import global_module_hooks, has_hooks, own_buffers, own_modules, own_parameters

LOOKED_AT = 200_000
"""Values that one walk looks at; what lies beyond counts as changed when it is replaced."""
HASHED = 16 << 20
"""Bytes of tensors and arrays, in all, whose contents are compared."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_SET_WITH_OTHERS = _OF_EVERY_MODULE - _REGISTRIES - _HOOKS - {"training", "_is_full_backward_hook"}
"""What torch keeps with hooks and buffers that are watched, or for checkpoints."""
_NOT_RUN = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__"})
_CALLED = ("forward", "__call__", "_call_impl")
_CODE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, type)


@dataclass
class _Holder:
    """A mapping by name, and those of its values that matter."""

    mapping: Mapping[str, Any]
    sized: bool
    names: list[str] = field(default_factory=list)


class Reading:
    """What was found: a token for each value by its path, and a watch over all of them.

    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) * self.config["scale"]
    >>> model = Scaled(2, 1)
    >>> model.config, model.epoch = {"scale": 2.0}, 1
    >>> tokens = Reading([model], None, Serials()).tokens
    >>> tokens["model.config['scale']"], "model.epoch" in tokens
    ((<class 'float'>, '2.0'), False)
    """

    def __init__(self, models: Collection[nn.Module], loss_fn: Any, serials: Serials) -> None:
        self.tokens: dict[str, Token] = {}
        self.watch = Watch()
        self.if_replaced: Counter[str] = Counter()
        """Kinds of objects that are seen to change only when they are replaced, and how many there are."""
        self.generators: dict[str, Any] = {}
        """Random generators of Python's and numpy's, by path."""
        self.iterators: dict[str, Iterator[Any]] = {}
        self._serials = serials
        models = _outermost(models)
        own = {id(module): module for model in models for module in model.modules()}
        self._own_modules = own.keys()
        self._own_tensors = {
            id(tensor)
            for module in own.values()
            for registry in (own_parameters(module), own_buffers(module))
            for tensor in registry.values()
        }
        self._interest = Interest()
        self._met: dict[int, tuple[str, Any]] = {}
        self._holders: list[_Holder] = []
        self._globals: dict[int, _Holder] = {}
        self._todo: deque[tuple[str, Any]] = deque((f"model{place or ''}", model) for place, model in enumerate(models))
        self._hashed = 0
        self._named("torch.nn", global_module_hooks())
        self._walk()
        self._value("loss_fn", loss_fn)
        self._walk()
        self._watch_holders()
        self.watch.take()

    def path_of(self, value: Any) -> str:
        """Where something was found; empty if it was not."""
        return self._met[id(value)][0] if id(value) in self._met else ""

    def is_told_of(self, path: str) -> bool:
        """Whether something stands in a plain attribute of a module, which `as_it_was` looks after."""
        owner, _, name = path.rpartition(".")
        modules = {place: value for place, value in self._met.values() if isinstance(value, nn.Module)}
        return owner in modules and name in vars(modules[owner])

    def _walk(self) -> None:
        while self._todo:
            path, value = self._todo.popleft()
            if id(value) in self._met:
                self._met_again(path, self._met[id(value)][0])
                continue
            self._met[id(value)] = path, value
            if len(self.tokens) > LOOKED_AT:
                self._replaced(path, value)
            else:
                self._look(path, value)

    def _met_again(self, path: str, first: str) -> None:
        if path != first:
            self._set(path, ObjectToken(f"the same as {first}", (first,)))

    def _watch_holders(self) -> None:
        for holder in (*self._holders, *self._globals.values()):
            self.watch.chosen(holder.mapping, holder.names, sized=holder.sized)

    def _set(self, path: str, token: Token) -> None:
        self.tokens[intern(path)] = token

    def _value(self, path: str, value: Any) -> None:
        token = plain_token(value)
        if token is not None:
            self._set(path, token)
        else:
            self._todo.append((path, value))

    def _look(self, path: str, value: Any) -> None:
        match value:
            case nn.Module():
                self._module(path, value)
            case torch.Tensor():
                self._tensor(path, value)
            case np.ndarray():
                self._array(path, value)
            case dict() | types.MappingProxyType():
                self._mapping(path, value)
            case list() | tuple() | set() | frozenset() | deque():
                self._members(path, value)
            case type():
                self._class(path, value)
            case types.ModuleType():
                self._python_module(path, value)
            case _ if (parts := _parts_of(value)) is not None:
                self._set(path, ObjectToken(f"a {type(value).__name__}", tuple(parts)))
                self._named(path, parts)
            case types.FunctionType():
                self._function(path, value)
            case _:
                self._object(path, value)

    def _replaced(self, path: str, value: Any) -> None:
        """Something that is not looked into."""
        if is_generator(value):
            self.generators[path] = value
        elif isinstance(value, Iterator):
            self.iterators[path] = value
        self._set(path, ObjectToken(_words(value), (self._serials.of(value),)))
        if not isinstance(value, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
            self.if_replaced[type(value).__qualname__] += 1

    def _module(self, path: str, module: nn.Module) -> None:
        kind, children = type(module), own_modules(module)
        self._set(path, ObjectToken(f"a {kind.__name__}", (self._serials.of(kind), *children.keys())))
        self._class_of(module)
        everything = not is_looked_into(kind)
        holder = self._hold(vars(module))
        for name, value in vars(module).items():
            if name in _REGISTRIES:
                holder.names.append(name)
            elif name in _HOOKS and not value:
                self.watch.no_hooks(value)
            elif name not in _SET_WITH_OTHERS:
                self._attribute(holder, path, name, value, everything or name in _OF_EVERY_MODULE)
        self._tensors_of(path, module)
        self.watch.mapping(children)
        self._named(path, children)

    def _tensors_of(self, path: str, module: nn.Module) -> None:
        own = id(module) in self._own_modules
        for registry, look in ((own_parameters(module), self._parameter), (own_buffers(module), self._buffer)):
            self.watch.mapping(registry)
            for name, tensor in registry.items():
                if own and tensor is not None:
                    look(f"{path}.{name}", tensor)
                else:
                    self._value(f"{path}.{name}", tensor)

    def _parameter(self, path: str, parameter: torch.Tensor) -> None:
        facts = parameter.requires_grad, parameter.dtype, has_hooks(parameter)
        self._set(path, ObjectToken(_of_parameter(parameter), (self._serials.of(parameter), *facts)))
        self.watch.parameter(parameter)

    def _buffer(self, path: str, buffer: torch.Tensor) -> None:
        self._set(path, ObjectToken(_of_tensor(buffer), (buffer.shape, buffer.dtype)))
        self.watch.buffer(buffer)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Of the model's own, the values are inputs of the program; of any other a part of it."""
        own, contents = id(tensor) in self._own_tensors, None
        if not own:
            contents = self._contents(memory_of(tensor), f"tensors on {tensor.device.type}")
            self.watch.constant(tensor)
        self._set(path, ObjectToken(_of_tensor(tensor), self.facts_of(tensor, contents, own=own)))

    def facts_of(self, tensor: torch.Tensor, contents: bytes | None, *, own: bool) -> tuple[Any, ...]:
        """What a tensor is known by, the model's own or another."""
        return (self._serials.of(tensor), *(() if own else (*state_of_constant(tensor), contents)))

    def _array(self, path: str, array: np.ndarray) -> None:
        contents = self._contents(memory_of(array), "arrays")
        facts = (array.shape, array.dtype, contents) if contents is not None else (self._serials.of(array),)
        self._set(path, ObjectToken(f"an array of shape {array.shape}", facts))

    def _contents(self, memory: np.ndarray | None, kind: str) -> bytes | None:
        if memory is None or self._hashed + memory.nbytes > HASHED:
            self.if_replaced[f"numbers of {kind} written past torch"] += 1
            return None
        self._hashed += memory.nbytes
        self.watch.memory(memory, f"larger {kind}")
        return digest(memory)

    def _mapping(self, path: str, mapping: Mapping[Any, Any]) -> None:
        keys = [plain_token(key) or self._serials.of(key) for key in mapping]
        self._set(path, ObjectToken(_words(mapping), (type(mapping), *keys)))
        self.watch.mapping(mapping)
        for key, value in mapping.items():
            self._value(f"{path}[{key!r}]" if plain_token(key) else f"{path}[a {type(key).__name__}]", value)
        self._beside(path, mapping)

    def _members(self, path: str, members: Collection[Any]) -> None:
        self._set(path, ObjectToken(_words(members), (type(members), len(members))))
        if not isinstance(members, tuple | frozenset):
            self.watch.members(members)
        for index, member in enumerate(members):
            self._value(f"{path}[{index}]", member)
        self._beside(path, members)

    def _beside(self, path: str, container: Any) -> None:
        """What a container of the user's own class holds beside its members."""
        if is_looked_into(type(container)):
            self._attributes(path, container)

    def _function(self, path: str, function: types.FunctionType) -> None:
        """Torch's own functions are not looked into, but a decorator of torch's may hold one of the user's."""
        code = function.__code__
        self._set(path, ObjectToken(_words(function), (self._serials.of(code),)))
        self.watch.function(function)
        self.watch.mapping(function.__dict__)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self._named(path, {name: cell.cell_contents for name, cell in cells if is_filled(cell)})
        self._named(path, function.__dict__)
        self._named(path, {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__})
        if is_looked_into(function):
            names = names_in(code)
            self._interest.mention(names)
            self._read_globals(function.__globals__, names.globals)

    def _read_globals(self, mapping: Mapping[str, Any], names: Iterable[str]) -> None:
        holder = self._globals.setdefault(id(mapping), _Holder(mapping, sized=False))
        for name in sorted(names):
            if name in mapping and name not in holder.names:
                holder.names.append(name)
                self._value(f"{mapping.get('__name__')}.{name}", mapping[name])

    def _python_module(self, path: str, module: types.ModuleType) -> None:
        if not is_looked_into(module):
            return self._replaced(path, module)
        self._set(path, ObjectToken(f"the module {module.__name__}", (self._serials.of(module),)))
        holder = self._globals.setdefault(id(vars(module)), _Holder(vars(module), sized=False))
        for name in vars(module):
            read = functools.partial(self._read_globals, holder.mapping, (name,))
            self._interest.when(name, read, code=True)
        return None

    def _object(self, path: str, instance: Any) -> None:
        kind = type(instance)
        if (names := names_of_getter(instance)) is not None:
            self._interest.mention(CodeNames(frozenset(), names, computed=False))
        if not is_looked_into(kind) and not is_open(kind):
            return self._replaced(path, instance)
        self._set(path, ObjectToken(f"a {kind.__qualname__}", (self._serials.of(kind),)))
        self._attributes(path, instance)
        return None

    def _attributes(self, path: str, instance: Any) -> None:
        self._class_of(instance)
        kind, mapping = type(instance), getattr(instance, "__dict__", None)
        if isinstance(mapping, dict):
            holder = self._hold(mapping)
            for name, value in mapping.items():
                self._attribute(holder, path, name, value, is_open(kind))
        if slots := slots_of(kind):
            self.watch.slots(instance, slots)
            self._named(path, {name: getattr(instance, name) for name in slots if hasattr(instance, name)})

    def _class_of(self, instance: Any) -> None:
        kind = type(instance)
        self.watch.types_of(instance)
        self._value(f"{kind.__module__}.{kind.__qualname__}", kind)

    def _class(self, path: str, kind: type) -> None:
        self._set(path, ObjectToken(f"class {kind.__qualname__}", (self._serials.of(kind),)))
        for base in kind.__bases__:
            self._value(f"{base.__module__}.{base.__qualname__}", base)
        if is_looked_into(kind):
            self._user_class(path, kind)
        elif issubclass(kind, nn.Module):
            self._torch_class(path, kind)

    def _user_class(self, path: str, kind: type) -> None:
        holder = self._hold(vars(kind))
        for name, value in vars(kind).items():
            if name.startswith("__") and name.endswith("__"):
                if isinstance(value, types.FunctionType) and name not in _NOT_RUN:
                    self._take(holder, path, name, value)
            elif not isinstance(value, types.MemberDescriptorType):
                self._attribute(holder, path, name, value, False, code=isinstance(value, _CODE))

    def _torch_class(self, path: str, kind: type) -> None:
        """Of torch's modules, the functions that are called may be replaced, and read attributes of the user's."""
        holder = self._hold(vars(kind), sized=False)
        for name, value in vars(kind).items():
            if name in _CALLED:
                self._take(holder, path, name, value)
            if isinstance(value, types.FunctionType) and kind is not nn.Module:
                self._interest.mention(names_in(value.__code__)._replace(computed=False))

    def _hold(self, mapping: Mapping[str, Any], *, sized: bool = True) -> _Holder:
        self._holders.append(_Holder(mapping, sized))
        return self._holders[-1]

    def _attribute(
        self, holder: _Holder, path: str, name: str, value: Any, everything: bool, *, code: bool = False
    ) -> None:
        """Something that counts if code reads its name."""
        if everything:
            self._take(holder, path, name, value)
        else:
            self._interest.when(name, functools.partial(self._take, holder, path, name, value), code=code)

    def _take(self, holder: _Holder, path: str, name: str, value: Any) -> None:
        holder.names.append(name)
        self._value(f"{path}.{name}", value)

    def _named(self, path: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._value(f"{path}.{name}", value)


def _outermost(models: Collection[nn.Module]) -> list[nn.Module]:
    """Those that are not inside of the first."""
    first = next(iter(models))
    inside = {id(module) for module in first.modules()}
    return [first, *(model for model in models if id(model) not in inside)]


def _parts_of(value: Any) -> dict[str, Any] | None:
    """What a callable that is made of others is made of."""
    match value:
        case types.MethodType():
            return {"__self__": value.__self__, "__func__": value.__func__}
        case functools.partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords, "__dict__": vars(value)}
        case staticmethod() | classmethod():
            return {"__func__": value.__func__}
        case property():
            return {"fget": value.fget}
        case functools.cached_property() | functools.partialmethod():
            return {"func": value.func}
    return {"__wrapped__": value.__wrapped__} if isinstance(value, functools._lru_cache_wrapper) else None


def _of_tensor(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _of_parameter(parameter: torch.Tensor) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    hooked = " with a hook" if has_hooks(parameter) else ""
    return f"a {trained} parameter of {str(parameter.dtype).removeprefix('torch.')}{hooked}"


def _words(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(name, str):
        return f"{type(value).__name__} {name}"
    size = f" of {len(value)}" if isinstance(value, dict | list | set | tuple | deque) else ""
    return f"a {type(value).__name__}{size}"
