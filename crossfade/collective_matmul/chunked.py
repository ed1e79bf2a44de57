"""Exchange in pieces by functional collectives, on whatever a process group runs on.

A gather starts the collectives of all pieces, computes the rank's own block meanwhile, then each piece as it arrives.
A scatter starts each piece's exchange once it is computed, then computes the rank's own block and what else there is.
"""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor

from crossfade.collective_matmul.pieces import GatheredProducts, ScatteredProduct, Span
from crossfade.collective_matmul.products import as_sent, cut
from crossfade.graph import collectives
from crossfade.graph.private import backend_of_group, group_named


def gather(products: GatheredProducts, chunks: int, rank: int, group: str) -> None:
    """Take the pieces of all ranks into the products."""
    part, dim, ranks = products.part, products.dim, products.ranks
    exchanged = backend_of_group(group) == "gloo"  # its all-gathers corrupt memory now and then: decision 10
    flying: deque[tuple[Span, Tensor]] = deque()
    for rows in cut(part.shape[dim], chunks):
        sent = as_sent(part.narrow(dim, *rows).contiguous())
        flying.append((rows, (_sent_to_others if exchanged else collectives.all_gather)(sent, ranks, group)))
    at_once = products.keep and dim == 0 and len(flying) == 1 and not exchanged
    if at_once:
        products.receive_whole()
    products.take(part.unsqueeze(0), (rank, 1), (0, part.shape[dim]))
    while flying:
        rows, started = flying.popleft()  # and let go of what has been computed with
        arrived = collectives.wait(started).view(part.dtype)
        if at_once:
            products.received_whole(arrived)
        block = arrived.view(-1, *part.shape[:dim], rows[1], *part.shape[dim + 1 :])
        for start, count in _others(rank, ranks):
            place = start - 1 if exchanged and start > rank else start
            products.take(block.narrow(0, place, count), (start, count), rows)


def _sent_to_others(sent: Tensor, ranks: int, group: str) -> Tensor:
    """Start an exchange that brings the other ranks' tensors, without one's own."""
    sizes = [sent.numel()] * ranks
    sizes[group_named(group).rank()] = 0
    return collectives.all_to_all_split(sent.reshape(-1).repeat(ranks - 1), sizes, sizes, group)


def scatter(product: ScatteredProduct, chunks: int, rank: int, group: str) -> None:
    """Send every other rank the pieces of its block, and add up those that come for this one's."""
    ranks = product.ranks
    flying: deque[tuple[Span, Tensor]] = deque()
    for rows in cut(product.rows, chunks):
        shape = product.piece_shape(rows[1])
        pieces = product.result.new_empty((ranks - 1, *shape))
        for start, count in _others(rank, ranks):
            product.compute((start, count), rows, pieces.narrow(0, 0 if start < rank else rank, count))
        sizes = [math.prod(shape)] * ranks
        sizes[rank] = 0
        flying.append((rows, collectives.all_to_all_split(as_sent(pieces).view(-1), sizes, sizes, group)))
    product.compute((rank, 1), (0, product.rows), product.result.unsqueeze(0))
    product.compute_others(1.0)
    while flying:
        rows, started = flying.popleft()
        received = collectives.wait(started).view(product.dtype)
        product.finish(rows, received.view(ranks - 1, *product.piece_shape(rows[1])))


def _others(rank: int, ranks: int) -> list[Span]:
    """The other ranks, as spans of neighbours."""
    return [span for span in ((0, rank), (rank + 1, ranks - rank - 1)) if span[1]]
