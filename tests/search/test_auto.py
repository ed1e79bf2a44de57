"""A mesh that is found at the first batch: the same on all ranks, and the step trains as one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossfade as cf
from crossfade import Ranks
from crossfade.errors import CrossfadeError, MeshError
from tests.forecast.models import Tower

STEPS = 3


def job(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    model = Tower(1, 32)
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randint(32, (8, 8), generator=generator) for _ in range(2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), batch  # type: ignore[return-value]


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, batch = job()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def trained(machine: str, memory: float | None) -> dict[str, Any]:
    model, optimizer, batch = job()
    step = cf.compile_step(model, None, optimizer, mesh="auto", machine=machine, memory=memory)
    losses = [float(step(*batch)) for _ in range(STEPS)]
    with step.gathered() as whole:
        values = {name: value.detach().clone() for name, value in whole.named_parameters()}
    options = {name: value for name, value in step.found.options.items() if name != "machine"}
    best = step.found.best
    assert best.figures is not None and (memory is None or best.figures.memory <= memory == step.found.memory)
    return {"losses": losses, "values": values, "options": options, "table": str(step.found), "steps": step.steps}


@pytest.mark.parametrize(("count", "memory"), [(2, None), pytest.param(4, None, marks=pytest.mark.models), (4, 1.6e5)])
def test_it_trains_as_one_device_does(ranks: Callable[[int], Ranks], count: int, memory: float | None) -> None:
    told = ranks(count).run(trained, "ethernet-1gbit", memory)
    losses, values = alone()
    assert [each["options"] for each in told] == [told[0]["options"]] * count
    assert [each["table"] for each in told] == [told[0]["table"]] * count
    for each in told:
        assert each["losses"] == pytest.approx(losses, rel=1e-4) and each["steps"] == STEPS
        for name, value in values.items():
            torch.testing.assert_close(each["values"][name], value, rtol=1e-3, atol=1e-4)


def too_early() -> str:
    model, optimizer, _ = job()
    step = cf.compile_step(model, None, optimizer, mesh="auto", machine="loopback-gloo")
    found = []
    for ask in (lambda: step.save("folder"), lambda: step.found):
        try:
            ask()
        except CrossfadeError as error:
            found.append(str(error))
    return "\n".join(found)


def nothing_fits() -> None:
    model, optimizer, batch = job()
    cf.compile_step(model, None, optimizer, mesh="auto", machine="loopback-gloo", memory=10)(*batch)


def other_batches() -> None:
    model, optimizer, batch = job()
    own = tuple(value[: 8 - 4 * dist.get_rank()] for value in batch)
    cf.compile_step(model, None, optimizer, mesh="auto", machine="loopback-gloo")(*own)


@pytest.mark.models  # it takes a minute
def test_what_goes_wrong_is_told_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    assert all(
        "before its first batch" in said and said.count("step.prepare(*batch)") == 2 for said in pool.run(too_early)
    )
    with pytest.raises(CrossfadeError, match="fits 10 bytes"):
        pool.run(nothing_fits)
    with pytest.raises(CrossfadeError, match="batch"):
        pool.run(other_batches)


def test_without_ranks_it_is_refused() -> None:
    model, optimizer, _ = job()
    with pytest.raises(MeshError, match=r'mesh="auto" without a process group.*Remedy: call torch'):
        cf.compile_step(model, None, optimizer, mesh="auto")


def test_what_is_no_mesh_is_refused() -> None:
    model, optimizer, _ = job()
    with pytest.raises(MeshError, match="mesh='dp': expected a DeviceMesh"):
        cf.compile_step(model, None, optimizer, mesh="dp")


def given_too(name: str, value: Any) -> str:
    model, optimizer, _ = job()
    try:
        cf.compile_step(model, None, optimizer, mesh="auto", **{name: value})
    except CrossfadeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "value"), [("data_parallel", "zero2"), ("memory_limit", 10**6), ("batch", "local"), ("recompute", "auto")]
)
def test_what_is_found_cannot_be_given_too(ranks: Callable[[int], Ranks], name: str, value: Any) -> None:
    said = ranks(2).run(given_too, name, value)
    assert all(f"{name}={value!r} together with mesh=" in each and "Remedy" in each for each in said)
