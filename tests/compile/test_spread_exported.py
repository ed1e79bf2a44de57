"""Exported programs with spread experts, all ranks made in one process: their weights, files, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import crossfade as cf
from crossfade.commands.shard_models import shard_model, summary, write_ranks
from crossfade.errors import CrossfadeError
from crossfade.shard.tensor.own_experts import SpreadExperts
from crossfade.shard.tensor.sources import source_of
from tests.ranks.expert_cases import routed, words

MESH = {"ep": 2, "tp": 2}


@functools.cache
def exported() -> ExportedProgram:
    return torch.export.export(words()[0], (words()[1][0][0],))


def test_every_rank_has_its_own_experts_and_files_hold_the_same(tmp_path: Path) -> None:
    """As the command writes them, with weights from elsewhere."""
    state = dict(words(seed=1)[0].state_dict())
    prepared = shard_model(exported(), "ep=2,tp=2", "megatron")
    written = list(write_ranks(prepared, state, tmp_path))
    assert [file.path.name for file in written] == [f"rank-{place}-of-4.safetensors" for place in range(4)]
    assert summary(written) is not None
    made = [cf.Sharded.load(tmp_path, MESH, rank=place) for place in range(4)]
    assert [(sharded.expert_rank, sharded.rank) for sharded in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    downs = [sharded.program.state_dict["layers.1.expert_down"] for sharded in made]
    rows = [torch.cat(downs[place : place + 2], 2) for place in (0, 2)]
    assert torch.equal(torch.cat(rows), state["layers.1.expert_down"])
    assert torch.equal(made[3].program.state_dict["token.weight"], state["token.weight"])
    last = prepared.of_place(3, source_of(state))
    for name, value in made[3].program.state_dict.items():
        assert torch.equal(last.program.state_dict[name], value)
    names = tuple(f"layers.{layer}.expert_{name}" for layer in range(2) for name in ("gate_up", "down"))
    assert made[3].experts == last.experts == SpreadExperts("ep", 2, names)
    assert made[3].collectives()["all-to-all"][0] == 6
    assert str(made[3]).startswith("ep=2, tp=2, a forward has 6 all-to-alls")
    with pytest.raises(CrossfadeError, match=r"2 ranks for .*: expected 2 ranks and ep=2, for which it was saved"):
        cf.Sharded.load(tmp_path, {"tp": 2}, rank=0)
    with pytest.raises(CrossfadeError, match=r"2 ranks and ep=4 for .*: expected 2 ranks and ep=2"):
        cf.Sharded.load(tmp_path, {"ep": 4, "tp": 2}, rank=0)


class Scaled(nn.Module):
    """Experts whose rows share a vector between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = routed()[0].first  # type: ignore[union-attr]
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
        up = nn.functional.grouped_mm(x.bfloat16(), self.layer.up.bfloat16(), offs=ends)
        return nn.functional.grouped_mm((up * self.scale).bfloat16(), self.layer.down.bfloat16(), offs=ends)


def test_what_all_rows_share_is_multiplied_where_rows_came_from() -> None:
    """Its gradient is a sum over this rank's rows, which autograd would take over those of all ranks."""
    sharded = cf.shard(torch.export.export(Scaled(), (torch.randn(16, 16),)), {"ep": 2}, rank=0)
    (product,) = [node for node in sharded.program.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert product.meta["val"].shape == (16, 32)
    assert sharded.collectives()["all-to-all"][0] == 5


@pytest.mark.parametrize(
    ("make", "mesh", "plan", "said"),
    [
        (lambda: torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), {"ep": 2}, None, "in which no experts are"),
        (exported, {"ep": 2}, {"mix": "colwise"}, "a plan, on a mesh with an axis ep and no axis tp"),
        (exported, {"ep": 3}, None, "4 experts (layers.0.expert_gate_up) over 3 ranks"),
        (
            lambda: torch.export.export(words()[0], words()[1][0][:1], dynamic_shapes={"words": {0: Dim.DYNAMIC}}),
            {"ep": 2},
            None,
            "whose number is known only when it runs",
        ),
    ],
    ids=["none", "plan", "odd", "dynamic"],
)
def test_what_cannot_be_spread_says_so(make: Any, mesh: dict[str, int], plan: Any, said: str) -> None:
    with pytest.raises(CrossfadeError) as raised:
        cf.shard(make(), mesh, plan, rank=0)
    assert said in str(raised.value)
    assert "Remedy" in str(raised.value)
