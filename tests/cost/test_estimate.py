"""Estimates computed by hand: arithmetic, bytes, views, collectives, symbolic sizes, measured numbers, speed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from crossfade.cost.estimate import estimate
from crossfade.cost.flops import flops_of
from crossfade.cost.keys import Keys, key_of
from crossfade.cost.products import Products, shape_of
from crossfade.errors import MachineError
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse
from tests.cost.toy_machine import toy_machine
from tests.growth import grows_linearly


def program_of(lines: str, **groups: int) -> Program:
    return parse(textwrap.dedent(lines), groups=groups)


def flops(lines: str) -> float:
    return flops_of(list(program_of(lines).graph.nodes)[-2])


def last_compute(lines: str, **changes: object) -> float:
    program = program_of(lines)
    return estimate(program, toy_machine(**changes)).compute[list(program.graph.nodes)[-2]]


def binary(op: str, left: str, right: str, rest: str = "", dtype: str = "f32") -> str:
    return f'x: {dtype}{left} = input("x")\nw: {dtype}{right} = input("w")\ny = {op}(x, w{rest})\nreturn output("y", y)'


def convolution(image: str, weight: str, *, transposed: bool = False, groups: int = 1) -> str:
    rest = f", None, [2, 2], [0, 0], [1, 1], {transposed}, [0, 0], {groups}"
    return binary("aten.convolution", image, weight, rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (binary("aten.mm", "[4, 8]", "[8, 5]"), 2 * 4 * 8 * 5),
        (binary("aten.bmm", "[3, 4, 8]", "[3, 8, 5]"), 3 * 2 * 4 * 8 * 5),
        (binary("aten.matmul", "[3, 4, 8]", "[8, 5]"), 3 * 2 * 4 * 8 * 5),
        (binary("aten.matmul", "[8]", "[8]"), 2 * 8),
        (binary("aten.linear", "[3, 4, 8]", "[5, 8]"), 3 * 2 * 4 * 8 * 5),
        (binary("aten.mv", "[4, 8]", "[8]"), 2 * 4 * 8),
        (convolution("[2, 6, 9, 9]", "[4, 6, 3, 3]"), 2 * 2 * 4 * 16 * 6 * 9),
        (convolution("[2, 6, 9, 9]", "[4, 3, 3, 3]", groups=2), 2 * 2 * 4 * 16 * 3 * 9),
        (convolution("[2, 6, 4, 4]", "[6, 4, 3, 3]", transposed=True), 2 * 2 * 6 * 16 * 4 * 9),
        (binary("aten.conv2d", "[2, 6, 5, 5]", "[4, 6, 3, 3]"), 2 * 2 * 4 * 9 * 6 * 9),
        (binary("aten.add.Tensor", "[4, 8]", "[4, 8]"), 0),
    ],
)  # fmt: skip
def test_operations_of_products_by_hand(text: str, expected: float) -> None:
    assert flops(text) == expected


def test_operations_of_products_that_add() -> None:
    addmm = 'b: f32[5] = input("b")\n' + binary("aten.addmm", "[4, 8]", "[8, 5]").replace("(x, w", "(b, x, w")
    assert flops(addmm) == 2 * 4 * 8 * 5
    baddbmm = 'b: f32[3, 4, 5] = input("b")\n' + binary("aten.baddbmm", "[3, 4, 8]", "[3, 8, 5]").replace("(x", "(b, x")
    assert flops(baddbmm) == 3 * 2 * 4 * 8 * 5


@pytest.mark.parametrize(("mask", "parts"), [("True, True, True", 2), ("False, True, False", 1)])
def test_operations_of_a_convolutions_gradients(mask: str, parts: int) -> None:
    lines = f"""
        g: f32[2, 4, 4, 4] = input("g")
        x: f32[2, 6, 9, 9] = input("x")
        w: f32[4, 6, 3, 3] = input("w")
        y = aten.convolution_backward(g, x, w, [4], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [{mask}])
        return output("y", g)
        """
    assert flops(lines) == parts * 2 * (2 * 4 * 4 * 4) * 6 * 3 * 3


@pytest.mark.parametrize(("causal", "share"), [("False", 1), ("True", 0.5)])
def test_operations_of_attention_and_its_gradients(causal: str, share: float) -> None:
    inputs = "\n".join(f'{name}: f32[2, 4, 16, 8] = input("{name}")' for name in ("g", "q", "k", "v"))
    forward = (
        f'{inputs}\ny = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, {causal})\nreturn output("y", g)'
    )
    scores = 2 * 4 * 16 * 16
    assert flops(forward) == share * 2 * scores * (8 + 8)
    backward = f"""{inputs}
l: f32[2, 16, 4] = input("l")
y = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, g, l, 0.0, {causal})
return output("y", g)"""
    assert flops(backward) == share * 2 * scores * (3 * 8 + 2 * 8)


def test_the_larger_of_arithmetic_and_memory_counts_plus_overhead() -> None:
    small, large = "[8, 8]", "[512, 512]"
    assert last_compute(binary("aten.mm", small, small)) == pytest.approx(3 * 256 / 1e6 + 1e-3)
    slow = {"flops": {"float32": 1e6}}
    assert last_compute(binary("aten.mm", large, large), **slow) == pytest.approx(2 * 512**3 / 1e6 + 1e-3)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("x: f16[64, 32] = input('x') | w: f16[32, 48] = input('w') | y: f16[64, 48] = aten.mm(x, w)", 1.0),
        ("x: f16[63, 32] = input('x') | w: f16[32, 48] = input('w') | y: f16[63, 48] = aten.mm(x, w)", 1.0),
        ("x: f16[64, 32] = input('x') | w: f16[32, 50] = input('w') | y: f16[64, 50] = aten.mm(x, w)", 0.35),
        ("x: f32[64, 32] = input('x') | w: f32[32, 52] = input('w') | y: f32[64, 52] = aten.mm(x, w)", 1.0),
        ("b: f16[8] = input('b') | x: f16[8, 5] = input('x') | w: f16[5, 8] = input('w') | "
         "y: f16[8, 8] = aten.addmm(b, x, w)", 0.35),
    ],
    ids=["aligned", "an odd number of rows", "odd columns", "a multiple of 16 bytes", "odd inner"],
)  # fmt: skip
def test_products_of_rows_that_are_not_aligned_are_slower(text: str, share: float) -> None:
    program = parse("\n".join([*text.split(" | "), 'return output("y", y)']))
    machine = replace(toy_machine(), products=Products(processors=4), overhead=0.0, memory_bandwidth=1e300)
    (node,) = (node for node in program.graph.nodes if node.op == "call_function")
    sizes = shape_of(node, Keys())
    assert sizes is not None
    dtype = "float16" if "f16" in text else "float32"
    rate = machine.flops.get(dtype, machine.flops["float32"])
    expected = Products(processors=4).seconds(*sizes, rate) / share
    assert estimate(program, machine).compute[node] == pytest.approx(expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_convolutions_reach_a_share_of_the_products_rate(transposed: bool, backward: bool) -> None:
    how = f"[1, 1], [1, 1], [1, 1], {transposed}, [0, 0], 1"
    made = f"aten.convolution(x, w, None, {how})"
    if backward:
        made = f"aten.convolution_backward(x, x, w, None, {how}, [True, True, False])"
    program = parse(f"""
        x: f32[2, 4, 6, 6] = input("x")
        w: f32[4, 4, 3, 3] = input("w")
        y = {made}
        return output("x", x)
        """)
    node = list(program.graph.nodes)[2]
    whole = replace(toy_machine(), overhead=0.0, memory_bandwidth=1e300)
    half = replace(whole, convolutions={"float32": 0.5, "float16": 0.1})
    assert estimate(program, half).compute[node] == pytest.approx(2 * estimate(program, whole).compute[node])
    assert last_compute(binary("aten.mm", "[8, 8]", "[8, 8]"), convolutions={"float32": 0.5}) == pytest.approx(
        last_compute(binary("aten.mm", "[8, 8]", "[8, 8]"))
    )


def test_the_gradient_of_attention_is_slower_than_attention() -> None:
    inputs = "\n".join(f'{name}: f32[2, 4, 16, 8] = input("{name}")' for name in ("g", "q", "k", "v"))
    program = parse(f"""{inputs}
l: f32[2, 16, 4] = input("l")
y = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
z = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, g, l, 0.0, False)
return output("g", g)""")
    products = Products(processors=4, attention=0.5, attention_backward=0.8)
    machine = replace(toy_machine(), products=products, overhead=0.0, memory_bandwidth=1e300)
    forward, backward = list(program.graph.nodes)[5:7]
    seconds, scores = estimate(program, machine).compute, 2 * 2 * 4 * 16 * 16 / machine.flops["float32"]
    assert seconds[forward] == pytest.approx(scores * (8 + 8) / 0.5)
    assert seconds[backward] == pytest.approx(scores * (3 * 8 + 2 * 8) / (0.5 * 0.8))


def test_each_dtype_has_its_rate_and_an_unknown_one_float32s() -> None:
    machine = {"memory_bandwidth": 1e12, "overhead": 0.0}
    seconds = {
        dtype: last_compute(binary("aten.mm", "[64, 64]", "[64, 64]", dtype=dtype), **machine)
        for dtype in ("f32", "bf16", "f64")
    }
    assert seconds == pytest.approx({"f32": 2 * 64**3 / 1e9, "bf16": 2 * 64**3 / 4e9, "f64": 2 * 64**3 / 1e9})


def unary(sizes: str, *calls: str) -> str:
    lines = [f"y{index} = {call.format(x=f'y{index - 1}')}" for index, call in enumerate(calls, 1)]
    return "\n".join([f'y0: f32{sizes} = input("x")', *lines, f'return output("y", y{len(calls)})'])


EMBEDDING = """
    w: f32[1000, 10] = input("w")
    i: i64[5] = input("i")
    y = aten.embedding(w, i)
    return output("y", y)
    """


def bytes_of(text: str) -> float:
    return round(last_compute(text, overhead=0.0) * 1e6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (unary("[100]", "aten.neg({x})"), 400 + 400),
        (unary("[100]", "aten.add.Tensor({x}, {x})"), 400 + 400),
        (unary("[100]", "aten.mul_.Tensor({x}, 2)"), 400 + 400),
        (binary("aten.add_.Tensor", "[100]", "[100]"), 400 + 400 + 400),
        (binary("aten.copy_", "[100]", "[100]"), 400 + 400),
        (unary("[100]", "aten.sum({x})"), 400 + 4),
        (unary("[1, 100]", "aten.expand({x}, [50, 100])", "aten.neg({x})"), 400 + 20000),
        (unary("[100]", "aten.empty_like({x}, pin_memory=False)"), 0),
        (EMBEDDING, 200 + 40 + 200),
        (unary("[100]", "aten.cat([{x}, {x}, {x}])"), 400 + 1200),
        (unary("[4, 6]", "aten.t({x})", "aten.reshape({x}, [24])"), 96 + 96),
        (unary("[4, 6]", "aten.to.dtype({x}, f64)"), 96 + 192),
    ],
)  # fmt: skip
def test_bytes_read_and_written_by_hand(text: str, expected: int) -> None:
    assert bytes_of(text) == expected


VIEWS = (
    "aten.view(x, [24])",
    "aten.t(x)",
    "aten.select.int(x, 0, 1)",
    "aten.split.Tensor(x, 2)",
    "aten.reshape(x, [24])",
)


@pytest.mark.parametrize("view", VIEWS)
def test_views_cost_a_call_on_the_host_and_nothing_where_it_runs_ahead(view: str) -> None:
    text = f'x: f32[4, 6] = input("x")\ny = {view}\nreturn output("y", x)'
    assert last_compute(text) == 1e-3
    assert last_compute(text, device="cuda") == 0.0


def test_elements_sizes_and_waits_have_no_entry() -> None:
    program = program_of(
        """
        x: f32[4, 6] = input("x")
        parts: (f32[2, 6], f32[2, 6]) = aten.split.Tensor(x, 2)
        p: f32[2, 6] = parts[0]
        n: int = aten.sym_size.int(x, 0)
        m: int = operator.mul(n, 2)
        w: f32[2, 6] = c10d.wait_tensor(p)
        return output("w", w), output("m", m)
        """
    )
    assert [node.name for node in estimate(program, toy_machine()).compute] == ["parts"]


def test_collectives_launch_and_travel() -> None:
    program = program_of(
        """
        x: f32[50] = input("x")
        r: f32[50] = c10d.all_reduce(x, "sum", "dp")
        g: f32[200] = c10d.all_gather_into_tensor(x, 4, "tp")
        c: (f32[50], f32[50]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        return output("x", x)
        """,
        dp=2,
    )
    costs = estimate(program, toy_machine())
    _, r, g, c, _ = program.graph.nodes
    assert costs.compute == {r: 1e-3, g: 1e-3, c: 1e-3}
    assert costs.travel == {r: 1e-3 + 0.2, g: 2e-3 + 0.6, c: 1e-3 + 0.4}
    assert costs.slows_compute == {"dp": 0.5, "tp": 0.5}


def test_a_group_of_unknown_size_is_named() -> None:
    program = program_of('x: f32[4] = input("x")\nr = c10d.all_reduce(x, "sum", "dp")\nreturn output("r", r)')
    with pytest.raises(MachineError, match="the size of group 'dp' is not known: expected the number of its ranks"):
        estimate(program, toy_machine())


def test_symbolic_sizes_count_by_their_hint() -> None:
    module = make_fx(lambda x, w: (x @ w).relu(), tracing_mode="symbolic")(torch.ones(6, 8), torch.ones(8, 5))
    program = from_graph_module(module)
    plain = from_graph_module(
        make_fx(lambda x, w: (x @ w).relu(), tracing_mode="fake")(torch.ones(6, 8), torch.ones(8, 5))
    )
    slow = toy_machine(flops={"float32": 1e3})
    by_name = [{n.target: s for n, s in estimate(program, slow).compute.items()} for program in (program, plain)]
    assert by_name[0] == by_name[1]
    assert by_name[0][torch.ops.aten.mm.default] == pytest.approx(2 * 6 * 8 * 5 / 1e3 + 1e-3)


def test_measured_numbers_come_before_arithmetic_for_their_threads_only() -> None:
    program = program_of(binary("aten.mm", "[4, 8]", "[8, 5]"))
    mm = list(program.graph.nodes)[2]
    measured = {key_of(mm, threads=3): 7.0}
    assert estimate(program, toy_machine(), measured, threads=3).compute[mm] == 7.0
    assert estimate(program, toy_machine(), measured, threads=2).compute[mm] < 1.0


def test_time_grows_with_the_nodes() -> None:
    def estimating(count: int) -> Callable[[], object]:
        lines = ['x: f32[64, 64] = input("x")', "y0 = aten.mm(x, x)"]
        lines += [f"y{i} = aten.{'mm' if i % 3 else 'add.Tensor'}(y{i - 1}, x)" for i in range(1, count)]
        program = parse("\n".join([*lines, f'return output("y", y{count - 1})']))
        return lambda: estimate(program, toy_machine(), {"none": 1.0})

    grows_linearly(estimating, 500)
