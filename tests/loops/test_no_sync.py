"""Accumulation with one exchange: `no_sync` means what it means in DDP, and sums are one device's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.errors import CrossfadeError
from crossfade.graph import collectives

RANKS, WINDOWS, SAMPLES = 2, 3, 4


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))


def tokens_of(window: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    """Samples of one rank, of which others than the other's are ignored."""
    generator = torch.Generator().manual_seed(100 * window + 10 * part + rank)
    labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
    labels[: (window + part + rank) % SAMPLES] = -100
    return torch.randn(SAMPLES, 6, generator=generator), labels


def numbers_of(window: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * window + 10 * part + rank)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 5, generator=generator)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]] = {
    "mean": (F.mse_loss, numbers_of),
    "tokens": (F.cross_entropy, tokens_of),
}


def train(name: str, parts: int, kind: str, to_none: bool = True) -> tuple[list[float], list[Tensor], Any]:
    """Losses and parameters by one process on all samples (`one`), or on this rank by DDP or ours."""
    loss_fn, batch_of = LOSSES[name]
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = cf.compile_gradients(model, loss_fn, {"dp": RANKS}, batch="local") if kind == "ours" else None
    wrapped = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    losses = []
    for window in range(WINDOWS):
        for part in range(parts):
            given = [batch_of(window, part, rank) for rank in range(RANKS)]
            x, y = given[dist.get_rank()] if kind != "one" else map(torch.cat, zip(*given, strict=True))
            waits = getattr(gradients or wrapped, "no_sync", contextlib.nullcontext)
            with waits() if part < parts - 1 else contextlib.nullcontext():
                loss = gradients(x, y) if gradients else loss_fn(wrapped(x), y)
                (loss / parts).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return losses, [p.detach() for p in model.parameters()], gradients


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "parts", "to_none"), [("mean", 2, True), ("tokens", 3, True), ("tokens", 2, False)])
def test_sums_are_exchanged_once_and_equal_one_device(ranks: Any, name: str, parts: int, to_none: bool) -> None:
    losses, expected, _ = train(name, parts, "one")
    for ours, found, by_ddp in ranks(RANKS).run(_ours_and_ddp, name, parts, to_none):
        assert ours == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        if name == "mean":  # DDP averages the means of ranks, whatever they are means of
            torch.testing.assert_close(found, by_ddp, rtol=1e-5, atol=1e-6)


def _ours_and_ddp(name: str, parts: int, to_none: bool) -> Any:
    losses, found, gradients = train(name, parts, "ours", to_none)
    assert gradients.captures == 2
    gradients.close()
    return losses, found, train(name, parts, "ddp", to_none)[1]


def _collectives(gradients: cf.Gradients) -> int:
    return sum(c.bytes for c in collectives.find(gradients.program.graph))


def _by_hand() -> None:
    model = model_of()
    gradients = cf.compile_gradients(model, F.mse_loss, {"dp": RANKS}, batch="local")
    first, second = (numbers_of(0, part, dist.get_rank()) for part in range(2))
    everything = sum(p.nbytes for p in model.parameters())
    with gradients.no_sync():
        gradients(*first).backward()
        assert _collectives(gradients) < everything  # the loss, and what ranks compare
    gradients(*second).backward()
    assert _collectives(gradients) >= everything
    both = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with gradients.no_sync():  # cleared: as if it had not been
        gradients(*first).backward()
    model.zero_grad()
    gradients(*second).backward()
    alone = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with gradients.no_sync():  # on top of what was exchanged already
        gradients(*first).backward()
    loss = gradients(*second)
    loss.backward()
    for p, one, two in zip(model.parameters(), alone, both, strict=True):
        torch.testing.assert_close(p.grad, one + two)
    model.zero_grad()
    gradients(*second).backward()
    with gradients.no_sync():  # one backward of two, on top of what was exchanged
        (gradients(*first) + gradients(*first)).backward()
    gradients(*second).backward()
    for p, two in zip(model.parameters(), both, strict=True):
        torch.testing.assert_close(p.grad, 2 * two)
    model.zero_grad()
    with gradients.no_sync():
        gradients(*first).backward()
    loss = gradients(*second)
    model.zero_grad()
    with pytest.raises(CrossfadeError, match="was cleared or changed after"):
        loss.backward()
    with gradients.no_sync():
        gradients(*first).backward()
    loss = gradients(*second)
    with pytest.raises(CrossfadeError, match=r"were multiplied by 0\.5, 1\.0"):
        (loss / 2).backward()
    model.zero_grad()
    gradients.close()


@pytest.mark.ranks
def test_what_waits_may_be_cleared_added_to_and_is_not_mixed_up(ranks: Any) -> None:
    ranks(RANKS).run(_by_hand)


def _other_parameters() -> None:
    model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
    for p in model.parameters():
        nn.init.ones_(p)
    gradients = cf.compile_gradients(_Either(model), F.mse_loss, {"dp": RANKS}, batch="local")
    x, y = numbers_of(0, 0, dist.get_rank())
    with gradients.no_sync():
        gradients(x, y).backward()
    with pytest.raises(CrossfadeError, match="which this batch has none of"):
        gradients(x[1:], y[1:])
    gradients.close()


class _Either(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[len(x) % 2](x)


@pytest.mark.ranks
def test_a_last_micro_batch_without_a_waiting_gradient_is_refused(ranks: Any) -> None:
    ranks(RANKS).run(_other_parameters)


def _of_uneven_batches() -> Any:
    """A whole batch of all ranks, then one that does not divide, which every rank computes whole."""
    model = model_of()
    gradients = cf.compile_gradients(model, F.mse_loss, {"dp": RANKS}, loss_is="auto")
    x, y = (
        torch.cat([numbers_of(0, 0, r)[0] for r in range(RANKS)]),
        torch.cat([numbers_of(0, 0, r)[1] for r in range(RANKS)]),
    )
    for first, last in ((slice(0, 8), slice(0, 5)), (slice(0, 5), slice(0, 8))):
        with gradients.no_sync():
            (3 * gradients(x[first], y[first])).backward()
        (3 * gradients(x[last], y[last])).backward()
    found = [p.grad for p in model.parameters()]
    gradients.close()
    plain = model_of()
    for part in (slice(0, 8), slice(0, 5)) * 2:
        (3 * F.mse_loss(plain(x[part]), y[part])).backward()
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_batches_that_do_not_divide_wait_with_those_that_do(ranks: Any) -> None:
    ranks(RANKS).run(_of_uneven_batches)


def test_parts_of_gradients_do_not_wait(ranks: Any) -> None:
    ranks(RANKS).run(_in_parts)


def _in_parts() -> None:
    gradients = cf.compile_gradients(model_of(), F.mse_loss, {"dp": RANKS}, data_parallel="zero2")
    with pytest.raises(CrossfadeError, match=r"no_sync\(\) with data_parallel"), gradients.no_sync():
        pass
    gradients.close()


def test_on_one_device_there_is_nothing_to_wait_for() -> None:
    model, plain = model_of(), model_of()
    gradients = cf.compile_gradients(model, F.mse_loss)
    for part in range(2):
        x, y = numbers_of(0, part, 0)
        with gradients.no_sync():
            gradients(x, y).backward()
        F.mse_loss(plain(x), y).backward()
    assert gradients.captures == 1
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
