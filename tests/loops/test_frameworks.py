"""Trainer, Accelerate and Lightning as people use them: the same losses as by the framework's own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate", minversion="1.12")
pytest.importorskip("lightning", minversion="2.6")


def on_two_ranks(framework: str, folder: Path, timeout: float = 280) -> Any:
    """What both ranks found; they are killed with all their children when time is up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.loops.framework_job", framework, str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    assert process.returncode == 0, said[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def numbers(logged: list[list[float | None]]) -> list[float]:
    """What was logged, in its order."""
    return [value for entry in logged for value in entry if value is not None]


@pytest.mark.ranks
def test_L5_trainer(tmp_path: Path) -> None:
    for found in on_two_ranks("trainer", tmp_path):
        plain, (ours, captures) = found["ddp"][0], found["crossfade"]
        assert len(plain) == 6 and captures == 2  # of a batch whose gradients wait, and of the last one
        assert numbers(ours) == pytest.approx(numbers(plain), rel=2e-3)  # in bfloat16 the order of sums shows
        assert numbers(found["resumed"][0]) == pytest.approx(numbers(ours), rel=1e-4)
        for changed in ("own loss", "lengths"):
            assert numbers(found[changed][0]) == pytest.approx(numbers(found[f"{changed} by ddp"][0]), rel=2e-3)
        assert "ranks have not exchanged them" in found["not exchanged"]
        assert numbers(found["smoothed"][0]) == pytest.approx(numbers(found["smoothed by ddp"][0]), rel=2e-3)


@pytest.mark.ranks
def test_L5_accelerate(tmp_path: Path) -> None:
    for found in on_two_ranks("accelerate", tmp_path):
        assert len(found["ddp"]) == 5
        assert found["crossfade"] == pytest.approx(found["ddp"], rel=1e-5)
    assert list(tmp_path.glob("state-True/model*"))


@pytest.mark.ranks
def test_L5_lightning(tmp_path: Path) -> None:
    for found in on_two_ranks("lightning", tmp_path):
        (plain, _), (ours, captures) = found["ddp"], found["crossfade"]
        assert (
            len(plain) == 9 and captures == 4
        )  # of batches that wait and of the last; another number in hparams is another
        for was, now in zip(plain, ours, strict=True):
            assert now == pytest.approx(was, rel=1e-4)
        for was, now in zip(found["more by ddp"][0], found["more"][0], strict=True):
            assert now == pytest.approx(was, rel=1e-4)
        by_index, kept, measured = found["refused"]
        assert "training_step reads batch_idx" in by_index
        assert "append to self.seen in on_train_batch_end" in kept
        assert "training_step updates a metric" in measured
