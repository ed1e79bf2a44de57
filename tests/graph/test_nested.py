"""Graphs inside programs: read, written, verified, hashed, and given to the passes that ask for them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.errors import PassError, TextError, VerifyError
from crossfade.graph.nested import nested_graphs, node_count
from crossfade.graph.passes import Numerics, Pass, PassResult, fingerprint, run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.remove_aliases import RemoveAliases
from crossfade.simplify.remove_dead_code import RemoveDeadCode

COND = textwrap.dedent("""
    def yes():
        x: f32[4] = input("x")
        detach: f32[4] = aten.detach(x)
        sin: f32[4] = aten.sin(detach)
        return output("0", sin)
    def no():
        def inner():
            y: f32[4] = input("y")
            alias: f32[4] = aten.alias(y)
            cos: f32[4] = aten.cos(alias)
            return output("0", cos)
        x: f32[4] = input("x")
        some: b8[] = aten.any(x)
        inner: graph = constant("inner")
        cond: (f32[4],) = higher_order.cond(some, inner, inner, (x,))
        getitem: f32[4] = cond[0]
        return output("0", getitem)
    p: b8[] = input("p")
    x: f32[4] = input("x")
    yes: graph = constant("yes")
    no: graph = constant("no")
    cond: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    getitem: f32[4] = cond[0]
    return output("y", getitem)
""").strip()

LOOP = textwrap.dedent("""
    def go_on():
        x: f32[2, 2] = input("x")
        n: i64[] = input("n")
        lt: b8[] = aten.lt.Scalar(n, 3)
        return lt
    def body():
        x: f32[2, 2] = input("x")
        n: i64[] = input("n")
        detach: f32[2, 2] = aten.detach(x)
        more: f32[2, 2] = aten.{op}
        one: i64[] = aten.add.Tensor(n, 1)
        return output("0", more), output("1", one)
    x: f32[2, 2] = input("x")
    n: i64[] = input("n")
    go_on: graph = constant("go_on")
    body: graph = constant("body")
    while_loop: (f32[2, 2], i64[]) = higher_order.while_loop(go_on, body, (x, n), ())
    last: f32[2, 2] = while_loop[0]
    return output("x", last)
""").strip()


def run(program: Program, *inputs: Tensor) -> list[Tensor]:
    return list(program.module()(*inputs))


@pytest.mark.parametrize("text", [COND, LOOP.format(op="exp(detach)")], ids=["cond", "while"])
def test_text_is_read_back(text: str):
    program = parse(text)
    assert render(program) == text
    verify(program, recompute=True)
    assert render(program.copy()) == text


def test_a_graph_that_is_not_there_is_an_error_of_its_line():
    with pytest.raises(TextError, match=r"a function above it, `def yes\(\):`"):
        parse('yes: graph = constant("yes")\nreturn output("y", yes)')


def first_call(module: fx.GraphModule) -> fx.Node:
    return next(node for node in module.graph.nodes if node.op == "call_function")


def traced(kind: str, mode: str) -> fx.GraphModule:
    x = torch.linspace(0, 1, 12).view(4, 3)
    if kind == "cond":
        return make_fx(lambda x: torch.cond(x.sum() > 1, torch.sin, torch.cos, (x,)), tracing_mode=mode)(x)
    if kind == "while":
        return make_fx(lambda x: torch.while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x,)), tracing_mode=mode)(
            x
        )
    if kind == "map":
        from torch._higher_order_ops.map import map as map_rows

        return make_fx(lambda x: map_rows(lambda row: row.sin(), x), tracing_mode=mode)(x)
    from torch._higher_order_ops.scan import scan

    return make_fx(lambda x: scan(lambda c, row: (c + row, c * row), x[0].clone(), x), tracing_mode=mode)(x)


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
@pytest.mark.parametrize("kind", ["cond", "while", "map", "scan"])
def test_traced_programs_are_accepted(kind: str, mode: str):
    module = traced(kind, mode)
    program = from_graph_module(module)
    verify(program, recompute=True)
    text = render(program)
    assert text.startswith("def ") and "higher_order." in text
    done = run_passes(program, [RemoveAliases(), RemoveDeadCode()])
    x = torch.linspace(0, 2, 12).view(4, 3)
    expected = torch.utils._pytree.tree_leaves(module(x))
    assert all(torch.equal(found, wanted) for found, wanted in zip(run(done, x), expected, strict=True))


def test_passes_reach_graphs_at_every_depth():
    program = parse(COND)
    done = run_passes(program, [RemoveAliases()])
    (record,) = done.history
    assert (record.changed, dict(record.counts)) == (True, {"detach": 1, "alias": 1})
    assert record.nodes_before == node_count(program) == 7 + 4 + 6 + 4
    assert record.nodes_after == record.nodes_before - 2
    assert record.before == COND
    assert "aten.detach" not in record.after and "aten.alias" not in record.after
    assert render(program) == COND, "the original keeps its graphs"
    x = torch.randn(4)
    for p in (True, False):
        assert torch.equal(*run(done, torch.tensor(p), x), *run(program, torch.tensor(p), x))
    verify(done, recompute=True)


def test_one_graph_of_two_names_stays_one():
    program = parse(COND)
    program.constants = {**program.constants, "no": program.constants["yes"]}
    done = run_passes(program, [RemoveAliases()])
    assert dict(done.history[0].counts) == {"detach": 1}
    assert done.constants["yes"] is done.constants["no"] is not program.constants["yes"]


def test_declines_inside_carry_the_name_of_the_graph():
    text = COND.replace('return output("0", sin)', 'again: f32[4] = aten.detach(x)\n    return output("0", again)', 1)
    verdicts = run_passes(parse(text), [RemoveAliases()]).history[0].verdicts
    reason = "it is a result of the program, which keeps a tensor of its own"
    assert [(verdict.subject, verdict.reason) for verdict in verdicts] == [("yes.again", reason)]


def test_passes_that_do_not_ask_see_only_the_program():
    @dataclass(frozen=True)
    class Outside(Pass):
        name = "stay-outside"
        numerics = Numerics.BITWISE

        def run(self, program: Program) -> PassResult:
            return PassResult(False, {"nodes": len(program.graph.nodes)})

    assert run_passes(parse(COND), [Outside()]).history[0].counts == {"nodes": 7}


@dataclass(frozen=True)
class LieInside(Pass):
    """Changes a nested graph and says it did not; or breaks it."""

    name = "lie-inside"
    numerics = Numerics.BITWISE
    nested = True
    breaks: bool = False
    outside: bool = False

    def run(self, program: Program) -> PassResult:
        if self.outside:
            first_call(next(iter(nested_graphs(program).values()))).target = torch.ops.aten.exp.default
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.exp.default
                if self.breaks:
                    del node.meta["val"]
                return PassResult(self.breaks)
        return PassResult(False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (LieInside(), "reporting changed=False on a graph that did change"),
        (LieInside(outside=True), "reporting changed=False on a graph that did change"),
        (LieInside(breaks=True), "which left a broken program at node sin"),
    ],
)
def test_the_runner_sees_inside(broken: Pass, message: str):
    with pytest.raises(PassError, match=message):
        run_passes(parse(COND), [broken])


def test_a_new_graph_is_verified():
    @dataclass(frozen=True)
    class PutBroken(Pass):
        name = "put-broken"
        numerics = Numerics.BITWISE

        def run(self, program: Program) -> PassResult:
            other = parse(COND).constants["yes"]
            del first_call(other).meta["val"]
            program.constants = {**program.constants, "no": other}
            return PassResult(True)

    with pytest.raises(PassError, match="left a broken program at node detach"):
        run_passes(parse(COND), [PutBroken()])


def test_verify_looks_inside():
    program = parse(COND)
    del first_call(program.constants["yes"]).meta["val"]
    with pytest.raises(VerifyError, match="has no metadata"):
        verify(program)
    verify(program, nested=False)


def test_the_hash_sees_inside():
    program = parse(COND)
    assert fingerprint(program) == fingerprint(parse(COND))
    for change in (("aten.sin", "aten.exp"), ("aten.cos", "aten.exp")):
        assert fingerprint(parse(COND.replace(*change))) != fingerprint(program)


def test_loops_whose_values_change_their_strides_are_left_alone():
    """In its second turn the body would read `x` transposed, though its metadata says otherwise."""
    steady = run_passes(parse(LOOP.format(op="exp(detach)")), [RemoveAliases()])
    assert dict(steady.history[0].counts) == {"detach": 1}
    program = parse(LOOP.format(op="exp(detach)"))
    more = next(node for node in program.constants["body"].graph.nodes if node.name == "more")
    more.meta["val"] = more.meta["val"].t()
    done = run_passes(program, [RemoveAliases()])
    assert not done.history[0].changed
    reason = "what its caller carries from turn to turn lies in memory differently"
    assert [(v.subject, v.reason) for v in done.history[0].verdicts] == [("go_on", reason), ("body", reason)]


def test_callers_that_may_batch_their_graph_keep_it_as_it_is():
    program = parse(COND)
    cond = next(node for node in program.graph.nodes if node.name == "cond")
    cond.target = torch.ops.higher_order.wrap
    done = run_passes(program, [RemoveAliases()])
    assert not done.history[0].changed
    reason = "its caller may give it other values than its metadata describes"
    assert [(v.subject, v.reason) for v in done.history[0].verdicts] == [("yes", reason), ("no", reason)]


def test_graphs_of_another_dialect_are_neither_shown_nor_changed():
    program = parse(COND)
    other = fx.symbolic_trace(lambda x: (x.sin(),))
    program.constants = {**program.constants, "yes": other}
    verify(program)
    assert render(program).startswith("def yes():\n    ...\ndef no():")
    done = run_passes(program, [RemoveAliases()])
    assert done.constants["yes"] is other
    assert ("yes", "its graph is not one of operators with metadata") in {
        (v.subject, v.reason) for v in done.history[0].verdicts
    }


@pytest.mark.parametrize(("op", "stays"), [("aten.sin", False), ("aten.rand_like", True)])
def test_dead_calls_stay_if_something_happens_inside(op: str, stays: bool):
    text = COND.replace('return output("y", getitem)', 'return output("y", x)').replace("aten.cos", op)
    names = [node.name for node in run_passes(parse(text), [RemoveDeadCode()]).graph.nodes]
    assert ("cond" in names) == stays
