"""What the walk over a program says: once for each value and reason, however much lies between."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossfade.shard.tensor.localize import Request, localize
from crossfade.shard.tensor.plan import Plan


class Net(nn.Module):
    """One split value that many operators need whole, with others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        others = [(y * index).softmax(-1) for index in range(2, 14)]
        return torch.stack([y.softmax(-1), *others, y.softmax(-1)])


def test_a_value_that_is_gathered_for_many_is_told_once() -> None:
    exported = torch.export.export(Net(), (torch.ones(2, 4),))
    verdicts = localize(exported, Plan({"up": "colwise"}).resolve(exported, 2), 2, "tp", Request()).verdicts
    gathered = [one.subject for one in verdicts if one.reason == "gathered"]
    assert len(gathered) == 13 and len(set(gathered)) == 13
