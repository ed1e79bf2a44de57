"""What a forward stores beside computing is put back, and told of where training would need it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step


class Remembers(nn.Module):
    """Keeps what it is told to in a plain attribute."""

    def __init__(self, kept: object) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 2), kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.kept = y.detach().mean() if self.kept is None else self.kept + y.detach().mean()
        return y


@pytest.mark.parametrize("kept", [torch.zeros(()), None], ids=["a running mean", "what was seen last"])
def test_a_tensor_that_the_forward_goes_on_from_is_told_of(
    kept: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Remembers(kept)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert model.kept is kept
    told = "kept of the Remembers is changed by the forward, which runs only when a step is captured" in caplog.text
    assert told == (kept is not None) and ("make it a buffer" in caplog.text) == told
