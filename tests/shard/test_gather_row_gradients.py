"""Gradients of embeddings as rows: added up where they are needed, and only where that is less to send."""

from __future__ import annotations

import pytest

from crossfade.shard.gather_row_gradients import GatherRowGradients
from tests.shard.parts import after, lines

ROWS = """
    g: f32[2, 4, 33] = input("g")
    i: i64[2, 4] = input("i")
    dense: f32[8191, 33] = aten.embedding_dense_backward(g, i, {rows}, {padding}, {scaled})
    pad: f32[8192, 33] = aten.constant_pad_nd(dense, [0, 0, 0, 1])
    start: f32[4096, 33] = c10d.reduce_scatter_tensor(pad, "{op}", 2, "dp")
    done: f32[4096, 33] = c10d.wait_tensor(start)
    return gradient("w", done)
"""


def rows(op: str = "sum", padding: int = -1, scaled: bool = False) -> str:
    return ROWS.format(rows=8191, padding=padding, scaled=scaled, op=op)


def test_each_rank_adds_up_its_own_rows():
    text, done = after(rows("sum"), GatherRowGradients())
    assert text[2:] == lines("""
        rank_dp: int = scalar("rank.dp")
        view: f32[8, 33] = aten.view(g, [-1, 33])
        all_gather_into_tensor: f32[16, 33] = c10d.all_gather_into_tensor(view, 2, "dp")
        wait_tensor: f32[16, 33] = c10d.wait_tensor(all_gather_into_tensor)
        view_1: i64[8] = aten.view(i, [-1])
        all_gather_into_tensor_1: i64[16] = c10d.all_gather_into_tensor(view_1, 2, "dp")
        wait_tensor_1: i64[16] = c10d.wait_tensor(all_gather_into_tensor_1)
        mul: int = operator.mul(rank_dp, 4096)
        sub: i64[16] = aten.sub.Tensor(wait_tensor_1, mul)
        ge: b8[16] = aten.ge.Scalar(sub, 0)
        lt: b8[16] = aten.lt.Scalar(sub, 4096)
        bitwise_and: b8[16] = aten.bitwise_and.Tensor(ge, lt)
        bitwise_not: b8[16] = aten.bitwise_not(bitwise_and)
        masked_fill: i64[16] = aten.masked_fill.Scalar(sub, bitwise_not, 4096)
        embedding_dense_backward: f32[4097, 33] = aten.embedding_dense_backward(wait_tensor, masked_fill, 4097, -1, False)
        slice_1: f32[4096, 33] = aten.slice.Tensor(embedding_dense_backward, 0, 0, 4096)
        return gradient("w", slice_1)
    """)  # noqa: E501
    assert [str(verdict) for verdict in done.history[0].verdicts] == [
        "start: replaced: gradients of the rows looked up are gathered instead",
        "all_gather_into_tensor: inserted: gathers gradients of rows",
        "all_gather_into_tensor_1: inserted: says which rows these are of",
    ]


def test_a_gradient_by_another_name_is_the_gradient():
    plain = rows("sum").replace("constant_pad_nd(dense", "constant_pad_nd(same")
    named = plain.replace("    pad:", "    same: f32[8191, 33] = aten.detach(dense)\n    pad:")
    assert after(named, GatherRowGradients())[0] == after(rows("sum"), GatherRowGradients())[0]


def test_rows_that_are_padding_do_not_count():
    text, _ = after(rows("avg", padding=5), GatherRowGradients())
    assert "ne: b8[16] = aten.ne.Scalar(wait_tensor_1, 5)" in text
    assert "bitwise_and_1: b8[16] = aten.bitwise_and.Tensor(bitwise_and, ne)" in text


LEFT = {
    "only the plain reductions are replaced": (
        rows()
        .replace("return", "done_1: f32[4096, 33] = aten.neg(start)\n    return")
        .replace('gradient("w", done)', 'output("n", done_1), gradient("w", done)'),
        GatherRowGradients(),
    ),
    "something else uses the gradient of the whole table": (
        rows().replace("return gradient", 'return output("dense", dense), gradient'),
        GatherRowGradients(),
    ),
    "the rows or their gradients are written to in place": (
        rows().replace("    start:", "    added: f32[2, 4, 33] = aten.add_.Scalar(g, 1)\n    start:"),
        GatherRowGradients(),
    ),
    "its reduction is no sum": (rows("max"), GatherRowGradients()),
    "it is scaled by how often a rank looked a row up": (rows(scaled=True), GatherRowGradients()),
    "the table is small": (rows(), GatherRowGradients(least_mb=1.1)),
    "all ranks together looked up half of the table or more": (rows(), GatherRowGradients(ranks=1000)),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    text, step = LEFT[reason]
    _, done = after(text, step)
    assert [str(verdict) for verdict in done.history[0].verdicts] == [f"start: left alone: {reason}"]
    assert not done.history[0].changed
