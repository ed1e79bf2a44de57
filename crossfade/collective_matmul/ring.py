"""Exchange in pieces from neighbour to neighbour: each rank sends to the next and receives from the one before.

A gather passes every piece on around the ring as soon as it has come, and computes with it meanwhile. A scatter sends
sums around: each rank computes its product while the sum to add it to is on its way.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from crossfade.collective_matmul.pieces import GatheredProducts, ScatteredProduct
from crossfade.collective_matmul.products import as_sent, cut
from crossfade.graph.private import group_named

_TAG = 1 << 20
"""Where our tags of messages begin, far from those that programs count from 0."""


def gather(products: GatheredProducts, chunks: int, rank: int, group: str) -> None:
    """Take the pieces of all ranks into the products, those of the rank before first."""
    part, dim, ranks = products.part, products.dim, products.ranks
    pieces = cut(part.shape[dim], chunks)
    own = [part.narrow(dim, *rows).contiguous() for rows in pieces]
    travelling = list(own)
    for step in range(1, ranks):
        for rows, like in zip(pieces, own, strict=True):
            place = products.place((rank - step) % ranks, rows)
            travelling.append(like.new_empty(like.shape) if place is None else place)
    ring: _Batches | _Messages = _ring(part, group)
    arrivals = ring.pass_on(travelling, len(pieces))
    products.take(part.unsqueeze(0), (rank, 1), (0, part.shape[dim]))
    for step in range(1, ranks):
        for index, rows in enumerate(pieces):
            arrivals.wait()
            block = travelling[step * len(pieces) + index]
            products.take(block.unsqueeze(0), ((rank - step) % ranks, 1), rows)
    ring.finish()


def scatter(product: ScatteredProduct, chunks: int, rank: int, group: str) -> None:
    """Add this rank's product to the sums that pass by, and keep the one for its own block."""
    ranks = product.ranks
    pieces = cut(product.rows, chunks)
    ring = _ring(product.result, group)
    sums = [product.result.new_empty(product.piece_shape(size)) for _ in range(1, ranks) for _, size in pieces]
    ring.expect(sums)
    for step in range(ranks - 1):
        for index, rows in enumerate(pieces):
            number = step * len(pieces) + index
            computed = product.computed(((rank - 1 - step) % ranks, 1), rows)[0]
            if step:
                product.compute_others(step / (ranks - 1))
                ring.wait(number - len(pieces))
                computed.add_(sums[number - len(pieces)])
            ring.send(computed, number)
    product.compute((rank, 1), (0, product.rows), product.result.unsqueeze(0))
    product.compute_others(1.0)
    for index, rows in enumerate(pieces):
        number = (ranks - 2) * len(pieces) + index
        ring.wait(number)
        product.finish(rows, sums[number].unsqueeze(0))
    ring.finish()


class _Messages:
    """Messages that travel on their own: each is sent when it is there, and received whenever it comes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        rank, ranks = group.rank(), group.size()
        self._next = dist.get_global_rank(group, (rank + 1) % ranks)
        self._before = dist.get_global_rank(group, (rank - 1) % ranks)
        self._sent: list[tuple[Any, Tensor]] = []
        self._expected: list[Any] = []

    def expect(self, places: list[Tensor]) -> None:
        """Receive into these, in whatever order they come."""
        for number, place in enumerate(places):
            work = dist.irecv(as_sent(place), self._before, group=self._group, tag=_TAG + number)
            self._expected.append(work)

    def send(self, tensor: Tensor, number: int) -> None:
        """Send what the next rank expects under this number; the tensor must not change until the end."""
        work = dist.isend(as_sent(tensor), self._next, group=self._group, tag=_TAG + number)
        self._sent.append((work, tensor))

    def wait(self, number: int) -> None:
        """Wait for what is expected under this number."""
        self._expected[number].wait()

    def pass_on(self, tensors: list[Tensor], own: int) -> _Arrivals:
        """Send the first `own` tensors; receive the others, and send each on as it comes, but not the last `own`."""
        self.expect(tensors[own:])
        for number in range(own):
            self.send(tensors[number], number)
        if len(tensors) == 2 * own:  # nothing to be passed on
            return _Arrivals(self)
        queue: SimpleQueue[Exception | None] = SimpleQueue()
        # Gloo cannot be asked whether something has come, only be waited for.
        threading.Thread(target=self._forward, args=(tensors, own, queue), daemon=True).start()
        return _Arrivals(self, queue)

    def _forward(self, tensors: list[Tensor], own: int, queue: SimpleQueue[Exception | None]) -> None:
        try:
            for number in range(own, len(tensors)):
                self.wait(number - own)
                if number < len(tensors) - own:
                    self.send(tensors[number], number)
                queue.put(None)
        except Exception as error:
            queue.put(error)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sent:
            work.wait()


class _Batches:
    """Messages on a CUDA stream: each is sent in one call with the receipt of another, or two ranks could lock."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._messages = _Messages(group)
        self._group = group
        self._places: list[Tensor] = []
        self._works: list[list[Any]] = []
        self._alive: list[Tensor] = []

    def expect(self, places: list[Tensor]) -> None:
        """Receive into these, each when as much is sent."""
        self._places = places

    def send(self, tensor: Tensor, number: int) -> None:
        """Send a tensor, and receive that of the same number."""
        messages, place = self._messages, self._places[number]
        there = dist.P2POp(dist.isend, as_sent(tensor), messages._next, self._group)
        back = dist.P2POp(dist.irecv, as_sent(place), messages._before, self._group)
        self._works.append(dist.batch_isend_irecv([there, back]))
        self._alive.append(tensor)

    def wait(self, number: int) -> None:
        """Let the current stream wait for what was received under this number."""
        for work in self._works[number]:
            work.wait()

    def pass_on(self, tensors: list[Tensor], own: int) -> _Arrivals:
        """Send and receive everything: what is passed on waits in the stream until it has come."""
        self.expect(tensors[own:])
        for number in range(len(tensors) - own):
            self.send(tensors[number], number)
        return _Arrivals(self)

    def finish(self) -> None:
        """Let the current stream wait until everything has been sent."""
        for number in range(len(self._works)):
            self.wait(number)


class _Arrivals:
    """What is to come, in order: of the ring itself, or of a thread that passes it on."""

    def __init__(self, ring: _Messages | _Batches, queue: SimpleQueue[Exception | None] | None = None) -> None:
        self._ring, self._queue, self._number = ring, queue, 0

    def wait(self) -> None:
        """Wait for the next."""
        if self._queue is None:
            self._ring.wait(self._number)
        elif (error := self._queue.get()) is not None:
            raise error
        self._number += 1


def _ring(tensor: Tensor, name: str) -> _Messages | _Batches:
    """How this group exchanges messages of a device: emulated fabrics take them as they come, like a CPU's."""
    group = group_named(name)
    batches = tensor.is_cuda and dist.get_backend(group) != "emulated"
    return _Batches(group) if batches else _Messages(group)
