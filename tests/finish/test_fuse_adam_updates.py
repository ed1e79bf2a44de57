"""Adam's update as one call: the same numbers within rounding, where its steps may be done at once, and where not."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.execute.executable import Executable
from crossfade.finish.fuse_adam_updates import FuseAdamUpdates
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.growth import grows_linearly

UPDATE = """
    mean: f32[4] = aten.lerp_.Scalar(m, g, 0.1)
    decayed: f32[4] = aten.mul_.Tensor(v, 0.99)
    square: f32[4] = aten.addcmul_(decayed, g, g, value=0.01)
    root: f32[4] = aten.sqrt(square)
    corrected: f32[4] = aten.div_.Tensor(root, c)
    denominator: f32[4] = aten.add_.Tensor(corrected, 1e-08)
    new: f32[4] = aten.addcdiv_(p, mean, denominator, value=s)
"""


def program_of(update: str = UPDATE, *, dtype: str = "f32", returned: str = "p") -> Program:
    text = f"""
        p: f32[4] = parameter("p")
        m: f32[4] = optimizer_state("m")
        v: f32[4] = optimizer_state("v")
        x: f32[4] = input("x")
        c: float = scalar("correction")
        s: float = scalar("size")
        g: f32[4] = aten.neg(x)
        {textwrap.indent(textwrap.dedent(update), "        ").strip()}
        return output("out", {returned})
    """
    return parse(textwrap.dedent(text).replace("f32", dtype))


def fused(program: Program, smallest_kb: float = 0.0) -> Program:
    return run_passes(program, [FuseAdamUpdates(smallest_kb)])


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-6), ("f64", 1e-14)])
@pytest.mark.parametrize("elements", [4, 37])
@pytest.mark.parametrize(("correction", "size"), [(0.1, -0.01), (1.0, -1e-3), (0.999, 0.02)])
def test_numbers_are_those_of_the_steps(
    dtype: str, tolerance: float, elements: int, correction: float, size: float
) -> None:
    torch.manual_seed(0)
    plain = parse(str(program_of(dtype=dtype)).replace("[4]", f"[{elements}]"))
    done = fused(plain)
    assert [node.name for node in done.graph.nodes if "adam_" in str(node.target)] == ["adam_"]
    kind = torch.float32 if dtype == "f32" else torch.float64
    given = [torch.randn(elements, dtype=kind), torch.randn(elements, dtype=kind), torch.rand(elements, dtype=kind)]
    given.append(torch.randn(elements, dtype=kind))
    ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    for tensors, program in ((ours, done), (theirs, plain)):
        for _ in range(3):
            Executable(program, {})([*tensors, correction, size])
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not torch.equal(ours[0], given[0])


AMONG = "    square: f32[4] = aten.addcmul_(decayed, g, g, value=0.01)\n"
NOT_ADAM = "what it divides by is not Adam's"
USED = "something else uses a step of the update"
LAYOUT = "it is not contiguous, or not in single or double precision, on the CPU"

LEFT = {
    "the largest square so far (amsgrad)": (
        UPDATE.replace("aten.sqrt(square)", "aten.maximum(square, x)")
        .replace("root:", "root0:")
        .replace("    corrected", "    root: f32[4] = aten.sqrt(root0)\n    corrected"),
        "p",
        NOT_ADAM,
    ),
    "another gradient for the square": (UPDATE.replace("(decayed, g, g", "(decayed, g, x"), "p", NOT_ADAM),
    "shares that do not add up": (UPDATE.replace("value=0.01", "value=0.02"), "p", NOT_ADAM),
    "a mean that something reads": (UPDATE + "    read: f32[4] = aten.neg(mean)\n", "read", USED),
    "a square that is returned": (UPDATE, "v", USED),
    "a moment that is read before it changes": ("    read: f32[4] = aten.neg(m)\n" + UPDATE, "read", USED),
    "a gradient that is overwritten": (
        UPDATE.replace("    root:", "    over: f32[4] = aten.mul_.Tensor(g, 2.0)\n    root:"),
        "p",
        "its gradient is overwritten before the update ends",
    ),
    "a gradient in another order": (
        UPDATE.replace("f32[4]", "f32[2, 2]")
        .replace("m, g,", "m2, gt,")
        .replace("g, g,", "gt, gt,")
        .replace("_.Tensor(v", "_.Tensor(v2")
        .replace("(p,", "(p2,")
        .replace(
            "    mean",
            "    m2: f32[2, 2] = aten.view(m, [2, 2])\n    v2: f32[2, 2] = aten.view(v, [2, 2])\n"
            "    p2: f32[2, 2] = aten.view(p, [2, 2])\n    g2: f32[2, 2] = aten.view(g, [2, 2])\n"
            "    gt: f32[2, 2] = aten.t(g2)\n    mean",
            1,
        ),
        "p",
        LAYOUT,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_an_update_is_left_as_it_is(name: str) -> None:
    update, returned, reason = LEFT[name]
    before = program_of(update, returned=returned)
    done = fused(before)
    assert [str(verdict) for verdict in done.history[-1].verdicts] == [f"new: left alone: {reason}"]
    assert str(done) == str(before)


def test_half_precision_is_left_as_it_is() -> None:
    (verdict,) = fused(program_of(dtype="bf16")).history[-1].verdicts
    assert verdict.reason == LAYOUT


def test_what_is_small_is_left_for_others_to_group() -> None:
    assert fused(program_of(), smallest_kb=1).history[-1].verdicts == ()


def test_steps_far_apart_are_not_looked_through() -> None:
    between = "".join(f"    n{i}: f32[4] = aten.neg(x)\n" for i in range(300))
    (verdict,) = fused(program_of(UPDATE.replace("    root:", between + "    root:"))).history[-1].verdicts
    assert verdict.reason == "its steps are far apart"


def test_time_grows_with_the_number_of_updates() -> None:
    def of(updates: int) -> Any:
        lines = []
        for i in range(updates):
            lines += [f'p{i}: f32[4] = parameter("p{i}")', f'm{i}: f32[4] = optimizer_state("m{i}")']
            lines += [f'v{i}: f32[4] = optimizer_state("v{i}")']
        lines += ['x: f32[4] = input("x")', 'c: float = scalar("c")', 's: float = scalar("s")']
        for i in range(updates):
            text = f"g: f32[4] = aten.neg(x)\n{textwrap.dedent(UPDATE)}"
            for name in ("mean", "decayed", "square", "root", "corrected", "denominator", "new", "p", "m", "v", "g"):
                for before, after in ((" ", ","), ("(", ","), ("(", ")"), ("\n", ":"), (" ", ")")):
                    text = ("\n" + text).replace(f"{before}{name}{after}", f"{before}{name}{i}{after}")[1:]
            lines += text.strip().splitlines()
        lines.append('return output("x", x)')
        program = parse("\n".join(line for line in lines if line))
        return lambda: fused(program)

    grows_linearly(of, 100)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_only_a_planned_step_has_other_bits_than_torch(kind: Any) -> None:
    """One device is not planned, whatever machine is given: every bit is the default optimizer's."""
    models = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(300, 300)
        optimizer = kind(model.parameters(), lr=1e-2, foreach=False)
        x = torch.randn(4, 300)
        if ours:
            step = cf.compile_step(model, lambda out: out.square().mean(), optimizer, machine="ethernet-1gbit")
            for _ in range(3):
                step(x)
            assert "adam_" not in str(step.program)
        else:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)
