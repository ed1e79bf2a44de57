"""What a simplification is held to on any program, and how a program that shows it broken is made small."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

import sympy
import torch
from torch import Tensor, fx

from crossfade.errors import CrossfadeError
from crossfade.graph.passes import Numerics, Pass
from crossfade.graph.private import size_expression, statically_equal, tree_flatten
from crossfade.graph.program import Input, InputKind, Program
from crossfade.graph.text import render_type
from crossfade.graph.verify import verify
from tests.properties.simplify_values import call_key, described, input_like, quiet

Sizes = dict[Any, int]
"""What each symbol of a program's sizes stands for."""

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass(frozen=True)
class Failure:
    """How a program and what passes made of it differ."""

    kind: str
    detail: str = ""


@dataclass
class Ran:
    """What one run left: results and inputs in one list, and which of them share memory."""

    values: list[Any]

    @property
    def sharing(self) -> set[tuple[int, int]]:
        homes = [value.untyped_storage().data_ptr() if _has_elements(value) else 0 for value in self.values]
        return {(i, j) for i in range(len(homes)) for j in range(i) if homes[i] and homes[i] == homes[j]}


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def run(program: Program, sizes: Sizes, seed: int, special: bool = False, moved: float = 0.0) -> Ran:
    """Run a program node by node on inputs drawn from a seed; `moved` is how far each float is off."""
    values: dict[fx.Node, Any] = {}
    for item, node in program.named_inputs():  # by name: data stays the same where other inputs are dropped
        value = input_like(concrete(node.meta["val"], sizes), seed + crc32(item.name.encode()), special)
        if moved and value.dtype.is_floating_point:
            value.copy_(value * (1 + moved) + moved)
        values[node] = value
    inputs = list(values.values())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for all devices, which takes longer than a run
    for node in program.graph.nodes:
        if node.op == "get_attr":
            values[node] = program.constants[str(node.target)]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return Ran([*(values[one] if isinstance(one, fx.Node) else one for one in program.results), *inputs])


def concrete(value: Any, sizes: Sizes) -> Any:
    """A tensor on no device with the layout of a fake one, symbols as `sizes` says."""
    if not sizes:
        return value
    shape, strides = ([_size(one, sizes) for one in many] for many in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


def _size(size: Any, sizes: Sizes) -> int:
    return size if isinstance(size, int) else int(size.node.expr.xreplace(sizes))


def all_sizes(program: Program, random: Random) -> Iterator[Sizes]:
    """The sizes that the program was made with, and others under which its guards hold."""
    shape_env = program.fake_mode.shape_env
    if shape_env is None:
        yield {}
        return
    symbols = {symbol: int(hint) for symbol, hint in shape_env.backed_var_to_val.items()}
    yield symbols
    for _ in range(4):
        others = {symbol: random.randint(2, 5) for symbol in symbols}
        if others != symbols and all(guard.expr.xreplace(others) == True for guard in shape_env.guards):  # noqa: E712
            yield others


class Last:
    """What the last checks made of one program and the next ones need again: a copy left as it was, and its runs."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.spare: Program | None = None
        self.runs: dict[Any, Ran] = {}
        self.calls: set[Any] | None = None

    def _now(self, program: Program) -> None:
        if self.program is not program:
            self.program, self.spare, self.runs, self.calls = program, None, {}, None

    def calls_of(self, program: Program) -> set[Any]:
        """The keys of all calls of a program."""
        self._now(program)
        if self.calls is None:
            self.calls = {call_key(node.target, node.args, node.kwargs) for node in _calls(program)}
        return self.calls

    def copy_of(self, program: Program) -> Program:
        """A copy for passes; the one before if none changed it: if one did and did not say so, that is seen later."""
        self._now(program)
        done, self.spare = self.spare or program.copy(), None
        return done

    def run_of(self, program: Program, sizes: Sizes, seed: int, special: bool) -> Ran:
        """What `run` leaves; nobody writes it afterwards."""
        self._now(program)
        key = frozenset(sizes.items()), seed, special
        if key not in self.runs:
            self.runs[key] = run(program, sizes, seed, special)
        return self.runs[key]


_LAST = Last()


def failure_of(program: Program, passes: Sequence[Pass], seed: int = 0) -> Failure | None:
    """How passes break a program; None if they do not, or if the program tells nothing."""
    done = _LAST.copy_of(program)
    guards = _guards(program)
    changed = False
    with quiet():
        for one in passes:
            try:
                changed |= one.run(done).changed
            except Exception as error:
                return Failure(f"{one.name} raises {type(error).__name__}", str(error))
    if not changed:
        _LAST.spare = done
        return None
    if _guards(program) != guards:
        return Failure("a guard was added", str(program.fake_mode.shape_env.guards[guards:]))
    return _malformed(program, done) or _differs(program, done, passes, seed)


def _guards(program: Program) -> int:
    shape_env = program.fake_mode.shape_env
    return len(shape_env.guards) if shape_env is not None else 0


def _malformed(program: Program, done: Program) -> Failure | None:
    try:
        verify(done)
    except CrossfadeError as error:
        return Failure("not well formed", str(error))
    known, mode = _LAST.calls_of(program), program.fake_mode
    for node in _calls(done):
        if call_key(node.target, node.args, node.kwargs) in known:
            continue  # torch's fake kernels are not always right: what was there before is not the pass's
        try:
            fresh = described(mode, node.target, node.args, node.kwargs)
        except Exception as error:
            return Failure("not well formed", f"{node.format_node()} raises {error}")
        if _types(fresh) != _types(node.meta["val"]) and not _described_alike(fresh, node.meta["val"]):
            told = f"{_types(fresh)}, not {_types(node.meta['val'])}"
            return Failure("metadata is not true", f"{node.format_node()} is {told}")
    return None


def _calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def _types(value: Any) -> list[str]:
    leaves, _ = tree_flatten(value)
    return [f"{render_type(one)} {_strides(one) if isinstance(one, Tensor) else ''}" for one in leaves]


def _described_alike(one: Any, other: Any) -> bool:
    """Whether values are of the same dtype, sizes and strides for all symbols, or for all that were tried: torch writes
    `s // 2` and `Max(1, s // 2)` for what is the same but of empty tensors."""
    pairs = list(zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=False))
    if not all(isinstance(value, Tensor) for pair in pairs for value in pair):
        return False
    return all(
        (first.dtype, first.dim(), first.device) == (second.dtype, second.dim(), second.device)
        and all(map(_same_size, [*first.shape, *_strides(first)], [*second.shape, *_strides(second)]))
        and len(_strides(first)) == len(_strides(second))
        for first, second in pairs
    )


def _same_size(one: Any, other: Any) -> bool:
    if statically_equal(one, other):
        return True
    expressions = [sympy.sympify(size_expression(size)) for size in (one, other)]
    symbols = set().union(*(expression.free_symbols for expression in expressions))
    return all(
        len({expression.subs(dict.fromkeys(symbols, tried)) for expression in expressions}) == 1 for tried in (4, 6, 14)
    )


def _strides(value: Tensor) -> list[Any]:
    """The strides that say where an element lies: torch's kernels and their fakes differ in the others."""
    if not statically_equal(value.numel(), 0):
        return [
            stride for size, stride in zip(value.shape, value.stride(), strict=True) if not statically_equal(size, 1)
        ]
    return []


def _differs(program: Program, done: Program, passes: Sequence[Pass], seed: int) -> Failure | None:
    bitwise = all(one.numerics is Numerics.BITWISE for one in passes)
    tolerance = 0.0 if bitwise else _tolerance(program)
    random = Random(seed)
    for sizes in all_sizes(program, random):
        special = bitwise and random.random() < 0.5
        try:
            before = _LAST.run_of(program, sizes, seed, special)
        except Exception:  # a size or number that the program is not made for
            continue
        try:
            after = run(done, sizes, seed, special)
        except Exception as error:
            return Failure(f"running it raises {type(error).__name__}", str(error))
        if (failure := _compare(before, after, tolerance)) is None:
            continue
        if bitwise or not _jumps(program, sizes, seed, before):
            return failure
    return None


def _tolerance(program: Program) -> float:
    """By the least exact dtype on the way: what was rounded to it stays so, whatever it is converted to."""
    values = [one for node in program.graph.nodes for one in tree_flatten(node.meta.get("val"))[0]]
    dtypes = {one.dtype for one in values if isinstance(one, Tensor)}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=1e-4)


def _compare(before: Ran, after: Ran, tolerance: float) -> Failure | None:
    """How one run differs from another; without a tolerance every bit counts."""
    for index, (old, new) in enumerate(zip(before.values, after.values, strict=True)):
        if isinstance(old, Tensor) != isinstance(new, Tensor) or (not isinstance(old, Tensor) and old != new):
            return Failure("other values", f"value {index}: {old} became {new}")
        if not isinstance(old, Tensor):
            continue
        if (old.dtype, old.shape, _strides(old)) != (new.dtype, new.shape, _strides(new)):
            return Failure("another layout", f"value {index}: {render_type(old)} {old.stride()} became "
                           f"{render_type(new)} {new.stride()}")  # fmt: skip
        if not (_close(old, new, tolerance) if tolerance else _same_bits(old, new)):
            return Failure("other values", f"value {index}:\n{old}\nbecame\n{new}")
    if before.sharing != after.sharing:
        return Failure("memory is shared otherwise", f"{sorted(before.sharing)} became {sorted(after.sharing)}")
    return None


def _same_bits(old: Tensor, new: Tensor) -> bool:
    """Every bit, but not those by which one NaN differs from another."""
    if old.dtype.is_complex:
        old, new = torch.view_as_real(old.resolve_conj()), torch.view_as_real(new.resolve_conj())
    if not old.dtype.is_floating_point:
        return torch.equal(old, new)
    zero = torch.equal(old.signbit() & ~old.isnan(), new.signbit() & ~new.isnan())
    return zero and torch.equal(old.isnan(), new.isnan()) and torch.equal(old.nan_to_num(0.5), new.nan_to_num(0.5))


def _close(old: Tensor, new: Tensor, tolerance: float) -> bool:
    """Within what adding in another order may do; beside infinities and huge numbers that says nothing."""
    wide = torch.complex128 if old.dtype.is_complex else torch.float64
    one, other = old.to(wide), new.to(wide)
    if not one.numel() or not bool((one.abs() < 1e6).all()):
        return True
    slack = tolerance * max(1.0, float(one.abs().max()))
    return bool(((one - other).abs() <= slack).all())


def _jumps(program: Program, sizes: Sizes, seed: int, before: Ran) -> bool:
    """Whether the program itself says something else when its inputs move by a little: rounding decides then."""
    for moved in (1e-5, -1e-5, 1e-3, -1e-3):
        try:
            after = run(program, sizes, seed, moved=moved)
        except Exception:
            return True
        near = [_near(old, new) for old, new in zip(before.values, after.values, strict=True)]
        if not all(near):
            return True
    return False


def _near(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not old.numel():
        return True
    one, other = old.to(torch.complex128), new.to(torch.complex128)
    largest = float(one.abs().nan_to_num(0.0).max())
    return largest < 1e6 and bool(((one - other).abs() <= 0.1 * max(1.0, largest)).all())


# ------------------------------------------------------------------------------------------------------ made small


def smallest(program: Program, fails: Callable[[Program], Failure | None]) -> Program:
    """A program with as few results and calls as still fail in the same way."""
    kind = getattr(fails(program), "kind", None)

    def still(candidate: Program) -> bool:
        failure = fails(candidate)
        return failure is not None and failure.kind == kind

    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in _smaller(program):
            if still(candidate):
                program, shrinking = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less: a result, or the last step to one; a call that nobody uses, or made an input."""
    for index in range(len(program.results) if len(program.results) > 1 else 0):
        less = program.copy()
        results, outputs = less.results, list(less.outputs)
        del results[index], outputs[index]
        less.set_results(results, tuple(outputs))
        yield _without_leftovers(less)
    yield from _ending_earlier(program)
    for position in reversed(range(len(program.graph.nodes))):
        less = program.copy()
        node = list(less.graph.nodes)[position]
        if node.op == "call_function" and not node.users:
            less.graph.erase_node(node)
            yield _without_leftovers(less)
        elif node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            yield from _skipping(program, position)
            given = less.add_input(Input(InputKind.INPUT, f"was_{node.name}"), node.meta["val"])
            node.replace_all_uses_with(given)
            less.graph.erase_node(node)
            yield _without_leftovers(less)


def _ending_earlier(program: Program) -> Iterator[Program]:
    """The program with an argument of a result as the result."""
    for index, result in enumerate(program.results):
        for number in range(len(result.all_input_nodes) if result.op == "call_function" else 0):
            less = program.copy()
            results = less.results
            results[index] = results[index].all_input_nodes[number]
            if isinstance(results[index].meta["val"], Tensor):
                less.set_results(results)
                yield _without_leftovers(less)


def _skipping(program: Program, position: int) -> Iterator[Program]:
    """The program with a call's argument, or what that is a part of, in place of the call, where they are alike."""
    given = list(program.graph.nodes)[position].all_input_nodes
    for argument in [*given, *(source for one in given for source in one.all_input_nodes)]:
        less = program.copy()
        nodes = list(less.graph.nodes)
        node, other = nodes[position], nodes[list(program.graph.nodes).index(argument)]
        if isinstance(other.meta["val"], Tensor) and _types(other.meta["val"]) == _types(node.meta["val"]):
            node.replace_all_uses_with(other)
            less.graph.erase_node(node)
            yield _without_leftovers(less)


def _without_leftovers(program: Program) -> Program:
    """Drop inputs, constants and elements that nobody reads."""
    for node in reversed(list(program.graph.nodes)):
        if (node.op == "get_attr" or node.target is operator.getitem) and not node.users:
            program.graph.erase_node(node)
    used = [(item, node) for item, node in program.named_inputs() if node.users]
    for item, node in list(program.named_inputs()):
        if not node.users and len(used) and not any(out.name == item.name for out in program.outputs):
            program.graph.erase_node(node)
            program.inputs = tuple(other for other in program.inputs if other is not item)
    return program
