"""Plans of what is made of convolutions: pairs, what passes between them, what is in no pair; equal to one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossfade.shard.tensor.localize import LocalProgram, Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.lockstep import run_ranks


def split(model: nn.Module, x: Tensor, singles: bool = False) -> tuple[Plan, LocalProgram]:
    """The plan for a model, and its program on two ranks, which computes what the model does."""
    exported = torch.export.export(model.eval(), (x,))
    plan = Plan.megatron(exported, singles=singles)
    local = localize(exported, plan.resolve(exported, 2), 2, "tp", Request())
    for (found,) in run_ranks(local, exported.state_dict, [x]):
        torch.testing.assert_close(found, model(x))
    return plan, local


def collectives(local: LocalProgram) -> list[str]:
    """The names of those that exchange something, in order."""
    called = [getattr(node.target, "__name__", "") for node in local.exported.graph.nodes]
    return [name.partition(".")[0] for name in called if name.startswith(("tp_reduce", "tp_gather", "tp_scatter"))]


class Block(nn.Module):
    """A bottleneck as ResNet has it: narrow, wide, and added to what came in."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.enter, self.middle = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
        self.leave = nn.Conv2d(16, 8, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.BatchNorm2d(8)])
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.enter(x)).relu()
        y = self.norms[1](self.middle(y)).relu()
        return x + self.norms[2](self.leave(y))


def test_convolutions_pair_through_a_norm() -> None:
    plan, local = split(Block(), torch.randn(2, 8, 6, 6))
    assert plan == Plan({"enter": "colwise", "middle": "rowwise"})
    assert collectives(local) == ["tp_reduce"]
    assert plan.notes == ("leave.weight stays whole: no other projection contracts over what it puts out",)


def test_what_is_in_no_pair_is_split_if_asked() -> None:
    plan, local = split(Block(), torch.randn(2, 8, 6, 6), singles=True)
    assert plan == Plan({"enter": "colwise", "middle": "rowwise", "leave": "colwise_gather_output"})
    assert collectives(local) == ["tp_reduce", "tp_gather"]
    assert plan.notes == ()


def test_groups_of_channels_pass_and_are_split_with_the_pair() -> None:
    plan, local = split(Block(groups=4), torch.randn(2, 8, 6, 6))
    assert plan == Plan({"enter": "colwise", "middle": "colwise", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


def test_each_channel_by_itself_is_split_with_the_pair() -> None:
    plan, local = split(Block(groups=16), torch.randn(2, 8, 6, 6))
    assert plan == Plan({"enter": "colwise", "middle": "colwise", "leave": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


class Narrowing(nn.Module):
    """Pooling, resizing and norms over groups of channels between two convolutions, the second transposed."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.GroupNorm(groups, 16)
        self.last = nn.ConvTranspose2d(16, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.norm(self.first(x)), 2)
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear")
        return self.last(y)


def test_pools_sizes_and_groups() -> None:
    plan, local = split(Narrowing(4), torch.randn(2, 3, 10, 10))
    assert plan == Plan({"first": "colwise", "last": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


def test_one_group_of_all_channels_needs_them_whole() -> None:
    plan, _ = split(Narrowing(1), torch.randn(2, 3, 10, 10))
    assert plan == Plan({})


def test_a_linear_layer_and_a_convolution_pair() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Conv1d(16, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu().transpose(1, 2))

    plan, local = split(Mixed(), torch.randn(2, 5, 8))
    assert plan == Plan({"up": "colwise", "down": "rowwise"})
    assert collectives(local) == ["tp_reduce"]


class Positions(nn.Module):
    """Words and positions, as encoders add them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(32, 16), nn.Embedding(24, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))


def test_tables_of_positions_are_split_by_width_if_asked() -> None:
    exported = torch.export.export(Positions(), (torch.ones(2, 5, dtype=torch.int64),))
    assert Plan.megatron(exported, vocab=True) == Plan({"words": "embedding_rowwise"})
    assert Plan.megatron(exported, vocab=True, singles=True) == Plan(
        {"words": "embedding_rowwise", "places": "embedding_colwise"}
    )
    plan, local = split(Positions(), torch.arange(10).view(2, 5), singles=True)
    assert plan == Plan({"words": "embedding_colwise", "places": "embedding_colwise"})
    assert collectives(local) == ["tp_gather", "tp_gather"]
