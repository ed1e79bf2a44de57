"""What compiled regions hold: values that a compiler computes where they are read take no memory."""

from __future__ import annotations

import textwrap

from crossfade.execute.region_memory import alive_at_peak_in_regions, live_in_regions
from crossfade.graph.program import Program
from crossfade.graph.text import parse

KB = 2**10


def program_of(lines: str) -> Program:
    return parse('x: f32[256] = input("x")\n' + textwrap.dedent(lines))


def held(lines: str) -> tuple[int, int]:
    """The most kilobytes in all regions, node by node and fused."""
    program = program_of(lines)
    return max(live_in_regions(program)) // KB, max(live_in_regions(program, fused=True)) // KB


def test_a_chain_of_elements_is_one_kernel() -> None:
    chain = """
    a: f32[256] = aten.neg(x)
    b: f32[256] = aten.exp(a)
    c: f32[256] = aten.mul.Tensor(b, x)
    return output("c", c)
    """
    assert held(chain) == (2, 1)


def test_what_it_is_computed_from_stays_until_it_is_read() -> None:
    program = program_of("""
    a: f32[16, 16] = aten.view(x, [16, 16])
    m: f32[16, 16] = aten.mm(a, a)
    e: f32[16, 16] = aten.exp(m)
    n: f32[16, 16] = aten.mm(a, a)
    o: f32[16, 16] = aten.mm(n, a)
    s: f32[16, 16] = aten.add.Tensor(e, o)
    return output("s", s)
    """)
    assert max(live_in_regions(program, fused=True)) == 3 * KB  # m, n and o; m, o and s
    assert alive_at_peak_in_regions(program, fused=True) == [("m", KB), ("n", KB), ("o", KB)]


def test_what_a_product_reads_is_in_memory() -> None:
    product = """
    a: f32[16, 16] = aten.view(x, [16, 16])
    e: f32[16, 16] = aten.exp(a)
    m: f32[16, 16] = aten.mm(e, a)
    return output("m", m)
    """
    assert held(product) == (2, 2)


def test_what_two_read_is_in_memory() -> None:
    twice = """
    e: f32[256] = aten.exp(x)
    a: f32[256] = aten.neg(e)
    b: f32[256] = aten.mul.Tensor(e, e)
    return output("a", a), output("b", b)
    """
    assert held(twice) == (3, 3)


def test_what_is_written_later_is_in_memory() -> None:
    written = """
    e: f32[256] = aten.exp(x)
    f: f32[256] = aten.add_.Tensor(e, x)
    return output("f", f)
    """
    assert held(written) == (1, 1)


def test_the_gradient_of_labels_is_made_where_it_is_read() -> None:
    program = parse("""
    logits: f32[64, 512] = input("logits")
    labels: i64[64] = input("labels")
    weight: f32[] = input("weight")
    grad: f32[] = input("grad")
    logs: f32[64, 512] = aten._log_softmax(logits, 1, False)
    at: f32[64, 512] = aten.nll_loss_backward(grad, logs, labels, None, 1, -100, weight)
    back: f32[64, 512] = aten._log_softmax_backward_data(at, logs, 1, f32)
    return output("back", back)
    """)
    size = 64 * 512 * 4
    assert max(live_in_regions(program)) == 3 * size
    assert max(live_in_regions(program, fused=True)) == 2 * size


def test_what_is_read_often_is_in_memory_if_it_reads_much() -> None:
    def most(lines: str) -> int:
        return held(lines)[1]

    norm = """s: f32[256] = aten._softmax({last}, 0, False)\nreturn output("s", s)"""
    sums = [f"{new}: f32[256] = aten.add.Tensor({old}, x)\n" for old, new in ("xa", "ab", "bc", "cd", "de")]
    assert most("".join(sums[:3]) + norm.format(last="c")) == 1
    assert most("".join(sums) + norm.format(last="e")) == 2
