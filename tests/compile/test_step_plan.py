"""Plan files: what is saved, read back, compared; and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import crossfade as cf
from crossfade import emulated
from crossfade.commands.cli import app
from crossfade.compile.step_plan import StepPlan, differences
from crossfade.cost.presets import preset
from crossfade.errors import CrossfadeError, NotYetError, PlanDriftError
from crossfade.graph.passes import fingerprint

BATCH = torch.ones(8, 32), torch.zeros(8, 4)


def begin(width: int = 64, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))
    return cf.compile_step(model, nn.functional.mse_loss, optimizer(model.parameters(), lr=0.01), **options)


def planned(path: Path, **options: Any) -> Any:
    """A step as rank 0 of 4, whose plan is saved."""
    given = {"mesh": {"dp": 4}, "data_parallel": "zero2", "machine": "ethernet-1gbit", **options}
    step = begin(**given).prepare(*BATCH)
    step.save_plan(path)
    return step


def test_a_plan_gives_the_same_program_without_planning(tmp_path: Path) -> None:
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    with emulated.world(preset("ethernet-1gbit"), ranks=4):
        first = planned(path)
        second = begin(plan=path).prepare(*BATCH)
        second.save_plan(again)
        assert fingerprint(second.program) == fingerprint(first.program)
    assert path.read_bytes() == again.read_bytes()
    ran = second.pipeline.names()
    assert "as-planned" in ran
    assert not {"measure", "schedule", "communicate", "exchange-factors", "predict", "finish"} & set(ran)
    found = json.loads(path.read_text())
    assert found["chosen"] == {
        "mesh": {"dp": 4},
        "data_parallel": "zero2",
        "keep_whole": [],
        "tensor_parallel": None,
        "machine": "ethernet-1gbit",
        "memory_limit": None,
    }
    assert found["parameters"]["2.weight"] == "float32[64, 64] rows over dp"
    (program,) = found["programs"]
    assert program["batch"] == ["batch[0]: float32[8, 32]", "batch[1]: float32[8, 4]"]
    assert [entry["pass"] for entry in program["passes"]].count("arrange-nodes") == 1
    assert any(line.startswith("all_gather over dp, ") for line in program["collectives"])


def test_a_plan_of_a_step_without_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with emulated.world(preset("ethernet-1gbit"), ranks=4):
        first = planned(path, data_parallel="replicate", machine=None)
        assert fingerprint(begin(plan=path).prepare(*BATCH).program) == fingerprint(first.program)
    assert json.loads(path.read_text())["chosen"]["machine"] is None


DRIFTED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"width": 65}, "parameters.0.weight: float32[64, 32] -> float32[65, 32]"),
    "optimizer": ({"optimizer": torch.optim.SGD}, "optimizer: AdamW -> SGD"),
    "setting": ({"accumulate": 2}, "settings.accumulate: 1 -> 2"),
    "mode": ({"data_parallel": "zero3"}, "data_parallel: zero2 -> zero3"),
    "machine": ({"machine": "loopback-gloo"}, "machine: ethernet-1gbit -> loopback-gloo"),
    "mesh": ({"mesh": {"dp": 2}}, "mesh.dp: 4 -> 2"),
    "plan": ({"tensor_parallel": {"0": "colwise"}}, 'tensor_parallel: null -> {"0": "colwise"}'),
}


@pytest.mark.parametrize("what", DRIFTED)
def test_what_drifted_is_shown(tmp_path: Path, what: str) -> None:
    path = tmp_path / "plan.json"
    options, message = DRIFTED[what]
    with emulated.world(preset("ethernet-1gbit"), ranks=4):
        planned(path)
        with pytest.raises(PlanDriftError) as raised:
            begin(plan=path, **options).prepare(*BATCH)
    assert message in str(raised.value)
    assert "plan again" in str(raised.value)


def test_another_torch_batch_and_program_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with emulated.world(preset("ethernet-1gbit"), ranks=4):
        planned(path)
        with pytest.raises(PlanDriftError, match=r"a batch with batch\[0\]: float32\[16, 32\]"):
            begin(plan=path).prepare(torch.ones(16, 32), torch.zeros(16, 4))
        other = begin(plan=path)
        other.model[1] = nn.Tanh()
        with pytest.raises(PlanDriftError, match=r"operators.aten.gelu_backward.default: 2 -> 1"):
            other.prepare(*BATCH)
        found = json.loads(path.read_text())
        found["made_for"]["torch"] = "2.11.0"
        path.write_text(json.dumps(found))
        with pytest.raises(PlanDriftError, match=r"torch: 2.11.0 -> "):
            begin(plan=path)


def test_what_a_plan_cannot_hold_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(RuntimeError, match="nothing captured yet"):
        begin().save_plan(path)
    with pytest.raises(NotYetError, match="sizes are symbols"):
        begin(dynamic=True).prepare(*BATCH).save_plan(path)
    begin().prepare(*BATCH).save_plan(path)
    with pytest.raises(CrossfadeError, match="passes= together with plan="):
        begin(plan=path, passes=[])
    with pytest.raises(CrossfadeError, match="keep_whole='0' together with plan="):
        begin(plan=path, keep_whole="0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("chosen"), "without 'chosen'"),
        (lambda found: found.update(format=2), "format = 2"),
        (lambda found: found["programs"][0]["passes"].append({"pass": "sink-wait"}), "a known pass"),
        (
            lambda found: found["programs"][0]["passes"].append({"pass": "sink-waits", "near": "x(1)"}),
            "options that it",
        ),
        (lambda found: found["chosen"].update(mesh={"dp": "two"}), "mesh.dp = 'two'"),
        (lambda found: found["parameters"].update({"0.weight": 3}), "parameters.0.weight = 3"),
    ],
)
def test_what_is_no_plan_file_names_the_place(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    path = tmp_path / "plan.json"
    begin().prepare(*BATCH).save_plan(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(CrossfadeError) as raised:
        StepPlan.load(path)
    assert str(path) in str(raised.value) and message in str(raised.value)


def test_two_plans_compared(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{mode}.json") for mode in ("zero2", "zero3")]
    with emulated.world(preset("ethernet-1gbit"), ranks=4):
        for path in paths:
            planned(Path(path), data_parallel=Path(path).stem)
    same = CliRunner().invoke(app, ["plan", "diff", paths[0], paths[0]])
    assert (same.exit_code, same.output) == (0, "the same\n")
    found = CliRunner().invoke(app, ["plan", "diff", *paths])
    assert found.exit_code == 1
    assert "chosen.data_parallel: zero2 -> zero3" in found.output.splitlines()
    assert "programs[0].collectives: + all_gather over dp" in found.output


def test_an_order_is_compared_by_its_stretches() -> None:
    before = {"passes": [{"pass": "arrange-nodes", "order": ["x..s", "exp", "d..neg"]}]}
    after = {"passes": [{"pass": "arrange-nodes", "order": ["x..s", "d..neg", "exp"]}]}
    assert differences(before, after) == ["passes[0].order: + d..neg", "passes[0].order: - d..neg"]
