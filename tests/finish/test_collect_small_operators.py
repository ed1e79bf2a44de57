"""What is put off, until when, and that every bit stays."""

from __future__ import annotations

import pytest
import torch

from crossfade.execute.executable import Executable
from crossfade.finish.collect_small_operators import CollectSmallOperators
from crossfade.finish.group_small_operators import GroupSmallOperators
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from tests.growth import grows_linearly

INPUTS = """
    p: f32[2] = parameter("p")
    q: f32[2] = parameter("q")
    x: f32[2] = input("x")
"""


def order(body: str, results: str = 'output("y", y)', **options: float) -> str:
    """The names of the nodes between inputs and output, in their order afterwards."""
    program = parse(f"{INPUTS}{body}\n    return {results}", groups={"dp": 2})
    nodes = run_passes(program, [CollectSmallOperators(**options)]).graph.nodes
    return " ".join(node.name for node in nodes if node.op == "call_function")


def test_a_chain_waits_with_its_numbers_and_views() -> None:
    body = """
    s: f32[2] = aten.mul_.Tensor(p, 2.0)
    f: f32[2] = aten.view(s, [2])
    t: f32[2] = aten.sqrt(f)
    y: f32[2] = aten.exp(x)
    m: f32[2] = aten.mul_.Tensor(q, 2.0)
    u: f32[2] = aten.addcdiv_(s, t, t, value=0.5)
    """
    assert order(body) == "y s f t m u"


PASSED_BY_NOTHING = {
    "it reads what they write": "y: f32[2] = aten.exp(p)",
    "it writes what they write": "y: f32[2] = aten.relu_(p)",
    "it writes what they read": "y: f32[2] = aten.relu_(x)",
    "it communicates": 's: f32[2] = c10d.all_reduce(x, "sum", "dp")\n    y: f32[2] = c10d.wait_tensor(s)',
}


@pytest.mark.parametrize("line", PASSED_BY_NOTHING.values(), ids=PASSED_BY_NOTHING)
def test_they_run_before(line: str) -> None:
    body = f"""
    m: f32[2] = aten.addcmul_(p, x, x, value=0.5)
    {line}
    n: f32[2] = aten.mul_.Tensor(q, 2.0)
    """
    assert order(body).startswith("m ") and order(body).endswith(" n")


def test_parts_of_one_memory_that_do_not_overlap_pass_each_other() -> None:
    body = """
    a: f32[1] = aten.slice.Tensor(p, 0, 0, 1)
    b: f32[1] = aten.slice.Tensor(p, 0, 1, 2)
    m: f32[1] = aten.mul_.Tensor(a, 2.0)
    y: f32[1] = aten.exp(b)
    """
    assert order(body) == "b y a m"
    assert order(body.replace("exp(b)", "exp(a)")) == "a b m y"


def test_what_is_needed_or_returned_stays() -> None:
    body = """
    m: f32[2] = aten.mul_.Tensor(p, 2.0)
    n: f32[2] = aten.mul_.Tensor(q, 2.0)
    y: f32[2] = aten.maximum(x, m)
    """
    assert order(body, 'output("y", y), output("n", n)') == "m n y"


def test_elements_are_taken_out_where_they_stand_so_that_their_list_can_go() -> None:
    body = """
    b: (f32[1], f32[1]) = aten.split.Tensor(x, 1)
    a: f32[1] = b[0]
    m: f32[1] = aten.sqrt(a)
    y: f32[2] = aten.exp(x)
    """
    assert order(body) == "b a y m"


def test_what_reads_a_list_passes_nothing() -> None:
    body = """
    l: (f32[2], f32[2]) = aten._foreach_exp([p, q])
    a: f32[2] = l[0]
    m: f32[2] = aten.mul_.Tensor(a, 2.0)
    y: f32[4] = aten.cat(l)
    """
    assert order(body) == "l a m y"


def test_what_has_no_schema_passes_nothing() -> None:
    lines = ["m: f32[2] = aten.mul_.Tensor(p, 2.0)", "y: f32[2] = aten.exp(x)", "n: f32[2] = aten.mul_.Tensor(q, 2.0)"]
    program = parse(INPUTS + "\n".join("    " + line for line in lines) + '\n    return output("y", y)')
    next(node for node in program.graph.nodes if node.name == "y").target = lambda x: x.exp()
    CollectSmallOperators().run(program)
    assert [node.name for node in program.graph.nodes if node.op == "call_function"] == ["m", "y", "n"]


def test_no_more_than_so_many_bytes_wait() -> None:
    body = """
    m: f32[2] = aten.mul_.Tensor(p, 2.0)
    y: f32[2] = aten.exp(x)
    n: f32[2] = aten.mul_.Tensor(q, 2.0)
    z: f32[2] = aten.exp(y)
    """
    assert order(body, 'output("z", z)') == "y z m n"
    assert order(body, 'output("z", z)', most_mb=12 / 2**20) == "y m z n"


def test_with_grouping_every_bit_stays() -> None:
    lines = []
    for name in "pq":
        lines += [
            f"g{name}: f32[2] = aten.exp(x)",
            f"l{name}: f32[2] = aten.lerp_.Scalar({name}, g{name}, 0.25)",
            f"s{name}: f32[2] = aten.sqrt(g{name})",
            f"d{name}: f32[2] = aten.addcdiv_(l{name}, g{name}, s{name}, value=-0.5)",
        ]
    text = INPUTS + "\n".join("    " + line for line in lines) + '\n    return output("g", gq)'
    before = parse(text)
    after = run_passes(before, [CollectSmallOperators(), GroupSmallOperators()])
    assert "_foreach_addcdiv_" in str(after)
    ours, theirs = ([torch.full((2,), 0.5), torch.full((2,), 2.0), torch.rand(2)] for _ in range(2))
    ours[2] = theirs[2].clone()
    kept = [list(ours), list(theirs)]
    for program, values in zip((before, after), (ours, theirs), strict=True):
        Executable(program, {})(values)
    for result, other in zip(*kept, strict=True):
        assert torch.equal(result, other)


def test_the_time_grows_with_the_program() -> None:
    def work(count: int):
        inputs = [f'p{i}: f32[8] = parameter("p{i}")' for i in range(count)]
        calls = [
            line
            for i in range(count)
            for line in (f"m{i}: f32[8] = aten.mul_.Tensor(p{i}, 2.0)", f"e{i}: f32[8] = aten.exp(x)")
        ]
        text = "\n".join([*inputs, 'x: f32[8] = input("x")', *calls, 'return output("y", e0)'])
        return lambda: CollectSmallOperators().run(parse(text))

    grows_linearly(work, 400)
