"""A compiled step in the life of a training script: checkpoints, schedulers, evaluation, meshes, given graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import crossfade as cf
from crossfade.graph import collectives
from tests.ranks.cases import CASES, batches


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = CASES["mlp"].model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_resuming_from_a_checkpoint_is_bitwise() -> None:
    data = batches(CASES["mlp"], 6)
    model, optimizer = start()
    step = cf.compile_step(model, F.mse_loss, optimizer)
    for batch in data[:3]:
        step(*batch)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for batch in data[3:]:
        step(*batch)

    resumed, its_optimizer = start()
    resumed.load_state_dict(checkpoint[0])
    its_optimizer.load_state_dict(checkpoint[1])
    again = cf.compile_step(resumed, F.mse_loss, its_optimizer)
    for batch in data[3:]:
        again(*batch)
    assert same(model, resumed)


def test_a_checkpoint_loaded_into_a_running_step_is_used() -> None:
    data = batches(CASES["mlp"], 4)
    model, optimizer = start()
    step = cf.compile_step(model, F.mse_loss, optimizer)
    step(*data[0])
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = float(step(*data[1]))
    step(*data[2])
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert float(step(*data[1])) == first
    assert step.captures == 1


def test_a_scheduler_drives_the_rate_without_warning(recwarn: pytest.WarningsRecorder) -> None:
    results = []
    for compiled in (False, True):
        model, optimizer = start()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        step = cf.compile_step(model, F.mse_loss, optimizer) if compiled else None
        for inputs, targets in batches(CASES["mlp"], 5):
            if step is not None:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            scheduler.step()
        results.append(model)
    assert same(*results)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_parameter_groups_have_their_own_rates() -> None:
    models = []
    for compiled in (False, True):
        model, _ = start()
        groups = [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias, *model[2].parameters()]}]
        optimizer = torch.optim.Adam(groups, lr=0.001, weight_decay=0.1)
        step = cf.compile_step(model, F.mse_loss, optimizer) if compiled else None
        for inputs, targets in batches(CASES["mlp"], 4):
            if step is not None:
                step(inputs, targets)
                continue
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        models.append(model)
    assert same(*models)


def test_preparing_changes_nothing() -> None:
    model, optimizer = start()
    before = copy.deepcopy(model)
    step = cf.compile_step(model, F.mse_loss, optimizer).prepare(*batches(CASES["mlp"], 1)[0])
    assert same(model, before)
    assert not optimizer.state
    assert step.report.nodes_after > 0


def on_a_device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> float:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, optimizer = start()
    step = cf.compile_step(model, F.mse_loss, optimizer, mesh, timeout=20)
    return float(step(*batches(CASES["mlp"], 1)[0]))


@pytest.mark.ranks
def test_device_meshes_are_accepted(ranks: Any) -> None:
    model, _ = start()
    inputs, targets = batches(CASES["mlp"], 1)[0]
    expected = float(F.mse_loss(model(inputs), targets).detach())
    for shape, names in [((2,), ("dp",)), ((2, 1), ("dp", "tp"))]:
        assert ranks(2).run(on_a_device_mesh, shape, names) == [pytest.approx(expected)] * 2


def run_a_given_graph() -> bool:
    """A make_fx graph with three all-reduces gives bitwise the same after `optimize`."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def exchange(tree: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = tree["x"]
        done = [collectives.wait(collectives.all_reduce(y, "sum", group)) for y in (x.sin(), x.cos(), x.exp())]
        return {"product": done[0] * done[1], "parts": (done[2], x)}

    x = torch.randn(5, generator=torch.Generator().manual_seed(dist.get_rank()))
    module = make_fx(exchange)({"x": x})
    improved = cf.optimize(module, groups={group: 2})
    assert improved.report.total_before[0] == 3 and improved.report.total_after[0] == 1
    before, after = module({"x": x}), improved.module({"x": x})
    return torch.equal(before["product"], after["product"]) and torch.equal(before["parts"][0], after["parts"][0])


@pytest.mark.ranks
def test_given_graphs_are_improved_and_keep_their_structure(ranks: Any) -> None:
    assert ranks(2).run(run_a_given_graph) == [True, True]


class Storing(nn.Module):
    """Keeps something of its forward, counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)
        self.calls, self.last = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.linear(x) + torch.randn(x.shape[0], 4)
        return self.drop(self.last)


def test_capturing_leaves_the_random_stream_and_attributes_as_they_were() -> None:
    model = Storing()
    before = torch.get_rng_state()
    cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)).prepare(
        *batches(CASES["mlp"], 1)[0]
    )
    assert torch.equal(before, torch.get_rng_state())
    assert (model.calls, model.last) == (0, None)


def test_what_a_program_bakes_in_is_part_of_its_key() -> None:
    model = Storing()
    batch = batches(CASES["mlp"], 1)[0]
    step = cf.compile_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*batch)
    step(*batch)
    assert step.captures == 1
    model.drop.p = 0.1
    step(*batch)
    assert step.captures == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(*batch)
    assert step.captures == 3


def test_a_kept_loss_stays_and_state_may_be_cleared() -> None:
    model, optimizer = start()
    step = cf.compile_step(model, F.mse_loss, optimizer)
    data = batches(CASES["mlp"], 3)
    loss = step(*data[0])
    value = float(loss)
    step(*data[1])
    optimizer.state.clear()
    step(*data[2])
    assert float(loss) == value


def test_one_device_takes_tensors_without_a_batch_dim_of_their_own() -> None:
    model, optimizer = start()
    inputs, _ = batches(CASES["mlp"], 1)[0]
    shared = torch.ones(1, 4)
    loss = cf.compile_step(model, lambda y, t: (y - t).square().mean(), optimizer)(inputs, shared)
    expected = (start()[0](inputs) - shared).square().mean()
    assert float(loss) == float(expected.detach())


def test_an_entry_of_state_that_is_none_is_made() -> None:
    """As an optimizer's state is after steps without momentum, which is then switched on."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, inputs, targets = nn.Linear(4, 2), torch.randn(8, 4), torch.randn(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = None
        step = cf.compile_step(model, nn.functional.mse_loss, optimizer)
        for _ in range(4):
            if compiled:
                step(inputs, targets)
            else:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
    assert losses[0] == losses[1]
