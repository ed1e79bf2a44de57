"""Which operators a program read from a file may name: those that compute tensors or sizes, and nothing else.

A file may come from a stranger, and reading one calls what it names (on tensors without numbers), so names are looked
up in closed lists and in torch's registry of operators; no attribute of a module is ever reached for.

    >>> operator_named("aten.mm")
    <OpOverload(op='aten.mm', overload='default')>
    >>> operator_named("builtins.exec") is None, operator_named("torch.load") is None
    (True, True)
    >>> operator_named("aten.__and__.Tensor"), operator_named("aten.__class__")
    (<OpOverload(op='aten.__and__', overload='Tensor')>, None)
    >>> why_refused(torch.ops.aten.from_file.default)
    'filename names a file'
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from typing import Any

import torch

from crossfade.graph import collectives
from crossfade.graph.operators import remembered
from crossfade.graph.private import OpNamespace, OpOverload, OpOverloadPacket, schema_of

NAMESPACES = {"c10d": collectives.NAMESPACE}
"""Short names of namespaces, as texts have them."""

_ARITHMETIC = "add sub mul truediv floordiv mod pow neg pos abs lshift rshift and_ or_ xor invert not_ matmul"
_COMPARISONS = "eq ne lt le gt ge is_ is_not truth"
_MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees dist erf erfc exp expm1 fabs floor fmod gcd "
    "hypot isclose isfinite isinf isnan isqrt ldexp lgamma log log10 log1p log2 pow prod radians remainder sin sinh "
    "sqrt tan tanh trunc"
)
_BUILTINS = "abs bool float int max min pow round sum"
_SIZES = (
    "sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_acos _sym_asin _sym_atan "
    "_sym_cos _sym_cosh _sym_log2 _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh"
)
FUNCTIONS: dict[str, Any] = {
    f"{name}.{function}": vars(module)[function]
    for name, module, functions in (
        ("operator", operator, f"{_ARITHMETIC} {_COMPARISONS} getitem"),
        ("math", math, _MATH),
        ("builtins", builtins, _BUILTINS),
        ("torch", torch, _SIZES),
    )
    for function in functions.split()
    if function in vars(module)
}
"""Functions on numbers and sizes that programs may call, by their names in a text."""

_HIGHER_ORDER_NAMES = (
    "associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention flex_attention_backward "
    "graphsafe_run_with_rng_state hints_wrapper invoke_quant invoke_quant_packed invoke_subgraph map_impl out_dtype "
    "run_and_save_rng_state run_with_rng_state scan strict_mode tag_activation_checkpoint "
    "triton_kernel_wrapper_functional triton_kernel_wrapper_mutation while_loop while_loop_stack_output with_effects "
    "wrap wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled"
)
HIGHER_ORDER = frozenset(_HIGHER_ORDER_NAMES.split())
"""Higher-order operators that only compute with the graphs and operators that they are given."""

REFUSED_NAMESPACES = frozenset(
    ["prim", "static_runtime", "profiler", "debugprims", "debug_mode_ops", "onnx", "_test", "_native", "export", "c10d"]
)
"""Namespaces of torch whose operators are the interpreter's own, record, write files, or work on process groups that
are objects: none is part of a program."""

_BITWISE = frozenset(("__and__", "__or__", "__xor__", "__lshift__", "__rshift__"))
"""Operators of torch that are called like methods of Python."""

_WITHOUT_TENSORS = frozenset(
    ("aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size")
)
_PLAIN = re.compile(
    r"(Tensor|int|bool|float|number|complex|str|Device|Generator|Layout|ScalarType|MemoryFormat|NoneType)"
)
_WRAPPED = re.compile(r"(Optional|List|Tuple)\[(.*)\]")
_NAMED = ("group_name", "group", "reduce_op")
_FILE_WORDS = re.compile(r"file|path|folder|dir(ectory)?$|url|command|library", re.IGNORECASE)


def operator_named(name: str) -> Any | None:
    """What a name in a text stands for: an operator, or a function on numbers; None where it is no program's."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    namespace, *path = name.split(".")
    if namespace == "higher_order":
        return _higher_order(path)
    found = overload_named(NAMESPACES.get(namespace, namespace), path)
    return found if found is not None and why_refused(found) is None else None


def overloads_named(name: str) -> list[str]:
    """The overloads that there are of an operator, for messages; none if there is no such operator."""
    namespace, *path = name.split(".")
    packet = _packet(NAMESPACES.get(namespace, namespace), path[0]) if path else None
    return packet.overloads() if packet is not None else []


def overload_named(namespace: str, path: list[str]) -> OpOverload | None:
    """An operator of torch's registry, whatever it does."""
    if not 1 <= len(path) <= 2:
        return None
    packet, overload = _packet(namespace, path[0]), path[1] if len(path) > 1 else "default"
    found = getattr(packet, overload) if packet is not None and overload in packet.overloads() else None
    return found if isinstance(found, OpOverload) else None


def _packet(namespace: str, name: str) -> OpOverloadPacket | None:
    """A family of overloads. Only what is an identifier and no attribute of a Python object is looked up."""
    hidden = namespace.startswith("__") or (name.startswith("__") and name not in _BITWISE)
    if hidden or not (namespace.isidentifier() and name.isidentifier()):
        return None
    space = getattr(torch.ops, namespace)
    found = getattr(space, name, None) if isinstance(space, OpNamespace) else None
    return found if isinstance(found, OpOverloadPacket) else None


def _higher_order(path: list[str]) -> Any | None:
    return getattr(torch.ops.higher_order, path[0], None) if len(path) == 1 and path[0] in HIGHER_ORDER else None


@remembered
def why_refused(target: OpOverload) -> str | None:
    """Why no program from a file may name an operator; None if one may. Its schema decides, so that operators that
    torch or the user registers later are judged as well."""
    schema = schema_of(target)
    if schema.name.partition("::")[0] in REFUSED_NAMESPACES:
        return "its namespace is not one of programs"
    named = (*schema.arguments, *schema.returns)
    types = [str(item.type) for item in named if item.name not in _NAMED]  # torch 2.15 also takes objects
    if strange := next((kind for kind in types if not _is_plain(kind)), None):
        return f"it takes or returns a {strange}"
    words = [item.name for item in schema.arguments if "str" in str(item.type)]
    words += [schema.name.partition("::")[2]] if words else []  # an operator may leave its arguments without names
    if file := next((word for word in words if _FILE_WORDS.search(word)), None):
        return f"{file} names a file"
    if not any("Tensor" in kind for kind in types) and schema.name not in _WITHOUT_TENSORS:
        return "it neither takes nor returns a tensor"
    return None


def _is_plain(kind: str) -> bool:
    if wrapped := _WRAPPED.fullmatch(kind):
        return all(_is_plain(item) for item in wrapped[2].split(", "))
    return _PLAIN.fullmatch(kind) is not None
