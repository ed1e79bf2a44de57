"""Rows P1 to P8 of docs/capabilities.md on 2 and 4 real ranks, against the plain program in the same process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.collective_matmul_cases import CASES, run_all_forms

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.ranks
@pytest.mark.parametrize(("count", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_collective_matmuls_compute_what_the_plain_program_does(ranks: Any, count: int, dtype: torch.dtype) -> None:
    pieces = (1, 5) if (count, dtype) == (2, torch.float32) else (2,)
    for found in ranks(count).run(run_all_forms, dtype, pieces):
        for how, cases in found.items():
            fusions = {name: number for name, (number, _) in cases.items()}
            assert fusions == {name: 2 if name == "a block" else 1 for name in CASES}, how
            far = {name: difference for name, (_, difference) in cases.items() if difference > TOLERANCE[dtype]}
            assert not far, how
