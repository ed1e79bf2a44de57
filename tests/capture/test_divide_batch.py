"""Which rows of a batch each rank computes, and which batches cannot be divided."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch

from crossfade.capture.divide_batch import BatchIs, BatchLayout, batch_key
from crossfade.errors import BatchError

ROWS = torch.arange(8.0).reshape(8, 1)


@pytest.mark.parametrize(
    ("ranks", "accumulate", "rank", "rows"),
    [
        (1, 2, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 1, 1, [4, 5, 6, 7]),
        (2, 2, 0, [0, 1, 4, 5]),
        (2, 2, 1, [2, 3, 6, 7]),
        (2, 4, 1, [1, 3, 5, 7]),
    ],
)
def test_a_rank_takes_its_part_of_every_micro_batch(ranks: int, accumulate: int, rank: int, rows: list[int]) -> None:
    layout = BatchLayout.of((ROWS,), ranks=ranks, accumulate=accumulate, given="global")
    (part,) = layout.take((ROWS,), rank)
    assert part.flatten().tolist() == rows
    assert layout.micro_batch_size * accumulate == len(rows)


def test_a_local_batch_is_the_ranks_own() -> None:
    layout = BatchLayout.of((ROWS, torch.tensor(3), "words"), ranks=2, accumulate=2, given="local")
    part, number = layout.take((ROWS, torch.tensor(3), "words"), 1)
    assert torch.equal(part, ROWS) and number.item() == 3
    assert (layout.micro_batch_size, layout.micro_batch_size_of_all_ranks) == (4, 8)


def test_parts_lie_in_memory_as_the_batch_does() -> None:
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    layout = BatchLayout.of((images,), ranks=2, accumulate=2, given="global")
    (part,) = layout.take((images,), 1)
    assert torch.equal(part, images[[1, 3]]) and part.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("given", "ranks", "whole"), [("global", 1, True), ("local", 2, False)])
def test_a_batch_that_does_not_divide_is_computed_at_once(given: BatchIs, ranks: int, whole: bool) -> None:
    layout = BatchLayout.of((ROWS[:7],), ranks=2, accumulate=2, given=given)
    assert (layout.ranks, layout.accumulate, layout.micro_batch_size, layout.whole) == (ranks, 1, 7, whole)
    assert all(torch.equal(layout.take((ROWS[:7],), rank)[0], ROWS[:7]) for rank in range(2))


REFUSED = {
    "a batch of 0 samples: expected at least one. Remedy: skip the step on all ranks.": (torch.ones(0, 2),),
    "the batch has no tensor to split. Remedy: pass at least one tensor with a batch dim.": (torch.tensor(1.0), 2),
    "batch[1] with 4 rows beside batch[0] with 8: expected the same number of samples along dim 0 of every tensor in "
    "the batch. Remedy: make tensors that all samples share (masks, tables) buffers of the model.": (
        torch.ones(8),
        torch.ones(4),
    ),
}


@pytest.mark.parametrize("message", REFUSED, ids=lambda message: message.partition(":")[0])
def test_what_cannot_be_divided_is_refused(message: str) -> None:
    with pytest.raises(BatchError) as caught:
        BatchLayout.of(REFUSED[message], ranks=2, accumulate=2, given="global")
    assert str(caught.value) == message


def test_a_batch_is_known_by_its_types_and_plain_values() -> None:
    key = batch_key((torch.ones(2, 3), {"scale": 2}))
    assert key == batch_key((torch.zeros(2, 3), {"scale": 2}))
    others = [
        (torch.ones(2, 3), {"scale": 3}),
        (torch.ones(2, 3), {"scale": 2.0}),
        (torch.ones(3, 2).t(), {"scale": 2}),
        (torch.ones(2, 3).int(), {"scale": 2}),
    ]
    assert key not in map(batch_key, others)


class Boxed:
    """A batch as an object, which torch's trees do not open."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            Boxed(torch.ones(2)),
            "a Boxed in the batch hides its numbers: .* pass the tensors of the Boxed in a dict",
        ),
        (UserDict(x=torch.ones(2)), r"a UserDict in the batch hides its numbers: .* Remedy: pass dict\(batch\)"),
        (np.ones(2), "a ndarray in the batch hides its numbers: .* Remedy: pass torch.as_tensor of it"),
    ],
    ids=["object", "mapping", "array"],
)
def test_what_hides_its_numbers_is_refused(batch: object, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_key((batch,))


def test_other_values_are_a_part_of_the_key() -> None:
    assert batch_key((torch.ones(2), 3, "train", None)) != batch_key((torch.ones(2), 4, "train", None))
