"""`p.grad` left from before `compile_step`: refused, since torch would have added to it."""

from __future__ import annotations

import pytest
from torch.nn import functional as F

import crossfade as cf
from tests.loops.plain import adamw, batches, network, trained


def test_a_gradient_left_from_before_is_refused_until_it_is_cleared() -> None:
    model = network()
    optimizer = adamw(model)
    trained(model, optimizer, batches(1))
    for clear in (lambda: None, lambda: optimizer.zero_grad(set_to_none=False)):
        clear()
        with pytest.raises(
            cf.OptimizerError, match=r"0.weight has a gradient left .* Remedy: call optimizer.zero_grad"
        ):
            cf.compile_step(model, F.mse_loss, optimizer)
    optimizer.zero_grad()
    step = cf.compile_step(model, F.mse_loss, optimizer)
    reference = network()
    expected = trained(reference, adamw(reference), batches())
    assert [step(x, y).item() for x, y in batches()[1:]] == expected[1:]


def test_a_gradient_of_what_is_not_trained_is_nobodys_concern() -> None:
    model = network()
    model(batches(1)[0][0]).sum().backward()
    model[0].requires_grad_(False)
    optimizer = adamw(model[2])
    optimizer.zero_grad()
    cf.compile_step(model, F.mse_loss, optimizer)(*batches(1)[0])
    assert model[0].weight.grad is not None
