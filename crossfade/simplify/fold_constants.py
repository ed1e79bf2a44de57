"""What is computed from constants alone is computed once, now."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from crossfade.graph.aliasing import Aliasing
from crossfade.graph.effects import is_pure, memory_of
from crossfade.graph.operators import arguments, remembered
from crossfade.graph.passes import Numerics, Outcome, Pass, PassResult, Verdict
from crossfade.graph.private import FakeTensor, is_erased, schema_of
from crossfade.graph.program import Program, tensor_bytes
from crossfade.graph.splice import erase_if_dead, insert_call
from crossfade.simplify.filled import FILLING, fill_of

_aten = torch.ops.aten
_PREFIX = "folded_"
_CPU = torch.device("cpu")

_SOURCES = frozenset({*FILLING, *(getattr(_aten.arange, name) for name in ("default", "start", "start_step"))})

# fmt: off
_KEEPS_VALUES = frozenset({
    "alias", "clone", "contiguous", "detach", "expand", "permute", "reshape", "select", "slice", "squeeze", "t",
    "transpose", "unsqueeze", "view", "_unsafe_view",
})
"""Operators that move values or repeat them; of one value they leave that."""

_EXACT = frozenset({
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "div", "eq", "ge", "gt", "le", "logical_and",
    "logical_not", "logical_or", "lt", "mul", "ne", "neg", "rsub", "sub", "where",
})
"""Elementwise operators that give one element the same bits whatever stands beside it, since they round once."""

_INEXACT = frozenset({
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "conv1d", "conv2d", "conv3d", "dot", "einsum",
    "linear", "matmul", "mm", "mv", "vdot", "_scaled_mm", "_int_mm",
})
"""Operators that libraries compute in an order of their own, which threads and alignment may change."""
# fmt: on

_ARITHMETIC = frozenset({
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_),
    *(operator.not_, math.floor, math.ceil, math.trunc),
})  # fmt: skip

_TOO_LARGE = "its values take more than limit_bytes"
_ONLY_ONE = "what it is made of is known only to be of one value"
_ELSEWHERE = "only what lies on the CPU is computed now"
_LAST_BITS = "its last bits may depend on threads and alignment"
_WRITTEN = "its memory is written to"
_RETURNED = "a result of the program would share memory with a constant"
_REFUSED = "torch refuses to compute it, as it will when the program runs"
_OTHER_LAYOUT = "it is of one value, but lies in memory as no `full` does"
_MAY_CHANGE = "the tensors that the program keeps may change from run to run"


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute now what follows from constructors and constants alone: arithmetic on numbers, and small CPU tensors.

    What is of one value stays a `full`; anything else of at most `limit_bytes` becomes a constant of the program.
    Values are those that this machine computes: they are the same bits where the same kernels run. `kept` promises
    that the tensors the program already keeps never change, so that what is made of them can be folded too.

    Also known as: constant folding: XLA's `constant-folding`, Inductor's `constant_fold_uniform_value`.

    Before:
        x: f32[4] = input("x")
        a: f32[4] = aten.full([4], 2.0)
        b: f32[4] = aten.mul.Tensor(a, 3.0)
        y: f32[4] = aten.add.Tensor(x, b)
        return output("y", y)

    After:
        x: f32[4] = input("x")
        full: f32[4] = aten.full([4], 6.0, dtype=f32, layout=strided, device=device("cpu"), pin_memory=False)
        y: f32[4] = aten.add.Tensor(x, full)
        return output("y", y)
    """

    name = "fold-constants"
    numerics = Numerics.BITWISE

    limit_bytes: int = 65536
    kept: bool = False

    def run(self, program: Program) -> PassResult:
        """Fold numbers and find what is constant from the top; replace it from the bottom."""
        numbers = _fold_numbers(program)
        known = _Known(program, self)
        for node in program.graph.nodes:
            known.look_at(node)
        folder = _Folder(program, known)
        for node in reversed(list(known.foldable)):
            folder.fold(node)
        program.constants = {**program.constants, **folder.constants}
        counts = {"numbers": numbers, "constants": len(folder.constants), "fulls": folder.fulls}
        changed = any(counts.values())
        return PassResult(changed, {**counts, "left": len(known.verdicts)}, tuple(known.verdicts))


class _Known:
    """Which nodes are constant: `foldable` by evaluation, `uniform` by their one value."""

    def __init__(self, program: Program, options: FoldConstants) -> None:
        self.program, self.options = program, options
        self.aliasing = Aliasing(program)
        self.foldable: dict[fx.Node, bool] = {}
        """Whether it is small enough to be evaluated whole; nodes that are only of one value need not be."""
        self.uncomputed: dict[fx.Node, str] = {}
        """Constructors that are not run now, and why."""
        self.uniform: dict[fx.Node, Tensor] = {}
        self.verdicts: list[Verdict] = []
        self.real: dict[fx.Node, Any] = {}

    def leave(self, node: fx.Node, reason: str) -> None:
        """Account for a candidate that stays."""
        remedy = "kept=True promises that they do not" if reason == _MAY_CHANGE else ""
        self.verdicts.append(Verdict.of(node, Outcome.LEFT, reason, remedy=remedy))

    def look_at(self, node: fx.Node) -> None:
        """Decide about a node, all its inputs being decided."""
        if node.op == "get_attr":
            self._look_at_constant(node)
        elif node.op == "call_function" and _is_source(node.target):
            if _is_static(node):
                self._look_at_source(node)
        elif node.op == "call_function" and self._reads_constants(node) and _is_static(node):
            self._look_at_computed(node)

    def _reads_constants(self, node: fx.Node) -> bool:
        """Whether all that a node reads is constant, and there is some."""
        inputs = node.all_input_nodes
        return bool(inputs) and all(source in self.foldable or source in self.uncomputed for source in inputs)

    def _look_at_constant(self, node: fx.Node) -> None:
        value = self.program.constants.get(str(node.target))
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or "val" not in node.meta:
            return
        if (reason := self._reason_against_constant(node, value)) is None:
            self.foldable[node] = True
            self.real[node] = value.detach()
        elif any(_is_static(user) and _is_computable(user) and len(user.all_input_nodes) == 1 for user in node.users):
            self.leave(node, reason)

    def _reason_against_constant(self, node: fx.Node, value: Tensor) -> str | None:
        """Why nothing is made now of a tensor that the program keeps, or None."""
        if self.aliasing.is_written(node):
            return _WRITTEN
        if not self.options.kept and not str(node.target).startswith(_PREFIX):
            return _MAY_CHANGE
        return self._reason_against_values([value])

    def _look_at_source(self, node: fx.Node) -> None:
        value, given = node.meta["val"], arguments(node)
        if self.aliasing.is_written(node) or given.get("pin_memory") or any(map(_is_number, node.all_input_nodes)):
            return
        if (element := _one_element(value, fill_of(node))) is not None:
            self.uniform[node] = element
        reason = self._reason_against_values([value])
        if reason is None or node in self.uniform:  # what is like another tensor has no values to compute
            self.foldable[node] = reason is None and not node.all_input_nodes
        else:
            self.uncomputed[node] = reason

    def _look_at_computed(self, node: fx.Node) -> None:
        if not _is_computable(node):
            return
        if self.aliasing.is_written(node):
            self.leave(node, _WRITTEN)
            return
        if (element := self._one_value(node)) is not None:
            self.uniform[node] = element
        reason = self._reason_against(node)
        if reason is None or node in self.uniform:
            self.foldable[node] = reason is None
        else:
            self.leave(node, reason)

    def _reason_against(self, node: fx.Node) -> str | None:
        """Why a node is not evaluated whole, or None."""
        value = node.meta["val"]
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if _name(node.target) in _INEXACT:
            return _LAST_BITS
        if (reason := self._reason_against_values(values)) is not None:
            return reason
        if reasons := [self.uncomputed[source] for source in node.all_input_nodes if source in self.uncomputed]:
            return reasons[0]
        return None if all(self.foldable[source] for source in node.all_input_nodes) else _ONLY_ONE

    def _reason_against_values(self, values: list[Tensor]) -> str | None:
        if any(value.device != _CPU for value in values):
            return _ELSEWHERE
        return _TOO_LARGE if sum(map(tensor_bytes, values)) > self.options.limit_bytes else None

    def _one_value(self, node: fx.Node) -> Tensor | None:
        """The one value of all elements, if the operator provably makes one value of its inputs' ones."""
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not all(source in self.uniform for source in node.all_input_nodes):
            return None
        name = _name(node.target)
        if name in _KEEPS_VALUES:
            element = self.uniform[node.all_input_nodes[0]]
            # a view of the same bits as another dtype is of other numbers
            return element if element.dtype is value.dtype else None
        if name == "_to_copy":
            element = self.uniform[node.all_input_nodes[0]]
            whole_from_float = element.dtype.is_floating_point and not value.dtype.is_floating_point
            return _surely(lambda: element.to(value.dtype)) if not whole_from_float else None
        exact = name in _EXACT and not value.dtype.is_complex and value.device == _CPU
        if not exact or arguments(node).get("alpha", 1) != 1 or arguments(node).get("rounding_mode") is not None:
            return None
        return self._on_one_element(node)

    def _on_one_element(self, node: fx.Node) -> Tensor | None:
        """Run an elementwise operator on one element of each input; as many dims, so that types promote alike."""
        values = {source: self.uniform[source].reshape([1] * _dims(source)) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return _surely(lambda: node.target(*args, **kwargs).reshape(()))  # type: ignore[operator]

    def evaluate(self, node: fx.Node) -> Any:
        """The real value of a foldable node and of all that leads to it, without recursion."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [source for source in top.all_input_nodes if source not in self.real]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top not in self.real:
                args, kwargs = fx.map_arg((top.args, top.kwargs), self.real.__getitem__)
                with torch.no_grad():
                    self.real[top] = top.target(*args, **kwargs)  # type: ignore[operator]
        return self.real[node]


class _Folder:
    """Replaces constant nodes from the bottom, so that only what others read is made."""

    def __init__(self, program: Program, known: _Known) -> None:
        self.program, self.known = program, known
        self.constants: dict[str, Tensor] = {}
        self.fulls = 0
        self.returned = {memory_of(value) for value in program.results if isinstance(value, fx.Node)}
        self.names = (name for n in itertools.count() if (name := f"{_PREFIX}{n}") not in program.constants)

    def fold(self, node: fx.Node) -> None:
        """Put a `full` or a constant in a node's place."""
        value = None if is_erased(node) else node.meta["val"]
        if not isinstance(value, Tensor) or not node.users or _is_source(node.target) or node.op == "get_attr":
            return
        element, whole = self.known.uniform.get(node), None
        if element is None:
            whole = self._evaluate(node)
            element = _one_value_of(whole) if whole is not None else None
        if element is not None and value.is_contiguous():
            replacement, reason = self._full(node, element), None
        elif element is not None:
            if memory_of(node) is node:  # what is not is a view, which costs nothing
                self.known.leave(node, _OTHER_LAYOUT)
            return
        elif whole is None:
            return  # that torch refuses to compute it is said already
        else:
            replacement, reason = self._constant(node, whole)
        reason = reason or self.known.aliasing.may_replace(node, replacement)
        if reason is not None:
            self._undo(node, replacement, reason)
            return
        self.fulls += replacement.op == "call_function"
        self.known.aliasing.replaced(node, replacement)
        node.replace_all_uses_with(replacement)
        erase_if_dead(node)

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        try:
            return self.known.evaluate(node)
        except (RuntimeError, IndexError):
            self.known.leave(node, _REFUSED)
            return None

    def _full(self, node: fx.Node, element: Tensor) -> fx.Node:
        value = node.meta["val"]
        how = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
        target = _aten.full.default
        return insert_call(self.program, target, list(value.shape), element.item(), before=node, like=node, **how)

    def _constant(self, node: fx.Node, whole: Tensor) -> tuple[fx.Node, str | None]:
        name = next(self.names)
        with self.program.graph.inserting_before(node):
            constant = self.program.graph.create_node("get_attr", name, name=name)
        with self.program.fake_mode:
            constant.meta["val"] = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype)
        self.constants[name] = whole
        return constant, _RETURNED if memory_of(node) in self.returned else None

    def _undo(self, node: fx.Node, replacement: fx.Node, reason: str) -> None:
        self.constants.pop(str(replacement.target), None)
        self.program.graph.erase_node(replacement)
        self.known.leave(node, reason)


def _fold_numbers(program: Program) -> int:
    """Give users of arithmetic on literals, and of known sizes, the number itself."""
    folded = 0
    for node in list(program.graph.nodes):
        number = _number(node) if node.op == "call_function" and _makes_number(node.target) else None
        if number is None:
            continue
        for user in list(node.users):
            replace = lambda source, node=node, number=number: number if source is node else source  # noqa: E731
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), replace)
        program.graph.erase_node(node)
        folded += 1
    return folded


@remembered
def _makes_number(target: Any) -> bool:
    return target is _aten.sym_size.int or target in _ARITHMETIC


def _number(node: fx.Node) -> int | float | bool | None:
    if node.target is _aten.sym_size.int:
        given = arguments(node)
        size = given["self"].meta["val"].shape[given["dim"]]
        return size if isinstance(size, int) else None
    if node.all_input_nodes or node.kwargs:
        return None
    if not all(isinstance(value, (int, float)) for value in node.args):
        return None
    try:
        return node.target(*node.args)  # type: ignore[operator]
    except ArithmeticError:  # it fails when it runs, as before
        return None


@remembered
def _is_source(target: Any) -> bool:
    return target in _SOURCES


def _is_computable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return node.op == "call_function" and is_pure(node.target) and schema_of(node.target).name.startswith("aten::")


def _is_static(node: fx.Node) -> bool:
    """Whether a node makes strided tensors of known sizes, on any device that has real memory."""
    value = node.meta.get("val")
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return bool(values) and all(_is_static_tensor(item) for item in values)


def _is_static_tensor(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return False
    return not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor)


def _dims(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _one_element(like: Tensor, fill: Any) -> Tensor | None:
    """A fill value as the tensor's dtype has it."""
    return _surely(lambda: torch.full((), fill, dtype=like.dtype)) if fill is not None else None


def _surely(compute: Callable[[], Tensor]) -> Tensor | None:
    """One element, if torch computes it and a `full` of its number has its bits: NaNs come in several."""
    try:
        with torch.no_grad():
            element = compute()
    except RuntimeError:  # so will the program, when it runs
        return None
    return element if not element.dtype.is_complex and _is_full_of(element, element) else None


def _one_value_of(whole: Tensor) -> Tensor | None:
    """The value of all elements if their bits are the same and a `full` of it has them; None if not."""
    if not whole.numel() or whole.dtype.is_complex:
        return None
    first = whole.reshape(-1)[0]
    return first if _is_full_of(whole, first) else None


def _is_full_of(whole: Tensor, element: Tensor) -> bool:
    number = element.item()
    written = math.nan if number != number else number  # a program's text has one NaN
    return torch.equal(_bits(torch.full(whole.shape, written, dtype=whole.dtype)), _bits(whole))


def _bits(value: Tensor) -> Tensor:
    return value.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)  # also of one strided element


@remembered
def _name(target: Any) -> str:
    schema = schema_of(target)
    return schema.name.removeprefix("aten::") if schema is not None else ""
