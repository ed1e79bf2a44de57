"""Expressions in files, which torch evaluates as Python later: only arithmetic on sizes is let through.

>>> why_no_size("2*s0 + Max(1, s1)"), why_no_size("__import__('os').system('ls')")
(None, "which is no arithmetic on sizes: __import__('os').system('ls')")
>>> why_no_guard("L['x'].size()[0] == L['y'].size()[0]"), why_no_guard("exec('ls')")
(None, "which is no comparison of sizes: exec('ls')")
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection

_FUNCTION_NAMES = (
    "Abs Add And CeilToInt CleanDiv Eq Equality Float FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity "
    "IntTrueDiv Integer Le LessThan Lt Max Min Mod ModularIndexing Mul Ne Not OpaqueUnaryFn_log2 OpaqueUnaryFn_sqrt Or "
    "PythonMod RShift Rational RoundDecimal RoundToInt StrictGreaterThan StrictLessThan ToFloat TruncToFloat "
    "TruncToInt Unequality Where ceiling floor sqrt"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_POWERS = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))
_ASSUMPTIONS = frozenset(("integer", "positive", "nonnegative", "real", "finite", "negative", "precision"))
_NAME = re.compile(r"[A-Za-z]\w{0,200}")
_METHODS = frozenset(("size", "stride", "storage_offset", "dim", "numel", "item"))
_MATHS = frozenset(("isnan", "isinf", "inf", "nan"))
_MOST_LETTERS = 20_000
_MOST_POWER = 256
_ARITHMETIC = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.Load,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
)  # fmt: skip


def why_no_size(text: str) -> str | None:
    """Why an expression is no arithmetic on symbols and numbers; None if it is."""
    return _why_not(text, _is_part_of_size, "arithmetic on sizes")


def why_no_guard(text: str) -> str | None:
    """Why a guard is no comparison of the sizes and values of inputs; None if it is."""
    return _why_not(text.partition("#")[0], _is_part_of_guard, "comparison of sizes")


_OF_NUMBERS = frozenset(("abs", "bool", "float", "int", "max", "min", "round"))
_OF_MATHS_NAMES = (
    "acos asin atan ceil cos cosh exp fabs floor fmod inf isinf isnan log log10 log1p log2 nan pow sin sinh sqrt tan "
    "tanh trunc"
)
_OF_MATHS = frozenset(_OF_MATHS_NAMES.split())


def why_no_formula(text: str, symbols: Collection[str]) -> str | None:
    """Why an expression is no arithmetic of Python's on some numbers, known by their symbols; None if it is.

    >>> why_no_formula("x * math.sqrt(1 - y**step)", ("x", "y", "step"))
    >>> why_no_formula("x.__class__", ("x",)), why_no_formula("9**9**9", ())
    ('which is no arithmetic: x.__class__', 'which is no arithmetic: its powers are too large')
    """
    return _why_not(text, lambda node: _is_part_of_formula(node, symbols), "arithmetic", _power_of_formula)


def _is_part_of_formula(node: ast.AST, symbols: Collection[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in symbols or name in _OF_NUMBERS or name in ("math", "torch")
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name in _OF_MATHS
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name in ("sym_float", "sym_int", "sym_max", "sym_min")
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in _OF_NUMBERS
        case ast.Call(func=ast.Attribute(), keywords=[]) | ast.Pow() | ast.IfExp():
            return True
        case ast.Constant(value=value):
            return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
    return isinstance(node, _ARITHMETIC)


def _power_of_formula(node: ast.AST) -> int:
    """As of sizes; but an exponent that is one of the numbers is no larger than these are."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow):
        return 1
    return _power(node) if any(isinstance(part, ast.Constant | ast.Pow) for part in ast.walk(node.right)) else 1


def _why_not(
    text: str, is_part: Callable[[ast.AST], bool], what: str, power: Callable[[ast.AST], int] | None = None
) -> str | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= _MOST_LETTERS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        return f"which is no {what}"
    nodes = list(ast.walk(tree))
    if stranger := next((node for node in nodes if not is_part(node)), None):
        return f"which is no {what}: {ast.unparse(stranger)[:200]}"
    return (
        f"which is no {what}: its powers are too large"
        if math.prod(map(power or _power, nodes)) > _MOST_POWER
        else None
    )


def _power(node: ast.AST) -> int:
    """What an expression raises something to at most; powers of powers multiply."""
    match node:
        case ast.BinOp(op=ast.Pow(), right=exponent):
            pass
        case ast.Call(func=ast.Name(id=name), args=[_, exponent]) if name in _POWERS:
            pass
        case _:
            return 1
    numbers = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
    sizes = [abs(number) if isinstance(number, (int, float)) else math.inf for number in numbers] or [math.inf]
    nested = any(isinstance(part, ast.Call) and _power(part) > 1 for part in ast.walk(exponent))
    most = math.prod(max(1, size) for size in sizes)
    return _MOST_POWER + 1 if nested or most > _MOST_POWER else math.ceil(most)


def _is_part_of_size(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return _NAME.fullmatch(name) is not None or re.fullmatch(r"[\d.e+-]{1,40}", name) is not None
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str())]):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS or name in _POWERS
        case ast.keyword(arg=name, value=ast.Constant()):
            return name in _ASSUMPTIONS
        case ast.Constant(value=value):
            return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
        case ast.UnaryOp(op=ast.Invert()) | ast.Invert() | ast.Pow() | ast.BitAnd() | ast.BitOr():
            return True
    return isinstance(node, _ARITHMETIC)


def _is_part_of_guard(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name), keywords=[]):
            return name in _MATHS
        case ast.Call(func=ast.Attribute(attr=name), keywords=[]):
            return name in _METHODS
        case ast.Attribute(attr=name):
            return not name.startswith("_")
        case ast.Name(id=name):
            return name in ("L", "math", "inf") or name in _FUNCTIONS
        case ast.Constant(value=str(word)):  # it becomes part of a message in double quotes
            return re.fullmatch(r"[\w .:-]*", word) is not None
        case ast.Constant(value=None):
            return True
        case ast.Subscript() | ast.List() | ast.Tuple():
            return True
    return _is_part_of_size(node)
