"""How losses of parts make up the whole batch's: found in small programs, or said why not."""

from __future__ import annotations

import textwrap

import pytest
import torch

from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render
from crossfade.shard.count_globally import CountGlobally
from crossfade.shard.loss_parts import LossParts, find_loss_parts

HEAD = """
    w: f32[3] = parameter("w")
    x: f32[{b}, 3] = input("x")
    m: f32[{b}] = input("m")
    n: i64[] = input("n")
    y: f32[{b}] = aten.mv(x, w)
"""


def sized(text: str, batch: int) -> str:
    sizes = {"b": batch, "2b": 2 * batch, "3b": 3 * batch, "h": batch // 2, "b-1": batch - 1, "b+1": batch + 1}
    for name, size in sizes.items():
        text = text.replace(f"{{{name}}}", str(size))
    return text


def found(body: str, micro_batches: bool = False) -> tuple[Program, LossParts]:
    """What is found of a loss computed from `y`, which is trained, and the inputs x, m and n."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(body) + '\nreturn loss("loss", loss)'
    small, large = (parse(sized(text, size)) for size in (4, 8))
    return small, find_loss_parts(small, large, 2, ["w"], micro_batches=micro_batches)


PROVED = {
    "rows of a bounded norm": ("h: f32[{b}, 3] = aten.renorm(x, 2, 0, 1.0)\nloss: f32[] = aten.mean(h)", "mean"),
    "a column written over": (
        "z: f32[{b}] = aten.mul.Tensor(y, 0.0)\nh: f32[{b}, 3] = aten.select_scatter(x, z, 1, 0)\n"
        "loss: f32[] = aten.mean(h)",
        "mean",
    ),
    "samples put in where a mask says": (
        "b: b8[{b}] = aten.gt.Scalar(y, 0.0)\nh: f32[{b}] = aten.masked_scatter(y, b, m)\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "a mean": ("loss: f32[] = aten.mean(y)", "mean"),
    "a sum": ("loss: f32[] = aten.sum(y)", "sum"),
    "a sum divided by the batch": ("s: f32[] = aten.sum(y)\nloss: f32[] = aten.div.Tensor(s, {b})", "mean"),
    "a sum divided by a number": ("s: f32[] = aten.sum(y)\nloss: f32[] = aten.div.Tensor(s, 5)", "sum"),
    "a sum divided by items": ("s: f32[] = aten.sum(y)\nloss: f32[] = aten.div.Tensor(s, n)", "sum"),
    "a loss that is a mean": ("loss: f32[] = aten.mse_loss(y, m)", "mean"),
    "a loss that is a sum": ("loss: f32[] = aten.mse_loss(y, m, 2)", "sum"),
    "a mean and a number": ("s: f32[] = aten.mean(y)\nloss: f32[] = aten.add.Tensor(s, 3)", "mean"),
    "a product over samples": ("loss: f32[] = aten.dot(y, m)", "sum"),
    "halves of what is divided by the batch": (
        "d: f32[{b}, 3] = aten.div.Tensor(x, {b})\np: (f32[{b}, 2], f32[{b}, 1]) = aten.split.Tensor(d, 2, 1)\n"
        "h: f32[{b}, 2] = p[0]\nloss: f32[] = aten.sum(h)",
        "mean",
    ),
    "the largest of what is divided by the batch": (
        "d: f32[{b}, 3] = aten.div.Tensor(x, {b})\np: (f32[{b}], i64[{b}]) = aten.max.dim(d, 1)\n"
        "h: f32[{b}] = p[0]\nloss: f32[] = aten.sum(h)",
        "mean",
    ),
    "places of what is divided by the batch": (
        "d: f32[{b}, 3] = aten.div.Tensor(x, {b})\np: (f32[{b}], i64[{b}]) = aten.max.dim(d, 1)\n"
        "h: i64[{b}] = p[1]\nloss: i64[] = aten.sum(h)",
        "sum",
    ),
    "a part of the batch, for each sample": (
        "f: f32[{b}] = aten.full([{b}], 1.0)\nd: f32[{b}] = aten.div.Tensor(f, {b})\n"
        "h: f32[{b}] = aten.mul.Tensor(y, d)\nloss: f32[] = aten.sum(h)",
        "mean",
    ),
    "filled with the batch": (
        "f: f32[3] = aten.new_full(y, [3], {b})\ns: f32[3] = aten.sum.dim_IntList(x, [0])\n"
        "h: f32[3] = aten.div.Tensor(s, f)\nloss: f32[] = aten.sum(h)",
        "mean",
    ),
    "a sum filled with zeros": (
        "s: f32[3] = aten.sum.dim_IntList(x, [0])\nf: f32[4] = aten.constant_pad_nd(s, [1, 0])\n"
        "loss: f32[] = aten.sum(f)",
        "sum",
    ),
    "what each sample's label picks": (
        "l: i64[{b}] = aten._to_copy(m, dtype=i64)\nr: i64[{b}] = aten.arange({b})\n"
        "h: f32[{b}] = aten.index.Tensor(x, [r, l])\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "a place in the flattened batch": (
        "l: i64[{b}] = aten._to_copy(m, dtype=i64)\nr: i64[{b}] = aten.arange({b})\n"
        "t: i64[{b}] = aten.mul.Tensor(r, 3)\np: i64[{b}] = aten.add.Tensor(t, l)\n"
        "f: f32[{3b}] = aten.view(x, [{3b}])\n"
        "h: f32[{b}] = aten.index_select(f, 0, p)\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "rows put back where they were": (
        "l: i64[{b}] = aten._to_copy(m, dtype=i64)\no: (i64[{b}], i64[{b}]) = aten.sort(l)\np: i64[{b}] = o[1]\n"
        "r: i64[{b}] = aten.arange({b})\ne: i64[{b}] = aten.empty_like(p)\nv: i64[{b}] = aten.index_put(e, [p], r)\n"
        "s: f32[{b}] = aten.index.Tensor(y, [p])\nh: f32[{b}] = aten.index.Tensor(s, [v])\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "what belongs to sorted numbers": (
        "l: i64[{b}] = aten._to_copy(m, dtype=i64)\no: (i64[{b}], i64[{b}]) = aten.sort(l)\ni: i64[{b}] = o[0]\n"
        "p: i64[{b}] = o[1]\nt: f32[9] = aten.ones([9])\ns: f32[{b}] = aten.index.Tensor(y, [p])\n"
        "f: f32[{b}] = aten.index.Tensor(t, [i])\nh: f32[{b}] = aten.mul.Tensor(s, f)\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "two of three in groups": (
        "f: f32[{3b}] = aten.view(x, [{3b}])\ng: f32[{b}, 3] = aten.view(f, [{b}, 3])\nloss: f32[] = aten.mean(g)",
        "mean",
    ),
    "pairs of what was joined": (
        "c: f32[{2b}] = aten.cat([y, m])\np: (f32[{b}], f32[{b}]) = aten.split.Tensor(c, {b})\n"
        "a: f32[{b}] = p[0]\no: f32[{b}] = p[1]\nh: f32[{b}] = aten.mul.Tensor(a, o)\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "later time steps": (
        "t: f32[3, {b}] = aten.repeat(m, [3, 1])\nv: f32[{3b}] = aten.view(t, [{3b}])\n"
        "h: f32[{2b}] = aten.slice.Tensor(v, 0, {b}, {3b})\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "every other sample": (
        "h: f32[{h}] = aten.slice.Tensor(y, 0, 1, {b}, 2)\nloss: f32[] = aten.mean(h)",
        "mean",
    ),
    "the mean beside a variance": (
        "p: (f32[3], f32[3]) = aten.var_mean.correction(x, [0])\nh: f32[3] = p[1]\nloss: f32[] = aten.sum(h)",
        "mean",
    ),
    "one of several parts of the batch": (
        "f: f32[3] = aten.full([3], 1.0)\nd: f32[3] = aten.div.Tensor(f, {b})\n"
        "p: (f32[], f32[], f32[]) = aten.unbind.int(d)\n"
        "h: f32[] = p[0]\ns: f32[] = aten.sum(y)\nloss: f32[] = aten.mul.Tensor(s, h)",
        "mean",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_how_parts_are_put_together(name: str) -> None:
    body, loss_is = PROVED[name]
    assert found(body)[1] == LossParts(loss_is, "", ("n",) if "items" in name else ())


UNPROVED = {
    "a maximum": ("loss: f32[] = aten.amax(y, [0])", "loss (amax.default) reduces the samples of one part"),
    "a root of a mean": (
        "s: f32[] = aten.mean(y)\nloss: f32[] = aten.sqrt(s)",
        "loss (sqrt.default) uses a total over the samples of one part",
    ),
    "samples compared": (
        "t: f32[{b}, 1] = aten.unsqueeze(y, 1)\nd: f32[{b}, {b}] = aten.sub.Tensor(t, y)\nloss: f32[] = aten.mean(d)",
        "d (sub.Tensor) compares samples of one part with each other",
    ),
    "a softmax over samples": (
        "s: f32[{b}] = aten._softmax(y, 0, False)\nloss: f32[] = aten.mean(s)",
        "s (_softmax.default) compares samples of one part with each other",
    ),
    "a power of the batch": (
        "h: f32[{b}] = aten.pow.Tensor_Scalar(y, {b})\nloss: f32[] = aten.mean(h)",
        "h (pow.Tensor_Scalar) uses a number that grows with the batch",
    ),
    "the batch added": (
        "h: f32[{b}] = aten.add.Tensor(y, {b})\nloss: f32[] = aten.mean(h)",
        "h (add.Tensor) uses a number that grows with the batch",
    ),
    "a part of the batch added": (
        "f: f32[{b}] = aten.full([{b}], {b}.0)\nh: f32[{b}] = aten.add.Tensor(y, f)\nloss: f32[] = aten.mean(h)",
        "h (add.Tensor) uses a number that grows with the batch",
    ),
    "a sum filled with a number": (
        "s: f32[3] = aten.sum.dim_IntList(x, [0])\nf: f32[4] = aten.constant_pad_nd(s, [1, 0], 2.0)\n"
        "loss: f32[] = aten.sum(f)",
        "f (constant_pad_nd.default) adds a number to a sum over samples",
    ),
    "places as numbers": (
        "r: i64[{b}] = aten.arange({b})\nh: f32[{b}] = aten.mul.Tensor(y, r)\nloss: f32[] = aten.mean(h)",
        "h (mul.Tensor) numbers the samples of one part",
    ),
    "a ramp over samples": (
        "r: f32[{b}] = aten.linspace(0, 1, {b})\nh: f32[{b}] = aten.mul.Tensor(y, r)\nloss: f32[] = aten.mean(h)",
        "r (linspace.default) numbers the samples of one part",
    ),
    "the first samples": (
        "r: i64[{b}] = aten.arange({b})\nf: b8[{b}] = aten.lt.Scalar(r, 2)\nh: f32[{b}] = aten.mul.Tensor(y, f)\n"
        "loss: f32[] = aten.mean(h)",
        "f (lt.Scalar) numbers the samples of one part",
    ),
    "a row of a table for each place": (
        "t: f32[9] = aten.ones([9])\nr: i64[{b}] = aten.arange({b})\nh: f32[{b}] = aten.index.Tensor(t, [r])\n"
        "a: f32[{b}] = aten.mul.Tensor(y, h)\nloss: f32[] = aten.mean(a)",
        "h (index.Tensor) numbers the samples of one part",
    ),
    "an order that a table has": (
        "t: i64[9] = aten.full([9], 1)\nr: i64[{b}] = aten.arange({b})\np: i64[{b}] = aten.index.Tensor(t, [r])\n"
        "h: f32[{b}] = aten.index.Tensor(y, [p])\nloss: f32[] = aten.mean(h)",
        "p (index.Tensor) numbers the samples of one part",
    ),
    "samples that the batch names": (
        "l: i64[{b}] = aten._to_copy(m, dtype=i64)\nh: f32[{b}] = aten.index.Tensor(y, [l])\n"
        "a: f32[{b}] = aten.mul.Tensor(y, h)\nloss: f32[] = aten.mean(a)",
        "h (index.Tensor) takes samples of one part by their places",
    ),
    "a fixed sample written over": (
        "z: f32[] = aten.full([], 0.0)\nh: f32[{b}] = aten.select_scatter(y, z, 0, 0)\nloss: f32[] = aten.mean(h)",
        "h (select_scatter.default) writes samples of one part by their places",
    ),
    "some samples written over": (
        "z: f32[2] = aten.full([2], 0.0)\nh: f32[{b}] = aten.slice_scatter(y, z, 0, 0, 2)\nloss: f32[] = aten.mean(h)",
        "h (slice_scatter.default) writes samples of one part by their places",
    ),
    "samples filled where a constant says": (
        "i: i64[2] = aten.arange(2)\nh: f32[{b}] = aten.index_fill.int_Scalar(y, 0, i, 0.0)\n"
        "loss: f32[] = aten.mean(h)",
        "h (index_fill.int_Scalar) writes samples of one part by their places",
    ),
    "an element put where a constant says": (
        "i: i64[1] = aten.full([1], 1)\nz: f32[1] = aten.full([1], 0.0)\nh: f32[{b}] = aten.put(y, i, z)\n"
        "loss: f32[] = aten.mean(h)",
        "h (put.default) writes samples of one part by their places",
    ),
    "one after the other into a mask": (
        "z: f32[9] = aten.full([9], 0.0)\nb: b8[{b}] = aten.gt.Scalar(y, 0.0)\n"
        "h: f32[{b}] = aten.masked_scatter(y, b, z)\nloss: f32[] = aten.mean(h)",
        "h (masked_scatter.default) writes samples of one part by their places",
    ),
    "columns of a bounded norm": (
        "h: f32[{b}, 3] = aten.renorm(x, 2, 1, 1.0)\nloss: f32[] = aten.mean(h)",
        "h (renorm.default) compares samples of one part with each other",
    ),
    "two halves as a new dim": (
        "h: f32[2, {h}] = aten.view(y, [2, {h}])\ns: f32[{h}] = aten.select.int(h, 0, 0)\nloss: f32[] = aten.mean(s)",
        "h (view.default) takes samples of one part by their places",
    ),
    "half of the samples": (
        "h: f32[{h}] = aten.slice.Tensor(y, 0, 0, {h})\nloss: f32[] = aten.mean(h)",
        "h (slice.Tensor) takes samples of one part by their places",
    ),
    "pairs of samples": (
        "p: (f32[{h}], f32[{h}]) = aten.split.Tensor(y, {h})\na: f32[{h}] = p[0]\no: f32[{h}] = p[1]\n"
        "h: f32[{h}] = aten.mul.Tensor(a, o)\nloss: f32[] = aten.mean(h)",
        "p (split.Tensor) takes samples of one part by their places",
    ),
    "all samples but one": (
        "h: f32[{b-1}] = aten.slice.Tensor(y, 0, 0, -1)\nloss: f32[] = aten.mean(h)",
        "h (slice.Tensor) takes samples of one part by their places",
    ),
    "a row of zeros more": (
        "h: f32[{b+1}] = aten.constant_pad_nd(y, [1, 0])\nloss: f32[] = aten.mean(h)",
        "h (constant_pad_nd.default) takes samples of one part by their places",
    ),
    "a window over samples": (
        "v: f32[1, {b}, 3] = aten.unsqueeze(x, 0)\nt: f32[1, 3, {b}] = aten.permute(v, [0, 2, 1])\n"
        "k: f32[3, 3, 3] = aten.full([3, 3, 3], 1.0)\n"
        "h: f32[1, 3, {b}] = aten.convolution(t, k, None, [1], [1], [1], False, [0], 1)\nloss: f32[] = aten.mean(h)",
        "h (convolution.default) compares samples of one part with each other",
    ),
    "a triangle of samples": (
        "h: f32[{b}, 3] = aten.triu(x)\nloss: f32[] = aten.mean(h)",
        "h (triu.default) compares samples of one part with each other",
    ),
    "samples sorted": (
        "p: (f32[{b}], i64[{b}]) = aten.sort(y)\nh: f32[{b}] = p[0]\nt: f32[{b}] = aten.mul.Tensor(h, m)\n"
        "loss: f32[] = aten.mean(t)",
        "p (sort.default) compares samples of one part with each other",
    ),
    "the largest samples": (
        "p: (f32[2], i64[2]) = aten.topk(y, 2)\nh: f32[2] = p[0]\nloss: f32[] = aten.mean(h)",
        "p (topk.default) compares samples of one part with each other",
    ),
    "a norm over samples": (
        "p: (f32[{b}, 3], f32[1, 1], f32[1, 1]) = aten.native_layer_norm(x, [{b}, 3], None, None, 1e-05)\n"
        "h: f32[{b}, 3] = p[0]\nloss: f32[] = aten.mean(h)",
        "p (native_layer_norm.default) compares samples of one part with each other",
    ),
    "a norm of groups over samples": (
        "v: f32[1, {b}, 3] = aten.unsqueeze(x, 0)\n"
        "p: (f32[1, {b}, 3], f32[1, 1], f32[1, 1]) = aten.native_group_norm(v, None, None, 1, {b}, 3, 1, 1e-05)\n"
        "h: f32[1, {b}, 3] = p[0]\nloss: f32[] = aten.mean(h)",
        "p (native_group_norm.default) compares samples of one part with each other",
    ),
    "samples rolled in one row": (
        "h: f32[{b}, 3] = aten.roll(x, [1])\nloss: f32[] = aten.mean(h)",
        "h (roll.default) compares samples of one part with each other",
    ),
    "a norm of what is divided by the batch": (
        "d: f32[{b}, 3] = aten.div.Tensor(x, {b})\n"
        "p: (f32[{b}, 3], f32[{b}, 1], f32[{b}, 1]) = aten.native_layer_norm(d, [3], None, None, 1e-05)\n"
        "h: f32[{b}, 3] = p[0]\nloss: f32[] = aten.mean(h)",
        "p (native_layer_norm.default) uses a number that grows with the batch",
    ),
    "attention over samples": (
        "q: f32[1, 1, {b}, 3] = aten.view(x, [1, 1, {b}, 3])\n"
        "a: (f32[1, 1, {b}, 3], f32[1, 1, {b}]) = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)\n"
        "o: f32[1, 1, {b}, 3] = a[0]\nloss: f32[] = aten.mean(o)",
        "a (_scaled_dot_product_flash_attention_for_cpu.default) compares samples of one part with each other",
    ),
    "a centred value": (
        "s: f32[] = aten.mean(y)\nc: f32[{b}] = aten.sub.Tensor(y, s)\nt: f32[{b}] = aten.abs(c)\n"
        "loss: f32[] = aten.mean(t)",
        "c (sub.Tensor) uses a total over the samples of one part",
    ),
    "a sum and a number": (
        "s: f32[] = aten.sum(y)\nloss: f32[] = aten.add.Tensor(s, 3)",
        "loss (add.Tensor) adds a number to a sum over samples",
    ),
    "a sum and a mean": (
        "s: f32[] = aten.sum(y)\nt: f32[] = aten.mean(y)\nloss: f32[] = aten.add.Tensor(s, t)",
        "y (mv.default) is a sum over samples, added to a mean of them",
    ),
    "a mean divided again": (
        "s: f32[] = aten.mean(y)\nloss: f32[] = aten.div.Tensor(s, {b})",
        "loss (div.Tensor) is divided by the number of samples more than once",
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_why_parts_do_not_make_up_the_whole(name: str) -> None:
    body, reason = UNPROVED[name]
    assert found(body)[1] == LossParts(None, reason)


@pytest.mark.parametrize(
    ("small", "large", "found"),
    [
        ([0.25, 0.25], [0.125, 0.125], "mean"),
        ([0.5, -0.5], [0.5, -0.5], "sum"),
        ([1.0, 0.5], [1.0, 0.25], "k (k) uses a number that grows with the batch"),
    ],
)
def test_constants_that_grow_with_the_batch(small: list[float], large: list[float], found: str) -> None:
    text = """
        k: f32[2] = constant("k")
        x: f32[{b}, 2] = input("x")
        s: f32[2] = aten.sum.dim_IntList(x, [0])
        t: f32[2] = aten.mul.Tensor(s, k)
        loss: f32[] = aten.sum(t)
        return loss("loss", loss)"""
    programs = [parse(textwrap.dedent(text).replace("{b}", str(size))) for size in (4, 8)]
    for program, numbers in zip(programs, (small, large), strict=True):
        program.constants = {"k": torch.tensor(numbers)}
    parts = find_loss_parts(*programs, 2, [])
    assert found in (parts.loss_is, parts.unproved)


def test_a_count_is_sent_before_the_forward() -> None:
    program, parts = found("""
        s: f32[] = aten.dot(y, m)
        c: f32[] = aten.sum(m)
        d: f32[] = aten.clamp(c, 1)
        loss: f32[] = aten.div.Tensor(s, d)""")
    assert parts.loss_is == "sum"
    program.groups = {"dp": 2}
    assert render(run_passes(program, [CountGlobally()])) == textwrap.dedent("""\
        w: f32[3] = parameter("w")
        x: f32[4, 3] = input("x")
        m: f32[4] = input("m")
        n: i64[] = input("n")
        c: f32[] = aten.sum(m)
        all_reduce: f32[] = c10d.all_reduce(c, "sum", "dp")
        wait_tensor: f32[] = c10d.wait_tensor(all_reduce)
        y: f32[4] = aten.mv(x, w)
        s: f32[] = aten.dot(y, m)
        d: f32[] = aten.clamp(wait_tensor, 1)
        loss: f32[] = aten.div.Tensor(s, d)
        return loss("loss", loss)""")


def test_a_count_added_to_a_mean_is_scaled_where_it_divides() -> None:
    program, parts = found("""
        s: f32[] = aten.dot(y, m)
        c: f32[] = aten.sum(m)
        q: f32[] = aten.div.Tensor(s, c)
        t: f32[] = aten.mean(y)
        loss: f32[] = aten.add.Tensor(q, t)""")
    assert parts.loss_is == "mean"
    program.groups = {"dp": 2}
    text = render(run_passes(program, [CountGlobally()]))
    assert "div: f32[] = aten.div.Tensor(wait_tensor, 2)\nq: f32[] = aten.div.Tensor(s, div)" in text


def test_the_report_says_what_is_not_proved() -> None:
    program, parts = found(UNPROVED["a maximum"][0])
    done = run_passes(program, [CountGlobally(unproved=parts.unproved)])
    (verdict,) = done.history[-1].verdicts
    assert "may not make up the loss of the whole batch: loss (amax.default) reduces" in str(verdict)
    assert "loss_is=" in verdict.remedy


def test_what_is_told_and_what_is_found() -> None:
    assert LossParts("sum").warning("auto") == LossParts("sum").warning("sum") == ""
    assert "the captured loss is a sum" in LossParts("sum").warning("mean")
    assert LossParts(None, "because").warning("sum") == ""
    assert "because" in LossParts(None, "because").warning("auto")
    assert [LossParts(None).put_together(requested) for requested in ("auto", "mean", "sum")] == ["mean", "mean", "sum"]
