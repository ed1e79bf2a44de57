"""Measuring operators: keys, what is run on what, what is left out, what stays untouched."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.cost.estimate import computes
from crossfade.cost.keys import key_of
from crossfade.cost.measure import Measurements, measure, measured_as_run
from crossfade.cost.sample import SampleMemory
from crossfade.errors import MachineError
from crossfade.finish.update_in_place import UpdateInPlace
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse

LAYERS = """
    x: f32[16, 8] = input("x")
    w: f32[8, 8] = input("w")
    a: f32[16, 8] = aten.mm(x, w)
    b: f32[16, 8] = aten.mm(a, w)
    r: f32[16, 8] = aten.relu(b)
    return output("r", r)
    """


def program_of(lines: str) -> Program:
    return parse(textwrap.dedent(lines), groups={"dp": 2})


def keys(program: Program, threads: int = 1) -> list[str]:
    return [key_of(node, threads) for node in program.graph.nodes if computes(node)]


def test_equal_work_has_one_key_in_every_program() -> None:
    first, second, relu = keys(program_of(LAYERS))
    assert first == second == "aten.mm.default(f32[16,8], f32[8,8]) cpu x1"
    assert relu == "aten.relu.default(f32[16,8]) cpu x1"
    assert keys(program_of(LAYERS.replace('"x"', '"other"'))) == [first, second, relu]


@pytest.mark.parametrize(
    "line",
    [
        "aten.sum.dim_IntList(x, [1])",
        "aten.sum.dim_IntList(x, [0], True)",
        "aten.sum.dim_IntList(t, [0])",
        "aten.sum.dim_IntList(h, [0])",
        "aten.mean.dim(x, [0])",
    ],
)
def test_other_work_has_another_key(line: str) -> None:
    program = program_of(
        f"""
        x: f32[6, 6] = input("x")
        t: f32[6, 6] = aten.t(x)
        h: bf16[6, 6] = aten._to_copy(x, dtype=bf16)
        a: f32[6] = aten.sum.dim_IntList(x, [0])
        b = {line}
        return output("a", a), output("b", b)
        """
    )
    *_, a, b = keys(program)
    assert a != b
    assert key_of(list(program.graph.nodes)[3], 1) != key_of(list(program.graph.nodes)[3], 2)


def test_symbolic_sizes_have_the_key_of_their_hint() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.t().relu()

    dynamic, static = (
        keys(from_graph_module(make_fx(step, tracing_mode=mode)(torch.ones(6, 8)))) for mode in ("symbolic", "fake")
    )
    assert dynamic == static


def test_every_distinct_operator_is_measured_once() -> None:
    table = measure(program_of(LAYERS), threads=1)
    assert set(table) == set(keys(program_of(LAYERS)))
    assert all(0 < seconds < 5 for seconds in table.values())
    assert repr(table) == "2 measured, 0 left out, 0 unmeasurable"


def test_larger_work_takes_longer() -> None:
    lines = """
        x: f32[512, 512] = input("x")
        s: f32[4, 4] = input("s")
        a: f32[512, 512] = aten.mm(x, x)
        b: f32[4, 4] = aten.mm(s, s)
        return output("a", a), output("b", b)
        """
    large, small = (measure(program_of(lines), threads=1)[key] for key in keys(program_of(lines)))
    assert large > 10 * small


def test_random_state_and_threads_are_left_as_they_were() -> None:
    program = program_of(
        """
        x: f32[64] = input("x")
        d: f32[64] = aten.bernoulli.p(x, 0.5)
        n: f32[64] = aten.rand_like(x)
        return output("d", d), output("n", n)
        """
    )
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    assert len(measure(program, threads=threads + 1)) == 2
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == threads


def test_integers_are_valid_indices() -> None:
    program = program_of(
        """
        w: f32[3, 4] = input("w")
        i: i64[6] = input("i")
        m: b8[6, 4] = input("m")
        e: f32[6, 4] = aten.embedding(w, i)
        g: f32[3, 4] = aten.embedding_dense_backward(e, i, 3, -1, False)
        s: f32[6, 4] = aten.index_select(w, 0, i)
        x: f32[6, 4] = aten.where.self(m, e, s)
        p: f32[3, 4] = aten.index_put_(w, [i], x, True)
        return output("g", g), output("p", p)
        """
    )
    table = measure(program, threads=1)
    assert (len(table), table.unmeasurable) == (5, {})


def test_what_cannot_run_alone_is_told() -> None:
    program = program_of(
        """
        x: f32[4, 4] = input("x")
        l: f32[4, 4] = aten.linalg_cholesky(x)
        y: f32[4, 4] = aten.neg(l)
        return output("y", y)
        """
    )
    table = measure(program, threads=1)
    assert list(table) == ["aten.neg.default(f32[4,4]/1,4) cpu x1"]
    ((key, reason),) = table.unmeasurable.items()
    assert key == "aten.linalg_cholesky.default(f32[4,4]) cpu x1"
    assert "positive-definite" in reason


def test_what_stops_working_is_told_too() -> None:
    calls = []

    def third_time_unlucky(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("no more")

    table = measure(program_of(LAYERS), threads=1, binding=lambda target: third_time_unlucky)
    assert dict(table) == {}
    assert set(table.unmeasurable.values()) == {"ValueError: no more"}


def test_what_stops_working_late_keeps_its_samples() -> None:
    calls: Counter[str] = Counter()

    def unlucky_later(target: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[str(target)] += 1
            if calls[str(target)] > 8:
                raise ValueError("no more")
            return target(*args)

        return call

    table = measure(program_of(LAYERS), threads=1, binding=unlucky_later)
    assert (len(table), table.unmeasurable) == (2, {})
    assert set(calls.values()) == {9, 10}  # the two products fail one after the other


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_what_runs_beside_an_absent_device_is_measured_alone() -> None:
    program = program_of(LAYERS)
    x, w, a, b, r, _ = program.graph.nodes
    with program.fake_mode:
        for node in (x, w, a, b):
            node.meta["val"] = torch.empty(node.meta["val"].shape, device="cuda")
    with program.graph.inserting_before(r):
        host = program.graph.call_function(torch.ops.aten.zeros.default, ([16, 8],))
    host.meta["val"] = r.meta["val"]
    r.args = (host,)
    table = measure(program, threads=1)
    assert [key.partition("(")[0] for key in table] == ["aten.relu.default", "aten.zeros.default"]
    assert set(table.unmeasurable.values()) == {"no cuda device here"}


def test_no_time_leaves_everything_out_and_says_so() -> None:
    table = measure(program_of(LAYERS), threads=1, seconds=0.0)
    assert dict(table) == {}
    assert sorted(table.left_out) == sorted(set(keys(program_of(LAYERS))))


def test_the_dearest_come_first() -> None:
    program = program_of(
        """
        s: f32[2] = input("s")
        x: f32[256, 256] = input("x")
        a: f32[2] = aten.neg(s)
        b: f32[256, 256] = aten.mm(x, x)
        return output("a", a), output("b", b)
        """
    )
    table = measure(program, threads=1, seconds=0.0)
    assert [key.partition("(")[0] for key in table.left_out] == ["aten.mm.default", "aten.neg.default"]


def test_known_times_are_taken_over_and_progress_is_told() -> None:
    (first, _, relu), seen = keys(program_of(LAYERS)), []
    table = measure(program_of(LAYERS), threads=1, known={first: 9.0}, progress=lambda *done: seen.append(done))
    assert table[first] == 9.0
    assert table[relu] < 9.0
    assert seen == [(1, 2), (2, 2)]


def test_the_given_binding_is_called() -> None:
    called = []

    def binding(target: Any) -> Any:
        return lambda *args: called.append([tuple(value.shape) for value in args])

    measure(program_of(LAYERS), threads=1, binding=binding)
    assert [(16, 8), (8, 8)] in called


@pytest.mark.parametrize("strides", [(8, 1), (1, 4), (16, 2), (0, 1)])
def test_made_up_tensors_have_sizes_strides_and_normal_numbers(strides: tuple[int, int]) -> None:
    like = torch.empty_strided((4, 8), strides, dtype=torch.bfloat16)
    memory = SampleMemory(2**12)
    for _ in range(50):
        made = memory.value(like)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        assert made.min() >= 0.5
        assert made.max() <= 1.0


def test_arguments_lie_elsewhere_each_time_and_larger_ones_than_the_memory_work() -> None:
    memory = SampleMemory(2**12)
    places = {memory.value(torch.empty(16)).data_ptr() for _ in range(16)}
    assert len(places) == 16
    large, again = memory.value(torch.empty(5000)), memory.value(torch.empty(5000))
    assert large.shape == (5000,)
    assert large.data_ptr() == again.data_ptr()


def test_tables_are_kept_as_files(tmp_path: Path) -> None:
    table = Measurements({"a": 1e-6}, left_out=["b"], unmeasurable={"c": "it raised"})
    again = Measurements.load(table.save(tmp_path / "times.json"))
    assert (again, again.left_out, again.unmeasurable) == (table, ["b"], {"c": "it raised"})
    with pytest.raises(MachineError, match="no file"):
        Measurements.load(tmp_path / "none.json")
    with pytest.raises(MachineError, match="a table of measurements, seconds = 3: expected an object"):
        Measurements.from_json('{"seconds": 3}')


def test_updates_are_measured_in_the_memory_that_they_replace() -> None:
    """The program speaks of `add`, which is `add_` when it runs: the time is known by both names."""
    program = parse(
        textwrap.dedent("""
        p: f32[64] = parameter("p")
        g: f32[64] = input("g")
        half: f32[64] = aten.mul.Tensor(g, 0.5)
        new: f32[64] = aten.add.Tensor(p, half)
        return update("p", new)
        """)
    )
    called: list[str] = []

    def binding(operator: Any) -> Any:
        called.append(str(operator))
        return operator

    found = measured_as_run(program, [UpdateInPlace()], threads=1, binding=binding)
    assert sorted(called) == ["aten.add_.Tensor", "aten.mul.Tensor"]
    assert found["aten.add.Tensor(f32[64], f32[64]) cpu x1"] == found["aten.add_.Tensor(f32[64], f32[64]) cpu x1"]
    assert set(found) >= {key_of(node, 1) for node in program.graph.nodes if node.op == "call_function"}
    assert not found.left_out and not found.unmeasurable
    assert str(program.graph).count("add_.") == 0
