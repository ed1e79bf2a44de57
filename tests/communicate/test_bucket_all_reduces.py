"""Which all-reduces travel together, which do not and why, and what the merged program looks like."""

from __future__ import annotations

import functools
import math
import textwrap

import pytest

from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.communicate.bucket_plan import MB, Bucket, BucketPlan
from crossfade.communicate.buckets import apply_buckets
from crossfade.compile.catalogue import pass_from_spelling
from crossfade.cost.machine import Fabric, Machine
from crossfade.cost.network import Network, Wire, routed
from crossfade.errors import PassError, RewriteError
from crossfade.graph import collectives
from crossfade.graph.collectives import Kind
from crossfade.graph.passes import fingerprint, run_passes
from crossfade.graph.program import MADE_FOR, Program
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

GROUPS = {"dp": 2, "tp": 2}
ALONE = "no neighbour of the same kind fits its bucket"


def all_reduces(*members: tuple[str, str, str, int]) -> str:
    """A program of all-reduces of inputs, each given by dtype, reduction, group and number of elements."""
    lines = [f'x{i}: {dtype}[{n}] = input("x{i}")' for i, (dtype, _, _, n) in enumerate(members)]
    for i, (dtype, op, group, n) in enumerate(members):
        lines.append(f's{i}: {dtype}[{n}] = c10d.all_reduce(x{i}, "{op}", "{group}")')
        lines.append(f"w{i}: {dtype}[{n}] = c10d.wait_tensor(s{i})")
    results = ", ".join(f'output("{i}", w{i})' for i in range(len(members)))
    return "\n".join([*lines, f"return {results}"])


def planned(text: str, *, cap: float = 1e6, first: float = 1e6) -> tuple[list[str], dict[str, str]]:
    """Members of each bucket, and the reason of every all-reduce that is left."""
    program = parse(textwrap.dedent(text), groups=GROUPS)
    pass_ = BucketAllReduces(cap_mb=cap / MB, first_mb=first / MB)
    before = fingerprint(program)
    plan = pass_.plan(program)
    assert fingerprint(program) == before and pass_.plan(program) == plan, "planning is pure"
    done = run_passes(program, [pass_])
    verify(done, recompute=True)
    record = done.history[0]
    everything = {c.node.name for c in collectives.find(program.graph) if c.kind is collectives.Kind.ALL_REDUCE}
    assert sorted(v.subject for v in record.verdicts) == sorted(everything), "one verdict for every all-reduce"
    packed = sum(len(bucket.members) for bucket in plan.buckets)
    assert record.counts == {"buckets": len(plan.buckets), "bucketed": packed, "left": len(plan.left)}
    assert record.changed == bool(plan.buckets)
    kinds = [c.kind for c in collectives.find(done.graph)]
    assert kinds.count(collectives.Kind.ALL_REDUCE) == len(everything) - packed + len(plan.buckets)
    return [" ".join(bucket.members) for bucket in plan.buckets], {v.subject: v.reason for v in plan.left}


@pytest.mark.parametrize(
    ("what", "other"),
    [("dtype", ("f64", "sum", "dp", 2)), ("op", ("f32", "max", "dp", 2)), ("group", ("f32", "sum", "tp", 2))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_are_kept_apart(what: str, other: tuple):
    usual = ("f32", "sum", "dp", 2)
    assert planned(all_reduces(usual, other, usual, other)) == (["s0 s2", "s1 s3"], {})


def test_cap_and_small_first_bucket():
    four_bytes = ("f32", "sum", "dp", 1)
    buckets, left = planned(all_reduces(*[four_bytes] * 8), cap=12, first=8)
    assert (buckets, left) == (["s0 s1", "s2 s3 s4", "s5 s6 s7"], {})
    buckets, left = planned(all_reduces(*[four_bytes] * 6), cap=12, first=8)
    assert buckets == ["s0 s1", "s2 s3 s4"]
    assert left == {"s5": ALONE}


def test_each_kind_has_its_own_first_bucket():
    dp, tp = ("f32", "sum", "dp", 1), ("f32", "sum", "tp", 1)
    assert planned(all_reduces(*[dp, tp] * 3, dp, tp), cap=100, first=8)[0] == ["s0 s2", "s1 s3", "s4 s6", "s5 s7"]


def test_one_larger_than_the_cap_travels_alone():
    small, large = ("f32", "sum", "dp", 1), ("f32", "sum", "dp", 100)
    buckets, left = planned(all_reduces(small, small, large, small, small), cap=12, first=12)
    assert (buckets, left) == (["s0 s1", "s3 s4"], {"s2": ALONE})


def test_one_that_is_not_worth_copying_travels_alone_and_parts_nobody():
    small, large = ("f32", "sum", "dp", 1), ("f32", "sum", "dp", 100)
    program = parse(textwrap.dedent(all_reduces(small, small, large, small, small)), groups={"dp": 2, "tp": 2})
    for alone, buckets in ((400, ["s0 s1 s3 s4"]), (401, ["s0 s1 s2 s3 s4"])):
        plan = BucketAllReduces(alone_mb=alone / MB, first_mb=None).plan(program)
        assert [" ".join(bucket.members) for bucket in plan.buckets] == buckets
    left = BucketAllReduces(alone_mb=400 / MB).plan(program).left
    assert list(map(str, left)) == ["s2: left alone: it is large enough to travel alone, and is not copied so"]
    with pytest.raises(PassError, match=r"bucket-all-reduces\(alone_mb=0\): expected megabytes, more than 0"):
        BucketAllReduces(alone_mb=0)


def test_one_that_another_collective_depends_on_is_left():
    text = """
        x: f32[4] = input("x")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        n: f32[4] = aten.neg(w)
        g: f32[8] = c10d.all_gather_into_tensor(n, 2, "tp")
        wg: f32[8] = c10d.wait_tensor(g)
        s1: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(s1)
        s2: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w2: f32[4] = c10d.wait_tensor(s2)
        return output("g", wg), output("1", w1), output("2", w2)
    """
    reason = "another collective depends on its result, and would be delayed with it"
    assert planned(text) == (["s1 s2"], {"s": reason})


def test_the_order_of_a_group_is_no_dependence():
    member = ("f32", "sum", "dp", 1)
    assert planned(all_reduces(*[member] * 3)) == (["s0 s1 s2"], {})


EARLY_USE = """
    x: f32[4] = input("x")
    s: f32[4] = c10d.all_reduce(x, "sum", "dp")
    w: f32[4] = c10d.wait_tensor(s)
    n: f32[4] = aten.neg(w)
    e: f32[4] = aten.exp(x)
    s1: f32[4] = c10d.all_reduce(e, "sum", "dp")
    w1: f32[4] = c10d.wait_tensor(s1)
    return output("n", n), output("1", w1)
"""


def test_what_uses_a_result_early_comes_after_the_bucket():
    assert planned(EARLY_USE) == (["s s1"], {})
    done = run_passes(parse(textwrap.dedent(EARLY_USE), groups=GROUPS), [BucketAllReduces()])
    expected = """
        x: f32[4] = input("x")
        e: f32[4] = aten.exp(x)
        cat: f32[8] = aten.cat([x, e])
        all_reduce: f32[8] = c10d.all_reduce(cat, "sum", "dp")
        wait_tensor: f32[8] = c10d.wait_tensor(all_reduce)
        split_with_sizes: (f32[4], f32[4]) = aten.split_with_sizes(wait_tensor, [4, 4])
        getitem: f32[4] = split_with_sizes[0]
        getitem_1: f32[4] = split_with_sizes[1]
        n: f32[4] = aten.neg(getitem)
        clone: f32[4] = aten.clone(getitem_1)
        return output("n", n), output("1", clone)
    """
    assert render(done) == textwrap.dedent(expected).strip()


def test_a_write_to_an_input_comes_after_the_bucket():
    text = """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        write: f32[4] = aten.add_.Tensor(a, 1)
        e: f32[4] = aten.exp(x)
        s1: f32[4] = c10d.all_reduce(e, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(s1)
        return output("0", w), output("1", w1)
    """
    assert planned(text) == (["s s1"], {})
    done = run_passes(parse(textwrap.dedent(text), groups=GROUPS), [BucketAllReduces()])
    order = [node.name for node in done.graph.nodes]
    assert order.index("write") > order.index("all_reduce")


def test_one_that_needs_what_was_written_after_the_first_goes_into_the_next():
    text = """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        s: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        write: f32[4] = aten.add_.Tensor(a, 1)
        s1: f32[4] = c10d.all_reduce(a, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(s1)
        s2: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w2: f32[4] = c10d.wait_tensor(s2)
        return output("0", w), output("1", w1), output("2", w2)
    """
    reason = "another collective depends on its result, and would be delayed with it"
    assert planned(text) == (["s1 s2"], {"s": reason})


def test_in_place_coalesced_and_unused_are_left():
    text = """
        x: f32[4] = input("x")
        a: f32[4] = aten.clone(x)
        s: f32[4] = c10d.all_reduce_(a, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        c: (f32[4],) = c10d.all_reduce_coalesced([x], "sum", "dp")
        c0: f32[4] = c[0]
        wc: f32[4] = c10d.wait_tensor(c0)
        u: f32[4] = c10d.all_reduce(x, "sum", "dp")
        wu: f32[4] = c10d.wait_tensor(u)
        return output("w", w), output("c", wc)
    """
    taken = "it is already coalesced or in place"
    assert planned(text) == ([], {"s": taken, "c": taken, "u": "nothing uses its result"})


def test_members_of_any_layout_keep_their_shape_and_all_their_waits():
    text = """
        x: f32[2, 3] = input("x")
        t: f32[3, 2] = aten.t(x)
        e: f32[2, 2, 3] = aten.expand(x, [2, 2, 3])
        s: f32[3, 2] = c10d.all_reduce(t, "sum", "dp")
        w: f32[3, 2] = c10d.wait_tensor(s)
        again: f32[3, 2] = c10d.wait_tensor(s)
        s1: f32[2, 2, 3] = c10d.all_reduce(e, "sum", "dp")
        w1: f32[2, 2, 3] = c10d.wait_tensor(s1)
        return output("a", w), output("b", again), output("c", w1)
    """
    done = run_passes(parse(textwrap.dedent(text), groups=GROUPS), [BucketAllReduces()])
    verify(done, recompute=True)
    expected = """
        x: f32[2, 3] = input("x")
        t: f32[3, 2] = aten.t(x)
        e: f32[2, 2, 3] = aten.expand(x, [2, 2, 3])
        clone: f32[3, 2] = aten.clone(t, memory_format=contiguous_format)
        _unsafe_view: f32[6] = aten._unsafe_view(clone, [6])
        clone_1: f32[2, 2, 3] = aten.clone(e, memory_format=contiguous_format)
        _unsafe_view_1: f32[12] = aten._unsafe_view(clone_1, [12])
        cat: f32[18] = aten.cat([_unsafe_view, _unsafe_view_1])
        all_reduce: f32[18] = c10d.all_reduce(cat, "sum", "dp")
        wait_tensor: f32[18] = c10d.wait_tensor(all_reduce)
        split_with_sizes: (f32[6], f32[12]) = aten.split_with_sizes(wait_tensor, [6, 12])
        getitem: f32[6] = split_with_sizes[0]
        getitem_1: f32[12] = split_with_sizes[1]
        view: f32[3, 2] = aten.view(getitem, [3, 2])
        view_1: f32[2, 2, 3] = aten.view(getitem_1, [2, 2, 3])
        clone_2: f32[3, 2] = aten.clone(view)
        clone_3: f32[2, 2, 3] = aten.clone(view_1)
        return output("a", clone_2), output("b", clone_2), output("c", clone_3)
    """
    assert render(done) == textwrap.dedent(expected).strip()


def test_options_decide_what_shares_a_bucket_and_in_which_order():
    text = parse(all_reduces(*[("f32", "sum", "dp", n) for n in (1, 4, 2, 1, 1)]), groups=GROUPS)

    def members(**options) -> list[tuple[str, ...]]:
        return [bucket.members for bucket in BucketAllReduces(**options).plan(text).buckets]

    assert members(cap_mb=(20 / MB, 8 / MB)) == [("s0", "s1"), ("s3", "s4")], "caps by index, the last one repeated"
    assert members(cap_mb=lambda index: 28 / MB if index == 0 else 8 / MB) == [("s0", "s1", "s2"), ("s3", "s4")]
    assert members(packing="largest-first") == [("s1", "s2", "s0", "s3", "s4")]
    assert members(packing="reversed") == [("s4", "s3", "s2", "s1", "s0")]


def test_grouping_by_module():
    program = parse(all_reduces(*[("f32", "sum", "dp", 1)] * 4), groups=GROUPS)
    served = ["layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight"]
    for collective, name in zip(collectives.find(program.graph), served, strict=True):
        collective.node.meta[MADE_FOR] = name
    plan = BucketAllReduces(grouping="module").plan(program)
    assert [bucket.members for bucket in plan.buckets] == [("s0", "s1"), ("s2", "s3")]


def by_index(index: int) -> float:
    return 2.0 + index


def test_options_are_spelled_alike_on_every_rank():
    assert BucketAllReduces(cap_mb=by_index, mode="concat").spelling == (
        "bucket-all-reduces(cap_mb=by_index,mode='concat')"
    )
    assert BucketAllReduces(cap_mb=functools.partial(by_index)).spelling == "bucket-all-reduces(cap_mb=partial)"
    unlimited = BucketAllReduces(first_mb=None)
    assert pass_from_spelling(unlimited.spelling) == unlimited


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "cancat"},
        {"grouping": "layer"},
        {"grouping": ()},
        {"grouping": ("a", 1)},
        {"packing": "size"},
        {"cap_mb": ()},
        {"cap_mb": -1.0},
    ],
)
def test_wrong_options_are_refused(options: dict):
    with pytest.raises(PassError, match=r"bucket-all-reduces\("):
        BucketAllReduces(**options)


def test_a_plan_for_another_program_is_refused():
    plan = BucketAllReduces().plan(parse(all_reduces(*[("f32", "sum", "dp", 1)] * 2), groups=GROUPS))
    other = parse(textwrap.dedent(EARLY_USE), groups=GROUPS)
    with pytest.raises(PassError, match="the plan names s0"):
        apply_buckets(other, plan, BucketAllReduces())


def test_a_plan_by_hand_that_makes_a_cycle_is_refused():
    text = EARLY_USE.replace("aten.exp(x)", "aten.exp(n)")
    plan = BucketPlan((Bucket(("s", "s1"), "all_reduce", 32),), ())
    with pytest.raises(RewriteError, match="s1 put together with s, on which it depends"):
        apply_buckets(parse(textwrap.dedent(text), groups=GROUPS), plan, BucketAllReduces())


def test_a_view_that_counts_in_strides_keeps_its_memory():
    text = """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        s1: f32[4] = c10d.all_reduce(y, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(s1)
        v: f32[2, 2] = aten.as_strided(w1, [2, 2], [2, 1], 0)
        n: f32[2, 2] = aten.neg(v)
        return output("w", w), output("n", n)
    """
    reason = "a view of it counts in strides, which differ in a bucket"
    only = "it is the only one of its group, dtype and reduction"
    assert planned(text) == ([], {"s1": reason, "s": only})


def test_returned_views_of_results_are_copies_too():
    text = """
        x: f32[4] = input("x")
        y: f32[4] = input("y")
        s: f32[4] = c10d.all_reduce(x, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        v: f32[2, 2] = aten.view(w, [2, 2])
        s1: f32[4] = c10d.all_reduce(y, "sum", "dp")
        w1: f32[4] = c10d.wait_tensor(s1)
        return output("v", v), output("again", v), output("w1", w1)
    """
    done = run_passes(parse(textwrap.dedent(text), groups=GROUPS), [BucketAllReduces()])
    assert render(done).splitlines()[-3:] == [
        "clone: f32[2, 2] = aten.clone(v)",
        "clone_1: f32[4] = aten.clone(getitem_1)",
        'return output("v", clone), output("again", clone), output("w1", clone_1)',
    ]


def test_plan_prints():
    text = all_reduces(*[("f32", "sum", "dp", 2**18)] * 3)
    plan = BucketAllReduces(cap_mb=2.0, first_mb=2.0).plan(parse(text, groups=GROUPS))
    reason = ALONE
    assert str(plan).splitlines() == [
        "2 all-reduces, 2.00 MB: s0, s1",
        f"s2: left alone: {reason}: cap 2 MB (remedy: a larger cap_mb packs more)",
    ]


def two_axes() -> Program:
    """Thirty-two gradients of 1 MB along an axis inside of nodes, and as many along one that leaves them."""
    return parse(all_reduces(*[("f32", "sum", axis, 2**18) for axis in ("tp", "dp")] * 32), groups={"tp": 8, "dp": 64})


def sizes_along(done: Program) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for collective in collectives.find(done.graph):
        found.setdefault(collective.group, []).append(collective.bytes)
    return found


def test_buckets_fill_the_link_of_their_axis() -> None:
    """Latency is a fifth of the travel: of a megabyte inside a node, of many between nodes."""
    network = Network(8, Wire(1e-7, 400e9), Wire(1e-5, 50e9), start=0.0)
    fabric = Fabric(dict.fromkeys(Kind, routed(network)))
    machine = Machine("nodes", {"*": fabric}, {"float32": 1e13}, 1e12, device="cuda", network=network)
    machine = machine.on_mesh({"dp": 64, "tp": 8})
    bucketing = BucketAllReduces(cap_mb=2.0, first_mb=None, saturates=True, keeps_overlap=False)
    alone = sizes_along(run_passes(two_axes(), [bucketing]))
    assert set(alone["tp"]) == set(alone["dp"]) == {2 * MB}, "without a machine, both by cap_mb"
    found = sizes_along(run_passes(two_axes(), [bucketing], context={"machine": machine}))
    least = {axis: machine.worthwhile(Kind.ALL_REDUCE, ranks, axis) for axis, ranks in (("tp", 8), ("dp", 64))}
    assert least["tp"] < 2 * MB and set(found["tp"]) == {2 * MB}
    assert 8 * MB < least["dp"] < 32 * MB
    assert found["dp"][0] == int(least["dp"] // MB) * MB, "as many as fill the link, and no more"


def test_sizes_along_an_axis_are_its_own() -> None:
    bucketing = BucketAllReduces(cap_mb=8.0, first_mb=None, along=(("tp", 4.0, math.inf),), keeps_overlap=False)
    assert {axis: max(sizes) / MB for axis, sizes in sizes_along(run_passes(two_axes(), [bucketing])).items()} == {
        "tp": 4,
        "dp": 8,
    }
    large = BucketAllReduces(along=(("tp", 4.0, 0.5),), keeps_overlap=False)
    assert set(sizes_along(run_passes(two_axes(), [large]))["tp"]) == {MB}, "each is large enough to travel alone"


@pytest.mark.parametrize("along", [("tp",), (("tp", 1.0),), ((1, 1.0, 1.0),), (("tp", 0, 1.0),)])
def test_wrong_sizes_along_an_axis_are_refused(along) -> None:
    with pytest.raises(PassError, match=r"along=.*expected for each group its name, cap_mb and alone_mb"):
        BucketAllReduces(along=along)
