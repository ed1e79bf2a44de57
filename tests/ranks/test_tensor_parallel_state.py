"""The state of a model that a plan has split: checkpoints, the whole model for a while, agreement before splitting."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

import crossfade as cf
from crossfade.errors import CrossfadeError, ModelError, RankMismatchError, StateError

BEFORE, AFTER = 2, 2
TIED = "token.weight", "head.weight"
PLAN: dict[str, Any] = {
    "token": "rowwise",
    "gate_up": cf.Fused("colwise", blocks=2),
    "down": "rowwise",
    "scale": TorchShard(0),
}


class Net(nn.Module):
    """A tied vocabulary, a fused weight, a split buffer, and dropout that can be switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.token.weight
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("scale", torch.linspace(1, 2, 12))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.head(x + self.drop(self.down(gate.sigmoid() * up * self.scale)))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(16, (4, 3), generator=draw) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def begin(mesh: dict[str, int] | None, *, seed: int = 0, rate: float = 0.01) -> Any:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    plan = PLAN if mesh else None
    return cf.compile_step(model, loss_of, optimizer, mesh, tensor_parallel=plan, clip_grad_norm=0.5, timeout=60)


def trained_alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """By eager torch on one device."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for tokens, targets in batches(steps):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def whole_state(step: Any) -> dict[str, Tensor]:
    with step.gathered() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_and_save(mesh: dict[str, int], folder: str) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    step = begin(mesh)
    losses = [float(step(*batch)) for batch in batches(BEFORE)]
    step.save(folder)
    state = step.state_dict()
    places = {name: str(value.placements) for name, value in state["model"].items() if isinstance(value, DTensor)}
    for name, entries in state["optimizer"].items():
        assert {type(entries[key]) for key in ("exp_avg", "exp_avg_sq")} == {type(state["model"][name])}
    return losses, whole_state(step), places


def load_and_train(mesh: dict[str, int] | None, folder: str, after_a_step: bool) -> tuple[list[float], dict]:
    """Loaded into a model that is split already, or before it is."""
    step = begin(mesh, seed=5)
    if after_a_step:
        step(*batches(1)[0])
    step.load(folder)
    assert step.steps == BEFORE
    losses = [float(step(*batch)) for batch in batches(BEFORE + AFTER)[BEFORE:]]
    return losses, whole_state(step)


def assert_like_one_device(losses: list[float], state: dict[str, Tensor]) -> None:
    expected, whole = trained_alone(BEFORE + AFTER)
    assert losses == pytest.approx(expected[BEFORE:], rel=1e-5)
    assert state.keys() == whole.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=2e-6)


@pytest.mark.ranks
def test_saved_split_goes_on_on_one_device_and_split(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for losses, state, places in ranks(2).run(train_and_save, {"tp": 2}, folder):
        expected, whole = trained_alone(BEFORE)
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=2e-6)
        split = dict.fromkeys((*TIED, "gate_up.weight", "gate_up.bias", "scale"), "(Shard(dim=0),)")
        assert places == {**split, "down.weight": "(Shard(dim=1),)"}
    assert_like_one_device(*load_and_train(None, folder, False))
    for after_a_step in (False, True):
        for found in ranks(2).run(load_and_train, {"tp": 2}, folder, after_a_step):
            assert_like_one_device(*found)


@pytest.mark.ranks
def test_saved_beside_data_parallelism_goes_on_on_fewer_and_on_more_parts(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(4).run(train_and_save, {"dp": 2, "tp": 2}, folder)
    assert_like_one_device(*load_and_train(None, folder, True))
    for found in ranks(4).run(load_and_train, {"tp": 4}, folder, True):
        assert_like_one_device(*found)


def whole_into_parts() -> tuple[list[float], dict[str, Tensor], list[str]]:
    """A state of whole tensors loaded into a split model; and parts, which say nothing of the whole."""
    alone, split = begin(None), begin({"tp": 2}, seed=3)
    for batch in batches(BEFORE):
        alone(*batch)
        split(*batch)
    split.load_state_dict(copy.deepcopy(alone.state_dict()))
    losses = [float(split(*batch)) for batch in batches(BEFORE + AFTER)[BEFORE:]]
    messages = []
    state = alone.state_dict()
    for value in (state["model"]["down.weight"][:, :6], 1.0):
        try:
            split.load_state_dict({**state, "model": {**state["model"], "down.weight": value}})
        except StateError as error:
            messages.append(str(error))
    return losses, whole_state(split), messages


@pytest.mark.ranks
def test_whole_tensors_load_into_parts_and_parts_do_not(ranks: Any) -> None:
    for losses, state, messages in ranks(2).run(whole_into_parts):
        assert_like_one_device(losses, state)
        assert (
            "the state has down.weight of shape (8, 6): expected a DTensor or a whole tensor of shape (8, 12)"
            in (messages[0])
        )
        assert "the state has down.weight as a float" in messages[1]


def changed_later() -> list[tuple[float, float]]:
    """Losses after attributes of modules changed, split and alone: with all of its inputs dropped, and in eval."""
    split, alone = begin({"tp": 2}, rate=0.0), Net()
    found = []
    torch.manual_seed(0)
    alone = Net()
    tokens, targets = batches(1)[0]
    for change in (lambda m: None, lambda m: setattr(m.drop, "p", 1.0), lambda m: m.eval()):
        for model in (split.model, alone):
            change(model)
        found.append((float(split(tokens, targets)), float(loss_of(alone(tokens), targets).detach())))
    assert split.captures == 3
    return found


@pytest.mark.ranks
def test_attributes_of_modules_count_as_they_are_when_a_step_is_captured(ranks: Any) -> None:
    for found in ranks(2).run(changed_later):
        for loss, expected in found:
            assert loss == pytest.approx(expected, rel=1e-5)
        assert abs(found[0][0] - found[1][0]) > 1e-4, "dropping everything must show"


def refused_again() -> list[str]:
    """What must not be done to a model that is split."""
    step = begin({"tp": 2})
    batch = batches(1)[0]
    step(*batch)
    messages = []
    for plan, mesh in ((PLAN, {"tp": 2}), (None, None)):
        try:
            cf.compile_step(step.model, loss_of, step.optimizer, mesh, tensor_parallel=plan)
        except ModelError as error:
            messages.append(str(error))
    with torch.no_grad():
        step.model.down.weight = nn.Parameter(step.model.down.weight.clone())
    step.optimizer.param_groups[0]["params"] = list(step.model.parameters())
    for used in (lambda: step(*batch), step.state_dict, lambda: whole_state(step)):
        try:
            used()
        except ModelError as error:
            messages.append(str(error))
    hooked = Net()
    hooked.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(hooked.parameters())
    try:
        cf.compile_step(hooked, loss_of, optimizer, {"tp": 2}, tensor_parallel=PLAN)
    except CrossfadeError as error:
        messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_a_split_model_is_not_taken_for_a_whole_one(ranks: Any) -> None:
    for messages in ranks(2).run(refused_again):
        assert len(messages) == 6
        for message in messages[:2]:
            assert "a Net that an earlier compile_step has split by a plan" in message
            assert "build the model again" in message
        for message in messages[2:5]:
            assert "another tensor down.weight than the one that was split" in message
        assert "a forward hook on the Net itself" in messages[5]


def begin_differently(seeds: list[int], rates: list[float], draws: list[int], mesh: dict[str, int]) -> str:
    """With other weights, another learning rate, or another state of the generator that dropout draws from."""
    rank = torch.distributed.get_rank()
    step = begin(mesh, seed=seeds[rank], rate=rates[rank])
    step.model.drop.p = 0.5
    torch.manual_seed(draws[rank])
    try:
        step(*batches(1)[0])
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.ranks
def test_ranks_that_would_take_parts_of_different_models_say_so(ranks: Any) -> None:
    for message in ranks(2).run(begin_differently, [0, 1], [0.1, 0.1], [0, 0], {"tp": 2}):
        assert message.startswith(RankMismatchError.__name__)
        assert "rank 0 has `token.weight with checksum" in message and "rank 1 has `token.weight with" in message
    for message in ranks(2).run(begin_differently, [0, 0], [0.1, 0.2], [0, 0], {"tp": 2}):
        assert "rank 0 has `lr.0 = 0.1`, rank 1 has `lr.0 = 0.2`" in message
    for message in ranks(2).run(begin_differently, [0, 0], [0.1, 0.1], [0, 1], {"tp": 2}):
        assert "rank 0 has `random generator in state" in message and "call torch.manual_seed alike" in message


@pytest.mark.ranks
def test_the_other_replicas_hear_of_it(ranks: Any) -> None:
    messages = ranks(4).run(begin_differently, [0, 0, 0, 1], [0.1] * 4, [0] * 4, {"dp": 2, "tp": 2})
    assert all("RankMismatchError" in message for message in messages), messages
