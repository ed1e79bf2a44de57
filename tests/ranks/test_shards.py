"""What one rank keeps of a model in parts: its rows and the padding, in any rank's place; the world is emulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from crossfade import emulated
from crossfade.cost.presets import preset
from crossfade.errors import ModelError
from crossfade.ranks.shards import Shards

MACHINE = preset("ethernet-1gbit")


def on_rank(rank: int, what: Callable[[Shards], None], **options: bool) -> None:
    """Call something with the shards of a layer of five rows on one of three ranks: two, two and one of them."""
    with emulated.world(MACHINE, ranks=3, rank=rank):
        model = nn.Linear(2, 5)
        with torch.no_grad():
            model.weight.copy_(torch.arange(10.0).view(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model.bias]["momentum_buffer"] = torch.arange(5.0)
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        what(Shards(model, optimizer, mesh, **options))


@pytest.mark.parametrize(
    ("rank", "rows", "own"),
    [(0, [[0, 1], [2, 3]], 2), (1, [[4, 5], [6, 7]], 2), (2, [[8, 9], [0, 0]], 1)],
)
def test_each_rank_keeps_as_many_rows_and_shows_its_own(rank: int, rows: list[list[float]], own: int) -> None:
    def check(shards: Shards) -> None:
        shards.split_all_but(["bias"])
        weight = shards.model.weight
        assert shards.parameter("weight").tolist() == rows
        assert isinstance(weight, DTensor) and weight.shape == (5, 2) and weight.to_local().tolist() == rows[:own]
        assert not isinstance(shards.model.bias, DTensor) and shards.whole == ("bias",)
        assert (shards.has("weight"), shards.has("bias")) == (True, False)
        assert shards.optimizer.param_groups[0]["params"] == [weight, shards.model.bias]

    on_rank(rank, check)


def test_optimizer_state_is_split_also_where_the_parameter_is_not() -> None:
    def check(shards: Shards) -> None:
        entries = shards.optimizer.state[shards.model.bias]
        assert shards.state("bias", "momentum_buffer").tolist() == [4.0, 0.0]
        assert entries["momentum_buffer"].to_local().tolist() == [4.0]
        entries["momentum_buffer"] = torch.arange(5.0) * 2  # as Optimizer.load_state_dict replaces it
        assert shards.state("bias", "momentum_buffer").tolist() == [8.0, 0.0]
        entries["step"] = torch.tensor(3.0)
        assert shards.state("bias", "step") is entries["step"]

    on_rank(2, check)


def test_state_that_a_first_step_made_is_kept_in_parts_only_where_it_is_a_part() -> None:
    def check(shards: Shards) -> None:
        rows, step = torch.full((2, 2), 7.0), torch.tensor(1.0)
        shards.create_state("weight", {"momentum_buffer": rows, "step": step})
        entries = shards.optimizer.state[shards.model.weight]
        assert entries["momentum_buffer"].shape == (5, 2) and shards.state("weight", "momentum_buffer") is rows
        assert entries["step"] is step
        shards.create_state("weight", {"momentum_buffer": torch.zeros(2, 2)})
        assert shards.state("weight", "momentum_buffer") is rows

    on_rank(1, check)


@pytest.mark.parametrize("waits", [False, True])
def test_a_parameter_that_was_replaced_is_named(waits: bool) -> None:
    def check(shards: Shards) -> None:
        if not waits:
            shards.split_all_but([])
        shards.check()
        shards.model.bias = nn.Parameter(torch.ones(5))
        with pytest.raises(ModelError, match=f"bias was replaced {'before' if waits else 'after'} it was split"):
            shards.check()

    on_rank(0, check, will_split=waits)


def test_parts_to_capture_with_have_the_shapes_of_parts_and_no_memory_before_the_split() -> None:
    def check(shards: Shards) -> None:
        parts = shards.like_parts()
        assert {name: tuple(part.shape) for name, part in parts.items()} == {"weight": (2, 2), "bias": (2,)}
        assert all(part.untyped_storage().nbytes() == 4 for part in parts.values())
        shards.split_all_but(["bias"])
        assert shards.like_parts()["weight"] is shards.parameter("weight")

    on_rank(0, check)


def test_the_old_parameter_is_empty_afterwards() -> None:
    def check(shards: Shards) -> None:
        old: Tensor = shards.model.weight
        shards.split_all_but([])
        assert old.numel() == 0 and old.grad is None

    on_rank(0, check)
