"""Exported programs whose experts are spread over ranks: outputs and gradients are those of one device."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import crossfade as cf
from crossfade.commands.run_sharded import _run
from crossfade.ranks.local import Ranks
from crossfade.shard.tensor.own_experts import OwnExperts
from crossfade.shard.tensor.sources import InMemory
from tests.models import zoo
from tests.ranks.expert_cases import language_model, words


def started(name: str, seed: int) -> tuple[nn.Module, Tensor]:
    """A model, the same for every seed, and tokens for it."""
    draw = torch.Generator().manual_seed(seed)
    if name == "words":
        return words()[0], torch.randint(24, (4, 5), generator=draw)
    return language_model(name)[0].eval(), torch.randint(0, zoo.VOCABULARY, (2, 6), generator=draw)


def logits(output: Any) -> Tensor:
    return getattr(output, "logits", output)


def worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())


def gradients_alone(name: str, seeds: list[int]) -> dict[str, Tensor]:
    """The gradients that one device has for the tokens of some seeds, summed up."""
    model, _ = started(name, 0)
    for seed in seeds:
        logits(model(started(name, seed)[1])).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def sharded_and_run(name: str, mesh: dict[str, int], folder: str) -> dict[str, Any]:
    """How far each way of running a program is from one device, whose tokens are those of this rank of `ep`."""
    world = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    own = world.get_local_rank("ep")
    model, tokens = started(name, own)
    expected = logits(model(tokens))
    exported = torch.export.export(model, (tokens,))
    sharded = cf.shard(exported, world)
    sharded.save(folder)
    module = sharded.module()
    answered = logits(module(tokens))
    found = {"module": worst(answered, expected)}
    answered.square().mean().backward()
    assert sharded.experts is not None
    alike, of_own = gradients_alone(name, list(range(mesh["ep"]))), gradients_alone(name, [own])
    apart = []
    for parameter, grad in of_own.items():
        whole = alike[parameter] if parameter in sharded.experts.parameters else grad
        source = OwnExperts(InMemory({parameter: whole}), sharded.experts, sharded.expert_rank)
        part = source.part(parameter, sharded.placements[parameter], sharded.rank, sharded.ranks)
        apart.append(worst(module.get_parameter(parameter).grad, part) / max(float(whole.abs().max()), 1e-4))
    dist.barrier()
    loaded = cf.Sharded.load(folder, mesh)
    with torch.no_grad():
        found["loaded"] = worst(logits(loaded.module()(tokens)), expected)
        again = torch.export.export(module, (tokens,)) if name == "words" else sharded.program
        found["exported again"] = worst(logits(again.module()(tokens)), expected)
    if name == "words" and next(iter(mesh)) == "ep":  # the order of the axes that the command makes
        inputs, outputs = Path(folder) / f"{dist.get_rank()}.inputs", Path(folder) / "outputs"
        torch.save(started(name, 0)[1], inputs)
        ran = _run(folder, str(inputs), str(outputs), False)
        dist.barrier()
        found["run"] = worst(torch.load(outputs), model(started(name, 0)[1]))
        assert ran.ranks == dist.get_world_size()
    shapes = {name: module.get_parameter(name).shape for name in sharded.experts.parameters}
    return {
        "apart": found,
        "gradients": max(apart),
        "experts": {shape[0] / model.get_parameter(name).shape[0] for name, shape in shapes.items()},
        "numbers": {shape.numel() / model.get_parameter(name).numel() for name, shape in shapes.items()},
        "spread": len(shapes),
        "collectives": {kind: count for kind, (count, _) in sharded.collectives().items()},
        "place": sharded.place,
    }


def _case(name: str, mesh: dict[str, int], *, ci: bool = False) -> Any:
    return pytest.param(name, mesh, marks=() if ci else (pytest.mark.models,), id=f"{name} {mesh}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        _case("words", {"ep": 2}),
        _case("words", {"ep": 2, "tp": 2}, ci=True),
        _case("words", {"tp": 2, "ep": 2}),
        _case("words", {"ep": 4}),
        *(_case(name, {"ep": 2}) for name in ("mixtral", "qwen2_moe", "olmoe", "deepseek_v3")),
        *(_case(name, {"ep": 2, "tp": 2}) for name in ("mixtral", "qwen2_moe", "olmoe", "deepseek_v3")),
    ],
)
def test_experts_of_exported_programs(ranks: Any, tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    with contextlib.ExitStack() as stack:
        count = math.prod(mesh.values())
        pool = ranks(2) if count == 2 else stack.enter_context(Ranks(count, timeout=400.0, start="forkserver"))
        done = pool.run(sharded_and_run, name, mesh, str(tmp_path), timeout=400)  # a name is for one set of ranks
    for found in done:
        assert len(found["apart"]) >= 3
        assert max(found["apart"].values()) < 1e-5
        assert found["gradients"] < 1e-5
        assert found["experts"] == {1 / mesh["ep"]}
        assert found["numbers"] == {1 / math.prod(mesh.values())}
        assert found["spread"] == (2 if name == "deepseek_v3" else 4)  # whose first layer has no experts
        assert found["collectives"]["all-to-all"] == 3 * found["spread"] // 2  # numbers of rows, rows, and results
    assert sorted(found["place"] for found in done) == list(range(len(done)))
