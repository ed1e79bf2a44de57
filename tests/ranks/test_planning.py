"""Steps planned for a machine: the same training, within the memory limit; and what cannot be planned says so."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf
import crossfade.compile.overlap
from crossfade.cost.estimate import computes
from crossfade.cost.keys import Keys
from crossfade.errors import CrossfadeError, MemoryLimitError
from crossfade.graph import collectives
from tests.models.choice import some
from tests.ranks.cases import PLANNED, batches, start, train_crossfade_on_ranks, train_eager
from tests.ranks.test_training_on_ranks import differences

NAME = "tied weights"


@pytest.mark.ranks
@pytest.mark.parametrize("machine", some(["ethernet-1gbit", "h100-nvlink-node"], often=["ethernet-1gbit"]))
@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "zero3"])
def test_planned_training_equals_one_device(ranks: Any, mode: str, machine: str) -> None:
    name = "gpt with dropout" if mode == "zero3" else NAME
    options = {"data_parallel": mode, "machine": machine}
    for trained in ranks(2).run(train_crossfade_on_ranks, name, 2, options):
        assert differences(train_eager(name), trained, *PLANNED) == []


def plan(mode: str, machine: Any, **options: Any) -> cf.Step:
    case, model, optimizer = start(NAME, "")
    mesh = {"dp": dist.get_world_size()}
    step = cf.compile_step(
        model, case.loss, optimizer, mesh, data_parallel=mode, machine=machine, timeout=20, **options
    )
    return step.prepare(*batches(case, 1)[0])


def calibrated() -> tuple[str, float]:
    step = plan("zero3", "calibrate")
    return str(step.program), step.report.predicted.seconds


@pytest.mark.ranks
def test_ranks_agree_on_what_they_measured(ranks: Any) -> None:
    (first, seconds), (second, _) = ranks(2).run(calibrated)
    assert first == second
    assert 0 < seconds < math.inf


def with_gelu(slow: bool, limit: int | None) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether gelu's gradient is written as its parts; a trained weight, and the same trained by one device."""

    def as_if(program: Any, lowering: Any, **options: Any) -> dict[str, float]:
        """Each operator takes a microsecond; that gradient a hundred, or as long as the others."""
        keys = Keys()
        found = {keys.of(node): 1e-6 for node in program.graph.nodes if computes(node)}
        return {key: 1e-4 if slow and "gelu_backward" in key else seconds for key, seconds in found.items()}

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    ours, theirs = model(), model()
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossfade.compile.overlap, "measured_as_run", as_if)
        mine = torch.optim.SGD(ours.parameters(), lr=0.1)
        options = {"machine": "ethernet-1gbit", "memory_limit": limit, "timeout": 20}
        step = cf.compile_step(ours, nn.functional.mse_loss, mine, {"dp": 2}, **options)
        step(x, y)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    nn.functional.mse_loss(theirs(x), y).backward()
    other.step()
    return "gelu_backward" not in str(step.program), ours[0].weight.detach(), theirs[0].weight.detach()


@pytest.mark.ranks
@pytest.mark.parametrize(("slow", "limit"), [(True, None), (False, None), (True, 10**6)])
def test_an_operator_slower_than_its_parts_is_spelled_out_unless_memory_is_limited(
    ranks: Any, slow: bool, limit: int | None
) -> None:
    for spelled_out, found, expected in ranks(2).run(with_gelu, slow, limit):
        assert spelled_out == (slow and limit is None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def with_large_updates(mode: str, limit: int | None) -> tuple[int, Any, torch.Tensor]:
    """How many updates are fused; a weight after five steps, and the same trained by one device."""

    def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(400, 400)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    (ours, mine), (theirs, other) = start(), start()
    x, y = torch.randn(4, 400), torch.randn(4, 400)
    options = {"machine": "ethernet-1gbit", "memory_limit": limit, "data_parallel": mode, "timeout": 20}
    step = cf.compile_step(ours, nn.functional.mse_loss, mine, {"dp": 2}, **options)
    for _ in range(5):
        step(x, y)
        other.zero_grad()
        nn.functional.mse_loss(theirs(x), y).backward()
        other.step()
    with step.gathered():
        return str(step.program).count("crossfade.adam_"), ours.weight.detach().clone(), theirs.weight.detach()


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "limit"), [("replicate", None), ("zero2", None), ("zero2", 10**8)])
def test_large_updates_are_fused_unless_memory_is_limited(ranks: Any, mode: str, limit: int | None) -> None:
    for fused, found, expected in ranks(2).run(with_large_updates, mode, limit):
        assert fused == (1 if limit is None else 0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # of five updates of 1e-2 each


def refusal(limit: int) -> str:
    try:
        plan("zero3", "ethernet-1gbit", memory_limit=limit)
    except MemoryLimitError as error:
        return str(error)
    return "fits"


def refusals() -> tuple[str, str]:
    """What is said to a tiny limit, and to the least limit that this names."""
    tiny = refusal(1000)
    return tiny, refusal(int(re.findall(r"at least (\d+)", tiny)[0]))


@pytest.mark.ranks
def test_a_limit_too_small_says_the_least_that_works(ranks: Any) -> None:
    for tiny, least in ranks(2).run(refusals):
        assert "expected at most 1,000, the memory limit" in tiny
        assert least == "fits"


def lowered(machine: str) -> list[str]:
    """The kinds of collectives that a planned step starts on gloo, and what they reduce by."""
    return sorted(
        {
            f"{collective.kind} {collective.reduce_op}"
            for collective in collectives.find(plan("zero2", machine).program.graph)
        }
    )


@pytest.mark.ranks
@pytest.mark.parametrize("machine", some(["ethernet-1gbit", "h100-nvlink-node"], often=["h100-nvlink-node"]))
def test_what_gloo_does_badly_is_lowered_whatever_the_machine(ranks: Any, machine: str) -> None:
    """Gloo averages nothing by itself, and its reduce-scatter sends twice what it need."""
    assert ranks(2).run(lowered, machine)[0] == ["all_gather None", "all_reduce sum", "all_to_all None"]


def different_machines() -> str:
    names = ["ethernet-1gbit", "h100-nvlink-node"]
    try:
        plan("zero3", names[dist.get_rank()])
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.ranks
def test_ranks_planning_for_different_machines_all_say_so(ranks: Any) -> None:
    for message in ranks(2).run(different_machines, timeout=60):
        assert message.startswith("RankMismatchError: different programs, first at line 1")
        assert "ethernet-1gbit" in message


def refused(options: dict[str, Any]) -> str:
    try:
        plan("replicate", **options)
    except CrossfadeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.ranks
def test_what_cannot_be_planned_is_refused(ranks: Any) -> None:
    typo = ranks(2).run(refused, {"machine": "ethernet-1gbt"})
    assert all("did you mean ethernet-1gbit" in message for message in typo)
    limit = ranks(2).run(refused, {"machine": None, "memory_limit": 10})
    assert all("without a machine to plan for" in message for message in limit)


def refused_then_trained() -> tuple[float, list[str], set[str]]:
    """The loss after a batch that all ranks refuse; the collectives that the final program starts, as its prediction
    has them; and those that the plan judged."""
    case, model, optimizer = start(NAME, "")
    options = {"data_parallel": "zero3", "machine": "ethernet-1gbit", "timeout": 20}
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 2}, **options)
    batch = batches(case, 1)[0]
    with pytest.raises(CrossfadeError, match="a batch of 0 samples"):
        step(*(part[:0] for part in batch))
    loss = float(step(*batch))
    predicted = [collective.name for collective in step.report.predicted.communication]
    assert predicted == [collective.node.name for collective in collectives.find(step.program.graph)]
    judged = {verdict.subject for name, verdict in step.report.verdicts if name == "overlap-communication"}
    return loss, predicted, judged


@pytest.mark.ranks
def test_a_refused_batch_does_not_spoil_the_next_and_every_collective_has_a_verdict(ranks: Any) -> None:
    everywhere = ranks(2).run(refused_then_trained)
    assert everywhere[0] == everywhere[1]
    _, predicted, judged = everywhere[0]
    kinds = Counter(name.rstrip("_0123456789") for name in judged)
    kinds["all_to_all_single"] = kinds.pop("reduce_scatter_tensor")  # as gloo is given them in the end
    assert Counter(name.rstrip("_0123456789") for name in predicted) == kinds


def test_one_device_needs_no_plan() -> None:
    case, model, optimizer = start("mlp", "")
    with pytest.raises(CrossfadeError, match="did you mean"):
        cf.compile_step(model, case.loss, optimizer, machine="loopback-glo")
    step = cf.compile_step(model, case.loss, optimizer, {"dp": 1}, machine="loopback-gloo", memory_limit=10**9)
    assert float(step(*batches(case, 1)[0])) > 0
    assert step.report.facts["memory limit"] == "1,000,000,000 bytes; not kept: on one device nothing is scheduled"
