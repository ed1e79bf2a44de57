"""`crossfade shard` and `crossfade run`, as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.commands.test_cli import crossfade, crossfade_alone


class Pair(nn.Module):
    """Two projections, called by name, that return several things."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(self.up(x).relu())
        return {"y": y, "moved": y + shift}


def saved(folder: Path) -> Pair:
    torch.manual_seed(0)
    model = Pair()
    torch.export.save(torch.export.export(model, (torch.ones(4, 8), torch.ones(8))), folder / "model.pt2")
    return model


@pytest.mark.parametrize("command", ["run", "shard"])
def test_help_of_sharding_is_there(command: str) -> None:
    result = crossfade(command, "--help")
    assert result.returncode == 0 and "Usage" in result.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("named", [False, True], ids=["positional", "named"])
def test_a_sharded_model_runs_as_the_whole_one(tmp_path: Path, named: bool) -> None:
    model, out = saved(tmp_path), tmp_path / "out"
    (tmp_path / "plan.json").write_text('{"up": "colwise", "down": "rowwise"}')
    plan = ["--plan", str(tmp_path / "plan.json")] if named else []
    done = crossfade("shard", str(tmp_path / "model.pt2"), "--mesh", "tp=2", *plan, "-o", str(out))
    assert done.returncode == 0, done.stderr
    for words in ("colwise", "rank-1-of-2.safetensors", "a forward has 1 all-reduces"):
        assert words in done.stdout
    x, shift = torch.randn(4, 8), torch.randn(8)
    torch.save({"x": x, "shift": shift} if named else (x, shift), tmp_path / "inputs.pt")
    ran = crossfade_alone("run", str(out), "--inputs", str(tmp_path / "inputs.pt"), "-o", str(tmp_path / "outputs.pt"))
    assert ran.returncode == 0, ran.stderr
    assert "output 0: float32 (4, 8)" in ran.stdout and "2 ranks" in ran.stdout
    found = torch.load(tmp_path / "outputs.pt")
    torch.testing.assert_close(found, {name: value.detach() for name, value in model(x, shift).items()})


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    torch.manual_seed(1)
    state = Pair().state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    out, weights = tmp_path / "out", tmp_path / "weights.safetensors"
    done = crossfade("shard", str(tmp_path / "model.pt2"), "--mesh", "tp=4", "--weights", str(weights), "-o", str(out))
    assert done.returncode == 0, done.stderr
    parts = [load_file(out / f"rank-{rank}-of-4.safetensors")["down.weight"] for rank in range(4)]
    assert torch.equal(torch.cat(parts, 1), state["down.weight"])


def test_what_cannot_be_says_so(tmp_path: Path) -> None:
    saved(tmp_path)
    model = str(tmp_path / "model.pt2")
    assert crossfade("shard", model, "--mesh", "tp=1", "-o", str(tmp_path / "out")).returncode == 0
    torch.save({"x": torch.ones(4, 8)}, tmp_path / "inputs.pt")
    for arguments, words in [
        (["shard", model, "--mesh", "4", "-o", str(tmp_path / "out")], "expected AXIS=RANKS"),
        (["shard", model, "--mesh", "tp=3", "--plan", str(tmp_path / "plan.toml"), "-o", "out"], "no plan in"),
        (["run", str(tmp_path), "--inputs", model], "has no sharded.json"),
        (["run", str(tmp_path / "out"), "--inputs", str(tmp_path / "inputs.pt")], "expected 2 inputs: x, shift"),
    ]:
        result = crossfade(*arguments)
        assert result.returncode == 1
        assert words in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
