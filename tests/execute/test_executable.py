"""Programs run as they read; an error inside a collective names it."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.execute.executable import Executable
from crossfade.graph.program import MADE_FOR
from crossfade.graph.text import parse, render

TEXT = textwrap.dedent("""
    x: f32[2] = input("x")
    n: f32[2] = aten.neg(x)
    s: f32[2] = c10d.all_reduce(n, "sum", "dp")
    w: f32[2] = c10d.wait_tensor(s)
    v: f32[2] = aten.view(w, [2])
    return output("y", v)
""").strip()


def failure(executable: Executable, *inputs: torch.Tensor) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        executable(list(inputs))
    return caught.value


def test_an_error_in_a_collective_names_it():
    program = parse(TEXT, groups={"dp": 2})
    start = next(node for node in program.graph.nodes if node.name == "s")
    start.meta[MADE_FOR] = "layer.weight"
    executable = Executable(program, {"dp": "no such group"})
    error = failure(executable, torch.ones(2))
    assert executable.collective_at(error) == "all_reduce s [layer.weight] of 8 bytes on group 'dp'"


def test_an_error_in_a_wait_names_what_it_waits_for():
    executable = Executable(parse(TEXT, groups={"dp": 2}), {})
    wait = next(node for node in executable.program.graph.nodes if node.name == "w")
    assert executable._describe(wait) == "all_reduce s of 8 bytes on group 'dp'"


def test_an_error_elsewhere_names_nothing():
    text = 'x: f32[2] = input("x")\nv: f32[2] = aten.view(x, [2])\nreturn output("v", v)'
    executable = Executable(parse(text), {})
    assert executable.collective_at(failure(executable, torch.ones(3))) == ""
    assert executable.collective_at(ValueError("never raised")) == ""


def test_groups_are_renamed_in_a_copy():
    program = parse(TEXT, groups={"dp": 2})
    executable = Executable(program, {"dp": "real"})
    assert render(program) == TEXT
    assert '"real"' in render(executable.program)


def test_no_gradients_are_recorded():
    text = 'p: f32[2] = parameter("p")\nq: f32[2] = aten.add_.Tensor(p, 1)\nreturn output("q", q)'
    parameter = torch.nn.Parameter(torch.zeros(2))
    (result,) = Executable(parse(text), {})([parameter])
    assert parameter.tolist() == [1, 1] and result.grad_fn is None
