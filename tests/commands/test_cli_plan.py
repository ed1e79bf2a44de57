"""`crossfade plan`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossfade.cost.presets import preset
from tests.commands.test_cli import crossfade

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))
    return model, nn.functional.mse_loss, (torch.empty(8, 32), torch.empty(8, 32))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


def test_it_prints_a_table_and_a_call(model: str, tmp_path: Path) -> None:
    machine = preset("ethernet-1gbit").save(tmp_path / "mine.json")
    done = crossfade("plan", model, "--ranks", "2", "--machine", str(machine), "--optimizer", "momentum")
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks of ethernet-1gbit" in done.stdout and "longer: " in done.stdout
    assert "step = cf.compile_step(" in done.stdout


def test_it_prints_json_within_a_memory(model: str) -> None:
    asked = ("--ranks", "2", "--machine", "loopback-gloo", "--memory", "1 MiB", "--accumulate", "1,2", "--json")
    done = crossfade("plan", "find", model, *asked)
    found = json.loads(done.stdout)
    assert found["memory_bytes"] == 2**20 and found["ranks"] == 2
    assert {each["accumulate"] for each in found["candidates"]} == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "eighty"), "memory='eighty'"),
        (("--memory", "1KB"), "fits 1,000 bytes"),
        (("--optimizer", "lion"), "--optimizer lion: expected one of adamw"),
        (("--machine", "h10"), "there is no machine named 'h10'"),
        (("--accumulate", "two"), "--accumulate two"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(model: str, options: tuple[str, str], message: str) -> None:
    done = crossfade("plan", model, "--ranks", "2", *options)
    assert done.returncode == 1 and message in " ".join(done.stderr.split()) and "Remedy" in done.stderr
