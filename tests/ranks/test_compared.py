"""What ranks compare, for which settings: each by the digest that changes with it, and only where it must be alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from crossfade.graph.text import parse
from crossfade.ranks import compared
from crossfade.ranks.members import Members

DRAWS = 'x: f32[4] = input("x")\ndrop: f32[4] = aten.rand_like(x)\nreturn output("y", drop)'
PLAIN = 'x: f32[4] = input("x")\nneg: f32[4] = aten.neg(x)\nreturn output("y", neg)'
BATCH = (torch.arange(4.0), torch.tensor(3))


def names(text: str = PLAIN, members: Members | None = None, by_plan: bool = False, **options: Any) -> list[str]:
    """The names of what is compared in one group."""
    model = nn.Linear(2, 2)
    settings: Any = {"every": 1, "whole_batch": True, "replicated": False, "one_stream": True, **options}
    found = compared.comparisons(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        parse(text),
        [("dp", members or Members((0, 1), 0, 1.0), by_plan)],
        reduce_op="avg",
        **settings,
    )
    return [invariant.name for comparison in found for invariant in comparison.invariants]


RATES = "a learning rate, or another number of the optimizer,"
ALWAYS = ["the program", "a batch", RATES]
COPIES, STREAM = "a parameter, or its optimizer state,", "the random generator's state"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ALWAYS),
        ({"replicated": True}, [*ALWAYS, COPIES]),
        ({"replicated": True, "by_plan": True}, ALWAYS),
        ({"whole_batch": False}, ["the program", "batch", RATES, "the size of a part of the batch"]),
        ({"whole_batch": False, "by_plan": True}, ALWAYS),
        ({"text": DRAWS}, [*ALWAYS, STREAM]),
        ({"text": DRAWS, "one_stream": False}, ALWAYS),
        ({"numbers": ["batch[1]"]}, ALWAYS),
        (
            {"numbers": ["batch[1]"], "whole_batch": False},
            [
                "the program",
                "batch",
                RATES,
                "the size of a part of the batch",
                "batch[1], a number that the loss depends on,",
            ],
        ),
        ({"every": 0}, []),
        ({"members": Members((0, 1), 0, 1.0, alone=True)}, []),
    ],
    ids=str,
)
def test_what_is_compared(options: dict[str, Any], expected: list[str]) -> None:
    assert names(**options) == expected


def test_digests_change_with_what_they_are_of() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.bias]["momentum_buffer"] = torch.ones(2)
    changes: dict[Any, Any] = {
        compared.same_batch(): lambda: BATCH[0].add_(1),
        compared.own_batch(): lambda: BATCH[0].add_(1),
        compared.shared_numbers(["batch[1]"]): lambda: BATCH[1].add_(1),
        compared.rates(optimizer): lambda: optimizer.param_groups[0].update(lr=0.2),
        compared.random_stream(model): lambda: torch.rand(1),
    }
    for invariant, change in changes.items():
        before = invariant.digest(BATCH, 0)
        assert invariant.digest(BATCH, 0) == before, invariant.name
        change()
        assert invariant.digest(BATCH, 0) != before, invariant.name


def test_copies_are_compared_in_turn_with_their_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.bias]["momentum_buffer"] = torch.ones(2)
    copies = compared.replicas(model, optimizer)
    assert [copies.words(step) for step in range(3)] == [
        "weight sums up to", "bias sums up to", "weight sums up to",
    ]  # fmt: skip
    weight, bias = (copies.digest(BATCH, step) for step in range(2))
    optimizer.state[model.bias]["momentum_buffer"][1] = 2.0
    assert copies.digest(BATCH, 0) == weight and copies.digest(BATCH, 1) != bias


def test_what_comparing_costs_is_said_in_bytes_and_time() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"reduce_op": "avg", "whole_batch": True, "replicated": False, "one_stream": False}
    among = [("dp", Members((0, 1), 0, 1.0), False)]
    found = compared.comparisons(model, optimizer, parse(PLAIN), among, every=5, **options)
    said = compared.cost_of_comparing(found, BATCH)["ranks compared"]
    assert said.startswith("every 5 steps: 72 bytes beside the loss, ")  # three digests of three pairs of float32
    assert compared.cost_of_comparing([], BATCH) == {}
