"""What people write after the loss by habit: `loss.backward()` says what to leave out, the rest does no harm."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same, trained

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
}


def loss_of_a_step() -> Tensor:
    model = network()
    return cf.compile_step(model, F.mse_loss, adamw(model))(*batches(1)[0])


@pytest.mark.parametrize("call", [lambda loss: loss.backward(), lambda loss: loss.backward(retain_graph=True)])
def test_backward_says_that_it_was_done(call: Callable[[Tensor], None]) -> None:
    with pytest.raises(cf.CrossfadeError, match=r"ran the backward and the optimizer already. Remedy: leave out loss"):
        call(loss_of_a_step())


def test_a_step_itself_is_not_saved_or_copied() -> None:
    model = network()
    step = cf.compile_step(model, F.mse_loss, adamw(model))
    for save in (lambda: torch.save(step, io.BytesIO()), lambda: copy.deepcopy(step)):
        with pytest.raises(cf.CrossfadeError, match=r"Remedy: save step.state_dict\(\) or use step.save"):
            save()


def test_backward_of_what_is_computed_from_it_fails_too() -> None:
    for derived in (loss_of_a_step() / 4, torch.amp.GradScaler("cpu", init_scale=2.0).scale(loss_of_a_step())):
        with pytest.raises(RuntimeError, match="does not require grad"):
            derived.backward()


def test_the_loss_is_a_plain_tensor_to_log() -> None:
    losses = [loss_of_a_step() for _ in range(3)]
    loss, total, count = losses[0], torch.zeros(()), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in losses:
            total += each
            count += float(each)
        assert total.item() == pytest.approx(count)
        assert type(loss) is Tensor and not loss.requires_grad and loss.grad_fn is None
        assert f"{loss:.3f}" == f"{loss.item():.3f}" and repr(loss) == repr(torch.tensor(loss.item()))
        assert math.isfinite(loss) and bool(loss == loss.detach()) and loss.cpu().numpy() == loss.item()
        assert torch.stack(losses).mean().item() == pytest.approx(count / 3)
        assert sum(losses).item() == pytest.approx(count)


def test_a_saved_or_copied_loss_is_a_plain_tensor() -> None:
    loss, file = loss_of_a_step(), io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["loss"]
    assert b"crossfade" not in file.getvalue()
    for other in (loaded, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), copy.copy(loss), loss.clone()):
        assert type(other) is Tensor and other == loss
    assert vars(loaded) == {}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizers_own_step_and_zero_grad_change_nothing(kind: str) -> None:
    reference, model = network(), network()
    expected = trained(reference, OPTIMIZERS[kind](reference), batches())
    optimizer = OPTIMIZERS[kind](model)
    step = cf.compile_step(model, F.mse_loss, optimizer)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(step(x, y).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert losses == expected
    same(model, reference)
    assert step.captures == 1


def test_a_gradient_of_the_users_own_stays_theirs() -> None:
    """Between steps, say for a saliency map: the step neither uses nor clears what is in `.grad`."""
    reference, model = network(), network()
    expected = trained(reference, adamw(reference), batches())
    step = cf.compile_step(model, F.mse_loss, adamw(model))
    losses = []
    for x, y in batches():
        losses.append(step(x, y).item())
        model(x).sum().backward()
    assert losses == expected
    same(model, reference)
    assert all(parameter.grad is not None for parameter in model.parameters())
