"""Functions of tensors and collectives, as users write them, that become collective matmuls; run on real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.fuse_gathers_into_matmuls import FuseGathersIntoMatmuls
from crossfade.communicate.fuse_scatters_into_matmuls import FuseScattersIntoMatmuls
from crossfade.graph.passes import Outcome


def gathered(x: Tensor, dim: int) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x, dim, dist.group.WORLD))


def scattered(x: Tensor, dim: int, op: str = "sum") -> Tensor:
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, op, dim, dist.group.WORLD))


def erased(x: Tensor, dim: int) -> Tensor:
    """Bytes are gathered and seen as what they are again."""
    return funcol.wait_tensor(funcol.all_gather_tensor(x.view(torch.uint8), dim, dist.group.WORLD)).view(x.dtype)


def trimmed(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x, 0)[:-1] @ w


def three(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Three matmuls of one gathered value, which is used elsewhere too."""
    g = gathered(x, 0)
    return g @ w, torch.addmm(w[0], g, w), torch.nn.functional.linear(g, w.t().contiguous()), g.exp()


def block(x: Tensor, w: Tensor) -> Tensor:
    """A sequence-parallel perceptron: gathered, multiplied, activated, multiplied, scattered."""
    return scattered(torch.relu(gathered(x, 1) @ w) @ w.t(), 1)


def gradient(x: Tensor, w: Tensor) -> Tensor:
    """A sum over the gathered dim, as a weight's gradient is."""
    g = gathered(x, 0)
    return g.t() @ torch.ones(6, 3).repeat(dist.get_world_size(), 1).to(x)


def _permuted(x: Tensor, w: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    g = gathered(x, 0).view(ranks, *x.shape).permute(1, 0, 2, 3).reshape(x.shape[0], -1, x.shape[2])
    return g @ w


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "P1 dim 0": (lambda x, w: gathered(x, 0) @ w, (6, 8)),
    "P1 dim 1, split and joined": (lambda x, w: gathered(x, 1) @ w, (2, 5, 8)),
    "P1 view and permute": (_permuted, (2, 5, 8)),
    "P1 last dim, a sum over ranks": (lambda x, w: gathered(x, 1) @ w.repeat(dist.get_world_size(), 1), (6, 8)),
    "P1 bytes": (lambda x, w: erased(x, 0) @ w, (6, 8)),
    "P1 trimmed": (trimmed, (6, 8)),
    "P2 dim 0": (lambda x, w: scattered(x @ w, 0), (12, 8)),
    "P2 dim 1": (lambda x, w: scattered(x @ w, 1), (2, 12, 8)),
    "P2 last dim": (lambda x, w: scattered(x @ w, 2), (2, 3, 8)),
    "P2 mean": (lambda x, w: scattered(x @ w, 0, "avg"), (12, 8)),
    "P3 bmm": (lambda x, w: torch.bmm(gathered(x, 1), w.expand(x.shape[0], -1, -1)), (3, 4, 8)),
    "P3 linear of three dims": (lambda x, w: torch.nn.functional.linear(gathered(x, 1), w.t(), w[0]), (3, 4, 8)),
    "P3 a gathered weight": (lambda x, w: w.t() @ gathered(x, 1), (8, 6)),
    "P3 the gradient of a weight": (gradient, (6, 8)),
    "P4 three consumers, kept": (three, (6, 8)),
    "P5 through a reshape": (lambda x, w: scattered((x.reshape(-1, 8) @ w).view(2, 12, 12), 1), (2, 12, 8)),
    "P5 saved, too": (lambda x, w: (lambda s: (s, s * 2))(scattered(x @ w, 0)), (12, 8)),
    "P7 an operand made later": (lambda x, w: (lambda g: (g.exp(), g @ (w * 2)))(gathered(x, 0)), (6, 8)),
    "a block": (block, (2, 5, 8)),
}  # fmt: skip
"""By row of docs/capabilities.md: a function of this rank's tensor and a weight of [8, 12], and the tensor's shape."""


def run_case(
    function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, forms: Iterable[tuple[str, int]]
) -> Iterator[tuple[int, float]]:
    """Trace once; for each form optimize, run both, compare: how many collective matmuls it became, and how far its
    results are from the plain ones'."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(shape, generator=generator).to(dtype)
    w = torch.randn(8, 12, generator=torch.Generator().manual_seed(99)).to(dtype)
    module = make_fx(function)(x, w)
    expected = _as_tuple(module(x, w))
    for form, chunks in forms:
        how = {"form": form, "chunks": chunks}
        done = cf.optimize(module, passes=[FuseGathersIntoMatmuls(**how), FuseScattersIntoMatmuls(**how)])
        verdicts = [verdict for _, verdict in done.report.verdicts]
        pairs = list(zip(expected, _as_tuple(done.module(x, w)), strict=True))
        assert all(a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride() for a, b in pairs)
        fused = sum(verdict.outcome is Outcome.FUSED and bool(verdict.bytes) for verdict in verdicts)
        yield fused, max(_difference(a, b) for a, b in pairs)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _difference(expected: Tensor, found: Tensor) -> float:
    scale = max(1.0, float(expected.abs().max()))
    return float((expected.double() - found.double()).abs().max()) / scale


def run_all_forms(dtype: torch.dtype, pieces: tuple[int, ...]) -> dict[str, dict[str, tuple[int, float]]]:
    """Every case in every form that runs anywhere, in so many pieces; parts of 5 and 6 rows divide by few of them."""
    forms = list(itertools.product(("chunked", "ring"), pieces))
    cases = {name: list(run_case(*case, dtype, forms)) for name, case in CASES.items()}
    return {
        f"{form} in {chunks}": {name: results[index] for name, results in cases.items()}
        for index, (form, chunks) in enumerate(forms)
    }
