"""`compile_gradients`: the user's own optimizer, closure, scaler and hooks, as in torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf

STEPS = 4


def model_of(seed: int = 0) -> nn.Module:
    """Rows that do not divide by two, batch statistics, dropout, parameters without dims and without gradients."""
    torch.manual_seed(seed)
    return Mixed()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.second.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)) * self.scale


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 5, generator=generator)


def by_closure(optimizer: Any, loss_of: Callable[[], Tensor], model: nn.Module) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return optimizer.step(closure)


def by_scaler(optimizer: Any, loss_of: Callable[[], Tensor], model: nn.Module) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    loss = loss_of()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def by_two_batches(optimizer: Any, loss_of: Callable[[], Tensor], model: nn.Module) -> Tensor:
    optimizer.zero_grad()
    losses = [loss_of() / 2 for _ in range(2)]
    for loss in losses:
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return sum(losses)


def by_hooks(optimizer: Any, loss_of: Callable[[], Tensor], model: nn.Module) -> Tensor:
    handles = [p.register_hook(lambda gradient: 2 * gradient) for p in model.parameters()]
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
LOOPS = {"closure": by_closure, "scaler": by_scaler, "two batches": by_two_batches, "hooks": by_hooks}


def train(optimizer: str, loop: str, ranks: int = 1, options: dict[str, Any] | None = None) -> Any:
    """Losses and parameters of a few steps; without options, by eager torch."""
    model = model_of()
    gradients = None if options is None else cf.compile_gradients(model, F.mse_loss, {"dp": ranks}, **options)
    stepped, losses = OPTIMIZERS[optimizer](model.parameters()), []
    torch.manual_seed(1)
    for step in range(STEPS):
        x, y = batch_of(step)
        losses.append(
            LOOPS[loop](stepped, lambda x=x, y=y: gradients(x, y) if gradients else F.mse_loss(model(x), y), model)
        )
    return [float(loss.detach()) for loss in losses], {name: whole(p) for name, p in model.state_dict().items()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_as_in_torch(found: Any, optimizer: str, loop: str) -> None:
    losses, state = train(optimizer, loop)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize(("optimizer", "loop"), [("LBFGS", "closure"), *(("RMSprop", loop) for loop in LOOPS)])
def test_L3_on_one_device(optimizer: str, loop: str) -> None:
    assert_as_in_torch(train(optimizer, loop, options={}), optimizer, loop)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("optimizer", "loop", "options"),
    [
        ("LBFGS", "closure", {}),
        ("Adagrad", "hooks", {"data_parallel": "zero2"}),
        ("AdamW", "two batches", {"data_parallel": "zero3"}),
        ("RMSprop", "scaler", {"machine": "loopback-gloo"}),
    ],
)
def test_L3_on_two_ranks(ranks: Any, optimizer: str, loop: str, options: dict[str, Any]) -> None:
    for found in ranks(2).run(train, optimizer, loop, 2, options):
        assert_as_in_torch(found, optimizer, loop)


def test_gradients_stay_when_the_next_batch_comes() -> None:
    model = nn.Linear(3, 2)
    gradients = cf.compile_gradients(model, F.mse_loss)
    gradients(torch.ones(2, 3), torch.zeros(2, 2)).backward()
    first = model.weight.grad
    before = first.clone()
    model.weight.grad = None
    gradients(torch.full((2, 3), 5.0), torch.zeros(2, 2)).backward()
    assert torch.equal(first, before) and not torch.equal(model.weight.grad, before)


def test_gradients_that_are_one_tensor_do_not_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * (self.a.view(2, 2) + self.b)).sum()

    model = Sum()
    cf.compile_gradients(model)(torch.ones(3, 2, 2)).backward()
    model.a.grad.zero_()
    assert torch.equal(model.b.grad, torch.full((2, 2), 3.0))


def test_without_gradients_the_loss_is_returned() -> None:
    model = nn.Linear(3, 2)
    gradients = cf.compile_gradients(model, F.mse_loss)
    with torch.no_grad():
        loss = gradients(torch.ones(2, 3), torch.zeros(2, 2))
    assert not loss.requires_grad and model.weight.grad is None


def test_a_second_backward_says_what_to_do() -> None:
    loss = cf.compile_gradients(nn.Linear(3, 2), F.mse_loss)(torch.ones(2, 3), torch.zeros(2, 2))
    loss.backward(retain_graph=True)
    with pytest.raises(
        cf.CrossfadeError, match=r"a second backward\(\) of one loss.*call the compiled gradients again"
    ):
        loss.backward()


def test_gradients_that_are_never_used_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    gradients = cf.compile_gradients(nn.Linear(3, 2), F.mse_loss)
    batch = torch.ones(2, 3), torch.zeros(2, 2)
    with torch.no_grad():
        gradients(*batch)
    gradients(*batch).backward()
    gradients(*batch)
    assert "never used" not in caplog.text
    for _ in range(3):
        gradients(*batch)
    assert caplog.text.count("never used: call loss.backward()") == 1


def test_rows_of_the_optimizer_alone_are_refused() -> None:
    with pytest.raises(cf.NotYetError, match=r'pass "replicate" or "zero2"'):
        cf.compile_gradients(nn.Linear(3, 2), F.mse_loss, data_parallel="zero1")


def hand_over(passed: bool) -> str:
    """Build the optimizer first; then whether it trains, or what is said."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    given = [optimizer] if passed else []
    try:
        gradients = cf.compile_gradients(model, F.mse_loss, {"dp": 2}, data_parallel="zero2", optimizers=given)
    except cf.OptimizerError as error:
        return str(error)
    before = model.first.weight.full_tensor().detach().clone()
    gradients(*batch_of(0)).backward()
    optimizer.step()
    changed = not torch.equal(before, model.first.weight.full_tensor())
    del optimizer, given
    gc.collect()
    return "trained" if changed else "nothing"


@pytest.mark.ranks
def test_an_optimizer_built_before_parameters_are_split(ranks: Any) -> None:
    assert ranks(2).run(hand_over, True) == ["trained", "trained"]
    for said in ranks(2).run(hand_over, False):
        assert "Adam was built before its parameters were split" in said and "optimizers=[it]" in said
