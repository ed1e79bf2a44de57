"""Gathers and scatters in all spellings: as text, as torch and our own shard stage trace them, and sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional

from crossfade.graph.gathers import Gather, Scatter, find_gathers, find_scatters
from crossfade.graph.passes import Outcome
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from tests.graph.traced_gathers import checked, fake_group, traced
from tests.growth import grows_linearly


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with fake_group() as made:
        yield made


def read(text: str, ranks: int = 2) -> Program:
    return parse(textwrap.dedent(text), groups={"tp": ranks})


GATHERS = {
    "split and cat": (
        """
        x: f32[4, 3, 8] = input("x")
        start: f32[8, 3, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3, 8] = c10d.wait_tensor(start)
        parts: (f32[4, 3, 8], f32[4, 3, 8]) = aten.split.Tensor(done, 4)
        a: f32[4, 3, 8] = parts[0]
        b: f32[4, 3, 8] = parts[1]
        y: f32[4, 6, 8] = aten.cat([a, b], 1)
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "chunk and cat, as torch 2.11": (
        """
        x: f32[4, 3, 8] = input("x")
        start: f32[8, 3, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3, 8] = c10d.wait_tensor(start)
        parts: (f32[4, 3, 8], f32[4, 3, 8]) = aten.chunk(done, 2)
        a: f32[4, 3, 8] = parts[0]
        b: f32[4, 3, 8] = parts[1]
        y: f32[4, 3, 16] = aten.cat([a, b], -1)
        return output("y", y)
        """,
        ("x", 2, "y", None),
    ),
    "slices and cat": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        a: f32[4, 3] = aten.slice.Tensor(done, 0, 0, 4)
        b: f32[4, 3] = aten.slice.Tensor(done, 0, 4, 9223372036854775807)
        y: f32[4, 6] = aten.cat([a, b], 1)
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "view, permute, clone, view": (
        """
        x: f32[4, 3, 8] = input("x")
        start: f32[8, 3, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3, 8] = c10d.wait_tensor(start)
        apart: f32[2, 4, 3, 8] = aten.view(done, [2, 4, 3, 8])
        moved: f32[4, 2, 3, 8] = aten.permute(apart, [1, 0, 2, 3])
        fresh: f32[4, 2, 3, 8] = aten.clone(moved, memory_format=contiguous_format)
        y: f32[4, 6, 8] = aten._unsafe_view(fresh, [4, 6, 8])
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "turned before and after": (
        """
        x: f32[4, 3, 8] = input("x")
        turned: f32[3, 4, 8] = aten.transpose.int(x, 0, 1)
        fresh: f32[3, 4, 8] = aten.contiguous(turned)
        start: f32[6, 4, 8] = c10d.all_gather_into_tensor(fresh, 2, "tp")
        done: f32[6, 4, 8] = c10d.wait_tensor(start)
        y: f32[4, 6, 8] = aten.transpose.int(done, 0, 1)
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "a batch of one, viewed": (
        """
        x: f32[1, 3, 8] = input("x")
        start: f32[2, 3, 8] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[2, 3, 8] = c10d.wait_tensor(start)
        y: f32[1, 6, 8] = aten.view(done, [1, 6, 8])
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "bytes along dim 0": (
        """
        x: bf16[4, 3] = input("x")
        raw: u8[4, 6] = aten.view.dtype(x, u8)
        start: u8[8, 6] = c10d.all_gather_into_tensor(raw, 2, "tp")
        done: u8[8, 6] = c10d.wait_tensor(start)
        y: bf16[8, 3] = aten.view.dtype(done, bf16)
        return output("y", y)
        """,
        ("x", 0, "y", None),
    ),
    "bytes along dim 1, each piece viewed back": (
        """
        x: bf16[4, 3] = input("x")
        raw: u8[4, 6] = aten.view.dtype(x, u8)
        start: u8[8, 6] = c10d.all_gather_into_tensor(raw, 2, "tp")
        done: u8[8, 6] = c10d.wait_tensor(start)
        parts: (u8[4, 6], u8[4, 6]) = aten.split.Tensor(done, 4)
        a: u8[4, 6] = parts[0]
        b: u8[4, 6] = parts[1]
        va: bf16[4, 3] = aten.view.dtype(a, bf16)
        vb: bf16[4, 3] = aten.view.dtype(b, bf16)
        y: bf16[4, 6] = aten.cat([va, vb], 1)
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "bytes joined, then viewed back": (
        """
        x: bf16[4, 3] = input("x")
        raw: u8[4, 6] = aten.view.dtype(x, u8)
        start: u8[8, 6] = c10d.all_gather_into_tensor(raw, 2, "tp")
        done: u8[8, 6] = c10d.wait_tensor(start)
        parts: (u8[4, 6], u8[4, 6]) = aten.split.Tensor(done, 4)
        a: u8[4, 6] = parts[0]
        b: u8[4, 6] = parts[1]
        both: u8[4, 12] = aten.cat([a, b], 1)
        y: bf16[4, 6] = aten.view.dtype(both, bf16)
        return output("y", y)
        """,
        ("x", 1, "y", None),
    ),
    "trimmed": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        parts: (f32[4, 3], f32[4, 3]) = aten.split.Tensor(done, 4)
        a: f32[4, 3] = parts[0]
        b: f32[4, 3] = parts[1]
        both: f32[4, 6] = aten.cat([a, b], 1)
        y: f32[4, 5] = aten.slice.Tensor(both, 1, 0, 5)
        return output("y", y)
        """,
        ("x", 1, "y", 5),
    ),
    "trimmed along dim 0": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        y: f32[7, 3] = aten.narrow(done, 0, 0, 7)
        return output("y", y)
        """,
        ("x", 0, "y", 7),
    ),
    "trimmed for one reader only": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        y: f32[7, 3] = aten.slice.Tensor(done, 0, 0, 7)
        z: f32[8, 3] = aten.neg(done)
        return output("y", y), output("z", z)
        """,
        ("x", 0, "done", None),
    ),
    "cut elsewhere than at the end": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        y: f32[7, 3] = aten.slice.Tensor(done, 0, 1, 8)
        return output("y", y)
        """,
        ("x", 0, "done", None),
    ),
    "also read as it came": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        apart: f32[2, 4, 3] = aten.view(done, [2, 4, 3])
        moved: f32[4, 2, 3] = aten.transpose.int(apart, 0, 1)
        y: f32[4, 6] = aten.reshape(moved, [4, 6])
        z: f32[8, 3] = aten.neg(done)
        return output("y", y), output("z", z)
        """,
        ("x", 0, "done", None),
    ),
    "blocks over all ranks": (
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        apart: f32[2, 2, 2, 3] = aten.view(done, [2, 2, 2, 3])
        moved: f32[2, 2, 2, 3] = aten.transpose.int(apart, 0, 1)
        y: f32[8, 3] = aten.reshape(moved, [8, 3])
        return output("y", y)
        """,
        ("x", 0, "done", None),
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_spellings_of_a_gather(name: str) -> None:
    text, expected = GATHERS[name]
    (found,) = checked(read(text))
    assert isinstance(found, Gather)
    assert (found.part.name, found.dim, found.result.name, found.trim) == expected


def test_several_waits_and_several_ends_hold_one_value() -> None:
    program = read(
        """
        x: f32[4, 3] = input("x")
        start: f32[8, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[8, 3] = c10d.wait_tensor(start)
        again: f32[8, 3] = c10d.wait_tensor(start)
        a: f32[4, 3] = aten.slice.Tensor(done, 0, 0, 4)
        b: f32[4, 3] = aten.slice.Tensor(done, 0, 4, 8)
        y: f32[4, 6] = aten.cat([a, b], 1)
        apart: f32[2, 4, 3] = aten.view(again, [2, 4, 3])
        moved: f32[4, 2, 3] = aten.movedim.int(apart, 0, 1)
        z: f32[4, 6] = aten.reshape(moved, [4, 6])
        return output("y", y), output("z", z)
        """
    )
    (found,) = checked(program)
    assert (found.dim, found.result.name, [node.name for node in found.also]) == (1, "y", ["z"])


def test_a_start_that_is_a_result_holds_the_value_too() -> None:
    program = read(
        """
        x: f32[8, 3] = input("x")
        start: f32[4, 3] = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        done: f32[4, 3] = c10d.wait_tensor(start)
        y: f32[4, 3] = aten.neg(done)
        return output("y", y), output("saved", start)
        """
    )
    (found,) = checked(program)
    assert (found.dim, found.result.name, [node.name for node in found.also]) == (0, "done", ["start"])


SCATTERS = {
    "split and cat": (
        """
        x: f32[4, 6, 8] = input("x")
        parts: (f32[4, 3, 8], f32[4, 3, 8]) = aten.split.Tensor(x, 3, 1)
        a: f32[4, 3, 8] = parts[0]
        b: f32[4, 3, 8] = parts[1]
        both: f32[8, 3, 8] = aten.cat([a, b])
        start: f32[4, 3, 8] = c10d.reduce_scatter_tensor(both, "avg", 2, "tp")
        y: f32[4, 3, 8] = c10d.wait_tensor(start)
        return output("y", y)
        """,
        ("x", 1, "avg", "y"),
    ),
    "slices and cat": (
        """
        x: f32[4, 6] = input("x")
        a: f32[4, 3] = aten.slice.Tensor(x, 1, 0, 3)
        b: f32[4, 3] = aten.slice.Tensor(x, 1, 3, 6)
        both: f32[8, 3] = aten.cat([a, b])
        start: f32[4, 3] = c10d.reduce_scatter_tensor(both, "sum", 2, "tp")
        y: f32[4, 3] = c10d.wait_tensor(start)
        return output("y", y)
        """,
        ("x", 1, "sum", "y"),
    ),
    "one dim apart, as our shard stage": (
        """
        x: f32[4, 6, 8] = input("x")
        apart: f32[4, 1, 2, 3, 8] = aten.view(x, [4, 1, 2, 3, 8])
        moved: f32[2, 4, 1, 3, 8] = aten.permute(apart, [2, 0, 1, 3, 4])
        fresh: f32[2, 4, 1, 3, 8] = aten.clone(moved, memory_format=contiguous_format)
        start: f32[1, 4, 1, 3, 8] = c10d.reduce_scatter_tensor(fresh, "sum", 2, "tp")
        done: f32[1, 4, 1, 3, 8] = c10d.wait_tensor(start)
        y: f32[4, 3, 8] = aten.reshape(done, [4, 3, 8])
        return output("y", y)
        """,
        ("x", 1, "sum", "y"),
    ),
    "turned before and after": (
        """
        x: f32[4, 6] = input("x")
        turned: f32[6, 4] = aten.t(x)
        fresh: f32[6, 4] = aten.clone(turned, memory_format=contiguous_format)
        start: f32[3, 4] = c10d.reduce_scatter_tensor(fresh, "sum", 2, "tp")
        done: f32[3, 4] = c10d.wait_tensor(start)
        y: f32[4, 3] = aten.t(done)
        return output("y", y)
        """,
        ("x", 1, "sum", "y"),
    ),
    "turned and left so": (
        """
        x: f32[4, 6] = input("x")
        turned: f32[6, 4] = aten.t(x)
        start: f32[3, 4] = c10d.reduce_scatter_tensor(turned, "sum", 2, "tp")
        done: f32[3, 4] = c10d.wait_tensor(start)
        y: f32[3, 4] = aten.neg(done)
        return output("y", y)
        """,
        ("turned", 0, "sum", "done"),
    ),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_spellings_of_a_scatter(name: str) -> None:
    text, expected = SCATTERS[name]
    (found,) = checked(read(text))
    assert isinstance(found, Scatter)
    assert (found.whole.name, found.dim, found.reduce_op, found.result.name) == expected


REFUSED = {
    "coalesced": (
        """
        x: f32[4] = input("x")
        start: (f32[8], f32[8]) = c10d.all_gather_into_tensor_coalesced([x, x], 2, "tp")
        a: f32[8] = start[0]
        done: f32[8] = c10d.wait_tensor(a)
        return output("y", done)
        """,
        "it moves several tensors at once: 2 tensors",
    ),
    "into a buffer": (
        """
        x: f32[4] = input("x")
        room: f32[8] = input("room")
        start: f32[8] = c10d.all_gather_into_tensor_out(x, 2, "tp", out=room)
        done: f32[8] = c10d.wait_tensor(start)
        return output("y", done)
        """,
        "it writes into a given buffer: room",
    ),
    "by maximum": (
        """
        x: f32[4] = input("x")
        start: f32[2] = c10d.reduce_scatter_tensor(x, "max", 2, "tp")
        done: f32[2] = c10d.wait_tensor(start)
        return output("y", done)
        """,
        "it reduces otherwise than by sum or mean: by max",
    ),
    "never waited for": (
        """
        x: f32[4] = input("x")
        start: f32[2] = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        return output("y", start)
        """,
        "nothing waits for it: 1 readers",
    ),
    "one rank": (
        """
        x: f32[4] = input("x")
        start: f32[4] = c10d.all_gather_into_tensor(x, 1, "tp")
        done: f32[4] = c10d.wait_tensor(start)
        return output("y", done)
        """,
        "its group has one rank: group tp of 1",
    ),
    "empty": (
        """
        x: f32[0, 3] = input("x")
        start: f32[0, 3] = c10d.all_gather_into_tensor(x, 2, "tp")
        done: f32[0, 3] = c10d.wait_tensor(start)
        return output("y", done)
        """,
        "it moves nothing: x f32[0, 3]",
    ),
    "bytes that stay bytes": (
        """
        x: bf16[4, 3] = input("x")
        raw: u8[4, 6] = aten.view.dtype(x, u8)
        start: u8[8, 6] = c10d.all_gather_into_tensor(raw, 2, "tp")
        done: u8[8, 6] = c10d.wait_tensor(start)
        y: u8[8, 6] = aten.bitwise_not(done)
        return output("y", y)
        """,
        "its parts are not put together along one dim: of 2 x bf16[4, 3]",
    ),
    "bytes read as bytes too": (
        """
        x: bf16[4, 3] = input("x")
        raw: u8[4, 6] = aten.view.dtype(x, u8)
        start: u8[8, 6] = c10d.all_gather_into_tensor(raw, 2, "tp")
        done: u8[8, 6] = c10d.wait_tensor(start)
        y: u8[8, 6] = aten.bitwise_not(done)
        z: bf16[8, 3] = aten.view.dtype(done, bf16)
        return output("y", y), output("z", z)
        """,
        "something reads it before its parts are put together: y reads done, done u8[8, 6]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    text, expected = REFUSED[name]
    program = read(text, ranks=1 if name == "one rank" else 2)
    found = [*find_gathers(program.graph)[1], *find_scatters(program.graph)[1]]
    assert [(f"{verdict.reason}: {verdict.detail}", verdict.outcome) for verdict in found] == [(expected, Outcome.LEFT)]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 4])
def test_torchs_own_gathers(group: Any, batch: int, dim: int) -> None:
    program = traced(lambda x: functional.all_gather_tensor(x, dim, group) + 0, torch.zeros(batch, 6, 8))
    (found,) = checked(program)
    assert found.dim == dim


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torchs_own_scatters(group: Any, dim: int) -> None:
    program = traced(lambda x: functional.reduce_scatter_tensor(x, "sum", dim, group) + 0, torch.zeros(4, 6, 8))
    (found,) = checked(program)
    assert found.dim == dim


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torchs_own_gathers_of_symbolic_sizes(group: Any, dim: int) -> None:
    program = traced(lambda x: functional.all_gather_tensor(x, dim, group) + 0, torch.zeros(4, 6, 8), symbolic=True)
    ((found,), verdicts) = find_gathers(program.graph)
    assert found.dim == dim and not verdicts


def test_a_symbolic_size_that_a_scatter_takes_divides(group: Any) -> None:
    program = traced(lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group), torch.zeros(4, 6), symbolic=True)
    ((found,), verdicts) = find_scatters(program.graph)
    assert (found.dim, verdicts) == (0, [])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_our_own_shard_stages_collectives(dim: int) -> None:
    from crossfade.shard.tensor import conjugate

    rank = torch.tensor(0)
    program = traced(lambda x: conjugate.gather(x, dim, 1, rank, 2, "tp") + 0, torch.zeros(2, 4, 6))
    assert [gather.dim for gather in checked(program)] == [dim]
    program = traced(lambda x: conjugate.scatter(x, dim, 1, rank, 2, "tp") + 0, torch.zeros(2, 4, 6))
    assert [gather.dim for gather in checked(program)] == [dim]


def test_many_gathers_take_linear_work() -> None:
    def work(size: int) -> Any:
        lines = ['x0: f32[4, 3] = input("x0")']
        for n in range(size):
            lines += [
                f's{n}: f32[8, 3] = c10d.all_gather_into_tensor(x{n}, 2, "tp")',
                f"w{n}: f32[8, 3] = c10d.wait_tensor(s{n})",
                f"a{n}: f32[4, 3] = aten.slice.Tensor(w{n}, 0, 0, 4)",
                f"r{n}: f32[4, 3] = aten.slice.Tensor(w{n}, 0, 4, 8)",
                f"joined_{n}: f32[4, 6] = aten.cat([a{n}, r{n}], 1)",
                f"x{n + 1}: f32[4, 3] = aten.slice.Tensor(joined_{n}, 1, 0, 3)",
            ]
        graph = read("\n".join([*lines, f'return output("y", x{size})'])).graph
        return lambda: find_gathers(graph)

    grows_linearly(work, 50)
