"""The text form: what is printed parses back to the same program, and what does not parse says where and why."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from crossfade.errors import TextError
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.text import DTYPES, parse, render, render_node, render_type

ROUND_TRIPS = {
    "input-kinds": """
        w: f32[8, 8] = parameter("layers.0.weight")
        b: f32[8] = buffer("mean")
        s: f32[] = optimizer_state("step")
        room: f32[16] = workspace("bucket")
        lr: float = scalar("lr")
        n: int = scalar("n")
        flag: bool = scalar("flag")
        x: f32[4, 8] = input("x")
        return output("x", x)
    """,
    "output-kinds": """
        w: f32[4] = parameter("w")
        y: f32[4] = aten.relu(w)
        total: f32[] = aten.sum(y)
        return loss("total", total), gradient("w", y), update("w", y), output("none", None), output("three", 3)
    """,
    "no-results": """
        x: f32[4] = input("x")
        return
    """,
    "dtype-device-layout": """
        x: f32[2, 3, 4, 5] = input("x")
        a: bf16[2, 3, 4, 5] = aten._to_copy(x, dtype=bf16)
        b: f32[2, 3, 4, 5] = aten.clone(x, memory_format=channels_last)
        c: i64[2] = aten.full([2], 1, dtype=i64, layout=strided, device=device("cpu"), pin_memory=False)
        return output("a", a), output("b", b), output("c", c)
    """,
    "dtype-without-short-name": """
        x: uint16[4] = input("x")
        y: uint32[4] = aten._to_copy(x, dtype=torch.uint32)
        return output("y", y)
    """,
    "floats": """
        x: f32[4] = input("x")
        a: f32[4] = aten.clamp(x, float("-inf"), float("inf"))
        b: f32[4] = aten.nan_to_num(x, float("nan"), 1e-05, -2.5)
        c: f32[4] = aten.add.Tensor(x, 1, alpha=3)
        return output("a", a), output("b", b), output("c", c)
    """,
    "nested-lists": """
        x: f32[4, 4] = input("x")
        i: i64[2] = input("i")
        a: f32[4, 2] = aten.index.Tensor(x, [None, i])
        b: f32[8, 4] = aten.cat([x, x])
        c: f32[4, 4] = aten.permute(x, [-1, 0])
        return output("a", a), output("b", b), output("c", c)
    """,
    "elements": """
        x: f32[4, 4] = input("x")
        parts: (f32[2, 4], f32[2, 4]) = aten.split.Tensor(x, 2)
        first: f32[2, 4] = parts[0]
        last: f32[2, 4] = parts[-1]
        whole: (f32[4, 4],) = aten.split.Tensor(x, 4)
        only: f32[4, 4] = whole[0]
        pair: (f32[], f32[]) = aten.aminmax(x)
        low: f32[] = pair[0]
        return output("a", first), output("b", last), output("c", only), output("d", low)
    """,
    "scalar-arithmetic": """
        n: int = scalar("n")
        lr: float = scalar("lr")
        x: f32[4] = input("x")
        m: int = operator.mul(n, 2)
        root: float = math.sqrt(lr)
        most: int = builtins.max(m, 3)
        y: f32[4] = aten.mul.Tensor(x, root)
        return output("y", y), output("m", most)
    """,
    "collectives": """
        x: f32[4] = input("x")
        start: (f32[4], f32[4]) = c10d.all_reduce_coalesced([x, x], "sum", "dp")
        a: f32[4] = start[0]
        b: f32[4] = start[1]
        wait_a: f32[4] = c10d.wait_tensor(a)
        wait_b: f32[4] = c10d.wait_tensor(b)
        return output("a", wait_a), output("b", wait_b)
    """,
    "constants": """
        k: f32[4] = constant("_tensor_constant0")
        inner: f32[2] = constant("sub.module.k")
        y: f32[4] = aten.relu(k)
        return output("y", y), output("z", inner)
    """,
    "names": r"""
        x: f32[4] = input("a \"quoted\" name, it's \\ odd")
        y: f32[4] = input("two\nlines = f32[] ü")
        return output("", x), output("y\"", y)
    """,
    "no-value": """
        x: f32[4] = input("x")
        ok: b8[] = aten.all(x)
        check: None = aten._assert_async.msg(ok, "not all = f32[]")
        return output("x", x)
    """,
}


def dedented(text: str) -> str:
    return "\n".join(line.removeprefix("        ") for line in text.strip("\n").splitlines()).strip()


def structure(program: Program) -> list[tuple]:
    """Everything the text claims to hold, by position rather than by name."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    rows = []
    for node in program.graph.nodes:
        target = None if node.op == "placeholder" else node.target  # its name, compared already
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{position[n]}")
        rows.append((node.op, node.name, target, repr(arguments), render_type(node.meta.get("val"))))
    return rows


@pytest.mark.parametrize("text", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_round_trip(text):
    program = parse(text)
    assert render(program) == dedented(text)
    again = parse(render(program))
    assert structure(again) == structure(program)
    assert (again.inputs, again.outputs) == (program.inputs, program.outputs)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    program = parse(f'x: {name}[2, 3] = input("x")\nreturn output("x", x)')
    assert program.placeholders[0].meta["val"].dtype is DTYPES[name]
    assert str(program) == f'x: {name}[2, 3] = input("x")\nreturn output("x", x)'


def test_values_come_back_as_what_they_were():
    program = parse(ROUND_TRIPS["names"])
    assert program.inputs == (
        Input(InputKind.INPUT, 'a "quoted" name, it\'s \\ odd'),
        Input(InputKind.INPUT, "two\nlines = f32[] ü"),
    )
    assert program.outputs == (Output(OutputKind.OUTPUT, ""), Output(OutputKind.OUTPUT, 'y"'))
    copied = next(node for node in parse(ROUND_TRIPS["dtype-device-layout"]).graph.nodes if node.name == "c")
    assert dict(copied.kwargs) == {
        "dtype": torch.int64,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "pin_memory": False,
    }
    bounds = next(node for node in parse(ROUND_TRIPS["floats"]).graph.nodes if node.name == "a").args[1:]
    assert bounds == (float("-inf"), float("inf"))


def test_slices():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = (torch.empty(2), torch.empty(3))
    part = graph.call_function(operator.getitem, (x, slice(0, None, 2)))
    assert render_node(part) == "x[slice(0, None, 2)]"
    program = parse("""
        x: f32[4] = input("x")
        parts = aten.split.Tensor(x, 1)
        some = parts[slice(1, None, 2)]
        one = some[1]
        return output("y", one)
    """)
    assert "some: (f32[1], f32[1]) = parts[slice(1, None, 2)]" in str(program)


def test_constants_and_groups_come_from_outside():
    value = torch.arange(4.0)
    program = parse(
        'k: f32[4] = constant("a.k")\ny = aten.neg(k)\nreturn output("y", y)',
        groups={"dp": 4},
        constants={"a.k": value},
    )
    assert program.groups == {"dp": 4}
    assert torch.equal(program.module()()[0], -value)


def test_types_are_computed_where_not_written():
    program = parse("""
        x: f32[2, 3] = input("x")
        y = aten.sum.dim_IntList(x, [1])
        return output("y", y)
    """)
    assert str(program).splitlines()[1] == "y: f32[2] = aten.sum.dim_IntList(x, [1])"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "bool"),
        (3, "int"),
        (0.5, "float"),
        (torch.empty(()), "f32[]"),
        ((torch.empty(2), None), "(f32[2], None)"),
        ([torch.empty(0)], "(f32[0],)"),
        (torch.empty(2, dtype=torch.uint16), "uint16[2]"),
        ("text", "str"),
    ],
)
def test_render_type(value, text):
    assert render_type(value) == text


def test_nodes_at_the_border_print_in_messages():
    program = parse('x: f32[4] = input("x")\nreturn output("x", x)')
    assert [render_node(node) for node in program.graph.nodes] == ['placeholder("x")', "return (x,)"]


X = 'x: f32[4] = input("x")'
END = 'return output("x", x)'
ERRORS = {
    "syntax": (f"{X}\ny = = 3\n{END}", "line 2: y = = 3. Remedy: write one assignment per line."),
    "empty": (
        "\n\n",
        'no lines: expected a program. Remedy: end with a line like `return output("y", y)`.',
    ),
    "no-return": (
        X,
        "line 1: x: f32[4] = input('x'): expected a last line like `return output(\"y\", y)`. "
        "Remedy: correct that line.",
    ),
    "not-an-assignment": (
        f"{X}\naten.relu(x)\n{END}",
        "line 2: aten.relu(x): expected an assignment. Remedy: correct that line.",
    ),
    "not-a-call": (
        f"{X}\ny = x\n{END}",
        "line 2: y = x: expected an input, a call or an element. Remedy: correct that line.",
    ),
    "input-without-type": (
        'x = input("x")\nreturn output("x", x)',
        "line 1: x = input('x'): expected a type, as in `x: f32[4] = input(\"x\")`. Remedy: correct that line.",
    ),
    "constant-without-type": (
        f'{X}\nk = constant("k")\n{END}',
        "line 2: k = constant('k'): expected a type, as in `k: f32[4] = constant(\"k\")`. Remedy: correct that line.",
    ),
    "unknown-type": (
        'x: f33[4] = input("x")\nreturn output("x", x)',
        f"line 1: x: f33[4] = input('x'): expected a type like f32[2, 3], one of {', '.join(DTYPES)}. "
        "Remedy: correct that line.",
    ),
    "wrong-type": (
        f"{X}\ny: f32[5] = aten.relu(x)\n{END}",
        "line 2: y: f32[5] = aten.relu(x): expected the type f32[4]. Remedy: correct that line.",
    ),
    "unknown-operator": (
        f"{X}\ny = aten.nothing(x)\n{END}",
        "line 2: y = aten.nothing(x): expected one like aten.mm or aten.add.Tensor. Remedy: correct that line.",
    ),
    "unknown-overload": (
        f"{X}\ny = aten.relu.Tensor(x)\n{END}",
        "line 2: y = aten.relu.Tensor(x): expected one like aten.mm or aten.add.Tensor; aten.relu.Tensor has "
        "default, out. Remedy: correct that line.",
    ),
    "unknown-function": (
        f"{X}\ny = operator.nothing(x)\n{END}",
        "line 2: y = operator.nothing(x): expected one like aten.mm or aten.add.Tensor. Remedy: correct that line.",
    ),
    "unknown-name": (
        f"{X}\ny = aten.relu(z)\n{END}",
        "line 2: y = aten.relu(z): expected a value or a name defined above for 'z'. Remedy: correct that line.",
    ),
    "element-of-unknown-name": (
        f"{X}\ny = z[0]\n{END}",
        "line 2: y = z[0]: expected an input, a call or an element. Remedy: correct that line.",
    ),
    "element-out-of-range": (
        f"{X}\np = aten.split.Tensor(x, 2)\ny = p[2]\n{END}",
        "line 3: y = p[2]: expected arguments that fit, but IndexError: list index out of range. "
        "Remedy: correct that line.",
    ),
    "arguments-that-do-not-fit": (
        f"{X}\ny = aten.view(x, [3])\n{END}",
        "line 2: y = aten.view(x, [3]): expected arguments that fit, but RuntimeError: ",
    ),
    "name-twice": (
        f"{X}\nx = aten.relu(x)\n{END}",
        "line 2: x = aten.relu(x): expected a name that is not used twice or reserved (x_1 would be free). "
        "Remedy: correct that line.",
    ),
    "reserved-name": (
        f"{X}\nsum = aten.relu(x)\n{END}",
        "line 2: sum = aten.relu(x): expected a name that is not used twice or reserved (sum_1 would be free). "
        "Remedy: correct that line.",
    ),
    "name-of-a-value": (
        f"{X}\nf32 = aten.relu(x)\n{END}",
        "line 2: f32 = aten.relu(x): expected a name other than f32, which is a value. Remedy: correct that line.",
    ),
    "unknown-result": (
        f'{X}\nreturn result("x", x)',
        'line 2: return result(\'x\', x): expected results like `output("y", y)` or `gradient("w", g)`. '
        "Remedy: correct that line.",
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(text, message):
    with pytest.raises(TextError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(("Remedy: correct that line.", message))
