"""All-gathers into memory of the program's; the docstring's program is tested with those of all passes."""

from __future__ import annotations

import functools
import math
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.errors import PassError
from crossfade.execute.executable import Executable
from crossfade.finish.pack_in_place import PackInPlace
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify
from tests.communicate.on_ranks import differences

BOTH = """
    x: f32[3, 2] = input("x")
    t: f32[2, 3] = aten.t(x)
    c: f32[3, 2] = aten.neg(x)
    both: (f32[6, 2], f32[4, 3]) = c10d.all_gather_into_tensor_coalesced([c, t], 2, "dp")
    first: f32[6, 2] = both[0]
    second: f32[4, 3] = both[1]
    w: f32[6, 2] = c10d.wait_tensor(first)
    v: f32[4, 3] = c10d.wait_tensor(second)
    return output("w", w), output("v", v)
    """

SINGLE = """
    x: f32[3, 2] = input("x")
    g: f32[6, 2] = c10d.all_gather_into_tensor(x, 2, "dp")
    y: f32[3, 2] = aten.exp(x)
    w: f32[6, 2] = c10d.wait_tensor(g)
    return output("w", w), output("y", y)
    """


LARGE = """
    x: f32[3] = input("x")
    g: f32[6] = c10d.all_gather_into_tensor(x, 2, "dp")
    y: f32[3] = aten.exp(x)
    w: f32[6] = c10d.wait_tensor(g)
    v: f32[6] = c10d.wait_tensor(g)
    z: f32[6] = aten.neg(v)
    return output("w", w), output("y", y), output("z", z)
    """

CUT = """
    x: f32[3] = input("x")
    view: f32[3] = aten.view(x, [3])
    split: (f32[2], f32[1]) = aten.split.Tensor(view, 2)
    getitem: f32[2] = split[0]
    getitem_1: f32[1] = split[1]
    empty: f32[4] = aten.empty.memory_format([4], dtype=f32, device=device("cpu"))
    all_gather_into_tensor_out: f32[4] = c10d.all_gather_into_tensor_out(getitem, 2, "dp", out=empty)
    empty_1: f32[2] = aten.empty.memory_format([2], dtype=f32, device=device("cpu"))
    all_gather_into_tensor_out_1: f32[2] = c10d.all_gather_into_tensor_out(getitem_1, 2, "dp", out=empty_1)
    y: f32[3] = aten.exp(x)
    wait_tensor: f32[4] = c10d.wait_tensor(all_gather_into_tensor_out)
    view_1: f32[2, 2] = aten.view(wait_tensor, [2, -1])
    wait_tensor_1: f32[2] = c10d.wait_tensor(all_gather_into_tensor_out_1)
    view_2: f32[2, 1] = aten.view(wait_tensor_1, [2, -1])
    cat: f32[2, 3] = aten.cat([view_1, view_2], 1)
    view_3: f32[6] = aten.view(cat, [6])
    z: f32[6] = aten.neg(view_3)
    return output("w", view_3), output("y", y), output("z", z)
    """
"""16 of 24 bytes in a piece."""


def lowered(lines: str, *groups: str) -> Program:
    done = run_passes(parse(textwrap.dedent(lines), groups={"dp": 2}), [LowerAllGathers(groups or ("dp",))])
    verify(done, recompute=True)
    return done


def verdicts(program: Program) -> list[str]:
    return [str(verdict) for verdict in program.history[0].verdicts]


def test_single_ones_have_memory_of_the_program_too() -> None:
    done = lowered(SINGLE)
    assert [str(node.target) for node in done.graph.nodes if node.op == "call_function"] == [
        "aten.empty.memory_format",
        "_c10d_functional.all_gather_into_tensor_out.default",
        "aten.exp.default",
        "_c10d_functional.wait_tensor.default",
    ]
    assert verdicts(done) == ["g: replaced: its group's backend is safe only with memory that it is given"]


def test_what_lies_otherwise_in_memory_is_laid_out_first() -> None:
    assert "aten.clone(t, memory_format=contiguous_format)" in str(lowered(BOTH))


def test_other_groups_keep_theirs() -> None:
    assert verdicts(lowered(SINGLE, "tp")) == ["g: left alone: its group's backend gathers safely"]


def test_complex_numbers_keep_theirs() -> None:
    assert verdicts(lowered(SINGLE.replace("f32", "c64"))) == [
        "g: left alone: complex numbers are gathered as lists only"
    ]


def test_a_second_time_there_is_nothing_to_do() -> None:
    again = run_passes(lowered(SINGLE), [LowerAllGathers()])
    assert not again.history[-1].changed
    assert [str(verdict) for verdict in again.history[-1].verdicts] == [
        "g: left alone: it is given memory to gather into already"
    ]


def test_complex_numbers_among_others_are_named() -> None:
    lines = BOTH.replace("x: f32[3, 2]", "x: c64[3, 2]").replace("f32[2, 3] = aten.t", "c64[2, 3] = aten.t")
    lines = lines.replace("c: f32[3, 2] = aten.neg(x)", 'c: f32[3, 2] = input("c")')
    lines = lines.replace("f32[4, 3]", "c64[4, 3]")
    done = lowered(lines)
    (verdict,) = verdicts(done)
    assert verdict.endswith("2 single ones, 1 of complex numbers still as lists")
    assert [collective.out is not None for collective in collectives.find(done.graph)] == [True, False]


def test_what_is_packed_for_a_gather_keeps_its_memory() -> None:
    lines = """
    x: f32[2] = input("x")
    y: f32[2] = input("y")
    p: f32[4] = aten.cat([x, y])
    g: f32[8] = c10d.all_gather_into_tensor(p, 2, "dp")
    w: f32[8] = c10d.wait_tensor(g)
    return output("w", w)
    """
    done = run_passes(lowered(lines), [PackInPlace()])
    assert done.history[-1].counts["buffers"] == 1


def test_what_is_large_travels_in_pieces_and_is_put_together_where_it_is_waited_for() -> None:
    done = run_passes(parse(textwrap.dedent(LARGE), groups={"dp": 2}), [LowerAllGathers(piece_mb=16 / MB)])
    verify(done, recompute=True)
    (verdict,) = verdicts(done)
    assert verdict.endswith(": 2 pieces")
    assert str(done) == textwrap.dedent(CUT).strip()


def test_pieces_say_what_they_cannot_be() -> None:
    with pytest.raises(PassError, match=r"lower-all-gathers\(piece_mb=0\) for 1 groups: expected sizes larger than 0"):
        LowerAllGathers(piece_mb=0)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "lines", [BOTH if torch.__version__ >= "2.12" else BOTH.replace("aten.t(x)", "aten.view(x, [2, 3])"), SINGLE]
)  # 2.11 itself gathers only what is contiguous
def test_the_same_arrives(ranks: Any, lines: str) -> None:
    compare = functools.partial(differences, whole_numbers=False)
    assert ranks(2).run(compare, textwrap.dedent(lines), LowerAllGathers()) == [[0.0, 0.0]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("bytes_a_piece", [8, 16, 20, 24])
def test_the_same_arrives_in_pieces(ranks: Any, bytes_a_piece: int) -> None:
    """Of a gather, and of one of what that gathered."""
    lines = """
    x: f32[2, 3] = input("x")
    g: f32[4, 3] = c10d.all_gather_into_tensor(x, 2, "dp")
    w: f32[4, 3] = c10d.wait_tensor(g)
    h: f32[8, 3] = c10d.all_gather_into_tensor(w, 2, "dp")
    v: f32[8, 3] = c10d.wait_tensor(h)
    return output("w", w), output("v", v)
    """
    compare = functools.partial(differences, whole_numbers=False)
    lowering = LowerAllGathers(piece_mb=bytes_a_piece / MB)
    assert ranks(2).run(compare, textwrap.dedent(lines), lowering) == [[0.0, 0.0]] * 2


FLOAT8 = """
x: f8e4m3[2, 3] = input("x")
g: f8e4m3[4, 3] = c10d.all_gather_into_tensor(x, 2, "dp")
w: f8e4m3[4, 3] = c10d.wait_tensor(g)
y: f32[4, 3] = aten._to_copy(w, dtype=f32)
return output("y", y)
"""


def float8_gathered(piece_mb: float) -> list[bool]:
    """Whether what arrives is what each rank gave, gathered by torch as bytes."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    done = run_passes(parse(FLOAT8, groups={"dp": 2}), [LowerAllGathers(piece_mb=piece_mb)])
    verify(done, recompute=True)
    mine = torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.float8_e4m3fn)
    parts = [torch.empty(2, 3, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(parts, mine.view(torch.uint8))
    (found,) = Executable(done, {"dp": group})([mine])
    return [torch.equal(found, torch.cat(parts).view(torch.float8_e4m3fn).float())]


@pytest.mark.ranks
@pytest.mark.parametrize("bytes_a_piece", [math.inf, 6])
def test_float8_travels_as_bytes(ranks: Any, bytes_a_piece: float) -> None:
    assert ranks(2).run(float8_gathered, bytes_a_piece / MB) == [[True], [True]]


def test_float8_is_waited_for_where_it_was() -> None:
    lines = FLOAT8.replace("w:", "n: f8e4m3[2, 3] = aten.clone(x)\nw:").replace("return", 'return output("n", n),')
    done = run_passes(parse(lines, groups={"dp": 2}), [LowerAllGathers()])
    names = [node.name for node in done.graph.nodes]
    assert names.index("all_gather_into_tensor_out") < names.index("n") < names.index("wait_tensor")
