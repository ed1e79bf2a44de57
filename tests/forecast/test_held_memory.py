"""Memory that a step holds, against sums written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade as cf
from crossfade.cost.allocator import MIB
from crossfade.forecast.capture import capture_model
from crossfade.forecast.held_memory import WORKSPACES, Kept, held_memory
from crossfade.graph.collectives import Kind
from crossfade.graph.text import parse
from tests.forecast.models import Tower, tokens

WIDE = 4 * MIB
STEP = f"""
w: f32[{WIDE}] = parameter("w")
x: f32[{WIDE}] = input("x")
a: f32[{WIDE}] = aten.mul.Tensor(w, x)
b: f32[{WIDE}] = aten.exp(a)
s: f32[] = aten.sum(b)
g: f32[{WIDE}] = aten.mul.Tensor(b, x)
return loss("loss", s), gradient("w", g)
"""


def test_parameters_state_gradients_and_the_updates_copies() -> None:
    size = 4 * WIDE
    kept = Kept([size], [2 * size])
    found = held_memory(parse(STEP), kept)
    # beside the parameter and its state: the product and its exponential, later the gradient and the update's copy
    assert found.alive == pytest.approx(WORKSPACES + size + 2 * size + 2 * size, abs=8)
    assert found.reserved == WORKSPACES + 2 * MIB + 5 * size  # a small tensor has a segment of 2 MB
    twice = held_memory(parse(STEP), Kept([size], [2 * size], micro_batches=3))
    assert twice.alive - found.alive == pytest.approx(size, abs=8)  # gradients of those before


def test_buckets_of_ddp_lie_beside() -> None:
    found = [held_memory(parse(STEP), Kept([4], [8], buckets=size)).alive for size in (0, 1000)]
    assert found[1] - found[0] == 1000


def test_fsdp_has_memory_for_gathers_and_scatters_of_its_own() -> None:
    width, layers, rows = 1024, 6, 512
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(layers)))
    batch = tuple(torch.empty(rows, width) for _ in range(2))
    found = cf.simulate(model, batch, mesh={"dp": 4}, loss_fn=nn.functional.mse_loss, expandable=True).memory
    weight = 4 * width * width
    assert found.parameters == layers * weight // 4 and found.optimizer == 2 * found.parameters
    # a part of every gradient stays, on a stream of its own; in the forward, two gathers are in flight at once
    assert found.bytes > WORKSPACES + 4 * found.parameters + 2 * weight
    segments = cf.simulate(model, batch, mesh={"dp": 4}, loss_fn=nn.functional.mse_loss).memory
    assert segments.at_peak == found.at_peak and segments.allocator != found.allocator


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_what_is_trained_in_half_precision_alone_keeps_no_copies(way: str) -> None:
    width, layers, ranks = 512, 4, 4
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
    batch = tuple(torch.empty(64, width, dtype=torch.bfloat16) for _ in range(2))
    mixed, alone = (
        cf.simulate(model, batch, mesh={"dp": ranks}, loss_fn=nn.functional.mse_loss, way=way, master=master)
        for master in (True, False)
    )
    count = layers * width * width // (ranks if way == "fsdp" else 1)
    assert (alone.memory.parameters, alone.memory.optimizer) == (2 * count, 4 * count)
    in_parts = (4 * count, 8 * count)  # the parts are the copies
    assert (mixed.memory.parameters, mixed.memory.optimizer) == (in_parts if way == "fsdp" else (2 * count, 12 * count))
    assert alone.spent["update"] < 0.6 * mixed.spent["update"]
    if way == "fsdp":  # gradients travel in two bytes instead of four
        sent = [[travel.bytes for travel in found.timeline.communication if travel.kind is Kind.REDUCE_SCATTER]
                for found in (mixed, alone)]  # fmt: skip
        assert sum(sent[0]) == 2 * sum(sent[1])


def test_selective_checkpointing_keeps_in_eager_mode_what_nothing_reads() -> None:
    layers, rows, width = 6, 8192, 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.mid, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.mid(torch.relu(self.up(x)))))

    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
    batch = tuple(torch.empty(rows, width) for _ in range(2))
    eager, compiled = (
        cf.simulate(model, batch, mesh={"dp": 1}, loss_fn=nn.functional.mse_loss, recompute="selective",
                    compiled=compiled).memory.at_peak
        for compiled in (False, True)
    )  # fmt: skip
    assert eager - compiled >= (layers - 1) * rows * width * 4  # `down` is every second product: its result is kept


def test_torchs_split_loss_holds_one_more_copy_of_the_logits() -> None:
    samples, length, words, ranks = 64, 64, 4096, 2
    with torch.device("meta"):
        model = Tower(3, 16, words)
    program = capture_model(model, tokens(samples, length), ranks=ranks).program
    ours, theirs = (held_memory(program, Kept([], [], own=own)).alive for own in (True, False))
    assert theirs - ours == pytest.approx(samples * length * words // ranks * 4, rel=0.01)
