"""Products whose operand comes, or whose result goes, in pieces: what each way to exchange them computes with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossfade.collective_matmul.products import (
    Scales,
    add_product,
    blocked,
    multiply,
    piece,
    rank_letter,
    scale_by_rows,
    wide,
)
from crossfade.graph.collective_matmul import Equation, GatherMatmulCall, MatmulScatterCall, read_product

Span = tuple[int, int]
"""Start and size: of neighbouring ranks, or of rows of each rank's block."""


class GatheredProducts:
    """The products of a tensor of which pieces arrive, and (with `keep`) the tensor itself.

    >>> part, weight = torch.ones(2, 3), torch.ones(3, 1)
    >>> call = GatherMatmulCall(part, [weight], [None], [], ["mk,kn->mn"], 0, 2, "chunked", 1, False, "tp")
    >>> products = GatheredProducts(call)
    >>> products.take(part[None], (1, 1), (0, 2))
    >>> products.take(part[None, :1], (0, 1), (1, 1))
    >>> products.results()[0][1:].tolist()
    [[3.0], [3.0], [3.0]]
    """

    def __init__(self, call: GatherMatmulCall) -> None:
        self.part, self.dim, self.ranks, self.keep = call.part, call.dim, call.ranks, call.keep
        self._products: list[_Placed | _Summed] = []
        shapes, whole = call.shapes(), call.whole()
        for index, (product, other, bias) in enumerate(zip(call.products, call.others, call.biases, strict=True)):
            equation, (shape, dtype) = read_product(product), shapes[index]
            letter = equation.first[self.dim]
            result = self.part.new_empty(shape, dtype=dtype)
            kind = _Placed if letter in equation.result else _Summed
            scaling = _scaling(call.scales_of(index), equation, letter, whole, other.shape, self.ranks)
            self._products.append(kind(equation, letter, other, bias, scaling, result, self.ranks))
        self._whole = self.part.new_empty(whole) if self.keep else None
        self._blocks = None if self._whole is None else blocked(self._whole, self.dim, self.ranks)

    def place(self, rank: int, rows: Span) -> Tensor | None:
        """Where a rank's rows can be received without a copy: in the kept tensor, if they lie together there."""
        if self._blocks is None:
            return None
        place = piece(self._blocks, self.dim, (rank, 1), rows)[0]
        return place if place.is_contiguous() else None

    def receive_whole(self) -> None:
        """Keep no pieces: the gathered tensor will come as it is."""
        self._whole = self._blocks = None

    def received_whole(self, whole: Tensor) -> None:
        """Keep the gathered tensor that came."""
        self._whole = whole

    def take(self, block: Tensor, ranks: Span, rows: Span) -> None:
        """Compute with a piece: some rows of some ranks' parts, stacked along a new first dim."""
        for product in self._products:
            product.take(block, ranks, rows)
        if self._blocks is not None:
            place = piece(self._blocks, self.dim, ranks, rows)
            if place.data_ptr() != block.data_ptr():  # it was received there
                place.copy_(block)

    def results(self) -> list[Tensor]:
        """The products, then the gathered tensor if it is kept; once all pieces have been taken."""
        results = [product.finished() for product in self._products]
        return results if self._whole is None else [*results, self._whole]


class Meanwhile:
    """Products of matrices that have nothing to do with what travels, some rows of each at a time.

    >>> others = Meanwhile([(torch.ones(3, 2), torch.ones(2, 1))])
    >>> others.compute(0.5)
    >>> others.compute(1.0)
    >>> others.results
    [tensor([[2.],
            [2.],
            [2.]])]
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._pairs, self._done = pairs, 0.0
        self.results = [left.new_empty(left.shape[0], right.shape[1]) for left, right in pairs]
        """Whole once everything up to 1.0 is computed."""

    def compute(self, until: float) -> None:
        """Compute the rows of each up to this share of all."""
        for (left, right), result in zip(self._pairs, self.results, strict=True):
            start, end = (round(left.shape[0] * share) for share in (self._done, until))
            if end > start:
                torch.mm(left[start:end], right, out=result[start:end])
        self._done = until


class ScatteredProduct:
    """A product of which pieces are sent away, and what comes from others for this rank's block is added up.

    >>> left, right = torch.arange(4.0).view(4, 1), torch.ones(1, 1)
    >>> call = MatmulScatterCall(left, right, None, [], "mk,kn->mn", 0, "sum", 2, "chunked", 1, "tp")
    >>> product = ScatteredProduct(call)
    >>> product.computed((1, 1), (0, 2)).tolist()
    [[[2.0], [3.0]]]
    """

    def __init__(self, call: MatmulScatterCall, others: Meanwhile | None = None) -> None:
        left, right, dim, ranks = call.left, call.right, call.dim, call.ranks
        shape, self.dtype = call.shape()
        equation = read_product(call.product)
        letter = equation.result[dim]
        self.dim, self.ranks, self.rows, self.mean = dim, ranks, shape[dim], call.reduce_op == "avg"
        self.result = left.new_empty(shape, dtype=self.dtype)
        """This rank's part; `finish` makes it complete."""
        self._left = _Cut(left, equation.first, letter, ranks)
        self._right = _Cut(right, equation.second, letter, ranks)
        self._bias = _cut_bias(call.bias, equation, letter, ranks)
        self._scaling = _scaling(call.scales, equation, letter, left.shape, right.shape, ranks)
        rank = rank_letter(equation)
        self._letters = (self._left.letters(rank), self._right.letters(rank), rank + equation.result)
        self.compute_others = (others or Meanwhile()).compute
        """Computes products that have nothing to do with this one, up to a share: for when there is time."""

    def piece_shape(self, size: int) -> tuple[int, ...]:
        """The shape of so many rows of the result."""
        return (*self.result.shape[: self.dim], size, *self.result.shape[self.dim + 1 :])

    def compute(self, ranks: Span, rows: Span, out: Tensor) -> None:
        """Write some rows of the product for some ranks into a tensor that has a first dim for those ranks."""
        left, right = self._left.piece(ranks, rows), self._right.piece(ranks, rows)
        scales = None if self._scaling is None else self._scaling.piece(ranks, rows)
        bias = None if self._bias is None else self._bias.piece(ranks, rows)
        multiply(self._letters, left, right, out, bias=bias, scales=scales)

    def computed(self, ranks: Span, rows: Span) -> Tensor:
        """Some rows of the product for some ranks, along a new first dim."""
        out = self.result.new_empty((ranks[1], *self.piece_shape(rows[1])))
        self.compute(ranks, rows, out)
        return out

    def finish(self, rows: Span, received: Tensor) -> None:
        """Add what others sent for some rows (along a new first dim) to the result's, and take the mean if asked."""
        place = self.result.narrow(self.dim, *rows)
        if wide(self.dtype) == self.dtype:
            for block in received:
                place.add_(block)
            total = place
        else:
            total = received.sum(0, dtype=wide(self.dtype)).add_(place)
        if self.mean:
            total.div_(self.ranks)
        if total is not place:
            place.copy_(total)


class _Placed:
    """A product in whose result the pieces of the gathered operand have places."""

    def __init__(
        self,
        equation: Equation,
        letter: str,
        other: Tensor,
        bias: Tensor | None,
        scaling: _Scaling | None,
        result: Tensor,
        ranks: int,
    ) -> None:
        rank = rank_letter(equation)
        self._other = _Cut(other, equation.second, letter, ranks)
        self._bias = _cut_bias(bias, equation, letter, ranks)
        self._scaling, self._result = scaling, result
        self._dim = equation.result.index(letter)
        self._places = blocked(result, self._dim, ranks)
        self._letters = (rank + equation.first, self._other.letters(rank), rank + equation.result)

    def take(self, block: Tensor, ranks: Span, rows: Span) -> None:
        """Compute where the piece belongs."""
        out = piece(self._places, self._dim, ranks, rows)
        scales = None if self._scaling is None else self._scaling.piece(ranks, rows)
        bias = None if self._bias is None else self._bias.piece(ranks, rows)
        multiply(self._letters, block, self._other.piece(ranks, rows), out, bias=bias, scales=scales)

    def finished(self) -> Tensor:
        """The result."""
        return self._result


class _Summed:
    """A product that sums over the gathered dim: each piece adds to all of the result."""

    def __init__(
        self,
        equation: Equation,
        letter: str,
        other: Tensor,
        bias: Tensor | None,
        scaling: _Scaling | None,
        result: Tensor,
        ranks: int,
    ) -> None:
        rank = rank_letter(equation)
        self._other = _Cut(other, equation.second, letter, ranks)
        self._bias, self._scaling, self._dtype = bias, scaling, result.dtype
        self._sum = result.to(wide(result.dtype))
        self._empty = True
        self._letters = (rank + equation.first, self._other.letters(rank), equation.result)

    def take(self, block: Tensor, ranks: Span, rows: Span) -> None:
        """Add the piece's product."""
        scales = None if self._scaling is None else self._scaling.piece(ranks, rows)
        other = self._other.piece(ranks, rows)
        if self._empty and self._sum.dtype == self._dtype:
            multiply(self._letters, block, other, self._sum, scales=scales)
        else:
            add_product(self._letters, block, other, self._sum.zero_() if self._empty else self._sum, scales=scales)
        self._empty = False

    def finished(self) -> Tensor:
        """The result, in its own dtype."""
        total = self._sum if self._bias is None else self._sum.add_(self._bias)
        return total.to(self._dtype)


class _Cut:
    """A tensor that is cut with the exchange if it has the dim that is, else used whole for every piece."""

    def __init__(self, tensor: Tensor, letters: str, letter: str, ranks: int) -> None:
        self._dim = letters.find(letter)
        self._letters = letters
        self._view = tensor if self._dim < 0 else blocked(tensor, self._dim, ranks)

    def letters(self, rank: str) -> str:
        """The letters of its pieces, which have the ranks first."""
        return self._letters if self._dim < 0 else rank + self._letters

    def piece(self, ranks: Span, rows: Span) -> Tensor:
        """What goes with some rows of some ranks' blocks."""
        return self._view if self._dim < 0 else piece(self._view, self._dim, ranks, rows)


class _Scaling:
    """The scales of a product, cut with its operands."""

    def __init__(self, first: _Cut, second: _Cut, dtype: torch.dtype, fast: bool) -> None:
        self._first, self._second, self._dtype, self._fast = first, second, dtype, fast

    def piece(self, ranks: Span, rows: Span) -> Scales:
        """The scales of a piece."""
        first, second = self._first.piece(ranks, rows), self._second.piece(ranks, rows)
        return Scales(first, second, self._dtype, self._fast)


def _scaling(
    scales: Sequence[Tensor | None],
    equation: Equation,
    letter: str,
    first: Sequence[int],
    second: Sequence[int],
    ranks: int,
) -> _Scaling | None:
    """How to cut the scales of a product, or None if it has none."""
    if not scales or scales[0] is None or scales[1] is None or equation.dtype is None:
        return None
    cuts = []
    for scale, letters, sizes in zip(scales, (equation.first, equation.second), (first, second), strict=True):
        assert scale is not None
        by_rows = scale_by_rows(scale, letters, equation, sizes)
        dim = letters.find(letter)
        if dim < 0 or by_rows.shape[dim] > 1:
            cuts.append(_Cut(by_rows, letters, letter, ranks))
        else:  # the same for all pieces, but they have a dim for the ranks
            cuts.append(_Cut(by_rows.unsqueeze(0), "", letter, ranks))
    return _Scaling(cuts[0], cuts[1], equation.dtype, equation.fast)


def _cut_bias(bias: Tensor | None, equation: Equation, letter: str, ranks: int) -> _Cut | None:
    """How to cut a bias: with the result's dims, ranks first, if it has the dim that is cut; else whole."""
    if bias is None:
        return None
    missing = len(equation.result) - bias.dim()
    dim = equation.result.index(letter)
    if dim < missing or bias.shape[dim - missing] == 1:
        return _Cut(bias, "", letter, ranks)
    return _Cut(bias.view(*[1] * missing, *bias.shape), equation.result, letter, ranks)
