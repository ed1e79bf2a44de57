"""Complex numbers travel as pairs of real ones where backends know none; what stays says why."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.communicate.pair_complex_numbers import PairComplexNumbers
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from crossfade.graph.text import parse, render


def paired(text: str) -> Program:
    return run_passes(parse(textwrap.dedent(text), groups={"dp": 2}), [PairComplexNumbers()])


SCATTERED_AND_GATHERED = """
    x: c64[4, 3] = input("x")
    conj: c64[4, 3] = aten._conj(x)
    s: c64[2, 3] = c10d.reduce_scatter_tensor(conj, "sum", 2, "dp")
    w: c64[2, 3] = c10d.wait_tensor(s)
    g: c64[4, 3] = c10d.all_gather_into_tensor(w, 2, "dp")
    v: c64[4, 3] = c10d.wait_tensor(g)
    return output("y", v)
"""


def run_paired(given: torch.Tensor) -> torch.Tensor:
    """On the ranks of this world, of whom the second has something else."""
    program = paired(SCATTERED_AND_GATHERED)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return Executable(program, {"dp": group})([given * (dist.get_rank() + 1)])[0]


@pytest.mark.ranks
def test_sums_of_complex_numbers_are_those_of_one_process(ranks: Any):
    x = torch.randn(4, 3, dtype=torch.complex64)
    for found in ranks(2).run(run_paired, x):
        torch.testing.assert_close(found, 3 * x.conj().resolve_conj())


def test_all_reduces_and_real_numbers_stay_as_they_are():
    text = """
        x: c64[4] = input("x")
        r: f32[4] = input("r")
        s: c64[4] = c10d.all_reduce(x, "sum", "dp")
        w: c64[4] = c10d.wait_tensor(s)
        g: f32[8] = c10d.all_gather_into_tensor(r, 2, "dp")
        v: f32[8] = c10d.wait_tensor(g)
        return output("y", w), output("z", v)
    """
    done = paired(text)
    assert not done.history[0].changed and not done.history[0].verdicts
    assert "view_as_real" not in render(done)


LEFT = {
    "only the plain spellings are replaced": 's = c10d.all_gather_into_tensor_coalesced([x], 2, "dp")\na = s[0]',
    "its reduction is no sum": 'a: c64[2] = c10d.reduce_scatter_tensor(x, "product", 2, "dp")',
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    done = paired(f'x: c64[4] = input("x")\n{LEFT[reason]}\nw = c10d.wait_tensor(a)\nreturn output("y", w)')
    assert [verdict.reason for verdict in done.history[0].verdicts] == [reason]
    assert not done.history[0].changed
