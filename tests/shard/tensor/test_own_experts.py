"""A rank's own experts, out of a state in memory and out of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crossfade.shard.tensor.own_experts import OwnExperts, SpreadExperts
from crossfade.shard.tensor.placements import REPLICATE, Shard
from crossfade.shard.tensor.sources import source_of

STATE = {"experts": torch.arange(64.0).view(4, 4, 4), "dense": torch.arange(16.0).view(4, 4)}


@pytest.mark.parametrize("form", ["memory", "file"])
def test_experts_are_cut_first_and_then_what_is_in_them(tmp_path: Path, form: str) -> None:
    save_file(STATE, tmp_path / "state.safetensors")
    source = source_of(STATE if form == "memory" else tmp_path)
    own = OwnExperts(source, SpreadExperts("ep", 2, ("experts",)), rank=1)
    assert own.shape("experts") == (2, 4, 4)
    assert own.shape("dense") == (4, 4)
    assert "experts" in own and "other" not in own and sorted(own.names()) == ["dense", "experts"]
    assert torch.equal(own.part("experts", REPLICATE, 0, 1), STATE["experts"][2:])
    assert torch.equal(own.part("experts", Shard(2), 1, 2), STATE["experts"][2:, :, 2:])
    in_blocks = Shard(1, outer=2)
    assert torch.equal(own.part("experts", in_blocks, 0, 2), STATE["experts"][2:, [0, 2]])
    assert torch.equal(own.part("dense", Shard(0), 1, 2), STATE["dense"][2:])


def test_experts_that_do_not_divide_keep_a_shape_that_fits_nowhere() -> None:
    own = OwnExperts(source_of({"experts": torch.ones(3, 2)}), SpreadExperts("ep", 2, ("experts",)), rank=0)
    assert own.shape("experts") == (3, 2)
