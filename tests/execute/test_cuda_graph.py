"""Which stretches of a program are recorded as CUDA graphs, and what they are given; needs no device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from crossfade.execute.cuda_graph import Replay, with_replays
from crossfade.graph.private import tree_map_only
from crossfade.graph.program import Program
from crossfade.graph.text import parse


def on_cuda(text: str) -> Program:
    """A program whose tensors are said to be on a GPU."""
    program = parse(text, groups={"dp": 2})

    def elsewhere(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cuda:0")

    with program.fake_mode:
        for node in program.graph.nodes:
            node.meta["val"] = tree_map_only(torch.Tensor, elsewhere, node.meta.get("val"))
    return program


def replays(program: Program, groups: Collection[str] = ()) -> list[tuple[list[str], list[str], tuple[bool, ...]]]:
    """For each recorded stretch what it is given, what it computes, and which of its inputs stay where they are."""
    recorded = with_replays(program, groups)
    nodes = [node for node in recorded.graph.nodes if isinstance(node.target, Replay)]
    return [
        (
            [source.name for source in node.args],
            [inner.name for inner in node.target.program.graph.nodes if inner.op == "call_function"],
            node.target.stays,
        )
        for node in nodes
    ]


def test_collectives_and_numbers_that_change_cut() -> None:
    program = on_cuda("""
        w: f32[4] = parameter("w")
        lr: float = scalar("lr")
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.mul.Tensor(a, w)
        sent: f32[4] = c10d.all_reduce(b, "avg", "dp")
        came: f32[4] = c10d.wait_tensor(sent)
        c: f32[4] = aten.mul.Tensor(came, lr)
        d: f32[4] = aten.neg(c)
        e: f32[4] = aten.sub_.Tensor(w, d)
        return output("d", d)
    """)
    assert replays(program) == [(["x", "w"], ["a", "b"], (False, True)), (["c", "w"], ["d", "e"], (False, True))]


def test_a_stretch_is_given_elements_of_lists_and_whole_numbers_by_value() -> None:
    program = on_cuda("""
        rank: int = scalar("rank")
        x: f32[8] = input("x")
        sent: f32[16] = c10d.all_gather_into_tensor(x, 2, "dp")
        came: f32[16] = c10d.wait_tensor(sent)
        parts: (f32[8], f32[8]) = aten.split.Tensor(came, 8)
        stop: f32[8] = c10d.all_reduce(x, "avg", "dp")
        first: f32[8] = parts[0]
        second: f32[8] = parts[1]
        a: f32[8] = aten.add.Tensor(first, rank)
        b: f32[8] = aten.mul.Tensor(a, second)
        stopped: f32[8] = c10d.wait_tensor(stop)
        return output("b", b), output("stopped", stopped)
    """)
    assert replays(program) == [(["first", "rank", "second"], ["a", "b"], (False, True, False))]


def test_collectives_that_a_graph_can_hold_are_recorded_unless_they_are_under_way_at_its_end() -> None:
    text = """
        w: f32[4] = parameter("w")
        lr: float = scalar("lr")
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        first: f32[4] = c10d.all_reduce(a, "avg", "dp")
        b: f32[4] = aten.exp(a)
        came: f32[4] = c10d.wait_tensor(first)
        second: f32[4] = c10d.all_reduce(b, "avg", "dp")
        {between}
        c: f32[4] = aten.neg(came)
        later: f32[4] = c10d.wait_tensor(second)
        d: f32[4] = aten.add.Tensor(c, later)
        return output("d", d)
    """
    whole = on_cuda(text.format(between="e: f32[4] = aten.exp(came)"))
    computed = ["a", "first", "b", "came", "second", "e", "c", "later", "d"]
    assert replays(whole, {"dp"}) == [(["x"], computed, (False,))]
    cut = on_cuda(text.format(between="e: f32[4] = aten.mul.Tensor(came, lr)"))
    assert replays(cut, {"dp"}) == [(["x"], ["a", "first", "b", "came"], (False,))]


def test_whole_numbers_are_computed_around_a_graph() -> None:
    program = on_cuda("""
        rank: int = scalar("rank")
        x: f32[8] = input("x")
        a: f32[8] = aten.neg(x)
        begin: int = operator.mul(rank, 2)
        b: f32[8] = aten.add.Tensor(a, begin)
        return output("b", b)
    """)
    assert replays(program) == [(["x", "begin"], ["a", "b"], (False, True))]


def test_what_is_written_reaches_memory_that_does_not_stay() -> None:
    """A graph writes the copy that it was recorded with: what came from outside is given its new value."""
    program = on_cuda("""
        x: f32[4] = input("x")
        n: i64[u0, 1] = aten.nonzero(x)
        a: f32[4] = aten.neg(x)
        sent: f32[4] = c10d.all_reduce(x, "avg", "dp")
        b: f32[4] = aten.exp_(a)
        c: f32[4] = aten.neg(b)
        came: f32[4] = c10d.wait_tensor(sent)
        return output("a", a), output("c", c), output("came", came)
    """)
    (node,) = (node for node in with_replays(program).graph.nodes if isinstance(node.target, Replay))
    assert [source.name for source in node.args] == ["a"]
    assert node.target.copied_back == [0]
