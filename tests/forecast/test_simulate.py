"""Forecasts, against sums written out and against the simulator itself."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.cost.flops import flops_of
from crossfade.cost.machine import ANY_AXIS, Fabric, Launching, Link, Machine
from crossfade.cost.network import Wire
from crossfade.cost.presets import preset
from crossfade.errors import CaptureError, CrossfadeError, MachineError, MeshError, ModelError
from crossfade.forecast.capture import capture_model
from crossfade.forecast.prepared import Prepared
from crossfade.forecast.recompute_layers import RecomputeLayers
from crossfade.forecast.simulate import Forecaster, Setting
from crossfade.forecast.sources import source_of
from crossfade.forecast.sweeps import Sweep, sweep, to_csv
from crossfade.forecast.ways import WAYS, way_named
from crossfade.graph.collectives import Kind
from crossfade.graph.memory import memory_curve
from crossfade.graph.passes import run_passes
from tests.forecast.models import tokens, tower

TOY = Machine("toy", {ANY_AXIS: Fabric(dict.fromkeys(Kind, Link(0.0, 1e3)))}, {"float32": 1e6}, 1e300, device="cuda")
"""A million operations a second, a thousand bytes a second, memory that costs nothing."""


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width, bias=False, device="meta")


def test_gradients_reduced_after_the_backward_are_exposed() -> None:
    batch = torch.empty(50, 10), torch.empty(50, 10)
    found = cf.simulate(linear(10), batch, mesh={"dp": 4}, machine=TOY, loss_fn=nn.functional.mse_loss, way="megatron")
    products = 2 * 2 * 50 * 10 * 10 / 1e6  # forward and the weight's gradient: nobody asks for the input's
    reduced = 2 * 3 / 4 * 400 / 1e3
    assert found.spent["products"] == pytest.approx(products)
    assert found.exposed == {"dp all_reduce": pytest.approx(reduced)}
    assert found.seconds == pytest.approx(products + reduced)
    assert found.memory.parameters == 400 and found.memory.optimizer == 800
    assert found.bound_by == "links" and found.fits is None


def test_micro_batches_and_stragglers() -> None:
    batch = torch.empty(50, 10), torch.empty(50, 10)
    once, thrice, slow = (
        cf.simulate(linear(10), batch, mesh={"dp": 4}, machine=TOY, loss_fn=nn.functional.mse_loss,
                    way="megatron", **more)
        for more in ({}, {"accumulate": 3}, {"spread": 0.1})
    )  # fmt: skip
    assert thrice.seconds - once.seconds == pytest.approx(2 * once.spent["products"])
    assert thrice.tokens == 3 * once.tokens == 600
    assert slow.seconds / once.seconds == pytest.approx(1 + 0.1 * 1.0294, rel=1e-3)  # the largest of four draws


def test_a_host_that_launches_slowly_is_waited_for() -> None:
    slow = dataclasses.replace(TOY, launching=Launching(1.0))
    batch = torch.empty(50, 10), torch.empty(50, 10)
    found = cf.simulate(linear(10), batch, mesh={"dp": 1}, machine=slow, loss_fn=nn.functional.mse_loss)
    assert found.bound_by == "launches" and found.seconds == pytest.approx(found.bounds["launches"], rel=0.05)


@pytest.mark.parametrize("way", WAYS)
def test_quick_seconds_are_those_of_the_timeline(way: str) -> None:
    machine = preset("h100-cluster")
    forecaster = Forecaster(tower(4, 64), tokens())
    mesh = {"dp": 8, "tp": 2}
    on_mesh = machine.on_mesh(mesh)
    built = forecaster._build(Setting(mesh, way_named(way)), on_mesh)
    assert built.last.seconds(on_mesh) == pytest.approx(built.last.timeline(on_mesh).seconds, rel=1e-12)
    found = forecaster.forecast(Setting(mesh, way_named(way)), machine)
    assert sum(found.spent.values()) == pytest.approx(found.seconds, rel=1e-9)


def test_sharding_layers_needs_less_memory_and_resharding_less_still() -> None:
    model, batch = tower(24, 256), tokens(1, 8)
    needed = {way: cf.simulate(model, batch, mesh={"dp": 8}, way=way).memory for way in ("ddp", "fsdp-kept", "fsdp")}
    assert needed["fsdp"].parameters * 8 == pytest.approx(needed["ddp"].parameters, rel=0.01)
    assert needed["fsdp"].bytes < needed["fsdp-kept"].bytes < needed["ddp"].bytes


def test_each_layer_is_gathered_twice_and_scattered_once() -> None:
    found = cf.simulate(tower(6), tokens(), mesh={"dp": 4}, way="fsdp")
    kinds = [travel.kind for travel in found.timeline.communication]
    assert kinds.count("all_gather") == 6 + 6 + 2 and kinds.count("reduce_scatter") == 6 + 2
    kept = cf.simulate(tower(6), tokens(), mesh={"dp": 4}, way="fsdp-kept")
    assert [travel.kind for travel in kept.timeline.communication].count("all_gather") == 6 + 2


def test_on_cpus_fsdp_waits_for_each_collective() -> None:
    """FSDP2 itself waits there: nothing of what it exchanges is hidden."""
    model, batch = tower(6), tokens()
    for device, hidden in (("cuda", True), ("cpu", False)):
        machine = dataclasses.replace(preset("h100-nvlink-node"), device=device, launching=Launching())
        for way in ("fsdp", "fsdp-kept"):
            found = cf.simulate(model, batch, mesh={"dp": 4}, way=way, machine=machine)
            travels = found.timeline.communication
            taken = [travel.finish - travel.start for travel in travels]
            overlapped = [travel.exposed < 0.99 * took for travel, took in zip(travels, taken, strict=True)]
            assert overlapped and any(overlapped) == hidden


def test_recomputing_layers_takes_their_forward_again_and_frees_memory() -> None:
    program = capture_model(tower(6, 64), tokens(16, 64)).program
    full = run_passes(program, [RecomputeLayers()])
    some = run_passes(program, [RecomputeLayers(keep="products")])
    peaks = [memory_curve(each).peak for each in (full, some, program)]
    assert peaks == sorted(peaks) and peaks[0] < 0.8 * peaks[2]
    products = [sum("mm" in str(node.target) for node in each.graph.nodes) for each in (program, full)]
    assert products[1] - products[0] == 6  # the second product of a block is not needed again
    seconds = [Prepared.of(each, {}).timeline(preset("a100-node")).seconds for each in (program, some, full)]
    assert seconds == sorted(seconds)


def test_compiled_operators_read_and_write_less() -> None:
    model, batch = tower(4, 1024), tokens(32, 512)
    eager, fused = (cf.simulate(model, batch, mesh={"dp": 1}, compiled=compiled) for compiled in (False, True))
    assert fused.bounds["memory"] < 0.99 * eager.bounds["memory"]
    assert fused.bounds["products"] == eager.bounds["products"]
    assert fused.bounds["launches"] < eager.bounds["launches"]


def test_what_helps_is_what_binds() -> None:
    batch = torch.empty(64, 4096, device="meta"), torch.empty(64, 4096, device="meta")
    model = nn.Sequential(*(linear(4096) for _ in range(4)))
    found = cf.simulate(model, batch, mesh={"dp": 64}, loss_fn=nn.functional.mse_loss, way="megatron")
    assert found.bound_by == "links"
    slow = dataclasses.replace(preset("h100-cluster"), name="slow", network=dataclasses.replace(
        preset("h100-cluster").network, between=Wire(1e-5, 1e9)))  # fmt: skip
    found = cf.simulate(model, batch, mesh={"dp": 64}, machine=slow, loss_fn=nn.functional.mse_loss, way="megatron")
    assert found.helps[0].what == "twice the network between nodes"
    assert len(found.helps) <= 3 and found.mfu is not None and found.mfu < 0.1


def test_rings_of_many_nodes_are_bound_by_their_latency() -> None:
    batch = torch.empty(64, 1024, device="meta"), torch.empty(64, 1024, device="meta")
    model = nn.Sequential(*(linear(1024) for _ in range(4)))
    found = cf.simulate(model, batch, mesh={"dp": 16384}, loss_fn=nn.functional.mse_loss, way="fsdp")
    assert found.helps[0].what == "half the latency of the links inside nodes"  # seven of eight steps of a ring
    assert found.helps[0].seconds > 0.2 * found.seconds


def test_a_sweep_over_gpus_and_bandwidth() -> None:
    forecaster = Forecaster(tower(4, 512), tokens(8, 128))
    settings = [(Setting({"dp": 8}, way_named(way)), preset("h100-cluster")) for way in ("ddp", "megatron")]
    weak = sweep(forecaster, settings, Sweep.read("gpus=8..64"))
    assert [(point.curve.split()[0], point.forecast.gpus) for point in weak] == [
        (way, gpus) for way in ("ddp", "megatron") for gpus in (8, 16, 32, 64)
    ]
    by_bandwidth = sweep(forecaster, [(Setting({"dp": 64}, way_named("megatron")), settings[0][1])],
                         Sweep.read("bandwidth=0.5,1,2"))  # fmt: skip
    seconds = [point.forecast.seconds for point in by_bandwidth]
    assert seconds == sorted(seconds, reverse=True)
    lines = to_csv(weak).splitlines()
    assert lines[0].startswith("curve,value,gpus,step_seconds") and len(lines) == 9
    strong = [(dataclasses.replace(settings[0][0], accumulate=8), settings[0][1])]
    tokens_of_all = {point.forecast.tokens for point in sweep(forecaster, strong, Sweep.read("gpus=8..64"), "strong")}
    assert tokens_of_all == {8 * 128 * 8 * 8}


def test_figures_are_json() -> None:
    found = cf.simulate(tower(3), tokens(), mesh={"dp": 2}, name="tower")
    plain = json.loads(found.to_json())
    assert plain["model"] == "tower" and plain["gpus"] == 2 and math.isfinite(plain["step_seconds"])


BUILD = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
def asks():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
        def forward(self, x, y):
            return x.float().sum() if x.sum().item() > 0 else self.weight.sum()
    return Asks(), (torch.zeros(2, 4), torch.zeros(2, 4))
def nothing():
    return None
"""


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(BUILD)
    source = source_of(f"{file}:build", "2x8")
    assert source.tokens == 16
    assert cf.simulate(source.model, source.batch, mesh={"dp": 2}, loss_fn=source.loss_fn).seconds > 0
    for kind, message, attempt in (
        (MachineError, "no machine named", lambda: cf.simulate(tower(3), tokens(), mesh={"dp": 2}, machine="h10")),
        (MeshError, "a mesh of", lambda: cf.simulate(tower(3), tokens(), mesh={"pp": 2})),
        (MeshError, "no way to run", lambda: cf.simulate(tower(3), tokens(), mesh={"dp": 2}, way="fast")),
        (MeshError, "recompute=", lambda: cf.simulate(tower(3), tokens(), mesh={"dp": 2}, recompute="all")),
        (MeshError, "a sweep of", lambda: Sweep.read("gpus=a")),
        (ModelError, "has no function", lambda: source_of(f"{file}:other", "2x8")),
        (ModelError, "returned NoneType", lambda: source_of(f"{file}:nothing", "2x8")),
        (CrossfadeError, "a batch of", lambda: source_of(f"{file}:build", "2by8")),
    ):
        with pytest.raises(kind, match=message):
            attempt()  # type: ignore[no-untyped-call]
    asks = source_of(f"{file}:asks", "2x4")
    with pytest.raises(CaptureError, match="Remedy"):
        cf.simulate(asks.model, asks.batch, mesh={"dp": 2})
    asked = Forecaster(tower(3), tokens())
    with pytest.raises(MeshError, match="GPUs"):
        sweep(asked, [(Setting({"dp": 1, "tp": 2}, way_named("ddp")), TOY)], Sweep.read("gpus=3"))


@pytest.mark.parametrize("text", ["gpus=nan", "gpus=inf", "gpus=1.5", "gpus=8..4", "gpus=-1", "cats=1", "bandwidth=0"])
def test_a_sweep_of_nonsense_is_refused(text: str) -> None:
    with pytest.raises(MeshError, match="a sweep of"):
        Sweep.read(text)


def test_what_a_users_code_raises_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def raises():\n    raise KeyError('no')\ndef five():\n    return 1, 2, 3, 4, 5\n")
    for kind, message, attempt in (
        (ModelError, "raised KeyError", lambda: source_of(f"{file}:raises", "1x8")),
        (ModelError, "returned int, int", lambda: source_of(f"{file}:five", "1x8")),
        (CaptureError, "reduction dim", lambda: cf.simulate(linear(4), (torch.ones(2, 5), torch.ones(2, 4)),
                                                     mesh={"dp": 1}, loss_fn=nn.functional.mse_loss)),
        (MachineError, "spread", lambda: cf.simulate(linear(4), (torch.ones(2, 4),) * 2, mesh={"dp": 1},
                                                     loss_fn=nn.functional.mse_loss, spread=math.nan)),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            attempt()  # type: ignore[no-untyped-call]
    file.write_text("def build(:")
    with pytest.raises(ModelError, match="raised SyntaxError"):
        source_of(f"{file}:build", "1x8")
    for text, message in (("[1]", "a list"), ("{", "not JSON"), ("{}", "no model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            source_of(str(tmp_path / "config.json"), "1x8")


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_sizes_that_do_not_divide_are_padded_and_layers_still_repeat(ranks: int) -> None:
    words, width, layers, rows = 32, 16, 5, 4 * 8
    captured = capture_model(tower(layers, width), tokens(), ranks=ranks)
    assert captured.layers is not None and captured.layers.count == layers
    made = captured.program
    vocabulary, middle = -(-words // ranks), -(-4 * width // ranks)
    sizes = {item.name: tuple(node.meta["val"].shape) for item, node in made.named_inputs()}
    assert sizes["words.weight"] == sizes["head.weight"] == (vocabulary, width)
    assert all(sizes[f"blocks.{index}.up.weight"] == (middle, width) for index in range(layers))
    products = sum(flops_of(node) for node in made.graph.nodes if "mm" in str(node.target))
    # forward and both gradients of each product, of which every rank has as much
    assert products == 3 * 2 * rows * width * (vocabulary + layers * 2 * middle)
