"""A transformer block that is tensor-parallel with sequence parallelism: what one rank computes, in three ways to move.

Between the matmuls each rank has its rows of the sequence; a gather before the first of each pair and a scatter after
the second change that. Tensors are [sequence, batch, width], so that rows of the sequence lie together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from crossfade.graph import collectives
from crossfade.graph.collective_matmul import gather_matmul, matmul_scatter


@dataclass(frozen=True)
class Block:
    """Sizes of the whole block, over how many ranks it is split, and the group they form."""

    sequence: int
    batch: int
    width: int
    heads: int
    ranks: int
    group: str
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def inputs(self) -> list[Tensor]:
        """This rank's rows of the sequence, then its parts of the four weights, the same numbers on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)
        width, part = self.width, self.width // self.ranks
        shapes = [(self.sequence // self.ranks, self.batch, width), (width, 3 * part), (part, width)]
        shapes += [(width, 4 * part), (4 * part, width)]
        scales = [1.0, *(shape[0] ** -0.5 for shape in shapes[1:])]
        draw = lambda shape: torch.randn(shape, generator=generator, device=self.device)  # noqa: E731
        return [(draw(shape) * scale).to(self.dtype) for shape, scale in zip(shapes, scales, strict=True)]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of what is gathered or scattered each time, over all ranks."""
        return self.sequence * self.batch * self.width * self.dtype.itemsize


class Moves(Protocol):
    """How a matmul after a gather and one before a scatter are computed; both know their backward."""

    def gather_linear(self, block: Block, part: Tensor, weight: Tensor) -> Tensor: ...

    def linear_scatter(self, block: Block, whole: Tensor, weight: Tensor) -> Tensor: ...


def forward(block: Block, moves: Moves, part: Tensor, *weights: Tensor) -> Tensor:
    """The block's output, this rank's rows of it."""
    qkv, projection, up, down = weights
    heads, size = block.heads // block.ranks, block.width // block.heads
    mixed = moves.gather_linear(block, F.layer_norm(part, [block.width]), qkv)
    query, key, value = (
        part.view(block.sequence, block.batch, heads, size).permute(1, 2, 0, 3) for part in mixed.chunk(3, dim=-1)
    )
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3)
    attended = attended.reshape(block.sequence, block.batch, heads * size)
    part = part + moves.linear_scatter(block, attended, projection)
    hidden = F.gelu(moves.gather_linear(block, F.layer_norm(part, [block.width]), up))
    return part + moves.linear_scatter(block, hidden, down)


def forward_and_backward(block: Block, moves: Moves, part: Tensor, *weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of its mean square by the input's rows and the weights."""
    given = [tensor.detach().requires_grad_() for tensor in (part, *weights)]
    output = forward(block, moves, *given)
    return [output.detach(), *torch.autograd.grad(output.float().pow(2).mean(), given)]


class Collectives:
    """Functional collectives that are waited for at once: plain tensor parallelism."""

    def gather_linear(self, block: Block, part: Tensor, weight: Tensor) -> Tensor:
        """Gather, then multiply."""
        return _Gathered.apply(part, block) @ weight  # type: ignore[no-untyped-call]

    def linear_scatter(self, block: Block, whole: Tensor, weight: Tensor) -> Tensor:
        """Multiply, then reduce and scatter."""
        return _Scattered.apply(whole @ weight, block)  # type: ignore[no-untyped-call]


class Nothing:
    """As much computation and no communication: every other rank's rows are this one's."""

    def gather_linear(self, block: Block, part: Tensor, weight: Tensor) -> Tensor:
        """Multiply as many rows."""
        return part.repeat(block.ranks, 1, 1) @ weight

    def linear_scatter(self, block: Block, whole: Tensor, weight: Tensor) -> Tensor:
        """Multiply all rows, and keep as many as one rank has."""
        return (whole @ weight)[: block.sequence // block.ranks]


@dataclass(frozen=True)
class Pipelined:
    """The operators that compute on each piece while the next travels, called by hand."""

    form: str
    chunks: int

    def gather_linear(self, block: Block, part: Tensor, weight: Tensor) -> Tensor:
        """Gather and multiply."""
        return _GatherLinear.apply(part, weight, block, self)  # type: ignore[no-untyped-call]

    def linear_scatter(self, block: Block, whole: Tensor, weight: Tensor) -> Tensor:
        """Multiply and scatter."""
        return _LinearScatter.apply(whole, weight, block, self)  # type: ignore[no-untyped-call]

    def gather(
        self, block: Block, part: Tensor, others: Sequence[Tensor], products: Sequence[str], *, keep: bool = False
    ) -> list[Tensor]:
        """All products of what is gathered."""
        return gather_matmul(
            part.contiguous(), others, products, dim=0, ranks=block.ranks, group=block.group, form=self.form,
            chunks=self.chunks, keep=keep,
        )  # fmt: skip

    def scatter(self, block: Block, left: Tensor, right: Tensor, product: str) -> Tensor:
        """This rank's rows of the sum of all ranks' products."""
        return matmul_scatter(
            left, right, product, dim=0, ranks=block.ranks, group=block.group, form=self.form, chunks=self.chunks
        )


def _gather(part: Tensor, block: Block) -> Tensor:
    return collectives.wait(collectives.all_gather(part.contiguous(), block.ranks, block.group))


def _scatter(whole: Tensor, block: Block) -> Tensor:
    return collectives.wait(collectives.reduce_scatter(whole.contiguous(), "sum", block.ranks, block.group))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, block: Block) -> Tensor:
        context.block = block
        return _gather(part, block)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _scatter(gradient, context.block), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, block: Block) -> Tensor:
        context.block = block
        return _scatter(whole, block)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return _gather(gradient, context.block), None


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, weight: Tensor, block: Block, pipelined: Pipelined) -> Tensor:
        keep = any(context.needs_input_grad)
        result, *kept = pipelined.gather(block, part, [weight], ["sbk,kn->sbn"], keep=keep)
        context.save_for_backward(weight, *kept)
        context.block, context.pipelined = block, pipelined
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        weight, whole = context.saved_tensors
        to_part = context.pipelined.scatter(context.block, gradient, weight, "sbn,kn->sbk")
        return to_part, whole.flatten(0, 1).t() @ gradient.flatten(0, 1), None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, weight: Tensor, block: Block, pipelined: Pipelined) -> Tensor:
        context.save_for_backward(whole, weight)
        context.block, context.pipelined = block, pipelined
        return pipelined.scatter(block, whole, weight, "sbk,kn->sbn")

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        whole, weight = context.saved_tensors
        products = ["sbn,kn->sbk", "sbn,sbk->kn"]
        to_whole, to_weight = context.pipelined.gather(context.block, gradient, [weight, whole], products)
        return to_whole, to_weight, None, None


Step = Callable[..., Any]
STEPS: dict[str, Step] = {"forward": forward, "forward+backward": forward_and_backward}
EXCHANGES = {"forward": (2, 2), "forward+backward": (4, 4)}
"""How many gathers and scatters each of them has."""
