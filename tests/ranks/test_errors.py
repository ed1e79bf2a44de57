"""Bad input and failing ranks: errors name the thing and the remedy, nothing of the user's changes, nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.errors import (
    BatchError,
    CaptureError,
    CrossfadeError,
    MeshError,
    ModelError,
    NotYetError,
    OptimizerError,
    RankMismatchError,
)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


class Clamping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def hooked(model: nn.Module) -> nn.Module:
    next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


BATCH = torch.ones(6, 4), torch.ones(6, 2)


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: Any = F.mse_loss, **options: Any
) -> cf.Step:
    return cf.compile_step(model, loss, optimizer or sgd(model), **options)


BAD: dict[str, tuple[type[CrossfadeError], str, Callable[[nn.Module], Any]]] = {
    "no samples": (
        BatchError,
        r"a batch of 0 samples: expected at least one. Remedy: skip the step",
        lambda m: compiled(m, accumulate=4)(BATCH[0][:0], BATCH[1][:0]),
    ),
    "tensors of different batch size": (
        BatchError,
        r"batch\[1\] with 5 rows beside batch\[0\] with 6",
        lambda m: compiled(m, accumulate=2)(BATCH[0], BATCH[1][:5]),
    ),
    "semantics misspelt": (
        CrossfadeError,
        r"semantics='Global': expected 'global' or 'per-rank'",
        lambda m: compiled(m, semantics="Global"),
    ),
    "negative clipping": (CrossfadeError, r"clip_grad_norm=-1", lambda m: compiled(m, clip_grad_norm=-1)),
    "no micro-batches": (CrossfadeError, r"accumulate=0", lambda m: compiled(m, accumulate=0)),
    "parameter changed by the forward": (
        CaptureError,
        r"the forward itself changes parameter weight: .*Remedy: do it between steps",
        lambda m: compiled(Clamping())(*BATCH),
    ),
    "gradient hook": (ModelError, r"parameter weight has a gradient hook", lambda m: compiled(hooked(m))),
    "optimizer that calls the loss": (
        OptimizerError,
        r"LBFGS calls the loss from within its step",
        lambda m: compiled(m, torch.optim.LBFGS(m.parameters())),
    ),
    "differentiable optimizer": (
        OptimizerError,
        r"differentiable=True in parameter group 0",
        lambda m: compiled(m, torch.optim.Adam(m.parameters(), differentiable=True)),
    ),
    "optimizer of another model": (
        OptimizerError,
        r"a parameter of shape \(2, 4\) in group 0 is not the model's",
        lambda m: compiled(m, sgd(linear())),
    ),
    "mesh larger than the world": (
        MeshError,
        r"a mesh of 8 ranks in a world of 1: .* Remedy: start 8 processes",
        lambda m: compiled(m, mesh={"dp": 8}),
    ),
    "axis of a later version": (NotYetError, r"mesh axes tp", lambda m: compiled(m, mesh={"tp": 2})),
    "unknown mode": (
        CrossfadeError,
        r"data_parallel=.zero4.: expected .*zero3",
        lambda m: compiled(m, data_parallel="zero4"),
    ),
    "model on the meta device": (
        ModelError,
        r"weight is on the meta device, .* Remedy: materialise the model first",
        lambda m: compiled(nn.Linear(4, 2, device="meta")),
    ),
    "nothing to train": (
        ModelError,
        r"no parameter of this ReLU requires a gradient",
        lambda m: compiled(nn.ReLU(), sgd(m)),
    ),
    "loss that is not a number": (
        CaptureError,
        r"the loss is a tensor of shape \(6, 2\): .* Remedy: reduce it with .mean\(\)",
        lambda m: compiled(m, loss=lambda y, t: y - t)(*BATCH),
    ),
    "shapes that do not fit": (
        CaptureError,
        r"while capturing the forward and backward of Linear",
        lambda m: compiled(m)(torch.ones(6, 3), BATCH[1]),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_and_changes_nothing(what: str) -> None:
    kind, message, attempt = BAD[what]
    model = linear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=message):
        attempt(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_data_dependent_control_flow_names_the_line() -> None:
    model = Branching()
    optimizer = sgd(model)
    with pytest.raises(CaptureError, match=r"test_errors.py:\d+: `if y.sum\(\) > 0:`.* Remedy: .*torch.where"):
        compiled(model, optimizer)(*BATCH)
    assert not optimizer.state


def test_another_shape_is_captured_again() -> None:
    model = linear()
    step = compiled(model)
    step(*BATCH)
    step(torch.ones(3, 4), torch.ones(3, 2))
    step(*BATCH)
    assert step.captures == 2


def test_changed_settings_are_captured_again() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    optimizer = sgd(model)
    step = compiled(model, optimizer)
    step(*BATCH)
    optimizer.param_groups[0]["lr"] = 0.01
    step(*BATCH)
    assert step.captures == 1
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(*BATCH)
    assert step.captures == 2
    model.eval()
    step(*BATCH)
    assert step.captures == 3


# ------------------------------------------------------------------------------------------------- on real ranks


def on_ranks(what: str) -> str:
    """Run one bad job on this rank and return the error it ends with."""
    try:
        JOBS[what]()
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _no_samples() -> None:
    compiled(linear(), mesh={"dp": 2}, timeout=10)(torch.ones(0, 4), torch.ones(0, 2))


def _different_models() -> None:
    width = 2 + dist.get_rank()
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    compiled(model, mesh={"dp": 2}, timeout=10)(*BATCH)


def _different_seeds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    torch.manual_seed(dist.get_rank())
    compiled(model, mesh={"dp": 2}, timeout=10)(*BATCH)


def _different_values() -> None:
    torch.manual_seed(dist.get_rank())
    compiled(nn.Linear(4, 2), mesh={"dp": 2}, timeout=10)(*BATCH)


def _different_rates() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    compiled(model, optimizer, mesh={"dp": 2}, timeout=10)(*BATCH)


def _one_cannot_capture() -> None:
    model = Branching() if dist.get_rank() == 1 else linear()
    compiled(model, mesh={"dp": 2}, timeout=10)(*BATCH)


JOBS = {
    "no samples": _no_samples,
    "different models": _different_models,
    "different seeds": _different_seeds,
    "different values": _different_values,
    "different rates": _different_rates,
    "one cannot capture": _one_cannot_capture,
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("no samples", ["BatchError: a batch of 0 samples: expected at least one"] * 2),
        (
            "different models",
            ["RankMismatchError: different programs, first in the 3rd collective of dp, which differs in sizes"] * 2,
        ),
        ("different seeds", ["RankMismatchError: different programs, first at line 2: rank 0 has `random"] * 2),
        (
            "different values",
            ["RankMismatchError: different programs, first at line 3: rank 0 has `weight with checksum"] * 2,
        ),
        (
            "different rates",
            ["RankMismatchError: different programs, first at line 5: rank 0 has `lr.0 = 0.1`"] * 2,
        ),
        (
            "one cannot capture",
            ["RankFailedError: rank 1: CaptureError: control flow", "CaptureError: control flow"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_disagree_all_say_so(ranks: Any, what: str, messages: list[str]) -> None:
    for message, expected in zip(ranks(2).run(on_ranks, what, timeout=60), messages, strict=True):
        assert message.startswith(expected)


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    error = RankMismatchError("a", expected="b", remedy="c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a: expected b. Remedy: c."
