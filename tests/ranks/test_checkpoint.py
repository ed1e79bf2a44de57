"""Checkpoints: training goes on bitwise; on other numbers of ranks within tolerance, in other modes too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Shard

import crossfade as cf
from crossfade.errors import CrossfadeError
from tests.models.choice import some
from tests.ranks.cases import CASES, PLANNED, Trained, batches, start, train_eager, trained
from tests.ranks.test_training_on_ranks import differences

NAME = "lstm with noise"
HALF = 5
WHOLE = "zero2+*.weight_ih_l0 *.bias*"


def begin(ranks: int, mode: str) -> Any:
    """A step in a mode; after a plus, the parameters that it keeps whole."""
    case, model, optimizer = start(NAME, "")
    data_parallel, _, whole = mode.partition("+")
    options = {"data_parallel": data_parallel, "keep_whole": "auto" if whole == "auto" else whole.split()}
    return cf.compile_step(model, case.loss, optimizer, {"dp": ranks}, timeout=30.0, **options)


def train_and_save(ranks: int, mode: str, folder: str) -> Trained:
    """Ten steps, a checkpoint after the fifth."""
    step = begin(ranks, mode)
    losses = []
    for number, batch in enumerate(batches(CASES[NAME], 2 * HALF)):
        if number == HALF:
            step.save(folder)
        losses.append(float(step(*batch)))
    return trained(losses, step.model, step.optimizer)


def load_and_train(ranks: int, mode: str, folder: str, earlier: list[float]) -> Trained:
    """The last five steps, from a checkpoint."""
    step = begin(ranks, mode)
    torch.manual_seed(99)
    step.load(folder)
    assert step.steps == HALF
    losses = [float(step(*batch)) for batch in batches(CASES[NAME], 2 * HALF)[HALF:]]
    return trained(earlier + losses, step.model, step.optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mode", some(["replicate", "zero1", "zero2", "zero3", WHOLE], often=["replicate", "zero3", WHOLE])
)
def test_training_goes_on_bitwise(ranks: Any, tmp_path: Path, mode: str) -> None:
    whole = ranks(2).run(train_and_save, 2, mode, str(tmp_path / "saved"))
    resumed = ranks(2).run(load_and_train, 2, mode, str(tmp_path / "saved"), whole[0].losses[:HALF])
    for before, after in zip(whole, resumed, strict=True):
        assert differences(before, after, 0, 0) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    "saved,loaded",
    [
        ("zero1", "zero2+auto"),
        ("zero2", "replicate"),
        (WHOLE, "zero3"),
        pytest.param("zero3", "zero3", marks=pytest.mark.models),
        pytest.param("zero1", "zero3", marks=pytest.mark.models),
    ],
)
def test_saved_on_four_ranks_goes_on_on_two(ranks: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    whole = ranks(4).run(train_and_save, 4, saved, str(tmp_path / "saved"))
    for resumed in ranks(2).run(load_and_train, 2, loaded, str(tmp_path / "saved"), whole[0].losses[:HALF]):
        assert differences(train_eager(NAME), resumed, *PLANNED) == []


def by_hand(ranks: int, folder: str) -> list[str]:
    """`torch.distributed.checkpoint` itself, on the state dict; returns what of it is split."""
    step = begin(ranks, "zero3")
    batch = batches(CASES[NAME], 1)[0]
    step(*batch)
    checkpoint.save(step.state_dict(), checkpoint_id=folder)
    expected = float(step(*batch))
    state = begin(ranks, "zero3").state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other = begin(ranks, "zero3")
    other.load_state_dict(state)
    assert float(other(*batch)) == expected
    whole = [name for name, value in state["model"].items() if not isinstance(value, DTensor)]
    assert whole == [] and all(value.placements == (Shard(0),) for value in state["model"].values())
    return list(state["model"])


@pytest.mark.ranks
def test_the_state_dict_is_for_torch_distributed_checkpoint(ranks: Any, tmp_path: Path) -> None:
    split = ranks(2).run(by_hand, 2, str(tmp_path / "saved"))[0]
    assert split == [name for name, _ in CASES[NAME].model().named_parameters()]


def evaluate(ranks: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    case, model, optimizer = start("mlp", "")
    inputs, targets = batches(case, 1)[0]
    expected = model(inputs).detach()
    step = cf.compile_step(model, case.loss, optimizer, {"dp": ranks}, data_parallel="zero3", timeout=30.0)
    with step.gathered() as whole:
        found = whole(inputs).detach()
    step(inputs, targets)
    return expected, found, str(type(next(model.parameters())).__name__)


@pytest.mark.ranks
def test_the_whole_model_can_be_had_for_a_while(ranks: Any) -> None:
    for expected, found, kind in ranks(2).run(evaluate, 2):
        assert torch.equal(expected, found)
        assert kind == "DTensor"


def test_a_cut_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    step = begin(1, "replicate")
    step(*batches(CASES[NAME], 1)[0])
    step.save(tmp_path / "saved")
    (tmp_path / "saved.new").mkdir()
    (tmp_path / "saved.new" / "half").write_text("written")
    other = begin(1, "replicate")
    other.load(tmp_path / "saved")
    assert other.steps == 1
    other.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "saved").rename(tmp_path / "saved.old")  # cut between the two moves
    begin(1, "replicate").load(tmp_path / "saved")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    step = begin(1, "replicate")
    with pytest.raises(CrossfadeError, match=r"no checkpoint at .*nowhere. Remedy: save one"):
        step.load(tmp_path / "nowhere")
    with pytest.raises(CrossfadeError, match=r"a state without optimizer, groups, steps"):
        step.load_state_dict({"model": {}})


def test_other_files_in_the_folder_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("precious")
    with pytest.raises(
        CrossfadeError, match=r"runs holds notes.txt, which is no part of a checkpoint: expected a folder that is new"
    ):
        begin(1, "replicate").save(tmp_path / "runs")
    assert (tmp_path / "runs" / "notes.txt").read_text() == "precious"


def test_a_scheduler_made_later_does_not_hinder_loading(tmp_path: Path) -> None:
    step = begin(1, "replicate")
    step(*batches(CASES[NAME], 1)[0])
    step.save(tmp_path / "saved")
    other = begin(1, "replicate")
    torch.optim.lr_scheduler.StepLR(other.optimizer, 1)
    other.load(tmp_path / "saved")
    assert other.steps == 1


def test_another_model_is_refused_with_the_name_that_is_missing(tmp_path: Path) -> None:
    step = begin(1, "replicate")
    step.save(tmp_path / "saved")
    case, model, optimizer = start("mlp", "")
    other = cf.compile_step(model, case.loss, optimizer)
    with pytest.raises(CrossfadeError, match=r"while loading from .*: Missing key in checkpoint state_dict: model"):
        other.load(tmp_path / "saved")


def whole_into_parts(ranks: int) -> bool:
    """A state of whole tensors, as a replica has it, loaded where parameters are split."""
    whole = begin(ranks, "replicate")
    batch = batches(CASES[NAME], 1)[0]
    whole(*batch)
    saved = copy.deepcopy(whole.state_dict())
    expected = float(whole(*batch))
    split = begin(ranks, "zero3")
    split.load_state_dict(saved)
    return split.steps == 1 and abs(float(split(*batch)) - expected) < 1e-5


@pytest.mark.ranks
def test_whole_tensors_load_into_parts(ranks: Any) -> None:
    assert ranks(2).run(whole_into_parts, 2) == [True, True]
