"""Random numbers of parts that run again in the backward are those of the forward; results equal eager torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import crossfade as cf
from crossfade.errors import CaptureError
from crossfade.graph.effects import is_random


class Block(nn.Module):
    """Dropout on plain and transposed values, and on the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.tanh(self.first(x)), 0.3)
        heads = y.unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).transpose(1, 2).flatten(2)
        return x + F.dropout(self.second(y), 0.5) + F.dropout(y.transpose(1, 2), 0.2).transpose(1, 2)


class Checkpointed(nn.Module):
    """Blocks that are run as `run` says, with dropout before and after them."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.last, self.run = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1), run

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(self.run(self.blocks, F.dropout(x, 0.1))), 0.1).square().mean()


def each(**options: Any) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """Every block checkpointed by itself."""

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x.requires_grad_()  # a reentrant checkpoint has no gradients without
        for block in blocks:
            x = checkpoint(block, x, **options)
        return x

    return run


def nested(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(blocks[1], F.dropout(blocks[0](x), 0.1), use_reentrant=False)

    return blocks[2](checkpoint(inner, x, use_reentrant=False))


class Reversed(torch.autograd.Function):
    """A checkpoint written by hand, which runs a backward inside of its own."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = (value.detach().requires_grad_() for value in ctx.saved_tensors)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.block(x)
        torch.autograd.backward(y, gradients)
        return None, x.grad


def by_hand(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = Reversed.apply(block, x.requires_grad_())
    return x


def early_ends(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Parts whose last draws no gradient needs, so that they are not run to their end again."""

    def part(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) + torch.rand(5, 8)

    for block in blocks:
        x = checkpoint(part, block, x, use_reentrant=False)
    return x


KINDS: dict[str, tuple[Callable[[nn.ModuleList, Tensor], Tensor], int]] = {
    "not reentrant": (each(use_reentrant=False), 14),
    "reentrant": (each(use_reentrant=True), 14),
    "other numbers": (each(use_reentrant=False, preserve_rng_state=False), 26),
    "reentrant, other numbers": (each(use_reentrant=True, preserve_rng_state=False), 26),
    "nested": (nested, 15),
    "by hand": (by_hand, 14),
    "early ends": (early_ends, 17),
}
"""Ways to run blocks again, and how many draws are in the whole step."""


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_dropout_is_bitwise_eager_torchs(kind: str) -> None:
    run, draws = KINDS[kind]
    torch.manual_seed(0)
    model = Checkpointed(run)
    eager = copy.deepcopy(model)
    batches = [torch.randn(4, 5, 8) for _ in range(3)]
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager))
    torch.manual_seed(1)
    expected = []
    for batch in batches:
        theirs.zero_grad()
        loss = eager(batch.clone())
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    next_number = torch.rand(())
    torch.manual_seed(1)
    step = cf.compile_step(model, None, ours)
    assert [step(batch).item() for batch in batches] == expected
    for trained, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(trained, wanted)
    assert torch.equal(torch.rand(()), next_number)
    assert sum(map(is_random, step.program.graph.nodes)) == draws


def test_a_capture_leaves_the_random_stream_as_it_was() -> None:
    model = Checkpointed(nested)
    step = cf.compile_step(model, None, torch.optim.SGD(model.parameters()))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    step.prepare(torch.randn(4, 5, 8, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_that_draws_something_else_when_it_runs_again_is_refused() -> None:
    runs = []

    def fickle(x: Tensor) -> Tensor:
        runs.append(x)
        return torch.tanh(F.dropout(x, 0.5 if len(runs) == 1 else 0.25))

    model = nn.Linear(4, 4)

    def loss_fn(y: Tensor) -> Tensor:
        return checkpoint(fickle, y, use_reentrant=False).square().mean()

    step = cf.compile_step(model, loss_fn, torch.optim.SGD(model.parameters()))
    with pytest.raises(CaptureError, match=r"at the place in the random stream where .* Remedy: let a checkpointed"):
        step(torch.randn(2, 4))
