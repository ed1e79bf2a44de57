"""Splicing: functions recorded with metadata and provenance, on bare or on fake tensors, with symbolic sizes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.errors import RewriteError
from crossfade.graph import collectives
from crossfade.graph import splice as splicing
from crossfade.graph.program import from_graph_module
from crossfade.graph.splice import after, erase_if_dead, inline, insert_call
from crossfade.graph.splice import splice as splice_into
from crossfade.graph.verify import verify
from tests.graph.small_programs import TWO, body, named, program_of

aten = torch.ops.aten


def test_metadata_and_provenance():
    program = program_of(TWO)
    n = named(program)
    n["y"].meta["stack_trace"] = 'File "model.py", line 3, in forward'
    n["y"].meta["nn_module_stack"] = {"layer": ("layer", torch.nn.Linear)}
    n["y"].meta["private"] = "stays"
    result = splice_into(program, lambda a, k: (a.exp() * k).sum(0), n["x"], 2.0, before=n["z"], like=n["y"])
    program.set_results([result])
    verify(program, recompute=True)
    assert body(program)[1:4] == [
        "exp: f32[4, 2] = aten.exp(x)",
        "mul: f32[4, 2] = aten.mul.Tensor(exp, 2.0)",
        "sum_1: f32[2] = aten.sum.dim_IntList(mul, [0])",
    ]
    for name in ("exp", "mul", "sum_1"):
        meta = named(program)[name].meta
        assert meta["stack_trace"] == n["y"].meta["stack_trace"]
        assert meta["nn_module_stack"] == n["y"].meta["nn_module_stack"]
        assert "private" not in meta


def test_results_of_any_structure_and_untouched_inputs():
    program = program_of(TWO)
    n = named(program)
    found = splice_into(
        program, lambda ab: {"a": ab[0], "sum": [ab[0] + ab[1], 3]}, [n["x"], n["y"]], before=n["z"], like=n["y"]
    )
    assert found["a"] is n["x"] and found["sum"][1] == 3
    assert found["sum"][0].args == (n["x"], n["y"])


def test_multiple_outputs():
    program = program_of(TWO)
    n = named(program)
    low, high = splice_into(program, lambda a: torch.aminmax(a, dim=0), n["x"], before=n["z"], like=n["y"])
    assert (low.target, low.args[1], high.args[1]) == (operator.getitem, 0, 1)
    assert low.args[0].target is aten.aminmax.default
    assert [tuple(node.meta["val"].shape) for node in (low, high)] == [(2,), (2,)]


def test_nodes_that_share_one_fake_tensor_are_told_apart():
    program = program_of("""
        x: f32[4] = input("x")
        parts: (f32[1], f32[3]) = aten.split_with_sizes(x, [1, 3])
        a: f32[3] = parts[1]
        b: f32[3] = parts[1]
        return output("a", a), output("b", b)
    """)
    n = named(program)
    assert n["a"].meta["val"] is n["b"].meta["val"]
    total = splice_into(program, lambda p, q: p.view(3) - q.view(3), n["a"], n["b"], before=n["output"], like=n["a"])
    assert [source.args[0] for source in total.args] == [n["a"], n["b"]]
    assert [source.meta["val"].storage_offset() for source in total.args] == [1, 1], "still the same place in x"
    storages = {source.meta["val"].untyped_storage()._cdata for source in total.args}
    assert storages == {n["x"].meta["val"].untyped_storage()._cdata}


def test_foreign_tensors_are_refused():
    program = program_of(TWO)
    n = named(program)
    foreign = n["y"].meta["val"]
    message = r"a tensor of shape \(4, 2\) that the spliced function did not make or receive"
    with pytest.raises(RewriteError, match=message):
        splice_into(program, lambda a: a + foreign, n["x"], before=n["z"], like=n["y"])
    with pytest.raises(RewriteError, match=message):
        splice_into(program, lambda a: foreign, n["x"], before=n["z"], like=n["y"])


PLAIN = {
    "packed": lambda a, b: torch.cat([a.view(-1), b.reshape(-1)]) / 2,
    "unpacked": lambda a, b: [part.view(2, -1) for part in a.view(-1).split([2, 6])],
    "strided": lambda a, b: (a.t()[1:], b.transpose(0, 1).unsqueeze(0), a.expand(3, 4, 2), a + b, a.sum(1)),
    "copied": lambda a, b: (a.t().clone(), a.t().clone(memory_format=torch.contiguous_format), -a * 2.0),
    "bytes": lambda a, b: a.view(torch.uint8),
    "exchanged": lambda a, b: collectives.wait(collectives.all_gather(a, 2, "dp")),
}


@pytest.mark.parametrize("function", PLAIN.values(), ids=PLAIN)
def test_plain_functions_are_described_as_fake_tensors_describe_them(function, monkeypatch):
    def spliced() -> tuple[list[str], list]:
        program = program_of(TWO)
        n = named(program)
        splice_into(program, function, n["x"], n["y"], before=n["output"], like=n["z"])
        verify(program, recompute=True)
        return body(program), [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]

    lines, values = spliced()
    monkeypatch.setattr(splicing, "_is_static", lambda nodes: False)
    assert spliced()[0] == lines
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert len({value.fake_mode for value in tensors}) == 1 and {value.device.type for value in tensors} == {"cpu"}


def symbolic(*shapes: tuple[int, ...]):
    """A program of inputs with symbolic sizes, and the shape environment that would gather guards."""
    module = make_fx(lambda *xs: [x.neg() for x in xs], tracing_mode="symbolic")(*(torch.ones(s) for s in shapes))
    program = from_graph_module(module, groups={"dp": 2})
    return program, program.fake_mode.shape_env


def test_symbolic_sizes_stay_symbolic():
    program, env = symbolic((5, 3), (7,))
    n = named(program)
    x, y = (node for node in program.placeholders if isinstance(node.meta["val"], torch.Tensor))

    def function(a, b):
        packed = torch.cat([a.reshape(-1), b])
        first, second = packed.split([a.numel(), b.numel()])
        return first.view(a.shape), second, packed.new_zeros(a.shape[0] * 2 + b.shape[0] // 2)

    guards = len(env.guards)
    results = splice_into(program, function, x, y, before=n["output"], like=n["neg"])
    assert len(env.guards) == guards, "sizes are read, never guessed"
    program.set_results(list(results), (*program.outputs, program.outputs[0]))
    verify(program)
    module = program.module()
    for rows, columns, length in ((5, 3, 7), (2, 4, 6)):
        given = torch.randn(rows, columns), torch.randn(length)
        sizes = iter([rows, columns, length])
        first, second, zeros = module(
            *(given[0] if p is x else given[1] if p is y else next(sizes) for p in program.placeholders)
        )
        assert torch.equal(first, given[0]) and torch.equal(second, given[1])
        assert zeros.shape == (rows * 2 + length // 2,)


def test_a_symbolic_size_that_no_input_has_is_refused():
    program, _ = symbolic((5,), (7,))
    x, y = (node for node in program.placeholders if isinstance(node.meta["val"], torch.Tensor))
    foreign = y.meta["val"].shape[0]
    with pytest.raises(
        RewriteError, match=r"the symbolic size s\d+ in a spliced function, which no shape of its inputs"
    ):
        splice_into(program, lambda a: a.new_zeros(foreign), x, before=program.output_node, like=x)


def test_insert_call_takes_scalars_of_the_graph():
    program = program_of("""
        x: f32[4] = input("x")
        k: int = scalar("k")
        y: f32[4] = aten.neg(x)
        return output("y", y)
    """)
    n = named(program)
    n["y"].meta["stack_trace"] = 'File "model.py", line 3, in forward'
    double = insert_call(program, operator.mul, n["k"], 2, before=n["y"], like=n["y"])
    part = insert_call(program, aten.slice.Tensor, n["x"], 0, n["k"], end=double, before=n["y"], like=n["y"])
    assert body(program)[:2] == [
        "mul: int = operator.mul(k, 2)",
        "slice_1: f32[1] = aten.slice.Tensor(x, 0, k, end=mul)",
    ]
    assert part.meta["stack_trace"] == n["y"].meta["stack_trace"]


def test_inline_copies_with_metadata_of_its_own():
    outer = program_of(TWO)
    inner = outer.copy()
    n = named(outer)
    (found,) = inline(outer, inner.graph, {inner.placeholders[0]: n["z"]}, before=outer.output_node)
    outer.set_results([found])
    verify(outer, recompute=True)
    assert body(outer)[2:] == ["y_1: f32[4, 2] = aten.relu(z)", "z_1: f32[4, 2] = aten.neg(y_1)"]
    found.meta["note"] = 1
    assert "note" not in named(inner)["z"].meta


def test_after_an_input_is_below_all_inputs():
    program = program_of("""
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.neg(y)
        return output("a", a), output("b", b)
    """)
    n = named(program)
    assert after(program, n["x"]) is n["a"] and after(program, n["a"]) is n["b"]


def test_erases_what_only_it_kept_alive():
    program = program_of("""
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        c: f32[4] = aten.add.Tensor(a, b)
        d: f32[4] = aten.sin(x)
        return output("d", d)
    """)
    n = named(program)
    assert erase_if_dead(n["d"]) == 0 and erase_if_dead(n["a"]) == 0 and erase_if_dead(n["x"]) == 0
    assert erase_if_dead(n["c"]) == 3
    assert body(program) == ["d: f32[4] = aten.sin(x)"]


def test_effects_stay():
    program = program_of("""
        x: f32[4] = input("x")
        write: f32[4] = aten.add_.Tensor(x, 1)
        draw: f32[4] = aten.rand_like(x)
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        return output("x", x)
    """)
    n = named(program)
    assert [erase_if_dead(n[name]) for name in ("write", "draw", "w")] == [0, 0, 0]


def test_what_is_recorded_does_not_depend_on_autocast_around():
    program = program_of("""
        x: f32[4, 4] = input("x")
        y: f32[4, 4] = aten.neg(x)
        return output("y", y)
    """)
    n = named(program)
    with torch.autocast("cpu", torch.bfloat16):
        made = splice_into(program, lambda t: t @ t, n["x"], before=n["y"], like=n["y"])
        called = insert_call(program, aten.mm.default, n["x"], n["x"], before=n["y"], like=n["y"])
    assert made.target is aten.mm.default and made.args == (n["x"], n["x"])
    assert made.meta["val"].dtype is called.meta["val"].dtype is torch.float32
