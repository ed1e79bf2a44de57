"""Program: signature, copies, running, and what is accepted from elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.errors import CaptureError
from crossfade.graph.program import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Program,
    from_graph_module,
    size_hint,
    source_line,
    tensor_bytes,
)
from crossfade.graph.text import parse

STEP = """
    w: f32[4] = parameter("w")
    x: f32[4] = input("x")
    k: f32[4] = constant("sub.k")
    sum_1: f32[4] = aten.add.Tensor(w, x)
    y: f32[4] = aten.mul.Tensor(sum_1, k)
    start: f32[4] = c10d.all_reduce(y, "sum", "dp")
    wait: f32[4] = c10d.wait_tensor(start)
    return update("w", wait), output("y", y), output("nothing", None)
"""


def step() -> Program:
    return parse(STEP, groups={"dp": 2}, constants={"sub.k": torch.full((4,), 2.0)})


def test_signature_runs_parallel_to_the_graph():
    program = step()
    assert [(item.name, node.name) for item, node in program.named_inputs()] == [("w", "w"), ("x", "x")]
    assert [(out.kind.value, str(value)) for out, value in program.named_results()] == [
        ("update", "wait"),
        ("output", "y"),
        ("output", "None"),
    ]
    assert program.input_nodes() == {"w": program.placeholders[0], "x": program.placeholders[1]}


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 3), (2, 2)])
def test_a_signature_that_does_not_fit(inputs, outputs):
    program = step()
    with pytest.raises(CaptureError) as caught:
        Program(program.graph, program.inputs[:inputs], program.outputs[:outputs])
    assert str(caught.value) == (
        f"the graph has 2 placeholders and 3 results: expected {inputs} and {outputs}, as the signature says. "
        "Remedy: describe every placeholder and every flat output once."
    )


def test_a_copy_is_equal_and_independent():
    program = step()
    program.output_node.meta["note"] = "kept"
    text = str(program)
    copied = program.copy()
    assert str(copied) == text
    assert copied.fake_mode is program.fake_mode
    assert copied.output_node.meta == {"note": "kept"}
    assert not set(copied.graph.nodes) & set(program.graph.nodes)

    y = next(node for node in copied.graph.nodes if node.name == "y")
    y.target = torch.ops.aten.sub.Tensor
    y.meta["val"] = None
    copied.set_results([y], (Output(OutputKind.LOSS, "y"),))
    copied.groups["tp"] = 4
    copied.constants["sub.k"] = None
    assert str(program) == text
    assert (dict(program.groups), program.constants["sub.k"].shape) == ({"dp": 2}, (4,))


def test_module_runs_the_program():
    program = parse(STEP.replace("wait)", "y)"), constants={"sub.k": torch.full((4,), 2.0)})
    for name in ("wait", "start"):
        program.graph.erase_node(next(node for node in program.graph.nodes if node.name == name))
    updated, y, nothing = program.module()(torch.ones(4), torch.arange(4.0))
    assert torch.equal(y, torch.tensor([2.0, 4.0, 6.0, 8.0])) and updated is y
    assert nothing is None


def test_fake_mode_of_a_program_without_tensors():
    assert parse('n: int = scalar("n")\nreturn output("n", n)').fake_mode is not None


def test_from_graph_module_leaves_the_module_alone():
    module = make_fx(lambda x: x.relu() * torch.tensor([1.0, 2.0]), tracing_mode="fake")(torch.ones(2))
    before = module.code
    program = from_graph_module(module)
    program.graph.erase_node(program.output_node)
    assert module.code == before
    assert list(program.constants) == ["_tensor_constant0"]


def test_from_graph_module_reads_groups_and_takes_given_ones():
    def gather(x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 4, "dp"))

    module = make_fx(gather, tracing_mode="fake")(torch.ones(2))
    assert from_graph_module(module).groups == {"dp": 4}
    assert from_graph_module(module, groups={"dp": 4, "tp": 2}).groups == {"dp": 4, "tp": 2}


def test_from_graph_module_flattens_results():
    module = make_fx(lambda x: {"a": x.relu(), "b": (x.neg(), None)}, tracing_mode="fake")(torch.ones(2))
    program = from_graph_module(module)
    assert [str(value) for value in program.results] == ["relu", "neg", "None"]
    assert program.outputs == tuple(Output(OutputKind.OUTPUT, name) for name in "012")
    assert program.inputs == (Input(InputKind.INPUT, "x_1"),)


TRACES = {
    "none": ("", ""),
    "innermost-user-frame": (
        'File "/me/train.py", line 3, in step\n  f(x)\n'
        '  File "/me/model.py", line 12, in forward\n    x.relu()\n'
        '  File "/venv/site-packages/torch/nn/functional.py", line 9, in relu\n',
        "model.py:12",
    ),
    "only-torch": ('File "/venv/torch/optim/adam.py", line 5, in step\n', "adam.py:5"),
    "comma-in-path": ('File "/me/a, b.py", line 7, in f\n', "a, b.py:7"),
    "no-folder": ('File "<stdin>", line 1, in <module>\n', "<stdin>:1"),
    "not-a-trace": ("File somewhere\n", ""),
}


@pytest.mark.parametrize(("trace", "line"), TRACES.values(), ids=TRACES)
def test_source_line(trace, line):
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert source_line(node) == line


def test_tensor_bytes():
    assert tensor_bytes((torch.empty(3, dtype=torch.bfloat16), [torch.empty(2, 2)], None, 3)) == 6 + 16


def test_sizes_that_are_symbols_count_by_their_hint():
    module = make_fx(lambda x: x.relu(), tracing_mode="symbolic")(torch.ones(6, 5))
    value = next(iter(module.graph.nodes)).meta["val"]
    assert isinstance(value.shape[0], torch.SymInt)
    assert (size_hint(value.shape[0]), tensor_bytes(value)) == (6, 120)


def test_inputs_stand_first_wherever_they_stood():
    program = parse("""
    x: f32[4] = input("x")
    n: f32[4] = aten.neg(x)
    y: f32[4] = input("y")
    a: f32[4] = aten.add.Tensor(n, y)
    return output("a", a)
    """)
    assert [node.name for node in program.graph.nodes] == ["x", "y", "n", "a", "output"]
    _, y, _, a, _ = program.graph.nodes
    a.prepend(y)
    for again in (program.copy(), from_graph_module(program.module())):
        assert [node.name for node in again.graph.nodes] == ["x", "y", "n", "a", "output"]
    assert [node.name for node in program.graph.nodes] == ["x", "n", "y", "a", "output"]


def test_what_is_in_flight_is_returned_waited_for():
    program = parse(
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_reduce(x, "sum", "dp")
        wait: f32[4] = c10d.wait_tensor(start)
        neg: f32[4] = aten.neg(wait)
        return output("kept for the backward", start), output("y", neg)
        """,
        groups={"dp": 2},
    )
    given = program.module()
    assert [node.name for node in from_graph_module(given, groups={"dp": 2}).results] == ["wait", "neg"]
    assert [node.name for node in given.graph.output_node().args[0]] == ["start", "neg"]  # which is left as it is
