"""The words of a program's text that stand for values: dtypes, layouts, quoted names, and types.

Whatever a name holds, its quoted form is one line of printable characters that Python reads back:

    >>> print(quote('a "b"\\n[c] ü'))
    "a \\"b\\"\\n[c] ü"
"""

from __future__ import annotations

import math
from typing import Any

import torch

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALL_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)} | DTYPES
"""Every dtype by its short name and by torch's."""

LAYOUTS = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, (torch.memory_format, torch.layout)) and not name.startswith("legacy")
}
LAYOUT_NAMES = {value: name for name, value in LAYOUTS.items()}

RESERVED = frozenset((*DTYPES, *LAYOUTS))
"""Names that are values, and so no node's."""


def quote(text: str) -> str:
    """A string as Python reads it, on one line, whatever is in it."""
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def spell_number(value: complex) -> str:
    """A float or a complex number, exactly.

    >>> spell_number(float("-inf")), spell_number(-0.0), spell_number(complex(-0.0, 2))
    ('float("-inf")', '-0.0', 'complex(-0.0, 2.0)')
    """
    if isinstance(value, complex):
        return f"complex({spell_number(value.real)}, {spell_number(value.imag)})"
    return repr(value) if math.isfinite(value) else f"float({quote(str(value))})"


def render_type(value: Any) -> str:
    """The dtype and shape of a value.

    >>> render_type(torch.empty(2, 3))
    'f32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(render_type(item) for item in value)}{',' if len(value) == 1 else ''})"
    for name, kinds in (
        ("bool", (bool, torch.SymBool)),
        ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)),
    ):
        if isinstance(value, kinds):
            return name
    return "None" if value is None else type(value).__name__
