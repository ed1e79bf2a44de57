"""What is expected of a compilation: its forms, ten verdicts whose remedies make it pass, and what cannot be judged."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import crossfade as cf
from crossfade.commands.cli import app
from crossfade.communicate.add_before_reducing import AddBeforeReducing
from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.merge_duplicate_collectives import MergeDuplicateCollectives
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.scatter_between_blocks import ScatterBetweenBlocks
from crossfade.communicate.scatter_sliced_reductions import ScatterSlicedReductions
from crossfade.cost.machine import Fabric, Link, Machine
from crossfade.errors import CrossfadeError, StrictError
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.text import parse
from crossfade.report.expect import DEFAULT, Expect
from crossfade.report.report import PassVerdict, Report
from crossfade.report.strict import Judged, Shortfall, hold, shortfalls
from crossfade.schedule.overlap_communication import OverlapCommunication
from crossfade.shard.gather_parameters import GatherParameters
from crossfade.simplify.fold_constants import FoldConstants
from crossfade.simplify.remove_asserts import RemoveAsserts
from crossfade.simplify.remove_redundant_gathers import RemoveRedundantGathers

TOY = Machine(
    "toy", {"*": Fabric(dict.fromkeys(Kind, Link(latency=1.0, bandwidth=1e30)))}, {"float32": 1e30}, 1e30, 1.0
)
"""Every collective and every operator takes a second, whatever its size."""

REDUCES = """
    a: f32[256, 1024] = parameter("a")
    b: f32[256, 1024] = parameter("b")
    s: f32[256, 1024] = c10d.all_reduce(a, "sum", "dp")
    ws: f32[256, 1024] = c10d.wait_tensor(s)
    t: f32[256, 1024] = c10d.all_reduce(b, "sum", "dp")
    wt: f32[256, 1024] = c10d.wait_tensor(t)
    return gradient("a", ws), gradient("b", wt)
"""
SCATTERS = """
    a: f32[256, 1024] = parameter("a")
    b: f32[256, 1024] = parameter("b")
    s: f32[128, 1024] = c10d.reduce_scatter_tensor(a, "sum", 2, "dp")
    ws: f32[128, 1024] = c10d.wait_tensor(s)
    t: f32[128, 1024] = c10d.reduce_scatter_tensor(b, "sum", 2, "dp")
    wt: f32[128, 1024] = c10d.wait_tensor(t)
    return output("a", ws), output("b", wt)
"""
GATHERS = """
    p: f32[64] = parameter("p")
    q: f32[64] = parameter("q")
    g: f32[128] = c10d.all_gather_into_tensor(p, 2, "dp")
    w: f32[128] = c10d.wait_tensor(g)
    a: f32[] = aten.sum(w)
    h: f32[128] = c10d.all_gather_into_tensor(q, 2, "dp")
    v: f32[128] = c10d.wait_tensor(h)
    c: f32[] = aten.sum(v)
    return output("a", a), output("c", c)
"""
TWICE = "\n".join(
    [
        'p: f32[2] = input("p")',
        'w0: f32[2] = input("q")',
        'g: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")',
        "gw: f32[4] = c10d.wait_tensor(g)",
        *(f's{i}: f32[2] = c10d.all_reduce(w{i}, "max", "dp")\nw{i + 1} = c10d.wait_tensor(s{i})' for i in range(5)),
        'h: f32[4] = c10d.all_gather_into_tensor(p, 2, "dp")',
        "hw: f32[4] = c10d.wait_tensor(h)",
        "b: f32[4] = aten.mul.Tensor(gw, hw)",
        'return output("b", b), output("w", w5)',
    ]
)
SLICED = """
    x: f32[4] = input("x")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    w: f32[4] = c10d.wait_tensor(s)
    a: f32[2] = aten.slice.Tensor(w, 0, 2, 4)
    n: f32[2] = aten.neg(a)
    return output("n", n)
"""
KEPT = """
    x: f32[4] = input("x")
    k: f32[4] = constant("k")
    m: (f32[], i64[]) = aten.max.dim(k, 0)
    i: i64[] = m[1]
    y: f32[4] = aten.add.Tensor(x, i)
    return output("y", y)
"""
CHECKED = """
    x: f32[4] = input("x")
    ok: b8[] = aten.any(x)
    check: None = aten._assert_async.msg(ok, "all zeros")
    neg: f32[4] = aten.neg(x)
    return output("y", neg)
"""
EXCHANGED = """
    x: f32[6] = input("x")
    a: f32[6] = c10d.all_to_all_single(x, [2, 2, 2], [2, 2, 2], "many")
    w: f32[6] = c10d.wait_tensor(a)
    b: f32[6] = c10d.all_to_all_single(w, [2, 2, 2], [2, 2, 2], "many")
    v: f32[6] = c10d.wait_tensor(b)
    y: f32[6] = aten.neg(v)
    return output("y", y)
"""
BLOCK = """
    x: f64[4, 8] = input("x")
    w: f64[8, 8] = input("w")
    o: f64[4, 8] = input("o")
    h = aten.mm(x, w)
    s = c10d.all_reduce(h, "sum", "dp")
    b: f64[4, 8] = c10d.wait_tensor(s)
    r = aten.add.Tensor(b, o)
    q = aten.relu(r)
    z = aten.mm(q, w)
    return output("z", z)
"""
SUMMED = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    ws: f32[4] = c10d.wait_tensor(s)
    t: f32[4] = c10d.all_reduce(y, "sum", "dp")
    wt: f32[4] = c10d.wait_tensor(t)
    z: f32[4] = aten.add.Tensor(ws, wt)
    return output("z", z)
"""

SUMS = """
    x: f32[64] = input("x")
    y: f32[64] = input("y")
    a: f32[64] = aten.exp(x)
    b: f32[64] = aten.exp(y)
    s: f32[64] = c10d.all_reduce(a, "sum", "dp")
    w: f32[64] = c10d.wait_tensor(s)
    t: f32[64] = c10d.all_reduce(b, "sum", "dp")
    v: f32[64] = c10d.wait_tensor(t)
    return output("w", w), output("v", v)
"""

# program, passes, what is expected, what the remedy says, and the passes that follow it
CASES: dict[str, tuple[str, list[Pass], Any, str, list[Pass]]] = {
    "bucket-all-reduces": (
        REDUCES,
        [BucketAllReduces(cap_mb=1.5, first_mb=1.5)],
        "bucketed:all",
        "a larger cap_mb packs more",
        [BucketAllReduces(cap_mb=4, first_mb=4)],
    ),
    "bucket-reduce-scatters": (
        SCATTERS,
        [BucketReduceScatters(cap_mb=1.5)],
        "no-remedies",
        "a larger cap_mb, and first_mb for the first bucket, packs more",
        [BucketReduceScatters(cap_mb=4, first_mb=4)],
    ),
    "bucket-all-gathers": (
        GATHERS,
        [BucketAllGathers(cap_mb=0.0006)],
        "collectives<=1",
        "raise cap_mb of the passes that make buckets",
        [BucketAllGathers(cap_mb=2)],
    ),
    "raise-launches": (
        GATHERS,
        [RaiseLaunches()],
        "no:raise-launches/*/starting*",
        "gathers=True starts it early",
        [RaiseLaunches(gathers=True)],
    ),
    "merge-duplicate-collectives": (
        TWICE,
        [MergeDuplicateCollectives()],
        {"no_left": ["merge-*"]},
        "hold=True merges it",
        [MergeDuplicateCollectives(hold=True)],
    ),
    "scatter-sliced-reductions": (
        SLICED,
        [ScatterSlicedReductions()],
        "no-left:scatter-sliced-reductions",
        "positions=(('dp', ...),) says it",
        [ScatterSlicedReductions((("dp", 1),))],
    ),
    "fold-constants": (
        KEPT,
        [FoldConstants()],
        {"no": [{"name": "fold-constants", "outcome": "left alone"}]},
        "kept=True promises that they do not",
        [FoldConstants(kept=True)],
    ),
    "remove-asserts": (
        CHECKED,
        [RemoveAsserts()],
        "no-left:remove-asserts",
        "RemoveAsserts(values=True) removes it",
        [RemoveAsserts(values=True)],
    ),
    "remove-redundant-gathers": (
        EXCHANGED,
        [RemoveRedundantGathers()],
        True,
        "alike=True promises it",
        [RemoveRedundantGathers(alike=True)],
    ),
    "scatter-between-blocks": (
        BLOCK,
        [ScatterBetweenBlocks(("x", "w"))],
        True,
        "if it is alike, alike=('o', ...) says so",
        [ScatterBetweenBlocks(("x", "w", "o"))],
    ),
    "overlap-communication": (
        GATHERS,
        [OverlapCommunication(TOY, 900)],
        True,
        "raise memory_limit",
        [OverlapCommunication(TOY)],
    ),
    "add-before-reducing": (
        SUMMED,
        [AddBeforeReducing()],
        "bitwise",
        'leave it out: passes=pipeline.without("add-before-reducing")',
        [],
    ),
}


def judged(text: str, passes: list[Pass]) -> Judged:
    constants = {"k": torch.tensor([1.0, 5.0, 2.0, 3.0])} if text is KEPT else {}
    before = parse(textwrap.dedent(text), groups={"dp": 2, "many": 3}, constants=constants)
    after = run_passes(before, passes)
    return Judged(Report.of(before, after), before, after)


@pytest.mark.parametrize("name", CASES)
def test_following_the_remedy_makes_it_pass(name: str) -> None:
    text, passes, expected, remedy, followed = CASES[name]
    expect = Expect.of(expected)
    assert expect is not None
    found = shortfalls(expect, judged(text, passes))
    assert remedy in [shortfall.remedy for shortfall in found]
    assert all(shortfall.subject and shortfall.reason for shortfall in found)
    with pytest.raises(StrictError, match="short of what strict= expects"):
        hold(expect, judged(text, passes))
    hold(expect, judged(text, followed))


def test_the_error_lists_each_verdict_with_node_source_and_remedy() -> None:
    module = parse(textwrap.dedent(REDUCES), groups={"dp": 2}).module()
    next(node for node in module.graph.nodes if node.name == "t").meta["made_for"] = "model.py:7"
    with pytest.raises(StrictError) as caught:
        cf.optimize(module, passes=[BucketAllReduces(cap_mb=1.5, first_mb=1.5)], strict="bucketed:all collectives<=1")
    assert str(caught.value) == (
        "3 things short of what strict= expects:\n"
        "  collectives<=1: the program: 2 collectives (remedy: raise cap_mb of the passes that make buckets)\n"
        "  bucketed:all: bucket-all-reduces: s: left alone: no neighbour of the same kind fits its bucket: cap 1.5 MB "
        "(remedy: a larger cap_mb packs more)\n"
        "  bucketed:all: bucket-all-reduces: t [model.py:7]: left alone: no neighbour of the same kind fits its bucket"
        ": cap 1.5 MB (remedy: a larger cap_mb packs more)\n"
        ": expected collectives<=1 bucketed:all. Remedy: follow the remedies above, or expect less."
    )
    assert [shortfall.source for shortfall in caught.value.shortfalls] == ["", "", "model.py:7"]
    done = cf.optimize(module, passes=[BucketAllReduces(cap_mb=4, first_mb=4)], strict="bucketed:all collectives<=1")
    assert done.report.total_after[0] == 1


def test_exposed_time_needs_a_machine_and_is_listed_by_collective() -> None:
    module = parse(textwrap.dedent(GATHERS), groups={"dp": 2}).module()
    with pytest.raises(StrictError, match=r"no machine to predict exposed time for \(remedy: pass machine="):
        cf.optimize(module, strict=Expect(exposed_ms=5), backends={})
    with pytest.raises(StrictError, match=r"exposed<=5ms: .*: 1000.000 ms of 1000.000 ms exposed in all") as caught:
        cf.optimize(module, strict=Expect(exposed_ms=5), backends={}, machine=TOY)
    assert all(shortfall.remedy for shortfall in caught.value.shortfalls)
    cf.optimize(module, strict=Expect(exposed_ms=1000), backends={}, machine=TOY)


def test_what_is_exposed_in_a_bucket_names_what_is_packed() -> None:
    module = parse(textwrap.dedent(SUMS), groups={"dp": 2}).module()
    for node, line in zip(module.graph.nodes, (0, 0, 7, 8), strict=False):
        node.meta["made_for"] = f"model.py:{line}"
    with pytest.raises(StrictError, match=r"\[model.py:7 and 1 more\]: 1000.000 ms of 1000.000 ms exposed"):
        cf.optimize(module, strict="exposed<=5ms", groups={"dp": 2}, backends={}, machine=TOY)


def test_a_choice_for_less_memory_is_no_oversight() -> None:
    for text, step_pass in ((TWICE, MergeDuplicateCollectives()), (GATHERS, RaiseLaunches())):
        hold(DEFAULT, judged(text, [step_pass]))


def test_a_weight_that_is_gathered_is_named() -> None:
    text = 'w: f32[4, 2] = parameter("w")\nx: f32[2, 4] = input("x")\ny = aten.mm(x, w)\nreturn output("y", y)'
    program = parse(text, groups={"dp": 2})
    split = run_passes(program, [GatherParameters("dp", 2)])
    expect = Expect(no_gather="weights")
    (found,) = shortfalls(expect, Judged(Report.of(split, split), split, split))
    assert (found.source, found.reason) == ("w", "w is gathered from all ranks of dp")
    assert 'data_parallel="replicate"' in found.remedy
    hold(expect, Judged(Report.of(program, program), program, program))


def test_what_a_plain_graph_does_not_say_is_said_so() -> None:
    text = 'w: f32[4] = input("w")\ng = c10d.all_gather_into_tensor(w, 2, "dp")\nd = c10d.wait_tensor(g)\n'
    program = parse(text + 'return output("d", d)', groups={"dp": 2})
    seen = Judged(Report.of(program, program), program, program)
    for expect in (Expect(no_gather="weights"), Expect(bucketed="gradients")):
        (found,) = shortfalls(expect, seen)
        assert found.reason == "a plain graph does not say which of its inputs are weights"
    (found,) = shortfalls(Expect(no_gather="w"), seen)
    assert found.subject == "g"
    (found,) = shortfalls(Expect(no_left="fuse-gathers-into-matmuls"), seen)
    assert found.reason == "no pass called fuse-gathers-into-matmuls ran"
    (found,) = shortfalls(Expect(bucketed="*.py:*"), seen)
    assert "did not run" in found.reason


def test_an_operator_without_a_rule() -> None:
    program = parse('x: f32[4] = input("x")\nreturn output("x", x)')
    report = Report.of(program, program)
    said = cf.Verdict("k", "replaced", "there is no rule for this operator", "m.py:3", "register_rule(...)")  # type: ignore[arg-type]
    (found,) = shortfalls(Expect(rules=True), Judged(report, program, program, [PassVerdict("shard", said)]))
    assert (found.source, found.remedy) == ("m.py:3", "register_rule(...)")


def test_a_step_is_held_to_it_before_it_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile_step(model, F.mse_loss, optimizer, strict="exposed<=5ms")
    with pytest.raises(StrictError, match="no machine to predict"):
        step(torch.ones(4, 4), torch.ones(4, 2))
    assert all(torch.equal(value, other) for value, other in zip(before, model.parameters(), strict=True))
    with pytest.raises(CrossfadeError, match="unknown word 'exposed' in strict="):
        cf.compile_step(model, F.mse_loss, optimizer, strict="exposed")
    cf.compile_step(model, F.mse_loss, optimizer, strict=True)(torch.ones(4, 4), torch.ones(4, 2))


def test_explain_holds_a_program_to_it(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(textwrap.dedent(REDUCES))
    passes = ("--passes", "bucket-all-reduces(cap_mb=1.5,first_mb=1.5)")
    done = CliRunner().invoke(app, ["explain", str(path), *passes, "--strict", "bucketed:gradients"])
    assert done.exit_code == 1
    assert isinstance(done.exception, StrictError)
    assert [shortfall.subject for shortfall in done.exception.shortfalls] == ["s", "t"]
    passes = ("--passes", "bucket-all-reduces(cap_mb=4,first_mb=4)")
    assert CliRunner().invoke(app, ["explain", str(path), *passes, "--strict", "bucketed:gradients"]).exit_code == 0
    done = CliRunner().invoke(app, ["explain", str(path), "--machine", "ethernet-1gbit", "--strict", "exposed<=0.1ms"])
    assert isinstance(done.exception, StrictError)


def test_the_error_travels_between_processes() -> None:
    import pickle

    error = StrictError("a", expected="b", remedy="c")
    error.shortfalls = (Shortfall("x", "y"),)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
