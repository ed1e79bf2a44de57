"""Hugging Face models with their defaults, trained on two ranks, equal eager torch in one process.

A few in every test run; `make models` trains all of them, with attention of either kind.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import compatibility
from tests.models.choice import some
from tests.models.trained import Training, difference, train_compiled, train_eager, trainings

CLOSE = 1e-4
"""Sums in another order, over three steps of AdamW; masks that differ do by 1e-2 and more."""

COMPARES_SAMPLES = "clip"
"""Its loss compares all samples of a batch with each other."""

OFTEN = ("gpt2, sdpa", "bert, eager")


def close_on_ranks(ranks: Any, training: Training, **options: Any) -> bool:
    expected = train_eager(training)
    everywhere = ranks(2).run(train_compiled, training, 2, options, timeout=600.0)
    return all(difference(found, expected) < CLOSE for found in everywhere)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "training",
    [
        pytest.param(training, id=str(training), marks=() if str(training) in OFTEN else (pytest.mark.models,))
        for training in trainings()
        if training.name != COMPARES_SAMPLES
    ],
)
def test_L1_two_ranks_train_as_eager_torch_in_one_process(ranks: Any, training: Training) -> None:
    assert close_on_ranks(ranks, training)


@pytest.mark.models
@pytest.mark.parametrize("training", list(trainings()), ids=str)
def test_L1_one_process_trains_as_eager_torch_bit_for_bit(training: Training) -> None:
    assert difference(train_compiled(training, 1), train_eager(training)) == 0.0


CHECKPOINTED = {
    "llama, adapted": (Training("llama", "sdpa", "non-reentrant", adapted=True), {}),
    "llama, adapted, reentrant": (Training("llama", "sdpa", "reentrant", adapted=True), {}),
    "gpt2, adapted": (Training("gpt2", "eager", "non-reentrant", adapted=True, use_cache=False), {}),
    "gpt2, adapted, no checkpoints": (Training("gpt2", "sdpa", adapted=True), {}),
    "bert": (Training("bert", "sdpa", "non-reentrant"), {}),
    "bert, reentrant, in parts": (Training("bert", "eager", "reentrant"), {"data_parallel": "zero3"}),
    "t5": (Training("t5", "sdpa", "non-reentrant", use_cache=False), {}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", some(CHECKPOINTED, often=["llama, adapted"]))
def test_checkpointed_and_adapted_models_train_as_in_one_process(ranks: Any, name: str) -> None:
    training, options = CHECKPOINTED[name]
    assert close_on_ranks(ranks, training, **options)


@pytest.mark.models
def test_masks_of_each_rank_for_itself_are_told_from_those_of_the_whole_batch(ranks: Any) -> None:
    assert not close_on_ranks(ranks, Training("distilbert", "sdpa"), semantics="per-rank")


def test_the_table_of_architectures_is_current() -> None:
    written, rows = compatibility.PAGE.read_text(), compatibility.saved()
    assert compatibility.section(rows) in written, "run: python -m tests.models.compatibility --names ''"
