"""Compiled regions compute what the program computes; equal ones are compiled once; each has its verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.compile.overlap import predicted_with_regions
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError
from crossfade.execute import compile_regions as module
from crossfade.execute.codegen import compile_program
from crossfade.execute.compile_regions import compile_regions, why_eager
from crossfade.execute.executable import Executable
from crossfade.execute.inductor import CompiledRegion, Inductor, Layout
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.ranks.cases import train_crossfade, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training_on_ranks import differences

needs_compiler = pytest.mark.skipif(bool(Inductor.missing("cpu")), reason="no C++ compiler")

LAYERS = """
    p: f32[4] = parameter("p")
    q: f32[4] = parameter("q")
    m: f32[4] = optimizer_state("p:m")
    lr: float = scalar("lr")
    x: f32[4] = input("x")
    a: f32[4] = aten.neg(x)
    b: f32[4] = aten.exp(a)
    r: f32[4] = aten.rand_like(b)
    c: f32[4] = aten.neg(r)
    d: f32[4] = aten.exp(c)
    u: f32[4] = aten.mul.Tensor(b, lr)
    new: f32[4] = aten.sub_.Tensor(p, u)
    v: f32[4] = aten.mul.Tensor(d, lr)
    newer: f32[4] = aten.sub_.Tensor(q, v)
    return output("d", d)
"""


@needs_compiler
def test_C1_equal_regions_are_compiled_once_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda compiled, region: True)
    program = parse(LAYERS)
    regions = compile_regions(program)
    assert regions.record.counts == {"regions": 4, "compiled": 4, "distinct": 2, "operators": 8}
    said = [str(verdict) for verdict in regions.record.verdicts]
    compiled = "compiled by Inductor: operators fused, called once: 2 operators, in 2 places"
    assert said[0] == f"a: fused: {compiled}"
    assert said[1] == f"u: fused: {compiled}"
    assert said[2].startswith("r: left alone: it draws random numbers")

    def run(executable: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = [torch.full((4,), float(number)) for number in range(3)]
        (result,) = executable([*inputs, 0.25, torch.arange(4.0)])
        return [result, *inputs]

    for mine, expected in zip(run(Executable(program, {}, regions)), run(Executable(program, {})), strict=True):
        torch.testing.assert_close(mine, expected)


@needs_compiler
def test_regions_that_do_not_pay_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda compiled, region: len(region.inputs) > 1)
    program = parse(LAYERS)
    regions = compile_regions(program)
    assert regions.record.counts["compiled"] == 2
    assert any("measured: compiled it is no faster here" in verdict.reason for verdict in regions.record.verdicts)
    source = compile_program(regions.called_by(program)).source
    assert source.count("eagerly") >= 2
    torch.manual_seed(0)
    executable = Executable(program, {}, regions)
    (result,) = executable([torch.zeros(4), torch.zeros(4), torch.zeros(4), 0.25, torch.ones(4)])
    torch.manual_seed(0)
    torch.testing.assert_close(result, (-torch.rand(4)).exp())


@needs_compiler
@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn with batch norm", marks=pytest.mark.models)])
def test_a_compiled_step_trains_as_eager_torch(name: str) -> None:
    ours = train_crossfade(name, execute="compiled", mesh=None)
    assert differences(train_eager(name), ours, 1e-4, 1e-5) == []


@needs_compiler
@pytest.mark.models
@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_C1_compiled_steps_on_ranks_equal_one_device(ranks: Any, mode: str) -> None:
    eager = train_eager("mlp")
    options = {"execute": "compiled", "data_parallel": mode, "clip_grad_norm": None}
    for trained in ranks(2).run(train_crossfade_on_ranks, "mlp", 2, options):
        assert differences(eager, trained, 1e-4, 1e-5) == []


def test_compiling_draws_no_numbers_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(self: Inductor, region: Any, *, alike: bool) -> Any:
        torch.rand(3)
        return lambda *inputs: compile_program(region).function(list(inputs))

    monkeypatch.setattr(Inductor, "compile", draws)
    monkeypatch.setattr(module, "_pays", lambda compiled, region: True)
    before = torch.random.get_rng_state()
    compile_regions(parse(LAYERS))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_cannot_be_compiled_is_refused_and_auto_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inductor, "missing", staticmethod(lambda device: "no C++ compiler was found"))
    with pytest.raises(CrossfadeError, match=r"no C\+\+ compiler was found.*pass execute=\"eager\""):
        why_eager("compiled", "cpu")
    assert why_eager("auto", "cuda") == "no C++ compiler was found"
    assert "takes longer than it saves" in why_eager("auto", "cpu")


def test_an_unknown_word_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(CrossfadeError, match="'auto' or 'eager' or 'compiled' or 'exact'"):
        cf.compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), execute="fast")  # type: ignore[arg-type]


def test_kernels_are_alike_where_ranks_compute_with_what_they_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels chosen by the clock round differently: replicas would drift apart by their last bits."""
    asked: list[tuple[str, bool]] = []

    def compiled(self: Inductor, region: Program, *, alike: bool) -> Any:
        asked.append((next(node.name for node in region.graph.nodes if node.op == "call_function"), alike))
        return lambda *inputs: compile_program(region).function(list(inputs))

    monkeypatch.setattr(Inductor, "compile", compiled)
    monkeypatch.setattr(module, "_pays", lambda compiled, region: True)
    program = parse(
        """
        p: f32[4] = parameter("p")
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        sent: f32[4] = c10d.all_reduce(b, "avg", "dp")
        c: f32[4] = aten.neg(b)
        d: f32[4] = aten.exp(c)
        came: f32[4] = c10d.wait_tensor(sent)
        u: f32[4] = aten.mul.Tensor(came, 0.1)
        new: f32[4] = aten.sub_.Tensor(p, u)
        return output("d", d)
        """,
        groups={"dp": 2},
    )
    compile_regions(program)
    assert asked == [("a", False), ("c", False), ("u", True)]
    asked.clear()
    compile_regions(program, alike=True)
    assert asked == [("a", True), ("c", True), ("u", True)]


def test_results_have_the_layouts_of_the_program() -> None:
    """Inductor returns a slice of a product that it has padded, and sums without the dimension that they keep."""
    padded = torch.arange(8.0).view(2, 4)
    shapes = [((2, 3), (3, 1)), ((2, 1), (4, 7)), ((2, 4), (4, 1)), ((1, 2), (2, 1))]
    layouts = [Layout(*shape, torch.float32) for shape in shapes]
    region = CompiledRegion(lambda: [padded[:, :3], padded[:, :1], padded, padded.sum(1)], 0.0, layouts)
    first, second, third, fourth = region()
    assert first.stride() == (3, 1) and torch.equal(first, padded[:, :3])
    assert second.data_ptr() == third.data_ptr() == padded.data_ptr()
    assert torch.equal(fourth, padded.sum(1)[None])


@needs_compiler
def test_results_have_the_precision_of_the_program() -> None:
    """Inductor of torch 2.11 would return the gradient of a loss in float32."""
    region = parse("""
        l: bf16[64, 32] = input("l")
        t: i64[64] = input("t")
        g: bf16[] = input("g")
        w: bf16[] = input("w")
        d: bf16[64, 32] = aten.nll_loss_backward(g, l, t, None, 1, -100, w)
        n: bf16[64, 32] = aten.neg(l)
        return output("d", d), output("n", n)
        """)
    given = torch.randn(64, 32).bfloat16(), torch.randint(0, 32, (64,)), torch.ones([]).bfloat16()
    given = (*given, torch.tensor(64.0).bfloat16())
    compiled = Inductor(torch.device("cpu")).compile(region)
    assert [value.dtype for value in compiled.function(*given)] == [torch.bfloat16] * 2
    found = compiled(*given)[0]
    logits, targets, gradient, weight = given
    expected = torch.ops.aten.nll_loss_backward(gradient, logits, targets, None, 1, -100, weight)
    assert torch.equal(found, expected)


@needs_compiler
def test_regions_are_timed_for_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pays", lambda compiled, region: True)
    program = parse(LAYERS)
    regions = compile_regions(program)
    before = torch.random.get_rng_state()
    taken = regions.measured()
    assert set(taken) == set(regions.calls.values()) and len(taken) == 2
    assert all(0 < seconds < 1 for seconds in taken.values())
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr(module.CompiledRegions, "measured", lambda _: taken)  # another measurement has other times
    timeline = predicted_with_regions(program, regions, preset("loopback-gloo"), {})
    assert timeline.busy >= sum(taken[call] for call in regions.calls.values())
