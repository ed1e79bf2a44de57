"""Numbers that the forward or the loss draws without torch would stay those of the capture: refused, by place."""

from __future__ import annotations

import random
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossfade import compile_step
from crossfade.errors import CaptureError
from tests.capture.changed_models import Holder, X, Y

OWN, NUMPYS = random.Random(0), np.random.default_rng(0)


def _skips(held: object, x: Tensor) -> Tensor:
    return x if random.randint(0, 1) else 2 * x


DRAWS: dict[str, tuple[Callable[[object, Tensor], Tensor], str]] = {
    "Python's": (_skips, r"of Python's random generator .* at .*test_python_draws.py:\d+: `return x if random.randint"),
    "numpy's": (lambda _, x: x * np.random.beta(1.0, 1.0), r"of numpy's random generator .*np.random.beta"),
    "of the user's own": (lambda _, x: x * OWN.random(), r"OWN are drawn .*OWN.random"),
    "of the user's own, of numpy": (lambda _, x: x * NUMPYS.random(), r"NUMPYS are drawn .*NUMPYS.random"),
}


@pytest.mark.parametrize(("read", "message"), DRAWS.values(), ids=DRAWS)
def test_numbers_that_a_capture_would_keep_are_refused(read: Callable[[object, Tensor], Tensor], message: str) -> None:
    model = Holder(None, read)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    before = random.getstate(), np.random.get_state()[1].tobytes(), OWN.getstate(), NUMPYS.bit_generator.state  # type: ignore[index]
    with pytest.raises(CaptureError, match=f"{message}.* Remedy: draw them with torch"):
        step(X, Y)
    after = random.getstate(), np.random.get_state()[1].tobytes(), OWN.getstate(), NUMPYS.bit_generator.state  # type: ignore[index]
    assert after == before


def test_numbers_that_are_seeded_in_every_step_may_be_drawn() -> None:
    """As BigBird does, which attends to the same random blocks in every step."""

    def seeded(_: object, x: Tensor) -> Tensor:
        np.random.seed(3)
        return x * np.random.rand()

    model = Holder(None, seeded)
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0))
    np.random.seed(8)
    torch.testing.assert_close(step(X, Y), F.mse_loss(model(X), Y).detach())


def test_the_switches_of_libraries_are_named() -> None:
    class Drops(nn.Linear):
        """Leaves a layer out by chance, as wav2vec does."""

        config = None

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] if torch.rand([]) < 0.1 else super().forward(x)

    model = Drops(3, 2)
    model.config = types.SimpleNamespace(layerdrop=0.1)  # type: ignore[assignment]
    step = compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=r"control flow depends on tensor values.*or switch off .*: layerdrop=0 in"):
        step(X, Y)
