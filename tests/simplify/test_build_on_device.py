"""What only the device uses is built there, all or none of it; what the host needs stays."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify
from crossfade.simplify.build_on_device import BuildOnDevice
from tests.simplify.holds import declines

CUDA = 'device=device("cuda:0")'

MOVED = {
    "indices, masks and their parts": (
        f"""
        x: f32[4, 4] = input("x")
        c: f32[4, 4] = aten._to_copy(x, {CUDA})
        i: i64[4] = aten.arange(4)
        f: i64[4] = aten.flip(i, [0])
        a: f32[4, 4] = aten.index.Tensor(c, [i, f])
        j: i64[4, 1] = aten.unsqueeze(i, 1)
        m: b8[4, 4] = aten.ge.Tensor(i, j)
        n: f32[4, 4] = aten._to_copy(m, dtype=f32, {CUDA})
        y: f32[4, 4] = aten.mul.Tensor(a, n)
        return output("y", y)
        """.replace("a: f32[4, 4] = aten.index", "a: f32[4] = aten.index"),
        f"""
        x: f32[4, 4] = input("x")
        c: f32[4, 4] = aten._to_copy(x, {CUDA})
        i: i64[4] = aten.arange(4, {CUDA})
        f: i64[4] = aten.flip(i, [0])
        a: f32[4] = aten.index.Tensor(c, [i, f])
        j: i64[4, 1] = aten.unsqueeze(i, 1)
        m: b8[4, 4] = aten.ge.Tensor(i, j)
        n: f32[4, 4] = aten._to_copy(m, dtype=f32, {CUDA})
        y: f32[4, 4] = aten.mul.Tensor(a, n)
        return output("y", y)
        """,
        {"moved": 1, "left": 0},
    ),
    "devices that are named, pinned memory": (
        f"""
        z: f32[4] = aten.zeros([4], device=device("cpu"), pin_memory=True)
        n: f32[4] = aten._to_copy(z, {CUDA}, non_blocking=True)
        y: f32[4] = aten.neg(n)
        k: f32[3] = aten.ones([3])
        l: f32[3] = aten.neg(k)
        return output("y", y), output("l", l)
        """,
        f"""
        z: f32[4] = aten.zeros([4], {CUDA}, pin_memory=False)
        y: f32[4] = aten.neg(z)
        k: f32[3] = aten.ones([3])
        l: f32[3] = aten.neg(k)
        return output("y", y), output("l", l)
        """,
        {"moved": 1, "left": 0},
    ),
    "a copy that is a result": (
        f"""
        z: f32[4] = aten.arange(4, dtype=f32)
        n: f32[4] = aten._to_copy(z, {CUDA})
        m: f32[4] = aten._to_copy(z, {CUDA})
        return output("n", n), output("m", m)
        """,
        f"""
        z: f32[4] = aten.arange(4, dtype=f32, {CUDA})
        m: f32[4] = aten._to_copy(z, {CUDA})
        return output("n", z), output("m", m)
        """,
        {"moved": 1, "left": 0},
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved(name: str) -> None:
    before, after, counts = MOVED[name]
    done = run_passes(parse(textwrap.dedent(before)), [BuildOnDevice()])
    assert render(done) == textwrap.dedent(after).strip()
    assert done.history[0].counts == counts
    verify(done, recompute=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MOVED)
def test_the_device_gets_the_same_bits(name: str) -> None:
    program = parse(textwrap.dedent(MOVED[name][0]))
    done = run_passes(program, [BuildOnDevice()])
    inputs = [torch.randn(node.meta["val"].shape) for node in program.placeholders]
    for expected, other in zip(program.module()(*inputs), done.module()(*inputs), strict=True):
        assert expected.device == other.device and torch.equal(expected, other)


def used(*lines: str, results: str = 'output("n", n)') -> str:
    return "\n".join(
        ["i: i64[4] = aten.arange(4)", f"n: i64[4] = aten._to_copy(i, {CUDA})", *lines, f"return {results}"]
    )


LEFT = {
    "its memory is written to": used("w: i64[4] = aten.add_.Tensor(i, 1)"),
    "it is a result of the program, on the CPU": used(results='output("n", n), output("i", i)'),
    "ranks exchange it as the CPU has it": used(
        's: i64[4] = c10d.all_reduce(i, "sum", "dp")',
        "w: i64[4] = c10d.wait_tensor(s)",
        results='output("n", n), output("w", w)',
    ),
    "draws would come from another generator": used(
        "f: f32[4] = aten._to_copy(i, dtype=f32)", "r: f32[4] = aten.rand_like(f)"
    ),
    "the device takes a CPU scalar without a copy": "\n".join(
        [
            "s: f32[] = aten.scalar_tensor(2.0)",
            f"a: f32[4] = aten.ones([4], {CUDA})",
            "y: f32[4] = aten.mul.Tensor(a, s)",
            'return output("y", y)',
        ]
    ),
    "its last bits may be others on the device": used(
        "f: f32[4] = aten.exp(i)", f"g: f32[4] = aten._to_copy(f, {CUDA})", results='output("n", n), output("g", g)'
    ),
    "the CPU computes with it": "\n".join(
        [
            'x: i64[4] = input("x")',
            *used("y: i64[4] = aten.add.Tensor(x, i)", results='output("n", n), output("y", y)').splitlines(),
        ]
    ),
    "several devices use it": used(
        'm: i64[4] = aten._to_copy(i, device=device("meta"))', results='output("n", n), output("m", m)'
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str) -> None:
    declines(BuildOnDevice(), LEFT[reason], reason, dp=2)


def test_fractions_are_left() -> None:
    declines(
        BuildOnDevice(),
        f"""
        i: f32[4] = aten.arange.start_step(0, 2, 0.5)
        n: f32[4] = aten._to_copy(i, {CUDA})
        return output("n", n)
        """,
        "its last bits may be others on the device",
    )


def test_what_the_host_reads_is_left() -> None:
    text = textwrap.dedent(f"""
        i: i64[] = aten.scalar_tensor(3, dtype=i64)
        n: i64[] = aten._to_copy(i, {CUDA})
        return output("n", n)
    """)
    program = parse(text)
    constructor = next(iter(program.graph.nodes))
    with program.graph.inserting_before(program.output_node):
        item = program.graph.call_function(torch.ops.aten._local_scalar_dense.default, (constructor,))
    item.meta["val"] = 3
    done = run_passes(program, [BuildOnDevice()])
    assert [str(verdict) for verdict in done.history[0].verdicts] == ["i: left alone: the host reads its values"]


def test_shared_users_move_all_or_none() -> None:
    declines(
        BuildOnDevice(),
        f"""
        a: i64[4] = aten.arange(4)
        b: i64[4] = aten.zeros([4], dtype=i64)
        c: f32[4, 4] = aten.ones([4, 4], {CUDA})
        y: f32[4] = aten.index.Tensor(c, [a, b])
        return output("y", y), output("b", b)
        """,
        "it is a result of the program, on the CPU",
    )
