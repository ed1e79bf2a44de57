"""Collectives that know their backward, on real ranks, against the same computed in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from crossfade import Ranks
from crossfade.shard.tensor import conjugate
from crossfade.shard.tensor.localize import placement_of
from crossfade.shard.tensor.parts import joined
from crossfade.shard.tensor.placements import Shard
from crossfade.shard.tensor.sources import local_part
from tests.shard.tensor.conjugate_jobs import batch, differentiate, model, plan_of, train_step

Many = list[Tensor]
MOVES = [(0, 1), (1, 1), (1, 2), (2, 2)]
"""Which dim, in how many blocks."""


def parts(whole: Tensor, split: Shard, ranks: int) -> Many:
    return [local_part(whole, split, rank, ranks) for rank in range(ranks)]


def draw(ranks: int, *shape: int) -> Many:
    generator = torch.Generator().manual_seed(len(shape) + ranks)
    return list(torch.randint(-9, 10, (ranks, *shape), generator=generator).float())


def total(values: Many) -> Tensor:
    return torch.stack(values).sum(0)


def compared(pool: Ranks, name: str, settings: Any, inputs: Many, grads: Many, results: Many, gradients: Many) -> None:
    found = pool.run(differentiate, name, settings, inputs, grads)
    for (result, gradient), right, right_gradient in zip(found, results, gradients, strict=True):
        assert torch.equal(result, right) and torch.equal(gradient, right_gradient)


@pytest.mark.parametrize("count", [2, 4])
def test_a_replicated_value_enters_and_its_gradients_are_added(ranks: Callable[[int], Ranks], count: int):
    x, grads = draw(count, 4, 8)[0], draw(count, 4, 8)
    compared(ranks(count), "enter", ("tp",), [x] * count, grads, [x] * count, [total(grads)] * count)


@pytest.mark.parametrize("count", [2, 4])
def test_partial_sums_are_reduced_and_their_gradient_is_whole(ranks: Callable[[int], Ranks], count: int):
    inputs, grad = draw(count, 4, 8), draw(count, 4, 8)[0]
    compared(ranks(count), "reduce", ("sum", "tp"), inputs, [grad] * count, [total(inputs)] * count, [grad] * count)


@pytest.mark.parametrize("count", [2, 4])
def test_a_share_is_kept_by_one_and_its_gradient_is_whole(ranks: Callable[[int], Ranks], count: int):
    x, grad = draw(count, 4, 8)[:2]
    results = [x, *[torch.zeros_like(x)] * (count - 1)]
    compared(ranks(count), "share", (), [x] * count, [grad] * count, results, [grad] * count)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("dim", "outer"), MOVES)
def test_parts_are_gathered(ranks: Callable[[int], Ranks], count: int, dim: int, outer: int):
    split, (whole, *_), grads = Shard(dim, outer), draw(count, 8, 8, 16), draw(count, 8, 8, 16)
    inputs, results = parts(whole, split, count), [whole] * count
    alike = [grads[0]] * count
    compared(ranks(count), "gather", (dim, outer), inputs, alike, results, parts(grads[0], split, count))
    added = parts(total(grads), split, count)
    compared(ranks(count), "gather_enter", (dim, outer), inputs, grads, results, added)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("dim", "outer"), MOVES)
def test_values_are_scattered_and_split(ranks: Callable[[int], Ranks], count: int, dim: int, outer: int):
    split, inputs, grad = Shard(dim, outer), draw(count, 8, 8, 16), draw(count, 8, 8, 16)[0]
    grads, whole = parts(grad, split, count), [grad] * count
    compared(ranks(count), "scatter", (dim, outer), inputs, grads, parts(total(inputs), split, count), whole)
    alike = [inputs[0]] * count
    compared(ranks(count), "split", (dim, outer), alike, grads, parts(inputs[0], split, count), whole)


def test_the_gradient_of_a_maximum_is_refused():
    with pytest.raises(NotImplementedError, match="detach what it reduces"):
        conjugate.reduce(torch.ones(2, requires_grad=True), "max", "tp")


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_transformer_has_the_gradients_of_one_device(ranks: Callable[[int], Ranks], count: int, sequence: bool):
    """Loss and every gradient, in its parameter's placement; embedding, head and loss split by vocabulary."""
    trained = model()
    loss = trained(*batch())
    loss.backward()
    plan = plan_of(trained, count, sequence=sequence)
    found = ranks(count).run(train_step, sequence)
    for value, grads, _ in found:
        assert value == pytest.approx(loss.item(), rel=1e-5)
        assert grads.keys() == plan.parameters.keys()
    for name, parameter in trained.named_parameters():
        place = placement_of(plan.parameters[name])
        gradients = [grads[name] for _, grads, _ in found]
        if isinstance(place, Shard):
            gradients = [joined(gradients, place)]
        for gradient in gradients:
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=1e-4, atol=1e-6, msg=partial("{}: {}".format, name)
            )
    moved = Counter(name.split("_", 1)[1].removesuffix(".default") for name in found[0][2])
    assert bool(moved["scatter"]) == sequence
