"""Parts of a state, from memory or from files: the same numbers, and errors that name what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crossfade.errors import StateError
from crossfade.shard.tensor.parts import joined
from crossfade.shard.tensor.placements import REPLICATE, Shard
from crossfade.shard.tensor.sources import missing, own_ranges, source_of

safetensors = pytest.importorskip("safetensors.torch")

WHOLE = torch.arange(48.0).view(8, 6)
SHARDS = [Shard(0), Shard(1), Shard(0, outer=2), Shard(1, sizes=(4, 2)), Shard(0, sizes=(2, 4, 2))]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("kind", ["memory", "file", "folder", "list"])
def test_parts_of_all_ranks_make_up_the_whole(kind: str, shard: Shard, tmp_path: Path):
    safetensors.save_file({"w": WHOLE}, tmp_path / "a.safetensors")
    state = {"memory": {"w": WHOLE}, "file": tmp_path / "a.safetensors", "folder": tmp_path, "list": [{}, tmp_path]}
    source = source_of(state[kind])
    parts = [source.part("w", shard, rank, 2) for rank in range(2)]
    assert torch.equal(joined(parts, shard), WHOLE)
    assert source.shape("w") == (8, 6) and "w" in source and "v" not in source and list(source.names()) == ["w"]


def test_what_is_kept_whole_is_the_tensor_itself():
    assert source_of({"w": WHOLE}).part("w", REPLICATE, 0, 2).data_ptr() == WHOLE.data_ptr()
    part = source_of({"w": WHOLE}).part("w", Shard(0), 0, 2)
    assert part.untyped_storage().nbytes() == part.nbytes, "the whole could not be freed"


def test_the_first_source_that_has_a_name_counts():
    source = source_of([{"w": WHOLE}, {"w": -WHOLE, "b": torch.ones(2)}])
    assert torch.equal(source.part("w", REPLICATE, 0, 1), WHOLE) and source.shape("b") == (2,)


def test_every_block_is_split_over_all_ranks():
    assert [own_ranges(Shard(0, sizes=(4, 2)), 6, rank, 2) for rank in range(2)] == [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]


def test_a_folder_without_a_state_is_refused(tmp_path: Path):
    with pytest.raises(StateError, match=r"no state in .*: expected a .safetensors file"):
        source_of(tmp_path)


def test_descriptions_have_no_numbers():
    source = source_of({"w": WHOLE.to("meta")})
    with pytest.raises(StateError, match="w has no numbers: it is on the meta device or fake"):
        source.part("w", Shard(0), 0, 2)


def test_a_missing_name_is_answered_with_the_nearest():
    source = source_of({"layers.0.up.weight": WHOLE})
    assert missing("layer.0.up.weight", source).remedy == "did you mean layers.0.up.weight"
    assert missing("q", source).remedy == "give the state of the model that was exported"
