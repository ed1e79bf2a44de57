"""One test for each owed capability of graph simplification, named by its id; the details are beside each pass."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.compile.catalogue import pass_from_spelling
from crossfade.compile.pipeline import simplification
from crossfade.graph.passes import run_passes
from crossfade.graph.program import from_graph_module
from crossfade.simplify.add_matmuls import AddMatmuls
from crossfade.simplify.remove_noops import RemoveNoops
from crossfade.simplify.simplify_nodes import SimplifyNodes
from tests.simplify.holds import declines, program_of, rewrites, same_results
from tests.test_pass_docstrings import example

TANGLED = """
    x: f32[4, 6] = input("x")
    w: f32[6, 6] = parameter("w")
    t: f32[6, 6] = aten.t(w)
    t_1: f32[6, 6] = aten.t(t)
    clone: f32[4, 6] = aten.clone(x)
    mm: f32[4, 6] = aten.mm(clone, t_1)
    again: f32[4, 6] = aten.mm(clone, t_1)
    dead: f32[4, 6] = aten.exp(mm)
    y: f32[4, 6] = aten.add.Tensor(mm, again)
    return output("y", y)
"""


def test_G1_a_pipeline_of_named_passes_with_the_users_own():
    program = program_of(TANGLED)
    pipeline = simplification()
    done = run_passes(program, pipeline)
    assert [node.name for node in done.graph.nodes] == ["x", "w", "mm", "y", "output"]
    same_results(program, done, AddMatmuls.numerics)
    kept = run_passes(program, pipeline.without("remove-noops").after("fold-constants", AddMatmuls()))
    assert [record.name for record in kept.history][1:3] == ["fold-constants", "add-matmuls"]
    assert "clone" in [node.name for node in kept.graph.nodes]


def test_G2_no_ops_go_but_never_make_an_alias():
    text = """
        x: f32[4] = input("x")
        s: f32[4] = aten.slice.Tensor(x, 0, 0, 9223372036854775807)
        c: f32[4] = aten.clone(s)
        n: f32[4] = aten.neg(c)
        return output("n", n)
    """
    rewrites(RemoveNoops(), text, 'x: f32[4] = input("x")\nn: f32[4] = aten.neg(x)\nreturn output("n", n)')
    returned = """
        x: f32[4] = input("x")
        c: f32[4] = aten.clone(x)
        return output("c", c)
    """
    declines(RemoveNoops(), returned, "a result of the program would share memory with an input")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("remove-asserts", id="G3"),
        pytest.param("simplify-cats", id="G4"),
        pytest.param("add-matmuls", id="G5 add(mm, mm)"),
        pytest.param("form-addmm", id="G5 addmm formed"),
        pytest.param("scale-int-matmuls", id="G5 int matmul with scale"),
        pytest.param("reuse-partial-reductions", id="G6 partial reductions"),
        pytest.param("fold-cumsums", id="G7 cumsum"),
        pytest.param("replace-scatters", id="G7 scatter"),
        pytest.param("build-on-device", id="G8"),
        pytest.param("reorder-for-locality", id="G9"),
        pytest.param("lower-maps", id="G10 map"),
        pytest.param("lower-scans", id="G10 scan"),
        pytest.param("lower-auto-functionalized", id="G10 auto_functionalized"),
        pytest.param("canonicalize-views", id="G11"),
        pytest.param("associate-matmuls", id="G12 back to back"),
        pytest.param("overwrite-dead-values", id="G12 in place"),
        pytest.param("merge-common-subexpressions", id="beyond: common subexpressions"),
        pytest.param("fold-constants", id="beyond: constants"),
    ],
)
def test_G3_to_G12_do_what_they_show(name: str):
    step = pass_from_spelling(name)
    before, after = example(type(step))
    done = run_passes(program_of(before), [step])
    assert str(done) == after
    assert done.history[0].changed


def test_G6_softmax_statistics_in_one_pass():
    x = torch.randn(3, 5000) * 20
    highest, total = torch.ops.crossfade.softmax_statistics(x, 1)
    torch.testing.assert_close((x - highest).exp() / total, x.softmax(1))


def test_G12_linears_of_one_input_are_grouped_where_that_pays():
    step = pass_from_spelling("group-linears")
    before, after = example(type(step))
    assert str(run_passes(program_of(before), [step])) == after


def test_one_worklist_reaches_what_passes_in_turn_would_not():
    module = make_fx(lambda x: x.t().t().clone().view(2, 6).view(3, 4).neg(), tracing_mode="fake")(torch.ones(4, 3))
    done = run_passes(from_graph_module(module), [SimplifyNodes()])
    assert sum(node.op == "call_function" for node in done.graph.nodes) == 2  # one view, one neg
