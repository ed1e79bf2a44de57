"""Bad input and failing ranks: errors name the thing and the remedy, nothing of the user's changes, nobody hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import crossfade as cf
from crossfade.errors import (
    BatchError,
    CaptureError,
    CrossfadeError,
    MeshError,
    ModelError,
    NotYetError,
    OptimizerError,
    RankFailedError,
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


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


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
    "batch not divisible by micro-batches": (
        BatchError,
        r"a batch of 6 samples: expected a multiple of 4 .* Remedy: pass 4 samples",
        lambda m: compiled(m, accumulate=4)(*BATCH),
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
    "dropout under activation checkpointing": (
        CaptureError,
        r"the backward draws .* again, as activation checkpointing does",
        lambda m: compiled(Checkpointed())(*BATCH),
    ),
    "gradient hook": (ModelError, r"parameter weight has a gradient hook", lambda m: compiled(hooked(m))),
    "optimizer we do not support": (
        OptimizerError,
        r"the optimizer RMSprop cannot be captured: expected one of SGD, Adam, AdamW",
        lambda m: compiled(m, torch.optim.RMSprop(m.parameters())),
    ),
    "fused optimizer": (
        OptimizerError,
        r"fused=True in parameter group 0",
        lambda m: compiled(m, torch.optim.Adam(m.parameters(), fused=True)),
    ),
    "optimizer of another model": (
        OptimizerError,
        r"a parameter of shape \(2, 4\) in group 0 is not the model's",
        lambda m: compiled(m, sgd(linear())),
    ),
    "dampened first step": (
        OptimizerError,
        r"SGD has dampening=0.5 and no momentum buffers yet",
        lambda m: compiled(m, torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, dampening=0.5))(*BATCH),
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
    "nothing to train": (ModelError, r"no parameter of this ReLU requires a gradient", lambda m: compiled(nn.ReLU(), sgd(m))),
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


def test_another_shape_is_captured_anew() -> None:
    model = linear()
    step = compiled(model)
    step(*BATCH)
    step(torch.ones(3, 4), torch.ones(3, 2))
    step(*BATCH)
    assert step.captures == 2


def test_changed_settings_are_captured_anew() -> None:
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


def _batch_not_divisible() -> None:
    compiled(linear(), mesh={"dp": 2}, timeout=10)(torch.ones(5, 4), torch.ones(5, 2))


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


def _one_stays_away() -> None:
    step = compiled(linear(), mesh={"dp": 2}, timeout=3)
    if dist.get_rank() == 1:
        time.sleep(6)
        return
    step(*BATCH)


JOBS = {
    "batch not divisible": _batch_not_divisible,
    "different models": _different_models,
    "different seeds": _different_seeds,
    "different values": _different_values,
    "different rates": _different_rates,
    "one cannot capture": _one_cannot_capture,
    "one stays away": _one_stays_away,
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        (
            "batch not divisible",
            ["BatchError: a batch of 5 samples: expected a multiple of 2 (2 data-parallel"] * 2,
        ),
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
        ("one stays away", ["RankFailedError: rank 1 did not come to compare programs within 3 s", "no error"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_disagree_all_say_so(ranks: Any, what: str, messages: list[str]) -> None:
    for message, expected in zip(ranks(2).run(on_ranks, what, timeout=60), messages, strict=True):
        assert message.startswith(expected)


def train_until(last: str) -> str:
    """Train; rank 1 stops taking part after two steps, in the way named. Returns what rank 0 sees, and how soon."""
    step = compiled(linear(), mesh={"dp": 2}, timeout=4)
    for number in range(5):
        if dist.get_rank() == 1 and number == 2:
            if last == "dies":
                os._exit(7)
            if last == "raises":
                raise ValueError("out of data")
            time.sleep(8)
            return "slept"
        start = time.monotonic()
        try:
            step(*BATCH)
        except RankFailedError as error:
            return f"after {time.monotonic() - start:.0f} s: {error}"
    return "no error"


@pytest.mark.ranks
def test_a_rank_that_dies_is_named_with_the_collective() -> None:
    with (
        cf.Ranks(2, timeout=60, start="forkserver") as world,
        pytest.raises(RankFailedError, match=r"rank 1 dead \(exit code 7\)") as caught,
    ):
        world.run(_die_and_report)
    assert "rank 0 also raised" in str(caught.value)
    assert "a failed collective in step 2: all_reduce" in str(caught.value)
    assert "rank 1 has ended" in str(caught.value)


def _die_and_report() -> None:
    result = train_until("dies")
    raise RuntimeError(result)


@pytest.mark.ranks
def test_a_rank_that_raises_is_named() -> None:
    with (
        cf.Ranks(2, timeout=60, start="forkserver") as world,
        pytest.raises(RankFailedError, match="ValueError: out of data on rank 1"),
    ):
        world.run(train_until, "raises")


@pytest.mark.ranks
def test_a_rank_that_sleeps_ends_the_others_within_the_timeout() -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        first, second = world.run(train_until, "sleeps")
    assert second == "slept"
    seconds = int(first.removeprefix("after ").split()[0])
    assert 3 <= seconds <= 12, "the timeout is 4 s"
    assert "rank 1 has not reached step 2 (last seen in step 1)" in first


@pytest.mark.ranks
def test_a_call_that_takes_too_long_ends_all_ranks() -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        with pytest.raises(RankFailedError, match="rank 0 still running after 3 s"):
            world.run(time.sleep, 30, timeout=3)
        assert world.run(os.path.basename, "a/b") == ["b", "b"]


def _one_changes(changing: int) -> str:
    """Only one rank changes what the program was captured with."""
    model = nn.Sequential(linear(), nn.Dropout(0.0))
    step = compiled(model, mesh={"dp": 2}, timeout=6)
    step(*BATCH)
    if dist.get_rank() == changing:
        model[1].p = 0.5
    try:
        step(*BATCH)
    except RankFailedError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("changing", [0, 1])
def test_a_rank_that_alone_captures_again_says_why(changing: int) -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:
        said = world.run(_one_changes, changing)
    why = "captures again, since model.1.p changed from 0.0 to 0.5"
    assert f"; this rank {why}: expected every rank to capture again at the same step" in said[changing]
    assert "a failed collective in step 1" in said[1 - changing] and f"it {why}" in said[1 - changing]


def test_errors_survive_the_way_between_processes() -> None:
    import pickle

    error = RankMismatchError("a", expected="b", remedy="c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a: expected b. Remedy: c."


def _one_never_opens() -> None:
    model = linear()
    if dist.get_rank() == 1:
        time.sleep(5)
        return
    compiled(model, mesh={"dp": 2}, timeout=2)


JOBS["one never opens"] = _one_never_opens


@pytest.mark.ranks
def test_a_rank_that_never_compiles_is_named() -> None:
    with cf.Ranks(2, timeout=60, start="forkserver") as world:  # not the pool: these have lost count of each other
        first, second = world.run(on_ranks, "one never opens")
    assert first.startswith("RankFailedError: rank 1 did not come to compare programs within 2 s")
    assert second == "no error"
