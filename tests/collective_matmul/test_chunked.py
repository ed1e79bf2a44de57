"""The chunked form on every rank of three, with a backend played by the test: which rows go where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade.collective_matmul import chunked
from crossfade.collective_matmul.pieces import GatheredProducts, ScatteredProduct
from crossfade.collective_matmul.products import cut
from crossfade.graph import collectives
from crossfade.graph.collective_matmul import GatherMatmulCall, MatmulScatterCall

RANKS, ROWS = 3, 4


class Group:
    """A group of three in which this process has a rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_gather_takes_each_rank_s_rows_to_its_place(
    monkeypatch: pytest.MonkeyPatch, backend: str, rank: int, chunks: int
) -> None:
    """Over gloo only the others' rows arrive, so that those behind one's own lie one place further in front."""
    parts = [torch.arange(2.0 * ROWS).view(ROWS, 2) + 100 * source for source in range(RANKS)]
    spans = iter(cut(ROWS, chunks))

    def all_gather(sent: Tensor, ranks: int, group: str) -> Tensor:
        rows = next(spans)
        assert torch.equal(sent, parts[rank].narrow(0, *rows))
        return torch.cat([part.narrow(0, *rows) for part in parts])

    def all_to_all_split(sent: Tensor, out: list[int], into: list[int], group: str) -> Tensor:
        rows = next(spans)
        assert [size > 0 for size in out] == [other != rank for other in range(RANKS)] and out == into
        return torch.cat([part.narrow(0, *rows).flatten() for other, part in enumerate(parts) if other != rank])

    monkeypatch.setattr(chunked, "backend_of_group", lambda group: backend)
    monkeypatch.setattr(chunked, "group_named", lambda group: Group(rank))
    monkeypatch.setattr(collectives, "all_gather", all_gather)
    monkeypatch.setattr(collectives, "all_to_all_split", all_to_all_split)
    monkeypatch.setattr(collectives, "wait", lambda started: started)
    weight = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    call = GatherMatmulCall(
        parts[rank], [weight], [None], [], ["mk,kn->mn"], 0, RANKS, "chunked", chunks, keep=True, group="tp"
    )
    products = GatheredProducts(call)
    chunked.gather(products, chunks, rank, "tp")
    product, whole = products.results()
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(product, torch.cat(parts) @ weight)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_scatter_sends_each_rank_its_rows(monkeypatch: pytest.MonkeyPatch, rank: int, chunks: int) -> None:
    lefts = [torch.arange(2.0 * RANKS * ROWS).view(RANKS * ROWS, 2) + 7 * source for source in range(RANKS)]
    right = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    spans = iter(cut(ROWS, chunks))

    def block(source: int, target: int, rows: Any) -> Tensor:
        return (lefts[source] @ right).narrow(0, target * ROWS, ROWS).narrow(0, *rows).flatten()

    def all_to_all_split(sent: Tensor, out: list[int], into: list[int], group: str) -> Tensor:
        rows, others = next(spans), [other for other in range(RANKS) if other != rank]
        assert torch.equal(sent, torch.cat([block(rank, other, rows) for other in others]))
        return torch.cat([block(other, rank, rows) for other in others])

    monkeypatch.setattr(collectives, "all_to_all_split", all_to_all_split)
    monkeypatch.setattr(collectives, "wait", lambda started: started)
    call = MatmulScatterCall(lefts[rank], right, None, [], "mk,kn->mn", 0, "sum", RANKS, "chunked", chunks, "tp")
    product = ScatteredProduct(call)
    chunked.scatter(product, chunks, rank, "tp")
    assert torch.equal(product.result, sum(left @ right for left in lefts).narrow(0, rank * ROWS, ROWS))
