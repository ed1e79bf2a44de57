"""`step(x, y, alpha=0.3)` and `step(**batch)`: keyword arguments go where a reader expects them to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same, trained


def smoothed(output: Tensor, target: Tensor, *, alpha: float | Tensor = 0.0, weight: Tensor | None = None) -> Tensor:
    each = (output - (1 - alpha) * target).square()
    return (each if weight is None else each * weight[:, None]).mean()


class WithLoss(nn.Module):
    """Returns its loss, as many models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, inputs: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.mse_loss(self.inside(inputs), labels)


def test_a_number_by_name_reaches_the_loss() -> None:
    reference, model = network(), network()
    expected = trained(reference, adamw(reference), batches(), lambda model, x, y: smoothed(model(x), y, alpha=0.3))
    step = cf.compile_step(model, smoothed, adamw(model))
    assert [step(x, y, alpha=0.3).item() for x, y in batches()] == expected
    same(model, reference)
    assert step.captures == 1


def test_another_number_is_another_program_and_a_tensor_is_not() -> None:
    reference, model = network(), network()
    alphas = [0.1, 0.2, 0.3, 0.4]
    data = [(*batch, alpha) for batch, alpha in zip(batches(), alphas, strict=True)]
    expected = trained(
        reference, adamw(reference), data, lambda model, x, y, alpha: smoothed(model(x), y, alpha=torch.tensor(alpha))
    )
    step = cf.compile_step(model, smoothed, adamw(model))
    assert [step(x, y, alpha=torch.tensor(alpha)).item() for x, y, alpha in data] == expected
    assert step.captures == 1
    assert step(*data[0][:2], alpha=0.5).item() != step(*data[0][:2], alpha=0.9).item()
    assert step.captures == 3


def test_a_tensor_by_name_is_divided_as_the_others_are() -> None:
    reference, model = network(), network()
    weights = torch.linspace(0.5, 2.0, 8)
    expected = trained(
        reference, adamw(reference), batches(), lambda model, x, y: smoothed(model(x), y, weight=weights)
    )
    step = cf.compile_step(model, smoothed, adamw(model), accumulate=2)
    losses = [step(x, y, weight=weights).item() for x, y in batches()]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_without_a_loss_function_names_are_the_models() -> None:
    torch.manual_seed(0)
    reference, model = WithLoss(), WithLoss()
    data = batches()
    expected = trained(reference, adamw(reference), data, lambda model, x, y: model(x, labels=y, scale=2.0))
    step = cf.compile_step(model, None, adamw(model))
    assert [step(inputs=x, labels=y, scale=2.0).item() for x, y in data[:2]] == expected[:2]
    assert [step(x, labels=y, scale=2.0).item() for x, y in data[2:3]] == expected[2:3]
    assert [step({"inputs": x}, labels=y, scale=2.0).item() for x, y in data[3:]] == expected[3:]
    same(model, reference)


def test_with_a_loss_function_and_only_names_they_are_the_models() -> None:
    torch.manual_seed(0)
    reference, model = WithLoss(), WithLoss()
    expected = trained(reference, adamw(reference), batches(), lambda model, x, y: 3 * model(x, labels=y))
    step = cf.compile_step(model, lambda loss: 3 * loss, adamw(model))
    assert [step(inputs=x, labels=y).item() for x, y in batches()] == expected


def test_prepare_and_profile_take_names_too() -> None:
    model = network()
    step = cf.compile_step(model, smoothed, adamw(model))
    x, y = batches(1)[0]
    step.prepare(x, y, alpha=0.3)
    step(x, y, alpha=0.3)
    assert step.profile(x, y, alpha=0.3).seconds > 0
    assert step.captures == 1 and step.steps == 2


def test_a_name_given_twice_or_unknown_is_told() -> None:
    model = WithLoss()
    step = cf.compile_step(model, None, adamw(model))
    x, y = batches(1)[0]
    with pytest.raises(cf.CaptureError, match=r"labels both in the batch's dict and by name. Remedy: pass it in one"):
        step({"inputs": x, "labels": y}, labels=y)
    with pytest.raises(cf.CaptureError, match="unexpected keyword argument 'label'"):
        step(x, label=y)
