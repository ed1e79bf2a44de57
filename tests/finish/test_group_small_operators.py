"""One call for many small tensors: which calls go together, in which order, and that every bit stays."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.compile.training import compile_step
from crossfade.execute.executable import Executable
from crossfade.finish.group_small_operators import GroupSmallOperators
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from tests.growth import grows_linearly


def grouped(text: str, **options: float) -> str:
    return render(run_passes(parse(text, groups={"dp": 2}), [GroupSmallOperators(**options)]))


def body(text: str) -> list[str]:
    return [line for line in text.splitlines() if '("' not in line and not line.startswith("return")]


TWO = """
    a: f32[2] = parameter("a")
    b: f32[3] = parameter("b")
"""
END = '\n    return output("a", a)'


def test_results_that_are_new_are_taken_out_of_the_list() -> None:
    lines = ["s: f32[2] = aten.sqrt(a)", "t: f32[3] = aten.sqrt(b)", "u: f32[2] = aten.add_.Tensor(s, 1.0)"]
    done = grouped(TWO + textwrap.indent("\n".join(lines), "    ") + '\n    return output("u", u), output("t", t)')
    assert body(done) == [
        "_foreach_sqrt: (f32[2], f32[3]) = aten._foreach_sqrt([a, b])",
        "getitem: f32[2] = _foreach_sqrt[0]",
        "getitem_1: f32[3] = _foreach_sqrt[1]",
        "u: f32[2] = aten.add_.Tensor(getitem, 1.0)",
    ]


def test_numbers_of_the_run_make_a_list() -> None:
    text = """
    s: float = scalar("lr.0")
    m: f32[2] = aten.mul_.Tensor(a, s)
    n: f32[3] = aten.mul_.Tensor(b, 2.0)
    """
    done = grouped(TWO + text + END)
    assert "_foreach_mul_: None = aten._foreach_mul_.ScalarList([a, b], [s, 2.0])" in done


LEFT = {
    "a collective stands between": """
    m: f32[2] = aten.mul_.Tensor(a, 2.0)
    w: f32[3] = c10d.all_reduce(b, "sum", "dp")
    r: f32[3] = c10d.wait_tensor(w)
    n: f32[3] = aten.mul_.Tensor(b, 2.0)
    """,
    "one follows the other": """
    m: f32[2] = aten.mul_.Tensor(a, 2.0)
    n: f32[2] = aten.mul_.Tensor(m, 3.0)
    """,
    "one overwrites what the other reads": """
    s: f32[2] = aten.sqrt(a)
    m: f32[2] = aten.mul_.Tensor(a, 2.0)
    t: f32[2] = aten.sqrt(a)
    """,
    "their tensors are of two shapes": """
    c: f32[1] = aten.slice.Tensor(a, 0, 0, 1)
    d: f32[1] = aten.slice.Tensor(b, 0, 0, 1)
    m: f32[2] = aten.copy_(a, c)
    n: f32[3] = aten.copy_(b, d)
    """,
}


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_what_cannot_go_together_stays(text: str) -> None:
    assert "_foreach" not in grouped(TWO + text + END)


def test_places_in_one_buffer_are_written_together() -> None:
    text = """
    w: f32[5] = workspace("w")
    c: f32[2] = aten.slice.Tensor(w, 0, 0, 2)
    m: f32[2] = aten.copy_(c, a)
    d: f32[3] = aten.slice.Tensor(w, 0, 2, 5)
    n: f32[3] = aten.copy_(d, b)
    """
    assert "_foreach_copy_: None = aten._foreach_copy_([c, d], [a, b])" in grouped(TWO + text + END)
    overlapping = text.replace("w, 0, 2, 5)", "w, 0, 1, 4)")
    assert "_foreach" not in grouped(TWO + overlapping + END)


def test_large_tensors_are_called_one_by_one() -> None:
    text = TWO + "    m: f32[2] = aten.mul_.Tensor(a, 2.0)\n    n: f32[3] = aten.mul_.Tensor(b, 2.0)" + END
    assert "_foreach_mul_" in grouped(text)
    assert "_foreach" not in grouped(text, largest_kb=10 / 1024)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_of_many_small_parameters_is_eager_torchs_to_the_last_bit(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(12)))

    ours, theirs = model(), model()
    mine, other = (optimizer(model.parameters(), lr=0.1) for model in (ours, theirs))  # type: ignore[call-arg]
    step = compile_step(ours, torch.nn.functional.mse_loss, mine)
    for number in range(4):
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        mine.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1 / (number + 1)
        step(x, y)
        other.zero_grad()
        torch.nn.functional.mse_loss(theirs(x), y).backward()
        other.step()
    assert "_foreach" in str(step.program)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_it_runs_as_before() -> None:
    text = (
        TWO
        + """
    g: f32[2] = input("g")
    h: f32[3] = input("h")
    l: f32[2] = aten.lerp_.Scalar(a, g, 0.25)
    k: f32[3] = aten.lerp_.Scalar(b, h, 0.25)
    q: f32[2] = aten.addcdiv_(l, g, g, value=0.5)
    r: f32[3] = aten.addcdiv_(k, h, h, value=-0.5)
    return output("q", q), output("r", r)
    """
    )
    before = parse(text)
    after = run_passes(before, [GroupSmallOperators()])
    assert "_foreach_addcdiv_" in str(after)
    values = [torch.rand(2), torch.rand(3), torch.rand(2), torch.rand(3)]
    for result, other in zip(*(Executable(p, {})([v.clone() for v in values]) for p in (before, after)), strict=True):
        assert torch.equal(result, other)


def test_the_time_grows_with_the_program() -> None:
    def work(count: int):
        inputs = [f'p{i}: f32[8] = parameter("p{i}")' for i in range(count)]
        calls = [f"{a}{i}: f32[8] = aten.mul_.Tensor({b}{i}, 2.0)" for i in range(count) for a, b in ("mp", "nm")]
        text = "\n".join([*inputs, *calls, 'return output("y", p0)'])
        return lambda: GroupSmallOperators().run(parse(text))

    grows_linearly(work, 400)
