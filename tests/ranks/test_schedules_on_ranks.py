"""What the check says of schedules, tried on real ranks: what fits runs, what deadlocks does hang."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import crossfade as cf
from crossfade.check.findings import FindingKind
from crossfade.errors import StrictError
from crossfade.graph import collectives
from tests.check.small_ranks import program

HUNG = 5.0
"""Seconds that a collective may take before a rank counts as hung, where it should be; a busy machine may be slow."""

ONE = ("reduce a dp sum 4", "wait a")
OTHER = ("reduce b tp sum 4", "wait b")
TWO = ("reduce a dp sum 4", "reduce b tp sum 4", "wait b", "wait a")
PAIRS = {
    "two groups in one order": ((*ONE, *OTHER), (*ONE, *OTHER), None),
    "two groups in opposite orders": ((*ONE, *OTHER), (*OTHER, *ONE), FindingKind.DEADLOCK),
    "launched in opposite orders": (TWO, (TWO[1], TWO[0], *TWO[2:]), None),
    "one rank ends": ((*ONE, "reduce c dp sum 4", "wait c"), ONE, FindingKind.NUMBER),
    "a message": (("send a pp 1, 0 4", "wait a"), ("recv a pp 0, 0 4", "wait a"), None),
    "messages by tag": (
        ("send a pp 1, 0 4", "send b pp 1, 1 8", "wait a", "wait b"),
        ("recv b pp 0, 1 8", "wait b", "recv a pp 0, 0 4", "wait a"),
        None,
    ),
    "both receive first": (
        ("recv a pp 1, 0 4", "wait a", "send b pp 1, 0 4", "wait b"),
        ("recv a pp 0, 0 4", "wait a", "send b pp 0, 0 4", "wait b"),
        FindingKind.DEADLOCK,
    ),
    "uneven splits": (
        ("exchange a dp [1, 2], [1, 3] 4", "wait a"),
        ("exchange a dp [3, 1], [2, 1] 3", "wait a"),
        None,
    ),
}


def run_rank(rows: tuple[tuple[str, ...], ...], limit: float) -> str:
    """Run this rank's events on groups of their own, whose collectives fail after the limit."""
    groups = {name: dist.new_group(timeout=timedelta(seconds=limit)) for name in ("dp", "tp", "pp")}
    mine = program(*rows[dist.get_rank()])
    collectives.rename_groups(mine.graph.nodes, {name: group.group_name for name, group in groups.items()})
    inputs = [torch.ones(node.meta["val"].shape) for node in mine.placeholders]
    try:
        mine.module()(*inputs)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("name", PAIRS)
def test_ranks_do_what_the_check_says(name: str, ranks: Callable[[int], cf.Ranks]) -> None:
    *rows, problem = PAIRS[name]
    found = cf.check_compatible(
        [program(*row) for row in rows], dict.fromkeys(("dp", "tp", "pp"), (0, 1)), backend="gloo"
    )
    assert [finding.problem for finding in found.findings] == ([problem] if problem else [])
    said = ranks(2).run(run_rank, tuple(rows), HUNG if problem else 60.0)
    assert (said == ["", ""]) == found.ok, said
    if problem is FindingKind.DEADLOCK:
        assert all("imed out" in message or "closed" in message or "reset" in message for message in said), said


def held_to_it(data_parallel: str, strict: str) -> tuple[str, bool]:
    """What a strict step says on this rank, and whether the model is as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile_step(
        model,
        F.mse_loss,
        optimizer,
        {"dp": 2},
        data_parallel=data_parallel,
        strict=strict,
        timeout=60,  # type: ignore[arg-type]
    )
    try:
        step(torch.ones(4, 4), torch.ones(4, 2))
    except StrictError as error:
        with step.gathered():
            same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return str(error), same
    return "", False


@pytest.mark.ranks
def test_all_ranks_hear_what_falls_short_before_they_train(ranks: Callable[[int], cf.Ranks]) -> None:
    said = ranks(2).run(held_to_it, "zero3", "no-gather:weights")
    assert said[0] == said[1]
    message, same = said[0]
    assert same
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert f"[{name}]: {name} is gathered from all ranks of dp (remedy: keep it whole on every rank" in message
    assert ranks(2).run(held_to_it, "replicate", "no-gather:weights bucketed:gradients") == [("", False)] * 2
