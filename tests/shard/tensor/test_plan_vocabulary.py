"""Tables as long as the vocabulary that tokens do not look up stay whole; programs are sharded more than once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import crossfade as cf
from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan
from tests.shard.tensor.lockstep import run_ranks

WORDS, WIDTH = 32, 8


class Positions(nn.Module):
    """Three tables of one length: of tokens, of positions counted from the shape, and one that is sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.scales = (nn.Embedding(WORDS, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        return self.head(x * self.scales.weight[:length])


def test_only_tables_of_tokens_are_split() -> None:
    tokens = torch.randint(0, WORDS, (2, 5))
    model = Positions()
    exported = torch.export.export(model, (tokens,))
    plan = Plan.megatron(exported, vocab=True)
    assert plan == Plan({"words": "embedding_rowwise", "head": "colwise_gather_output"})
    split = localize(exported, plan.resolve(exported, 2), 2, "tp", Request())
    for (found,) in run_ranks(split, exported.state_dict, [tokens]):
        torch.testing.assert_close(found, model(tokens))


class Counted(nn.Module):
    """Sizes that are read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        high, wide = (size.item() for size in sizes.unbind(0))
        torch._check(high >= 1)
        torch._check(wide >= 1)
        return self.down(torch.relu(self.up(x))) + torch.ones(high, wide).sum()


def test_a_program_with_sizes_from_data_is_split_twice() -> None:
    exported = torch.export.export(Counted(), (torch.randn(3, WIDTH), torch.tensor([2, 3])))
    for _ in range(2):
        assert cf.shard(exported, {"tp": 2}, rank=0).collectives() == {"all-reduce": (1, 3 * WIDTH * 4)}


class Twisted(nn.Module):
    """Heads and positions swapped in memory: a view of the whole that is none of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(x).view(*x.shape[:2], 4, 4).transpose(1, 2).contiguous().transpose(1, 2)
        return self.down(inside.reshape(*x.shape[:2], 16))


def test_views_of_the_whole_that_parts_do_not_have() -> None:
    x, model = torch.randn(2, 1, WIDTH), Twisted()
    exported = torch.export.export(model, (x,)).run_decompositions()
    split = localize(exported, Plan({"up": "colwise", "down": "rowwise"}).resolve(exported, 2), 2, "tp", Request())
    for (found,) in run_ranks(split, exported.state_dict, [x]):
        torch.testing.assert_close(found, model(x))
