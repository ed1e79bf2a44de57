"""Matrix products that travel while they are computed: operators that graphs hold, and the products they compute.

`crossfade.gather_matmul` is an all-gather with the products of what it gathers, `crossfade.matmul_scatter` a product
with the reduce-scatter of it (`crossfade.matmul_scatter_meanwhile` with other products too, which are computed while
its last pieces travel). A *product* is an einsum equation with one letter for each dim: "bsk,kn->bsn" is a linear
layer on three dims, "bmk,bkn->bmn" a bmm, "bsk,bsn->kn" a weight's gradient. A scaled product also says what it
returns ("mk,kn->mn bfloat16") and whether it may round more on the way ("mk,kn->mn bfloat16 fast").

Here are their arguments and the shapes that come out; how they run is with the code that runs programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossfade.errors import RewriteError

GATHER_MATMUL = "crossfade::gather_matmul"
MATMUL_SCATTER = "crossfade::matmul_scatter"
MATMUL_SCATTER_MEANWHILE = "crossfade::matmul_scatter_meanwhile"

FORMS = ("chunked", "ring", "symmetric")
"""Ways to run: functional collectives piece by piece; from neighbour to neighbour; torch's kernels on symmetric memory
of CUDA devices."""

ANYWHERE = ("chunked", "ring")
"""Those that run on every backend."""

REDUCTIONS = ("sum", "avg")
"""What a scattered product may be reduced by."""


@dataclass(frozen=True, slots=True)
class Equation:
    """A product of two tensors: the letters of their dims and of the result's.

    >>> read_product("bsk,kn->bsn")
    Equation(first='bsk', second='kn', result='bsn', dtype=None, fast=False)
    >>> read_product("mk,kn->mn bfloat16").dtype
    torch.bfloat16
    """

    first: str
    second: str
    result: str
    dtype: torch.dtype | None = None
    fast: bool = False

    @property
    def contracted(self) -> str:
        """The letters that are summed over."""
        return "".join(letter for letter in self.first if letter not in self.result)

    def __str__(self) -> str:
        return f"{self.first},{self.second}->{self.result}"


@functools.cache
def read_product(product: str) -> Equation:
    """The equation that a product spells, once each letter is summed over, kept, or shared by both operands."""
    equation, *words = product.split()
    operands, arrow, result = equation.partition("->")
    first, comma, second = operands.partition(",")
    letters = {*first, *second, *result}
    whole = arrow and comma and all(letter.isalpha() for letter in letters)
    once = all(len(set(side)) == len(side) for side in (first, second, result))
    if not whole or not once or any(sum(letter in side for side in (first, second, result)) < 2 for letter in letters):
        raise _error(
            f"the product {product!r}",
            "two operands and a result, such as 'mk,kn->mn', with each letter once in two or three of them",
            "spell the matrix product with one letter for each dim",
        )
    dtype = getattr(torch, words[0], None) if words else None
    if words and (not isinstance(dtype, torch.dtype) or words[1:] not in ([], ["fast"])):
        raise _error(f"the product {product!r}", "'EQUATION', 'EQUATION dtype' or 'EQUATION dtype fast'", "say one")
    return Equation(first, second, result, dtype, fast=len(words) > 1)


def spelled(equation: str, dtype: torch.dtype | None = None, *, fast: bool = False) -> str:
    """A product as the operators take it.

    >>> spelled("mk,kn->mn", torch.bfloat16, fast=True)
    'mk,kn->mn bfloat16 fast'
    """
    words = [equation] if dtype is None else [equation, str(dtype).removeprefix("torch.")]
    return " ".join([*words, "fast"] if fast else words)


def gather_matmul(
    part: Tensor,
    others: Sequence[Tensor],
    products: Sequence[str],
    *,
    dim: int,
    ranks: int,
    group: str,
    form: str = "chunked",
    chunks: int = 1,
    keep: bool = False,
    biases: Sequence[Tensor | None] | None = None,
    scales: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Gather a tensor from all ranks along `dim` and multiply it with others, each piece while the next travels.

    Result i is `einsum(products[i], gathered, others[i]) + biases[i]`; with `keep` the gathered tensor comes last.
    Each rank's part travels in `chunks` pieces. `scales` has two tensors for each product, of the whole gathered tensor
    and of the other (None for a product without), or nothing. All results are new and contiguous.

    >>> import crossfade.collective_matmul
    >>> part, weight = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> gather_matmul(part, [weight], ["mk,kn->mn"], dim=0, ranks=1, group="tp", biases=[torch.ones(2)])
    [tensor([[2., 3.],
            [4., 5.]])]
    """
    biases = [None] * len(others) if biases is None else biases
    return torch.ops.crossfade.gather_matmul(
        part, others, biases, scales, products, dim, ranks, form, chunks, keep, group
    )


def matmul_scatter(
    left: Tensor,
    right: Tensor,
    product: str,
    *,
    dim: int,
    ranks: int,
    group: str,
    reduce_op: str = "sum",
    form: str = "chunked",
    chunks: int = 1,
    bias: Tensor | None = None,
    scales: Sequence[Tensor | None] = (),
) -> Tensor:
    """Multiply, reduce over all ranks, and keep this rank's part along the result's `dim`, piece by piece.

    `bias` is added on every rank, before the reduction. The result is new and contiguous; its rows are cut into
    `chunks` pieces, and while one travels the next is computed.

    >>> import crossfade.collective_matmul
    >>> left, right = torch.ones(2, 3), torch.ones(3, 2)
    >>> matmul_scatter(left, right, "mk,kn->mn", dim=0, ranks=1, group="tp", reduce_op="avg")
    tensor([[3., 3.],
            [3., 3.]])
    """
    return torch.ops.crossfade.matmul_scatter(
        left, right, bias, scales, product, dim, reduce_op, ranks, form, chunks, group
    )


def matmul_scatter_meanwhile(
    left: Tensor,
    right: Tensor,
    product: str,
    meanwhile: Sequence[tuple[Tensor, Tensor]],
    *,
    dim: int,
    ranks: int,
    group: str,
    reduce_op: str = "sum",
    form: str = "chunked",
    chunks: int = 1,
    bias: Tensor | None = None,
    scales: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Like `matmul_scatter`, and the products of pairs of matrices, computed while the scattered one travels.

    >>> import crossfade.collective_matmul
    >>> left, right = torch.ones(2, 3), torch.ones(3, 2)
    >>> scattered, other = matmul_scatter_meanwhile(
    ...     left, right, "mk,kn->mn", [(right, left)], dim=0, ranks=1, group="tp"
    ... )
    >>> scattered.tolist(), other.tolist()
    ([[3.0, 3.0], [3.0, 3.0]], [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
    """
    operands = [operand for pair in meanwhile for operand in pair]
    return torch.ops.crossfade.matmul_scatter_meanwhile(
        left, right, bias, scales, product, dim, reduce_op, ranks, form, chunks, group, operands
    )


@dataclass(frozen=True, slots=True)
class GatherMatmulCall:
    """What `crossfade.gather_matmul` is called with, in the order of its schema."""

    part: Tensor
    others: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]
    products: Sequence[str]
    dim: int
    ranks: int
    form: str
    chunks: int
    keep: bool
    group: str

    def whole(self) -> list[int]:
        """The shape of what is gathered."""
        shape = list(self.part.shape)
        shape[self.dim] = shape[self.dim] * self.ranks
        return shape

    def scales_of(self, index: int) -> Sequence[Tensor | None]:
        """The scales of a product's two operands, or nothing."""
        return self.scales[2 * index : 2 * index + 2]

    def shapes(self) -> list[tuple[list[int], torch.dtype]]:
        """Shape and dtype of each product with what is gathered, once everything fits. Symbolic sizes are trusted."""
        _check_run(self.ranks, self.form, self.chunks)
        part, others, biases, scales, products = self.part, self.others, self.biases, self.scales, self.products
        if not len(others) == len(biases) == len(products) or len(scales) not in (0, 2 * len(products)):
            raise _error(
                f"{len(others)} operands, {len(biases)} biases and {len(scales)} scales for {len(products)} products",
                "one operand and one bias (or None) for each product, and no scales or two for each",
                "pass as many",
            )
        if not 0 <= self.dim < part.dim():
            found = f"a tensor of {part.dim()} dims to gather along dim {self.dim}"
            raise _error(found, "one of its dims, from 0", "pass one")
        whole = self.whole()
        return [
            _shape(read_product(product), whole, part, other, bias, self.scales_of(index))
            for index, (product, other, bias) in enumerate(zip(products, others, biases, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class MatmulScatterCall:
    """What `crossfade.matmul_scatter` is called with, in the order of its schema."""

    left: Tensor
    right: Tensor
    bias: Tensor | None
    scales: Sequence[Tensor | None]
    product: str
    dim: int
    reduce_op: str
    ranks: int
    form: str
    chunks: int
    group: str

    def shape(self) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of this rank's part of the product, once everything fits. Symbolic sizes are trusted."""
        _check_run(self.ranks, self.form, self.chunks)
        dim, ranks = self.dim, self.ranks
        if len(self.scales) not in (0, 2):
            raise _error(f"{len(self.scales)} scales for a product", "none, or one for each operand", "pass as many")
        if self.reduce_op not in REDUCTIONS:
            raise _error(f"the reduction {self.reduce_op!r}", " or ".join(REDUCTIONS), "reduce by one of them")
        equation = read_product(self.product)
        shape, dtype = _shape(equation, list(self.left.shape), self.left, self.right, self.bias, self.scales)
        if not 0 <= dim < len(shape):
            found = f"a product of {len(shape)} dims to scatter along dim {dim}"
            raise _error(found, "one of its dims, from 0", "pass it")
        if isinstance(shape[dim], int) and shape[dim] % ranks:
            found = f"dim {dim} of size {shape[dim]} to scatter over {ranks} ranks"
            raise _error(found, f"a multiple of {ranks}", "pad it")
        shape[dim] = shape[dim] // ranks
        return shape, dtype


def _shape(
    equation: Equation,
    first_shape: Sequence[int],
    first: Tensor,
    second: Tensor,
    bias: Tensor | None,
    scales: Sequence[Tensor | None],
) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of one product whose first operand will have the given shape."""
    sizes: dict[str, int] = {}
    for letters, shape in ((equation.first, first_shape), (equation.second, second.shape)):
        if len(letters) != len(shape):
            raise _error(
                f"a tensor of shape {list(shape)} for {letters!r} of {equation}", f"{len(letters)} dims", "spell it so"
            )
        for letter, size in zip(letters, shape, strict=True):
            known = sizes.setdefault(letter, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise _error(
                    f"sizes {known} and {size} for the letter {letter!r} of {equation}",
                    "one size for each letter, over all ranks for what is gathered",
                    "pass operands that fit",
                )
    scaled = any(scale is not None for scale in scales)
    if scaled and (equation.dtype is None or any(scale is None for scale in scales)):
        raise _error(
            f"a scaled product {equation} that lacks a scale or the result's dtype",
            "a scale for each operand and a product spelled as in 'mk,kn->mn bfloat16'",
            "pass both",
        )
    if not scaled and (equation.dtype is not None or first.dtype != second.dtype):
        raise _error(
            f"a product {equation} of {first.dtype} and {second.dtype} that returns {equation.dtype or first.dtype}",
            "one dtype, unless there are scales",
            "convert the operands or the result around it",
        )
    result = [sizes[letter] for letter in equation.result]
    if bias is not None and not _broadcasts(bias.shape, result):
        raise _error(f"a bias of shape {list(bias.shape)} for a result of {result}", "one that broadcasts", "pass it")
    return result, equation.dtype or first.dtype


def _broadcasts(shape: Sequence[int], result: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(result), strict=False)
    known = (pair for pair in pairs if isinstance(pair[0], int) and isinstance(pair[1], int))
    return len(shape) <= len(result) and all(size in (1, whole) for size, whole in known)


def _check_run(ranks: int, form: str, chunks: int) -> None:
    """Raise unless there is such a form, and something to exchange."""
    if ranks < 1 or chunks < 1 or form not in FORMS:
        raise _error(
            f"form={form!r}, ranks={ranks}, chunks={chunks}",
            f"one of {', '.join(FORMS)}, and at least one rank and one piece",
            "pass what a plan can be",
        )


def _gather_without_data(*given: Any) -> list[Tensor]:
    call = GatherMatmulCall(*given)
    shapes = call.shapes()
    if call.keep:
        shapes.append((call.whole(), call.part.dtype))
    return [call.part.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _scatter_without_data(*given: Any) -> Tensor:
    call = MatmulScatterCall(*given)
    shape, dtype = call.shape()
    return call.left.new_empty(shape, dtype=dtype)


def _scatter_meanwhile_without_data(*given: Any) -> list[Tensor]:
    """Takes what `_scatter_without_data` does, then the operands of what is computed meanwhile."""
    *scattered, meanwhile = given
    others = [left.new_empty([left.shape[0], right.shape[1]]) for left, right in pairs(meanwhile)]
    return [_scatter_without_data(*scattered), *others]


def pairs(meanwhile: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The operands of the products that are computed meanwhile, once they are matrices that fit.

    >>> [(one.shape[0], other.shape[1]) for one, other in pairs([torch.ones(2, 3), torch.ones(3, 4)])]
    [(2, 4)]
    """
    if len(meanwhile) % 2:
        raise _error(f"{len(meanwhile)} operands to be multiplied meanwhile", "two for each product", "pass pairs")
    found = list(zip(meanwhile[::2], meanwhile[1::2], strict=True))
    for left, right in found:
        matrices = left.dim() == right.dim() == 2 and left.dtype == right.dtype
        inner = (left.shape[-1], right.shape[0]) if matrices else ()
        unequal = all(isinstance(size, int) for size in inner) and len(set(inner)) > 1  # symbolic sizes are trusted
        if not matrices or unequal:
            raise _error(
                f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)} to be multiplied meanwhile",
                "two matrices of one dtype that fit",
                "pass pairs of such",
            )
    return found


def _error(found: str, expected: str, remedy: str) -> RewriteError:
    return RewriteError(found, expected=expected, remedy=remedy)


torch.library.define(
    GATHER_MATMUL,
    "(Tensor part, Tensor[] others, Tensor?[] biases, Tensor?[] scales, str[] products, int dim, int ranks, str form, "
    "int chunks, bool keep, str group_name) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    MATMUL_SCATTER,
    "(Tensor left, Tensor right, Tensor? bias, Tensor?[] scales, str product, int dim, str reduce_op, int ranks, "
    "str form, int chunks, str group_name) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    MATMUL_SCATTER_MEANWHILE,
    "(Tensor left, Tensor right, Tensor? bias, Tensor?[] scales, str product, int dim, str reduce_op, int ranks, "
    "str form, int chunks, str group_name, Tensor[] meanwhile) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.register_fake(GATHER_MATMUL, _gather_without_data)
torch.library.register_fake(MATMUL_SCATTER, _scatter_without_data)
torch.library.register_fake(MATMUL_SCATTER_MEANWHILE, _scatter_meanwhile_without_data)

GATHER_OPERATOR = torch.ops.crossfade.gather_matmul.default
"""What a graph calls to gather and multiply."""
SCATTER_OPERATOR = torch.ops.crossfade.matmul_scatter.default
"""What a graph calls to multiply and scatter."""
MEANWHILE_OPERATOR = torch.ops.crossfade.matmul_scatter_meanwhile.default
"""What a graph calls to multiply and scatter, and to multiply other matrices meanwhile."""
