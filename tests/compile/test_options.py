"""What `compile_step` is asked for is checked in an order that blames the right word."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crossfade import TRAINING, compile_step
from crossfade.communicate.bucket_all_reduces import BucketAllReduces
from crossfade.compile.options import Options
from crossfade.errors import CrossfadeError


def compiled(**options: object) -> object:
    model = nn.Linear(2, 2)
    return compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": "zero_2", "keep_whole": ["weight"]}, "data_parallel='zero_2': expected 'replicate' or"),
        ({"keep_whole": ["weight"]}, r"keep_whole=\['weight'\] with data_parallel='replicate'"),
        ({"accumulate": 0}, "accumulate=0: expected at least 1"),
        ({"timeout": 0}, "timeout=0: expected seconds"),
        ({"check_every": -1}, "check_every=-1"),
        ({"memory_limit": 100}, "memory_limit=100 without a machine to plan for"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(CrossfadeError, match=message):
        compiled(**options)


def test_ranks_compare_the_options_of_passes_and_the_changes_of_phases() -> None:
    large = Options(passes=(BucketAllReduces(cap_mb=8),)).settings()
    assert large != Options(passes=(BucketAllReduces(cap_mb=16),)).settings()
    changed = Options(phases=TRAINING.without_pass("sink-waits")).settings()
    assert changed != Options(phases=TRAINING).settings()


def test_the_warning_about_a_loss_names_the_line_that_calls_the_step() -> None:
    model = nn.Linear(2, 2)
    step = compile_step(model, lambda y, t: (y - t).square().max(), torch.optim.SGD(model.parameters()), accumulate=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(torch.ones(4, 2), torch.zeros(4, 2))
    assert [warning.filename for warning in caught if "loss" in str(warning.message)] == [__file__]


def test_a_memory_limit_on_one_device_is_said_not_to_be_kept() -> None:
    model = nn.Linear(2, 2)
    step = compile_step(
        model,
        F.mse_loss,
        torch.optim.SGD(model.parameters()),
        machine="ethernet-1gbit",
        memory_limit=100,
    )
    step.prepare(torch.ones(2, 2), torch.ones(2, 2))
    assert step.report.facts["memory limit"] == "100 bytes; not kept: on one device nothing is scheduled"
