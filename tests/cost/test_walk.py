"""Walking through a program: who gets whose result, what is freed when, what becomes of what raises."""

from __future__ import annotations

import operator
import textwrap
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import crossfade.cost.walk as walk_module
from crossfade.cost.estimate import computes
from crossfade.cost.sample import SampleMemory
from crossfade.cost.walk import TimedWalk
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.growth import grows_linearly

EVER = float("inf")

CHAIN = """
    x: f32[4] = input("x")
    a: f32[4] = aten.exp(x)
    b: f32[4] = aten.neg(a)
    c: f32[4] = aten.relu(b)
    return output("c", c)
    """


def program_of(lines: str) -> Program:
    return parse(textwrap.dedent(lines), groups={"dp": 2})


class Watched:
    """Functions of a program's operators that note what they were given and what they gave."""

    def __init__(self, program: Program) -> None:
        self.given: dict[str, tuple[Any, ...]] = {}
        self.gave: dict[str, weakref.ref[Any]] = {}
        nodes = [node for node in program.graph.nodes if computes(node)]
        self.functions = {node: self._watched(node) for node in nodes}

    def _watched(self, node: fx.Node) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.given[node.name] = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in args)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            self.gave[node.name] = weakref.ref(result)
            return result

        return call


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def test_each_operator_gets_what_the_one_before_it_made_and_frees_it() -> None:
    program = program_of(CHAIN)
    watched = Watched(program)
    alive_at_relu: list[bool] = []
    relu = watched.functions[named(program, "c")]

    def watching(value: Tensor) -> Tensor:
        alive_at_relu.extend(watched.gave[name]() is not None for name in "ab")
        assert value is watched.gave["b"]()
        return relu(value)

    walk = TimedWalk(program, {**watched.functions, named(program, "c"): watching}, SampleMemory(2**10))
    assert walk.round(EVER)
    assert alive_at_relu == [False, True]
    assert watched.gave["b"]() is None


def test_inputs_last_from_round_to_round_and_what_is_written_stays_there() -> None:
    program = program_of(
        """
        p: f32[4] = parameter("p")
        u: f32[4] = aten.mul_.Tensor(p, 2.0)
        v: f32[4] = aten.neg(u)
        return output("v", v)
        """
    )
    watched = Watched(program)
    walk = TimedWalk(program, watched.functions, SampleMemory(2**10))
    places = set()
    for _ in range(3):
        walk.round(EVER)
        places |= {watched.given["u"][0], watched.given["v"][0]}
    assert len(places) == 1


def test_what_travels_arrives_where_it_should() -> None:
    program = program_of(
        """
        x: f32[4] = input("x")
        a: f32[4] = aten.exp(x)
        r: f32[4] = c10d.all_reduce_(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(r)
        g: f32[8] = c10d.all_gather_into_tensor(w, 2, "dp")
        h: f32[8] = c10d.wait_tensor(g)
        y: f32[4] = aten.neg(w)
        z: f32[8] = aten.neg(h)
        return output("y", y), output("z", z)
        """
    )
    made: list[int] = []

    def made_at(value: Tensor) -> Tensor:
        result = torch.exp(value)
        made.append(result.data_ptr())
        return result

    watched = Watched(program)
    walk = TimedWalk(program, {**watched.functions, named(program, "a"): made_at}, SampleMemory(2**10))
    assert walk.round(EVER)
    assert watched.given["y"] == (made[0],)  # reduced in place
    assert watched.given["z"] != (made[0],)
    assert walk.seconds([named(program, "y"), named(program, "z")]) is not None


def test_what_arrives_in_memory_that_was_given_is_written_there() -> None:
    program = program_of(
        """
        x: f32[4] = input("x")
        m: f32[8] = aten.empty.memory_format([8])
        g: f32[8] = c10d.all_gather_into_tensor_out(x, 2, "dp", out=m)
        w: f32[8] = c10d.wait_tensor(g)
        y: f32[8] = aten.neg(w)
        return output("y", y)
        """
    )
    memory = torch.full((8,), float("nan"))
    given: list[Tensor] = []
    functions = {named(program, "m"): lambda *_: memory, named(program, "y"): given.append}
    assert TimedWalk(program, functions, SampleMemory(2**10)).round(EVER)
    assert given[0] is memory
    assert given[0].tolist() == [0.75] * 8


def test_elements_and_untimed_operators_have_values() -> None:
    program = program_of(
        """
        x: f32[4, 2] = input("x")
        s: (f32[1, 2], f32[3, 2]) = aten.split_with_sizes(x, [1, 3])
        e: f32[3, 2] = s[1]
        n: f32[3, 2] = aten.exp(e)
        y: f32[3, 2] = aten.neg(n)
        return output("y", y)
        """
    )
    watched = Watched(program)
    timed = {node: function for node, function in watched.functions.items() if node.name != "n"}
    walk = TimedWalk(program, timed, SampleMemory(2**10))
    assert walk.round(EVER)
    assert set(watched.given) == {"s", "y"}


def test_what_raises_is_noted_and_not_called_again() -> None:
    program = program_of(CHAIN)
    watched = Watched(program)
    calls = []

    def fails(_: Tensor) -> Tensor:
        calls.append(1)
        raise ValueError("no")

    b = named(program, "b")
    walk = TimedWalk(program, {**watched.functions, b: fails}, SampleMemory(2**10))
    walk.rounds(EVER)
    assert len(calls) == 1
    assert str(walk.failed[b]) == "no"
    assert "c" in watched.given  # on something made up


def test_what_now_and_then_takes_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(CHAIN)
    clock = [0.0]
    monkeypatch.setattr(walk_module, "_MOST_ROUNDS", 3)
    monkeypatch.setattr(walk_module.time, "perf_counter", lambda: clock[0])

    def slow_in(slow_round: int) -> Any:
        calls: list[float] = []

        def call(value: Tensor) -> Tensor:
            calls.append(10.0 if len(calls) == slow_round else 1.0)
            clock[0] += calls[-1]
            return torch.neg(value)

        return call

    nodes = [named(program, name) for name in "abc"]
    walk = TimedWalk(program, {node: slow_in(index) for index, node in enumerate(nodes)}, SampleMemory(2**10))
    walk.rounds(EVER)
    assert walk.seconds(nodes) == 4.0  # a third of each round's 12


def test_no_time_is_told() -> None:
    program = program_of(CHAIN)
    walk = TimedWalk(program, Watched(program).functions, SampleMemory(2**10))
    assert not walk.round(deadline=0.0)
    assert walk.seconds(list(walk.functions)) is None


def test_arithmetic_that_made_up_numbers_cannot_do_is_made_up_too() -> None:
    program = program_of(
        """
        x: f32[4] = input("x")
        y: f32[4] = aten.neg(x)
        return output("y", y)
        """
    )
    x, y, _ = program.graph.nodes
    with program.graph.inserting_before(y):
        zero = program.graph.call_function(operator.sub, (0.5, 0.5))
        nothing = program.graph.call_function(operator.truediv, (1.0, zero))
    zero.meta["val"], nothing.meta["val"] = 0.0, 1.0
    y.target, y.args = torch.ops.aten.mul.Tensor, (x, nothing)
    given = []
    walk = TimedWalk(program, {y: lambda value, other: given.append(other)}, SampleMemory(2**10))
    assert walk.round(EVER)
    assert given == [0.5]


HELD = """
    x: f32[4] = input("x")
    p: f32[4] = parameter("p")
    held: f32[4] = aten.exp(x)
    a: f32[4] = aten.neg(held)
    b: f32[4] = aten.relu(a)
    u: f32[4] = aten.mul_.Tensor(p, 2.0)
    y: f32[4] = aten.add.Tensor(b, held)
    written: f32[4] = aten.mul_.Tensor(held, 2.0)
    return output("y", y), output("u", u)
    """


def places(most_own: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Watched, dict[str, int]]:
    """What the operators were given in one round, and where their results were."""
    monkeypatch.setattr(walk_module, "_MOST_OWN", most_own)
    program = program_of(HELD)
    watched, made = Watched(program), {}

    def noting(node: fx.Node, function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            made[node.name] = result.data_ptr()
            return result

        return call

    functions = {node: noting(node, function) for node, function in watched.functions.items()}
    assert TimedWalk(program, functions, SampleMemory(2**10)).round(EVER)
    return watched, made


def test_what_there_is_memory_for_lies_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, made = places(48, monkeypatch)
    assert watched.given["y"] == (made["b"], made["held"])
    assert set(watched.given) == {"held", "a", "b", "u", "y", "written"}


def test_what_is_held_longest_shares_memory_where_too_much_is_and_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched, made = places(32, monkeypatch)
    assert watched.given["b"] == (made["a"],)
    assert watched.given["y"][0] == made["b"]
    assert watched.given["y"][1] == watched.given["a"][0] != made["held"]
    assert set(watched.given) == {"held", "a", "b", "u", "y"}


def test_inputs_beyond_the_bound_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = places(16, monkeypatch)
    assert not {"u", "written"} & set(watched.given)


def test_what_to_leave_out_is_found_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_module, "_MOST_OWN", 64)  # most of them

    def work(count: int) -> Any:
        lines = ['x: f32[4] = input("x")', "e0: f32[4] = aten.exp(x)"]
        lines += [f"e{i}: f32[4] = aten.exp(e{i - 1})" for i in range(1, count)]
        lines.append(f"c: f32[{4 * count}] = aten.cat([{', '.join(f'e{i}' for i in range(count))}])")
        program = parse("\n".join([*lines, 'return output("c", c)']))
        return lambda: TimedWalk(program, {}, SampleMemory(2**10))

    grows_linearly(work, 200)
