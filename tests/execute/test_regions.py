"""Which stretches of a program are compiled together, and what crosses their borders."""

from __future__ import annotations

from crossfade.execute.regions import regions_of
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse
from crossfade.schedule.recompute_values import RecomputeValues


def chosen(text: str) -> list[tuple[str, str, str]]:
    """The regions of a program: their nodes, inputs and outputs."""
    found = regions_of(parse(text, groups={"dp": 2})).regions
    return [tuple(" ".join(map(str, each)) for each in (r.nodes, r.inputs, r.outputs)) for r in found]  # type: ignore[misc]


def left(text: str) -> dict[str, str]:
    return {str(node): reason for node, reason in regions_of(parse(text, groups={"dp": 2})).left.items()}


def test_launches_and_waits_cut_and_views_do_not() -> None:
    text = """
        x: f32[4, 2] = input("x")
        a: f32[4, 2] = aten.neg(x)
        t: f32[2, 4] = aten.permute(a, [1, 0])
        b: f32[2, 4] = aten.exp(t)
        s: f32[2, 4] = c10d.all_reduce(b, "sum", "dp")
        c: f32[2, 4] = aten.mul.Tensor(t, 2.0)
        d: f32[2, 4] = aten.neg(c)
        w: f32[2, 4] = c10d.wait_tensor(s)
        e: f32[2, 4] = aten.add.Tensor(w, d)
        f: f32[2, 4] = aten.exp(e)
        return output("f", f)
    """
    assert chosen(text) == [("a b", "x", "a b"), ("c d", "a", "d"), ("e f", "w d", "f")]
    assert left(text) == {}


def test_elements_go_with_what_they_are_of() -> None:
    text = """
        x: f32[4, 2] = input("x")
        m: (f32[4], i64[4]) = aten.max.dim(x, 1)
        values: f32[4] = m[0]
        n: f32[4] = aten.neg(values)
        s: f32[4] = c10d.all_reduce(n, "sum", "dp")
        places: i64[4] = m[1]
        w: f32[4] = c10d.wait_tensor(s)
        return output("w", w), output("places", places)
    """
    assert chosen(text) == [("m values places n", "x", "places n")]


def test_random_and_foreign_operators_stay_eager() -> None:
    text = """
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        r: f32[4] = aten.rand_like(b)
        c: f32[4] = aten.mul.Tensor(b, r)
        return output("c", c)
    """
    assert chosen(text) == [("a b", "x", "b")]
    assert left(text) == {
        "r": "it draws random numbers, which a compiler would draw differently",
        "c": "nothing to fuse: one operator alone",
    }


def test_updates_are_regions_of_their_own_after_the_rest() -> None:
    text = """
        p: f32[4] = parameter("p")
        q: f32[4] = parameter("q")
        x: f32[4] = input("x")
        step: f32[] = optimizer_state("p:step")
        lr: float = scalar("lr")
        g: f32[4] = aten.neg(x)
        count: f32[] = aten.add_.Tensor(step, 1)
        number: float = aten._local_scalar_dense(count)
        rate: float = operator.truediv(lr, number)
        u: f32[4] = aten.mul.Tensor(g, rate)
        new: f32[4] = aten.sub_.Tensor(p, u)
        h: f32[4] = aten.exp(x)
        v: f32[4] = aten.mul.Tensor(h, rate)
        newer: f32[4] = aten.sub_.Tensor(q, v)
        return output("loss", g)
    """
    assert chosen(text) == [("g h", "x", "g h"), ("u new", "g rate p", ""), ("v newer", "h rate q", "")]
    assert [str(node) for node in regions_of(parse(text)).host] == ["count", "number", "rate"]


def test_what_reads_an_updated_parameter_follows_its_update() -> None:
    text = """
        p: f32[4] = parameter("p")
        x: f32[4] = input("x")
        lr: float = scalar("lr")
        g: f32[4] = aten.neg(x)
        u: f32[4] = aten.mul.Tensor(g, lr)
        new: f32[4] = aten.sub_.Tensor(p, u)
        sent: f32[4] = aten.mul.Tensor(new, 2.0)
        e: f32[4] = aten.exp(g)
        over: f32[4] = aten.neg_(g)
        return output("sent", sent), output("e", e)
    """
    # `over` writes what the update has read, so that it may not come before it.
    assert chosen(text) == [("g e", "x", "g e"), ("u new sent over", "g lr p", "sent")]


def test_parts_of_buckets_are_written_eagerly() -> None:
    text = """
        bucket: f32[8] = workspace("bucket")
        x: f32[4] = input("x")
        a: f32[4] = aten.neg(x)
        b: f32[4] = aten.exp(a)
        half: f32[4] = aten.slice.Tensor(bucket, 0, 0, 4)
        copied: f32[4] = aten.copy_(half, b)
        s: f32[8] = c10d.all_reduce_(bucket, "sum", "dp")
        w: f32[8] = c10d.wait_tensor(s)
        return output("w", w)
    """
    assert chosen(text) == [("a b", "x", "b")]
    assert list(left(text)) == ["copied"]


def test_a_tensor_of_the_host_that_others_read_keeps_everything_in_place() -> None:
    text = """
        p: f32[4] = parameter("p")
        step: f32[] = optimizer_state("p:step")
        a: f32[4] = aten.mul.Tensor(p, step)
        count: f32[] = aten.add_.Tensor(step, 1)
        b: f32[4] = aten.mul.Tensor(a, count)
        return output("b", b)
    """
    assert regions_of(parse(text)).host == {}


def test_what_is_computed_again_is_compiled_apart_from_what_computes_it_first() -> None:
    program = parse("""
        x: f32[4] = input("x")
        a: f32[4] = aten.exp(x)
        b: f32[4] = aten.neg(a)
        c: f32[4] = aten.exp(b)
        d: f32[4] = aten.neg(c)
        e: f32[4] = aten.mul.Tensor(d, a)
        return output("e", e)
    """)
    together = [" ".join(map(str, region.nodes)) for region in regions_of(program).regions]
    again = run_passes(program, [RecomputeValues(("a@e",))])
    apart = [" ".join(map(str, region.nodes)) for region in regions_of(again).regions]
    assert together == ["a b c d e"]
    assert apart == ["a b c d", "a_1 e"]


def test_what_an_earlier_region_made_is_written_where_it_is() -> None:
    """A weight decayed before its gradient has come: the update in its memory is compiled, and cuts nothing."""
    text = """
        p: f32[4] = parameter("p")
        rate: float = scalar("rate")
        g: f32[4] = input("g")
        a: f32[4] = aten.mul.Tensor(p, rate)
        b: f32[4] = aten.neg(g)
        s: f32[4] = c10d.all_reduce(b, "sum", "dp")
        w: f32[4] = c10d.wait_tensor(s)
        c: f32[4] = aten.sqrt(w)
        u: f32[4] = aten.addcdiv_(a, w, c, value=rate)
        other: f32[4] = aten.exp_(w)
        d: f32[4] = aten.neg(u)
        v: f32[4] = aten.add_.Tensor(d, 1.0)
        return output("v", v)
    """
    earlier = [("b", "g", "b"), ("a", "p rate", "a")]
    assert chosen(text) == [*earlier, ("c", "w", "c"), ("u", "a w c rate", ""), ("d v", "a", "d")]
    assert list(left(text)) == ["other"]
