"""Rows of a plan's parts (ZeRO with tensor parallelism): training equals one device's, checkpoints go anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

import crossfade as cf
from crossfade.errors import CrossfadeError
from crossfade.graph.passes import fingerprint
from crossfade.shard.tensor.plan import Plan
from tests.models import zoo
from tests.models.choice import some
from tests.ranks.test_tensor_parallel_training import language_batches, language_loss, started

BEFORE, AFTER = 2, 2
MODES = ["zero1", "zero2", "zero3"]
PLAN: dict[str, Any] = {
    "token": "rowwise",
    "gate_up": cf.Fused("colwise", blocks=2),
    "down": "rowwise",
    "up": "colwise",
    "out": "rowwise",
}


class Net(nn.Module):
    """A tied vocabulary, weights split by rows, by columns and in blocks, a single number; rows that divide nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(14, 9), nn.Linear(9, 14, bias=False)
        self.head.weight = self.token.weight
        self.gate_up, self.down = nn.Linear(9, 20), nn.Linear(10, 9)
        self.up, self.out = nn.Linear(9, 6, bias=False), nn.Linear(6, 9)
        self.norm, self.drop = nn.LayerNorm(9), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        x = x + self.drop(self.down(gate.sigmoid() * up))
        return self.head(x + self.scale * self.out(self.up(x).relu()))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(14, (8, 3), generator=draw) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def begin(mesh: dict[str, int] | None, mode: str = "replicate", optimizer: str = "adamw", **options: Any) -> Any:
    torch.manual_seed(options.pop("seed", 0))
    model = Net()
    plan = {"tensor_parallel": PLAN} if mesh and "tp" in mesh else {}
    built = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(3)
    given = {"data_parallel": mode, "clip_grad_norm": 0.5, "timeout": 60, **plan, **options}
    return cf.compile_step(model, loss_of, built, mesh, **given)


def trained_alone(
    steps: int, optimizer: str = "adamw", clip: float | None = 0.5, accumulate: int = 1
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """By eager torch on one device: losses, parameters, norms of gradients."""
    torch.manual_seed(0)
    model = Net()
    built = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(3)
    losses, norms = [], []
    for tokens, targets in batches(steps):
        total = 0.0
        for part in range(accumulate):
            loss = loss_of(model(tokens.chunk(accumulate)[part]), targets.chunk(accumulate)[part]) / accumulate
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else 1e9)))
        built.step()
        built.zero_grad()
        losses.append(total)
    return losses, model.state_dict(), norms


def whole_state(step: Any) -> dict[str, Tensor]:
    with step.gathered() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(mesh: dict[str, int], mode: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list]:
    step = begin(mesh, mode, **options)
    losses, norms = [], []
    part = torch.distributed.get_rank() // mesh["tp"]
    for batch in batches(BEFORE + AFTER):
        own = [value.chunk(mesh["dp"])[part] for value in batch] if options.get("batch") == "local" else batch
        losses.append(float(step(*own)))
        norms.append(float(step.outputs["grad_norm"]))
    assert step.captures == 1
    return losses, whole_state(step), norms


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=3e-6, msg=lambda text, n=name: f"{n}: {text}")


GIVEN: dict[str, dict[str, Any]] = {
    "as it is": {},
    "planned": {"machine": "ethernet-1gbit", "optimizer": "momentum"},
    "two micro-batches": {"accumulate": 2, "optimizer": "rmsprop"},
    "within memory": {"machine": "ethernet-1gbit", "memory_limit": 10**7, "optimizer": "adagrad"},
    "some whole": {"keep_whole": ["down.*", "token.weight"]},
    "whole as it pays": {"keep_whole": "auto", "machine": "ethernet-1gbit"},
    "compared seldom": {"check_every": 3, "batch": "local"},
}
"""By name, options beside the mode."""
FITTING = [
    (mode, name)
    for name, mode in itertools.product(GIVEN, MODES)
    if not ((name == "some whole" and mode == "zero1") or (name == "whole as it pays" and mode != "zero2"))
]


CHOSEN = [
    pytest.param(*case, marks=() if case == ("zero2", "some whole") else (pytest.mark.models,)) for case in FITTING
]


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "name"), CHOSEN)
def test_rows_of_parts_train_as_one_device(ranks: Any, mode: str, name: str) -> None:
    given = GIVEN[name]
    losses, state, norms = trained_alone(
        BEFORE + AFTER, given.get("optimizer", "adamw"), 0.5, given.get("accumulate", 1)
    )
    for found in ranks(4).run(train, {"dp": 2, "tp": 2}, mode, given):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[2] == pytest.approx(norms, rel=1e-5)
        assert_equal(found[1], state)


def train_and_save(mesh: dict[str, int] | None, mode: str, folder: str, by_hand: bool) -> dict[str, str]:
    """Two steps and a checkpoint, by `step.save` or by torch itself; returns how the state lies on the mesh."""
    step = begin(mesh, mode)
    for batch in batches(BEFORE):
        step(*batch)
    state = step.state_dict()
    held = {**state["model"], **{f"{n}:{k}": v for n, own in state["optimizer"].items() for k, v in own.items()}}
    if by_hand:
        checkpoint.save(state, checkpoint_id=folder)
    else:
        step.save(folder)
    return {name: str(value.placements) for name, value in held.items() if isinstance(value, DTensor)}


def load_and_train(
    mesh: dict[str, int] | None, mode: str, folder: str, after_a_step: bool
) -> tuple[list[float], dict[str, Tensor], int]:
    """Loaded into a model that is split already, or before it is."""
    step = begin(mesh, mode, seed=5)
    if after_a_step:
        step(*batches(1)[0])
    step.load(folder)
    losses = [float(step(*batch)) for batch in batches(BEFORE + AFTER)[BEFORE:]]
    return losses, whole_state(step), step.steps


def assert_goes_on(losses: list[float], state: dict[str, Tensor], steps: int) -> None:
    expected, whole, _ = trained_alone(BEFORE + AFTER)
    assert losses == pytest.approx(expected[BEFORE:], rel=1e-5)
    assert steps == BEFORE + AFTER
    assert_equal(state, whole)


BOTH = {"dp": 2, "tp": 2}
ELSEWHERE: list[tuple[dict[str, int], str, bool]] = [
    ({"dp": 4}, "zero3", False),
    (BOTH, "zero1", True),
    (BOTH, "zero3", True),
    (BOTH, "replicate", False),
    ({"tp": 2, "dp": 2}, "zero2", True),
]
ROWS, ROWS_OF_ROWS = "(Shard(dim=0), Replicate())", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
PLACED = {
    **dict.fromkeys(("token.weight", "head.weight", "gate_up.weight", "gate_up.bias", "up.weight"), ROWS_OF_ROWS),
    **dict.fromkeys(("down.weight", "out.weight"), "(Shard(dim=0), Shard(dim=1))"),
    **dict.fromkeys(("down.bias", "out.bias", "norm.weight", "norm.bias"), ROWS),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("by_hand", "elsewhere"),
    [
        (False, [(BOTH, "zero1", False)]),
        pytest.param(False, ELSEWHERE, marks=pytest.mark.models),
        pytest.param(True, ELSEWHERE[:1], marks=pytest.mark.models),
    ],
    ids=["often", "everywhere", "by hand"],
)
@pytest.mark.models  # it takes a minute
def test_what_is_saved_goes_on_on_other_meshes_and_one_device(
    ranks: Any, tmp_path: Path, by_hand: bool, elsewhere: list[tuple[dict[str, int], str, bool]]
) -> None:
    folder = str(tmp_path / "saved")
    for places in ranks(4).run(train_and_save, BOTH, "zero3", folder, by_hand):
        assert {name: place for name, place in places.items() if ":" not in name} == PLACED
        moments = {name.partition(":")[0]: place for name, place in places.items() if name.endswith(":exp_avg")}
        assert moments == {name: place for name, place in PLACED.items() if name != "head.weight"}
    assert_goes_on(*load_and_train(None, "replicate", folder, True))
    for mesh, mode, after_a_step in elsewhere:
        for found in ranks(4).run(load_and_train, mesh, mode, folder, after_a_step):
            assert_goes_on(*found)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "mode"), [(None, "replicate"), *((mesh, mode) for mesh, mode, _ in ELSEWHERE)], ids=str
)
@pytest.mark.models
def test_what_others_saved_goes_on_in_rows_of_parts(
    ranks: Any, tmp_path: Path, mesh: dict[str, int] | None, mode: str
) -> None:
    folder = str(tmp_path / "saved")
    if mesh is None:
        train_and_save(None, mode, folder, False)
    else:
        ranks(4).run(train_and_save, mesh, mode, folder, False)
    for loading in ("zero1", "zero2"):
        for after_a_step in (False, True):
            for found in ranks(4).run(load_and_train, BOTH, loading, folder, after_a_step):
                assert_goes_on(*found)


def train_architecture(name: str, mode: str, machine: str | None) -> tuple[list[float], list[float], float, int]:
    """Losses, one device's, how far any parameter is from one device's, and how many of them the plan splits."""
    (model, optimizer), (alone, alone_optimizer) = started(name), started(name)
    plan = Plan.megatron(zoo.architecture(name).export(), vocab=True)
    step = cf.compile_step(
        model, language_loss, optimizer, BOTH, data_parallel=mode, tensor_parallel=plan, machine=machine, timeout=60
    )
    losses, expected = [], []
    for inputs, labels in language_batches():
        losses.append(float(step(inputs, labels)))
        loss = language_loss(alone(**inputs), labels)
        loss.backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        expected.append(float(loss.detach()))
    state = whole_state(step)
    worst = max(float((state[name] - whole.detach()).abs().max()) for name, whole in alone.named_parameters())
    return losses, expected, worst, int(step.report.facts["split by the plan"].split()[0])


DECODERS = [each.name for each in zoo.ARCHITECTURES if list(each.dynamic_dims) == ["input_ids"]]


@pytest.mark.ranks
@pytest.mark.parametrize("name", some(DECODERS, often=()))
def test_rows_of_parts_of_decoders_train_as_one_device(ranks: Any, name: str) -> None:
    """Each in one of the modes, planned for a machine or not."""
    place = DECODERS.index(name)
    mode, machine = MODES[place % 3], (None, "ethernet-1gbit")[place // 3 % 2]
    for losses, expected, worst, split in ranks(4).run(train_architecture, name, mode, machine):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert worst < 5e-6
        assert split > 3


HYBRID = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


@pytest.mark.ranks
@pytest.mark.models
@pytest.mark.parametrize("mode", MODES)
def test_hybrid_rows_of_parts_train_as_one_device(ranks: Any, tmp_path: Path, mode: str) -> None:
    """Rows split over two pairs, parts over each pair, all of it twice."""
    folder, given = str(tmp_path / "saved"), {"accumulate": 2}
    losses, state, norms = trained_alone(BEFORE + AFTER, accumulate=2)
    for found in ranks(8).run(train, HYBRID, mode, given):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[2] == pytest.approx(norms, rel=1e-5)
        assert_equal(found[1], state)
    ranks(8).run(train_and_save, HYBRID, mode, folder, False)
    assert_goes_on(*load_and_train(None, "replicate", folder, False))
    for found in ranks(8).run(load_and_train, HYBRID, "zero2", folder, True):
        assert_goes_on(*found)


def refused() -> list[str]:
    """What cannot be split says so."""
    messages = []
    attempts: list[dict[str, Any]] = [
        {"mesh": {"tp": 2}, "mode": "zero2"},
        {"mesh": {"dp": 1, "tp": 2}, "mode": "zero1"},
        {"mesh": {"tp": 1, "tp2": 2}, "mode": "replicate"},
        {"mesh": {"dp": 2}, "mode": "zero3", "tensor_parallel": None},
    ]
    for attempt in attempts:
        mesh, mode = attempt.pop("mesh"), attempt.pop("mode")
        try:
            step = begin(mesh, mode, **attempt)
            cf.compile_step(step.model, loss_of, step.optimizer, {"tp": 2}, tensor_parallel=PLAN, timeout=20)
        except CrossfadeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_what_cannot_be_split_says_so(ranks: Any) -> None:
    for messages in ranks(2).run(refused):
        assert "data_parallel='zero2' on a mesh with an axis tp alone" in messages[0]
        assert "data_parallel='zero1' on a mesh that splits nothing" in messages[1]
        assert "in which nothing would be split over tp2" in messages[2] and "mesh={'tp': 2}" in messages[2]
        assert "parameter token.weight as a DTensor, together with tensor_parallel" in messages[3]


def compile_as_planned(path: str, mesh: dict[str, int], mode: str, given: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether losses and the program are those of the step that was planned, and its plan the same file."""
    first = begin(mesh, mode, **given)
    losses = [float(first(*batch)) for batch in batches(BEFORE)]
    first.save_plan(path)
    torch.distributed.barrier()
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[given.get("optimizer", "adamw")](model.parameters())
    torch.manual_seed(3)
    second = cf.compile_step(
        model, loss_of, optimizer, plan=path, clip_grad_norm=0.5, accumulate=given.get("accumulate", 1), timeout=60
    )
    again = [float(second(*batch)) for batch in batches(BEFORE)]
    second.save_plan(f"{path}.again")
    torch.distributed.barrier()
    same = Path(path).read_bytes() == Path(f"{path}.again").read_bytes()
    return again == losses, fingerprint(second.program) == fingerprint(first.program), same


@pytest.mark.ranks
@pytest.mark.models
@pytest.mark.parametrize("name", ["planned", "two micro-batches", "whole as it pays"])
def test_a_plan_file_gives_the_same_step(ranks: Any, tmp_path: Path, name: str) -> None:
    found = ranks(4).run(compile_as_planned, str(tmp_path / "plan.json"), BOTH, "zero2", GIVEN[name])
    assert found == [(True, True, True)] * 4


@pytest.mark.ranks
def test_a_plan_file_gives_the_same_step_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    path, given = str(tmp_path / "plan.json"), {"machine": "ethernet-1gbit", "optimizer": "momentum"}
    assert ranks(2).run(compile_as_planned, path, {"dp": 2}, "zero1", given) == [(True, True, True)] * 2
