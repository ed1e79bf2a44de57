"""Sharded programs on real ranks: as a module, from files, exported again, and compiled ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as torch_placements
from torch.distributed.device_mesh import init_device_mesh

import crossfade as cf
from crossfade.commands.run_sharded import _whole
from crossfade.demo.model import SIZES, build
from crossfade.errors import MeshError
from crossfade.graph.private import name_group
from crossfade.shard.tensor.placements import PARTIAL

SIZE = SIZES["tiny"]


def _gpt() -> tuple[nn.Module, Tensor]:
    tokens = torch.randint(0, SIZE.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    return build(SIZE).eval(), tokens


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())


def through_files(folder: str) -> dict[str, float]:
    """How far a GPT on these ranks is from one device, on every way that its program can take."""
    model, tokens = _gpt()
    expected = model(tokens)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "model"))
    exported = torch.export.export(model, (tokens,))
    sharded = cf.shard(exported, mesh, cf.Plan.megatron(exported, vocab=True), axis="model")
    found = {"module": worst(sharded.module()(tokens), expected)}
    sharded.save(folder)
    own = Path(folder) / f"own-{sharded.rank}.pt2"
    torch.export.save(sharded.program, own)
    found["torch.export.load"] = worst(torch.export.load(own).module()(tokens), expected)
    again = torch.export.export(sharded.module(), (tokens,))
    found["exported again"] = worst(again.module()(tokens), expected)
    dist.barrier()
    alone = init_device_mesh("cpu", (dist.get_world_size(),))  # its only axis, which has no name
    found["Sharded.load"] = worst(cf.Sharded.load(folder, alone).module()(tokens), expected)
    found["the world"] = worst(
        cf.Sharded.load(folder, {"model": dist.get_world_size()}).module()(tokens),
        expected,
    )
    return found


@pytest.mark.ranks
def test_a_program_is_right_on_every_way_it_can_take(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(through_files, str(tmp_path)):
        assert len(found) == 5
        assert max(found.values()) < 1e-5


def gradients_after_loading(folder: str) -> float:
    """A loaded program still knows its backward: the gradient of a replicated weight is that of one device."""
    model, tokens = _gpt()
    exported = torch.export.export(model, (tokens,))
    sharded = cf.shard(exported, {"tp": dist.get_world_size()})
    sharded.save(folder)
    dist.barrier()
    module = cf.Sharded.load(folder, {"tp": dist.get_world_size()}).module()
    module(tokens).square().mean().backward()
    model(tokens).square().mean().backward()
    return worst(module.get_parameter("token.weight").grad, model.get_parameter("token.weight").grad)


@pytest.mark.ranks
def test_a_loaded_program_trains(ranks: Any, tmp_path: Path) -> None:
    assert max(ranks(2).run(gradients_after_loading, str(tmp_path))) < 1e-6


def split_inputs() -> tuple[float, float]:
    """Rows in parts come in, go through a split pair, and leave in parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(4, 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = torch_placements.Shard(0)
    sharded = cf.shard(
        torch.export.export(model, (x,)),
        mesh,
        {"0": "colwise", "2": "rowwise"},
        inputs={"input": rows},
        outputs={0: rows},
    )
    found = sharded.module()(x.chunk(2)[sharded.rank])
    return worst(found, model(x).chunk(2)[sharded.rank]), len(sharded.collectives())


@pytest.mark.ranks
def test_inputs_and_outputs_may_stay_in_parts(ranks: Any) -> None:
    for difference, collectives in ranks(2).run(split_inputs):
        assert difference < 1e-6
        assert collectives == 2  # an all-gather and a reduce-scatter


def ahead_of_time(folder: str) -> float:
    """The same program as machine code of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    x = torch.randn(4, 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.no_grad():
        sharded = cf.shard(torch.export.export(model, (x,)), mesh, {"0": "colwise", "2": "rowwise"})
        path = torch._inductor.aoti_compile_and_package(
            sharded.program, package_path=f"{folder}/rank-{sharded.rank}.pt2"
        )
        return worst(torch._inductor.aoti_load_package(path)(x), model(x))


@pytest.mark.ranks
@pytest.mark.models
@pytest.mark.skipif(torch.__version__ < "2.12", reason="AOTInductor of torch 2.11 crashes on functional collectives")
def test_a_program_compiles_ahead_of_time(ranks: Any, tmp_path: Path) -> None:
    """Each rank compiles its own, since the compiler takes the rank's index for a constant."""
    assert max(ranks(2).run(ahead_of_time, str(tmp_path), timeout=500)) < 1e-6


def named_twice() -> list[str]:
    """A name that programs call is not given to other ranks; to another group of the same ranks it is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("named",))
    name_group("named", mesh.get_group())
    name_group("named", dist.new_group([0, 1]))
    messages = []
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    try:
        name_group("named", alone)
    except MeshError as error:
        messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_a_name_is_for_one_set_of_ranks(ranks: Any) -> None:
    for rank, (message,) in enumerate(ranks(2).run(named_twice)):
        assert f"the ranks {rank} to be called named: expected the ranks 0, 1" in message


def returned_twice() -> list[list[float]]:
    value = torch.tensor([1.0, 2.0])
    return [_whole(value, PARTIAL, dist.group.WORLD).tolist() for _ in range(2)]


@pytest.mark.ranks
def test_partial_sums_that_are_returned_twice_are_added_up_once(ranks: Any) -> None:
    assert ranks(2).run(returned_twice) == [[[2.0, 4.0], [2.0, 4.0]]] * 2
