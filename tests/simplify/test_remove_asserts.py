"""Checks that metadata answers go, and so do profiler marks; what checks data stays until it is asked to go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.capture.exported import capture_exported
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.verify import verify
from crossfade.simplify.remove_asserts import RemoveAsserts
from crossfade.simplify.remove_dead_code import RemoveDeadCode
from tests.simplify.holds import declines, program_of, rewrites


def check_of(*asked: Any, **named: Any) -> Program:
    """A program that checks the metadata of a tensor of [4, 2]."""
    program = program_of("""
        x: f32[4, 2] = input("x")
        check: None = aten._assert_tensor_metadata(x)
        neg: f32[4, 2] = aten.neg(x)
        return output("y", neg)
    """)
    x, check, _, _ = program.graph.nodes
    check.args, check.kwargs = (x, *asked), named
    return program


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (([4, 2],), {}),
        ((None, [2, 1]), {}),
        ((), {"dtype": torch.float32}),
        ((), {"device": torch.device("cpu")}),
        ((), {"layout": torch.strided}),
        (([4, 2], [2, 1], torch.float32), {"device": torch.device("cpu"), "layout": torch.strided}),
    ],
)
def test_checks_that_metadata_answers_go(asked: tuple, named: dict):
    done = run_passes(check_of(*asked, **named), [RemoveAsserts()])
    assert [node.name for node in done.graph.nodes] == ["x", "neg", "output"]
    assert done.history[0].counts == {"checks": 1, "marks": 0}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (([4, 3],), {}),
        ((None, [1, 4]), {}),
        ((), {"dtype": torch.float64}),
        ((), {"device": torch.device("meta")}),
        ((), {"layout": torch.sparse_coo}),
    ],
)
def test_checks_that_metadata_does_not_answer_stay(asked: tuple, named: dict):
    done = run_passes(check_of(*asked, **named), [RemoveAsserts()])
    assert not done.history[0].changed
    assert [verdict.reason for verdict in done.history[0].verdicts] == ["metadata does not say that it holds"]


VALUES = """
    x: f32[4] = input("x")
    ok: b8[] = aten.any(x)
    check: None = aten._assert_async.msg(ok, "all zeros")
    neg: f32[4] = aten.neg(x)
    return output("y", neg)
"""


def test_checks_of_values_stay_until_asked_to_go():
    declines(RemoveAsserts(), VALUES, "it checks values, which nothing else does")
    done = run_passes(program_of(VALUES), [RemoveAsserts(values=True), RemoveDeadCode()])
    assert [node.name for node in done.graph.nodes] == ["x", "neg", "output"]


def test_a_condition_known_to_hold_goes():
    rewrites(
        RemoveAsserts(),
        """
        x: f32[4] = input("x")
        check: None = aten._assert_scalar(True, "never")
        return output("x", x)
        """,
        """
        x: f32[4] = input("x")
        return output("x", x)
        """,
        {"checks": 1},
    )


class Rows(torch.nn.Module):
    """As many rows of ones as its input says, twice."""

    def forward(self, count: torch.Tensor) -> torch.Tensor:
        rows = count.item()
        torch._check(rows >= 2)
        torch._check(rows <= 9)
        return torch.ones(rows, 3).sum(1)


def test_sizes_from_data_keep_their_range():
    program = capture_exported(torch.export.export(Rows(), (torch.tensor(4),)))
    done = run_passes(program, [RemoveAsserts(), RemoveDeadCode()])
    checks = [str(node.target) for node in done.graph.nodes if "assert" in str(node.target)]
    assert checks, "torch checks the range"
    assert {verdict.reason for verdict in done.history[0].verdicts} <= {
        "it checks values, which nothing else does",
        "it says what sizes read from data can be",
    }
    free = run_passes(program, [RemoveAsserts(values=True, sizes=True), RemoveDeadCode()])
    assert not [node for node in free.graph.nodes if "assert" in str(node.target) or "constrain" in str(node.target)]
    verify(free)
    (rows,) = free.module()(torch.tensor(4))
    assert rows.tolist() == [3.0] * 4


SIZES = """
    count: int = input("count")
    x: f32[4] = input("x")
    check: None = aten.sym_constrain_range_for_size(count)
    return output("x", x)
"""


def test_ranges_of_sizes_stay_until_asked_to_go():
    declines(RemoveAsserts(values=True), SIZES, "it says what sizes read from data can be")
    assert run_passes(program_of(SIZES), [RemoveAsserts(sizes=True)]).history[0].counts == {"checks": 1, "marks": 0}


class Marked(torch.nn.Module):
    """A model with a range for the profiler."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mark = torch.ops.profiler._record_function_enter_new("inside", None)
        y = x.relu()
        torch.ops.profiler._record_function_exit._RecordFunction(mark)
        return y


def test_profiler_marks_go_in_pairs():
    module = make_fx(Marked(), tracing_mode="fake")(torch.ones(3))
    assert len(module.graph.nodes) == 5
    program = from_graph_module(module)
    done = run_passes(program, [RemoveAsserts()])
    assert done.history[0].counts == {"checks": 0, "marks": 2}
    kept = run_passes(program, [RemoveAsserts(marks=False)])
    assert [verdict.reason for verdict in kept.history[0].verdicts] == ["something uses its result", "marks are kept"]
