"""Which sizes become symbols, which batches then fit, and what is fixed after all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade.capture.divide_batch import BatchLayout
from crossfade.capture.symbolic_sizes import FittingSizes, SymbolicSizes
from crossfade.capture.training import capture_forward_backward
from crossfade.graph.private import known_sizes


@pytest.mark.parametrize(
    ("seen", "shapes"),
    [
        ([((8, 5), (8, 5)), ((8, 6), (8, 6))], ((8, "s0"), (8, "s0"))),
        ([((8, 8), (8,)), ((6, 6), (6,))], (("s0", "s1"), ("s0",))),
        ([((8, 5), (8, 5)), ((8, 6), (8, 7))], ((8, "s0"), (8, "s1"))),
        ([((8, 5),), ((1, 6),)], ((1, "s0"),)),
        ([((8, 5), ()), ((8, 1), ())], ((8, 1), ())),
    ],
    ids=["together", "samples apart from the rest", "each by itself", "one sample is a number", "so is a size of 1"],
)
def test_sizes_that_vary_become_symbols(seen: list[tuple[tuple[int, ...], ...]], shapes: object) -> None:
    assert SymbolicSizes.that_vary(seen).shapes == shapes


def test_a_part_has_fewer_samples_than_the_batch() -> None:
    seen = [((8, 5),), ((8, 6),)]
    sizes = SymbolicSizes.that_vary(seen, ((2, 6),), samples=True)
    assert (sizes.shapes, dict(sizes.hints), sizes.samples) == ((("s0", "s1"),), {"s0": 2, "s1": 6}, "s0")


class Positions(nn.Module):
    """Adds a row of a table to each place, and doubles long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.ones(30, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if x.shape[1] > 9 else x
        return self.head(x + self.table[: x.shape[1]])


def captured(every: bool = False) -> tuple[FittingSizes, dict[str, int]]:
    model, batch = Positions(), (torch.ones(4, 6, 4), torch.ones(4, 6, 1))
    sizes = SymbolicSizes.that_vary([((4, 5, 4), (4, 5, 1)), ((4, 6, 4), (4, 6, 1))], every=every, samples=True)
    lines: dict[str, str] = {}
    program = capture_forward_backward(
        model,
        F.mse_loss,
        batch,
        batch_size=4,
        trained=["table"],
        layout=BatchLayout.of(batch, ranks=1, accumulate=1, given="global"),
        sizes=sizes,
        lines=lines,
    )
    return FittingSizes.of(sizes, program.fake_mode, 2, lines), known_sizes(program.fake_mode)


@pytest.mark.parametrize(
    ("shapes", "why_not"),
    [
        (((4, 6, 4), (4, 6, 1)), ""),
        (((7, 9, 4), (7, 9, 1)), ""),
        (((4, 10, 4), (4, 10, 1)), "s1 <= 9, assumed at .*test_symbolic_sizes.py"),
        (((4, 6, 4), (4, 7, 1)), "sizes that were the same so far"),
        (((4, 6, 3), (4, 6, 1)), "sizes that were the same so far"),
        (((1, 6, 4), (1, 6, 1)), "a size of 1, where 2 to"),
    ],
    ids=str,
)
def test_a_program_fits_the_sizes_for_which_it_would_be_the_same(shapes: object, why_not: str) -> None:
    import re

    found = captured()[0].why_not(shapes)  # type: ignore[arg-type]
    assert bool(found) == bool(why_not)
    assert re.search(why_not, found), found


def test_a_size_that_the_model_asks_for_is_known() -> None:
    fitting, known = captured(every=True)
    features = fitting.sizes.shapes[0][2]
    assert known == {features: 4}
