"""Rows exchanged by ranks, in numbers known only when they run: two operators that graphs hold.

`crossfade.exchange_rows` sends as many rows as there are, and has room for as many as could arrive, so that programs
have static sizes. The numbers are tensors, read on the host when it starts: on a CUDA device that waits for them.
`crossfade.row_routes` computes the numbers, and the order of what arrives, of how many rows each group has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.errors import RewriteError
from crossfade.graph.private import group_named, register_work

EXCHANGE_ROWS = "crossfade::exchange_rows"
ROW_ROUTES = "crossfade::row_routes"


def exchange_rows(x: Tensor, sent: Tensor, received: Tensor, rows: int, group: str) -> Tensor:
    """Start to send the first `sent[0]` rows of `x` to rank 0, the next `sent[1]` to rank 1, and so on.

    What arrives, `received[r]` rows from rank r, is at the beginning of a result of `rows` rows, in the order of the
    ranks; the rest of it is zero. To be waited for like any collective.

    >>> counts = torch.empty(2, dtype=torch.int64, device="meta")
    >>> exchange_rows(torch.empty(6, 4, device="meta"), counts, counts, 12, "ep").shape
    torch.Size([12, 4])
    """
    return torch.ops.crossfade.exchange_rows(x, sent, received, rows, group)


def row_routes(leaving: Tensor, arriving: Tensor, ranks: int, rows: int) -> tuple[Tensor, ...]:
    """How rows travel to the ranks that have their groups, in equal parts in the order of the ranks, and back.

    `leaving` counts the rows that this rank has for every group, `arriving` those that come for its own groups, by rank
    and then by group; there is room for `rows` of them. Returned are how many go to each rank and come from each,
    which of what arrives comes first, second, ... in the order of groups, the same for the way back, and where the
    groups of this rank then end. Places that nothing arrives at stay where they are, behind all others.

    >>> leaving, arriving = torch.tensor([1, 0, 2, 1]), torch.tensor([1, 2, 1, 1])
    >>> for found in row_routes(leaving, arriving, ranks=2, rows=6):
    ...     print(found.tolist())
    [1, 3]
    [3, 2]
    [0, 3, 1, 2, 4, 5]
    [0, 2, 3, 1, 4, 5]
    [2, 5]
    """
    return torch.ops.crossfade.row_routes(leaving, arriving, ranks, rows)


def _routes_without_data(leaving: Tensor, arriving: Tensor, ranks: int, rows: int) -> tuple[Tensor, ...]:
    numbers = (leaving.new_empty([size]) for size in (ranks, ranks, rows, rows))
    return *numbers, arriving.new_empty([arriving.shape[0] // ranks], dtype=torch.int32)


def _routes(leaving: Tensor, arriving: Tensor, ranks: int, rows: int) -> tuple[Tensor, ...]:
    by_rank = arriving.view(ranks, -1)  # a block of rows for each rank and each group
    by_group = by_rank.t().reshape(-1)
    begins = (arriving.cumsum(0) - arriving).view(ranks, -1).t().reshape(-1)
    farther = begins - (by_group.cumsum(0) - by_group)  # than its place in the order of groups
    order = _moved(by_group, farther, rows)
    back = _moved(arriving, -farther.view(-1, ranks).t().reshape(-1), rows)
    return leaving.view(ranks, -1).sum(1), by_rank.sum(1), order, back, by_rank.sum(0).cumsum(0).to(torch.int32)


def _moved(blocks: Tensor, farther: Tensor, rows: int) -> Tensor:
    """Where each of `rows` rows comes from, if those of each block come from so much farther on; others stay."""
    places = torch.arange(rows, device=blocks.device)
    block = torch.searchsorted(blocks.cumsum(0), places, right=True)
    return places + torch.cat([farther, farther.new_zeros(1)])[block]


def _without_data(x: Tensor, sent: Tensor, received: Tensor, rows: int, group_name: str) -> Tensor:
    return x.new_empty([rows, *x.shape[1:]])


def _started(x: Tensor, sent: Tensor, received: Tensor, rows: int, group_name: str) -> Tensor:
    to, by = sent.tolist(), received.tolist()
    going, coming = sum(to), sum(by)
    if going > x.shape[0] or coming > rows:
        raise RewriteError(
            f"an exchange of {to} of {x.shape[0]} rows for {by} into {rows} rows",
            expected="no more rows than there are, and no more than there is room for",
            remedy="count rows by where their groups end, and make room for as many as all ranks may send",
        )
    arrived = x.new_empty([rows, *x.shape[1:]])
    arrived[coming:].zero_()
    group = group_named(group_name)
    leaving = x.contiguous()[:going]
    work = dist.all_to_all_single(arrived[:coming], leaving, by, to, group=group, async_op=True)
    register_work(arrived, work)
    return arrived


torch.library.define(
    EXCHANGE_ROWS,
    "(Tensor x, Tensor sent, Tensor received, int rows, str group_name) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.register_fake(EXCHANGE_ROWS, _without_data)
torch.library.impl(EXCHANGE_ROWS, "default", _started)

torch.library.define(
    ROW_ROUTES,
    "(Tensor leaving, Tensor arriving, int ranks, int rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.register_fake(ROW_ROUTES, _routes_without_data)
torch.library.impl(ROW_ROUTES, "default", _routes)

OPERATOR = torch.ops.crossfade.exchange_rows.default
"""What a graph calls to exchange rows."""
