"""Rows that are sorted by group belong to their part of a batch; other uses of a part's counts are not proved."""

from __future__ import annotations

import textwrap

import pytest

from crossfade.graph.text import parse
from crossfade.shard.loss_parts import LossParts, find_loss_parts

ROUTED = """
    w: bf16[8, 8, 8] = parameter("w")
    x: bf16[{b}, 8] = input("x")
    g: i64[{b}] = input("g")
    sort: (i64[{b}], i64[{b}]) = aten.sort(g)
    groups: i64[{b}] = sort[0]
    order: i64[{b}] = sort[1]
    rows: bf16[{b}, 8] = aten.index.Tensor(x, [order])
    floats: f32[{b}] = aten._to_copy(groups, dtype=torch.float32)
    counts: f32[8] = aten.histc(floats, 8, 0, 7)
    ends: i32[8] = aten.cumsum(counts, 0, dtype=torch.int32)
    y: bf16[{b}, 8] = aten._grouped_mm(rows, w, ends)
    loss: bf16[] = aten.mean(y)
    return loss("loss", loss)
"""


def found(text: str) -> LossParts:
    small, large = (parse(textwrap.dedent(text).replace("{b}", str(size))) for size in (4, 8))
    return find_loss_parts(small, large, 2, ["w"])


def test_groups_of_sorted_rows_are_each_parts_own() -> None:
    assert found(ROUTED) == LossParts("mean")


def test_what_exporting_asserts_of_groups_is_no_use_of_them() -> None:
    asserted = "asserted: None = aten._assert_tensor_metadata(groups, dtype=torch.int64)\n    floats:"
    assert found(ROUTED.replace("floats:", asserted, 1)) == LossParts("mean")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("_grouped_mm(rows, w", "_grouped_mm(x, w"),
        ("aten.histc(floats, 8, 0, 7)", "aten.histc(floats, 8, 0, 0)"),
        ("_to_copy(groups,", "_to_copy(g,"),
        ("loss: bf16[] = aten.mean(y)", "z: bf16[{b}, 8] = aten.mul.Tensor(y, ends)\nloss: bf16[] = aten.mean(z)"),
    ],
    ids=["rows in another order", "bins by their values", "counts of what is not sorted", "another use"],
)
def test_other_counts_are_not_proved(before: str, after: str) -> None:
    text = textwrap.dedent(ROUTED).replace(before, after)
    assert "counts (histc.default) reduces the samples of one part" in found(text).unproved
