"""What reductions, gathers and exchanges leave behind where every rank holds the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from crossfade.emulated import values
from crossfade.errors import MeshError, NotYetError


@pytest.mark.parametrize(
    ("op", "ranks", "expected"),
    [
        (ReduceOp.SUM, 3, [3, 6]), (ReduceOp.PRODUCT, 3, [1, 8]), (ReduceOp.AVG, 3, [1, 2]), (ReduceOp.MAX, 3, [1, 2]),
        (ReduceOp.BXOR, 2, [0, 0]), (ReduceOp.BXOR, 3, [1, 2]), (ReduceOp.SUM, 1, [1, 2]),
    ],
)  # fmt: skip
def test_a_reduction_with_equal_tensors(op: Any, ranks: int, expected: list[int]) -> None:
    tensor = torch.tensor([1, 2])
    if (write := values.reduced([tensor], op, ranks)) is not None:
        write()
    assert tensor.tolist() == expected


def test_parts_that_are_gathered_and_scattered() -> None:
    gathered, part = torch.zeros(6), torch.tensor([1.0, 2.0])
    values.gathered([gathered], [part], 3)()
    assert gathered.tolist() == [1, 2, 1, 2, 1, 2]
    assert values.own_part(torch.arange(6.0), 3, 1).tolist() == [2, 3]
    output = torch.zeros(2)
    values.scattered([output], [torch.tensor([2.0, 3.0])], ReduceOp.SUM, 3)()
    assert output.tolist() == [6, 9]


def test_an_exchange_of_other_sizes_takes_what_fits_and_zeros() -> None:
    outputs: list[Tensor] = [torch.full((size,), 9.0) for size in (1, 2, 3)]
    values.exchanged(outputs, torch.tensor([1.0, 2.0]))()
    assert [output.tolist() for output in outputs] == [[1], [1, 2], [1, 2, 0]]
    assert [part.tolist() for part in values.split(torch.arange(4), [], 2)] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in values.split(torch.arange(4), [3, 1], 2)] == [[0, 1, 2], [3]]


REFUSED: dict[str, Any] = {
    r"an output of 5 elements: expected 6 in a group of 3 ranks": lambda: values.gathered(
        [torch.zeros(5)], [torch.zeros(2)], 3
    ),
    r"2 outputs for 1 inputs: expected as many": lambda: values.gathered([torch.zeros(2)] * 2, [torch.zeros(1)], 2),
    r"a tensor with strides \(1, 2\): expected a contiguous one": lambda: values.own_part(torch.zeros(2, 2).t(), 2, 0),
    r"a size of 3 in a group of 2 ranks: expected a multiple of 2": lambda: values.split(torch.zeros(3), [], 2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_sizes_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(MeshError, match=message):
        REFUSED[message]()


def test_a_reduction_that_is_not_known_is_refused() -> None:
    with pytest.raises(NotYetError, match="expected sum, avg, product"):
        values.reduced([torch.zeros(1)], "median", 2)
