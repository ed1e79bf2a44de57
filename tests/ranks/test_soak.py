"""A sample of `make soak`: ranks killed, paused and delayed while they train and save, and how the others end."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.ranks
def test_survivors_name_the_rank_in_time_and_training_goes_on_from_the_checkpoint() -> None:
    """Rank 0, which hosts the store, among those killed, paused and delayed, in all modes."""
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "--first",
        "2",
        "--count",
        "6",
        "--jobs",
        "4",
        "--seed",
        "2",
        "--torchrun",
        "0.1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
