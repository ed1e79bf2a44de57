"""Candidates: which there are, and where they lie on a machine."""

from __future__ import annotations

from crossfade.cost.presets import preset
from crossfade.graph.collectives import Kind
from crossfade.search.candidates import Candidate, meshes, modes


def test_meshes_of_nodes_keep_tensor_parallelism_and_shards_inside() -> None:
    found = list(meshes(64, 8, per_node=8))
    assert [mesh["tp"] for mesh in found if set(mesh) == {"dp", "tp"}] == [2, 4, 8]
    for mesh in found:
        assert mesh.get("tp", 1) * mesh.get("dp_shard", 1) <= 8
        size = 1
        for each in mesh.values():
            size *= each
        assert size == 64
    assert {"dp_replicate": 8, "dp_shard": 4, "tp": 2} in found


def test_one_rank_has_one_way() -> None:
    assert list(meshes(1, 8)) == [{}] and list(modes({})) == [("replicate", False)]
    assert str(Candidate({})) == "one device" and Candidate({}).axes("gloo") is None


def test_axes_of_a_hybrid_mesh_lie_inside_and_between_nodes() -> None:
    candidate, cluster = Candidate({"dp_replicate": 8, "dp_shard": 8}, "zero3"), preset("h100-cluster")
    laid = candidate.lies_on(cluster)
    seconds = {axis: laid.collective_seconds(Kind.ALL_GATHER, 2**30, 8, axis) for axis in candidate.mesh}
    assert seconds["dp_replicate"] > 3 * seconds["dp_shard"]
    assert laid.collective_seconds(Kind.ALL_REDUCE, 2**30, 64, "dp") > 0
    assert candidate.splits == 8 and candidate.data == 64
