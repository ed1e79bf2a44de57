"""Plans in files: saved and loaded, and files that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from crossfade.errors import PlanError
from crossfade.shard.tensor.plan import Fused, Plan

ENTRIES = {
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "fused": Fused("colwise", (16, 4, 4)),
    "norm": SequenceParallel(sequence_dim=0),
    "sinks": Shard(0),
    "head": "colwise_rep",
    "embed": "embedding_rowwise",
}


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_plans_are_saved_and_loaded(tmp_path: Path, suffix: str) -> None:
    if suffix != "json":
        pytest.importorskip("yaml")
    plan, path = Plan(ENTRIES), tmp_path / f"plan.{suffix}"
    plan.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == plan
    assert list(Plan.load(path)) == list(ENTRIES)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.toml", "", "a suffix .json, .yaml or .yml"),
        ("plan.json", "{", "which is not JSON"),
        ("plan.json", "[]", "holds no mapping"),
        ("plan.json", '{"a": "colwize"}', "the style 'colwize'"),
    ],
)
def test_files_that_hold_no_plan_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / name)


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("1: colwise", "holds no mapping")])
def test_yaml_that_holds_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.yaml")


def test_yaml_without_its_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(PlanError, match=r"install pyyaml, or write the plan as \.json"):
        Plan({}).save(tmp_path / "plan.yaml")
