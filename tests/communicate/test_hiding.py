"""What hides a collective as the program is written, and buckets that leave it so."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.communicate.bucket_all_gathers import BucketAllGathers
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_reduce_scatters import BucketReduceScatters
from crossfade.communicate.buckets import BucketPass
from crossfade.communicate.hiding import Hiding, Window
from crossfade.compile.pipeline import communication, optimization
from crossfade.graph import collectives
from crossfade.graph.order import Order
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse
from crossfade.graph.verify import verify

EXPOSED = "in a bucket it would lose computation that hides it"
STARTS = {
    "AG": "f32[4] = c10d.all_gather_into_tensor({}, 2, 'dp')",
    "RS": "f32[1] = c10d.reduce_scatter_tensor({}, 'sum', 2, 'dp')",
    "AR": "f32[2] = c10d.all_reduce({}, 'sum', 'dp')",
}
DONE = {"AG": "f32[4]", "RS": "f32[1]", "AR": "f32[2]"}


def program_of(sketch: str) -> Program:
    """`AG1 mm AG2 W1 use1 W2 use2` as a program: each collective of an input of its own, each mm of the one before."""
    words = sketch.split()
    kind = next(word[:2] for word in words if word[:2] in STARTS)
    numbers = sorted({word[2:] for word in words if word[:2] == kind})
    lines = ["x: f32[4, 4] = input('x')", *(f"p{number}: f32[2] = input('p{number}')" for number in numbers)]
    last, uses = "x", []
    for place, word in enumerate(words):
        if word == "mm":
            lines.append(f"m{place}: f32[4, 4] = aten.mm({last}, x)")
            last = f"m{place}"
        elif word.startswith("W"):
            lines.append(f"w{word[1:]}: {DONE[kind]} = c10d.wait_tensor(s{word[1:]})")
        elif word.startswith("use"):
            lines.append(f"u{word[3:]}: {DONE[kind]} = aten.neg(w{word[3:]})")
            uses.append(f"u{word[3:]}")
        else:
            lines.append(f"s{word[2:]}: " + STARTS[kind].format(f"p{word[2:]}"))
    lines.append("return " + ", ".join(f"output('{name}', {name})" for name in [last, *uses]))
    return parse("\n".join(lines), groups={"dp": 2})


def sketch_of(program: Program) -> str:
    """A program's starts, waits and matmuls."""
    names = {"all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS", "all_reduce": "AR", "wait_tensor": "W"}
    found = []
    for node in program.graph.nodes:
        word = str(node.target).split(".")[-2] if node.op == "call_function" and "." in str(node.target) else ""
        found += [names[word]] if word in names else [word] if word == "mm" else []
    return " ".join(found)


@pytest.mark.parametrize(
    ("sketch", "window"),
    {
        "AG1 W1 use1 mm": Window(2, 4, None),
        "mm AG1 W1 use1 mm": Window(3, 5, None),
        "AG1 mm mm W1 use1": Window(2, 6, (3, 4)),
        "AG1 mm W1 mm use1": Window(2, 6, (3, 3)),
    }.items(),
)
def test_what_stands_between_start_and_wait(sketch: str, window: Window) -> None:
    program = program_of(sketch)
    assert Hiding(Order(program.graph)).window(collectives.find(program.graph)[0]) == window


def test_views_and_copies_are_no_use_but_writes_are() -> None:
    program = parse(
        textwrap.dedent("""
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        c: f32[2, 2] = aten.clone(v)
        a: f32[2, 2] = aten.add_.Tensor(c, 1)
        n: f32[2, 2] = aten.neg(c)
        return output("n", n)
        """),
        groups={"dp": 2},
    )
    assert Hiding(Order(program.graph)).window(collectives.find(program.graph)[0]).first_use == 5


KEPT = {
    # gathers start with the first: both are hidden by the same matmuls
    "AG1 AG2 mm mm W1 W2 use1 use2": "AG mm mm W",
    "AG1 AG2 mm W1 use1 W2 use2": "AG mm W",
    # nothing hides any: one launch fewer
    "AG1 W1 use1 mm AG2 W2 use2": "AG W mm",
    # the second was hidden by a matmul below the first use: it would have to arrive before that
    "AG1 W1 use1 AG2 mm W2 use2": "AG AG W mm W",
    "AG1 mm W1 use1 AG2 mm W2 use2": "AG AG mm W mm W",
    "AG1 AG2 mm W1 use1 mm W2 use2": "AG AG mm W mm W",
    # reductions start with the last: what hides the first must stand below that
    "AR1 AR2 mm W1 W2 use1 use2": "AR mm W",
    "AR1 mm W1 AR2 mm W2 use1 use2": "AR AR mm mm W W",
    "RS1 mm W1 use1 RS2 mm W2 use2": "RS RS mm W mm W",
    "AR1 W1 mm AR2 W2 mm use1 use2": "AR mm mm W",
    "AR1 mm AR2 mm W1 W2 use1 use2": "AR mm mm W",
    "AR1 mm AR2 W1 W2 use1 use2": "AR AR mm W W",
}


@pytest.mark.parametrize("sketch", KEPT)
def test_O3_buckets_keep_what_hides_collectives_as_written(sketch: str) -> None:
    for pipeline in (communication(), optimization()):
        done = run_passes(program_of(sketch), pipeline)
        verify(done, recompute=True)
        assert sketch_of(done) == KEPT[sketch]


@pytest.mark.parametrize(
    ("sketch", "bucketing"),
    {
        "AG1 mm W1 use1 AG2 mm W2 use2": BucketAllGathers,
        "AR1 mm W1 AR2 mm W2 use1 use2": BucketAllReduces,
        "RS1 mm W1 use1 RS2 mm W2 use2": BucketReduceScatters,
    }.items(),
)
def test_a_bucket_that_is_not_made_has_a_verdict(sketch: str, bucketing: type[BucketPass]) -> None:
    assert {verdict.reason for verdict in bucketing().plan(program_of(sketch)).left} == {EXPOSED}
    assert [bucket.members for bucket in bucketing(keeps_overlap=False).plan(program_of(sketch)).buckets] == [
        ("s1", "s2")
    ]


TOWERS = """
    x: f32[4] = input("x")
    y: f32[4] = input("y")
    a: f32[4] = c10d.all_reduce(x, "sum", "dp")
    wa: f32[4] = c10d.wait_tensor(a)
    n: f32[4] = aten.neg(wa)
    b: f32[4] = c10d.all_reduce(n, "sum", "dp")
    wb: f32[4] = c10d.wait_tensor(b)
    {between}
    c: f32[4] = c10d.all_reduce({given}, "sum", "dp")
    wc: f32[4] = c10d.wait_tensor(c)
    e: f32[4] = aten.exp(wc)
    d: f32[4] = c10d.all_reduce(e, "sum", "dp")
    wd: f32[4] = c10d.wait_tensor(d)
    return output("b", wb), output("d", wd)
"""


def buckets(between: str, given: str) -> list[tuple[str, ...]]:
    text = textwrap.dedent(TOWERS).format(between=between, given=given)
    program = parse(text, groups={"dp": 2})
    done = run_passes(program, [BucketAllReduces()])
    verify(done, recompute=True)
    return [bucket.members for bucket in BucketAllReduces().plan(program).buckets]


def test_collectives_that_others_depend_on_are_packed_with_their_equals() -> None:
    assert buckets("k: f32[4] = aten.sin(y)", "k") == [("a", "c"), ("b", "d")]


def test_none_waits_for_a_matmul_or_for_another_collective() -> None:
    long = "m: f32[4] = aten.mv(t, y)"
    assert buckets(f"t: f32[4, 4] = aten.expand(y, [4, 4])\n{long}", "m") == [("b", "d")]
    assert buckets("k: f32[4] = aten.add.Tensor(wa, y)", "k") == [("b", "d")], "it needs the first"


def test_of_a_long_chain_each_is_looked_at_a_few_times() -> None:
    lines, last = ['x: f32[4] = input("x")'], "x"
    for index in range(60):
        lines.append(f's{index}: f32[4] = c10d.all_reduce({last}, "sum", "dp")')
        lines.append(f"w{index}: f32[4] = c10d.wait_tensor(s{index})")
        last = f"w{index}"
    program = parse("\n".join([*lines, f'return output("y", {last})']), groups={"dp": 2})
    plan = BucketAllReduces().plan(program)
    assert (len(plan.buckets), len(plan.left)) == (0, 60)
