"""Models and optimizers as other tools return them: taken apart where that is safe, else refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import crossfade as cf
from tests.loops.plain import adamw, batches, network, same, trained


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split_by_fully_shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, r"the model is wrapped in DistributedDataParallel: .*: pass model.module, with"),
    "DataParallel": (nn.DataParallel, r"wrapped in DataParallel: .*: pass model.module, and start a process for each"),
    "FSDP1": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        r'wrapped in FullyShardedDataParallel: .*: leave FSDP out, and pass data_parallel="zero3"',
    ),
    "FSDP2": (
        split_by_fully_shard,
        r'0 of the model is wrapped in FSDPModule: .*: leave fully_shard out, and pass data_parallel="zero3"',
    ),
    "DDP, compiled": (
        lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
        r"the model is wrapped in DistributedDataParallel",
    ),
    "DDP of a part": (
        lambda model: nn.Sequential(DistributedDataParallel(model), nn.ReLU()),
        r"0 of the model is wrapped in DistributedDataParallel",
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("kind", WRAPPED)
def test_what_exchanges_gradients_itself_is_refused(alone: None, kind: str) -> None:
    wrap, told = WRAPPED[kind]
    model = wrap(network())
    with pytest.raises(cf.ModelError, match=told):
        cf.compile_step(model, F.mse_loss, adamw(model), {"dp": 1})


def test_what_was_wrapped_in_ddp_trains_when_taken_out(alone: None) -> None:
    reference = network()
    expected = trained(reference, adamw(reference), batches())
    wrapped = DistributedDataParallel(network())
    step = cf.compile_step(wrapped.module, F.mse_loss, adamw(wrapped.module))
    assert [step(x, y).item() for x, y in batches()] == expected


def counting(compiled: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs graphs as they are, and remembers them."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    return backend


COMPILED: dict[str, Callable[[nn.Module, Any], tuple[nn.Module, Any]]] = {
    "the model": lambda model, backend: (torch.compile(model, backend=backend), F.mse_loss),
    "the model, in place": lambda model, backend: (model.compile(backend=backend) or model, F.mse_loss),
    "a layer": lambda model, backend: (nn.Sequential(torch.compile(model, backend=backend), nn.ReLU()), F.mse_loss),
    "the loss": lambda model, backend: (model, torch.compile(F.mse_loss, backend=backend)),
}


@pytest.mark.parametrize("what", COMPILED)
def test_what_was_compiled_is_captured_as_it_was_written(what: str) -> None:
    compiled: list[torch.fx.GraphModule] = []
    model, loss = COMPILED[what](network(), counting(compiled))
    reference = nn.Sequential(network(), nn.ReLU()) if what == "a layer" else network()
    expected = trained(reference, adamw(reference), batches())
    step = cf.compile_step(model, loss, adamw(model))
    assert [step(x, y).item() for x, y in batches()] == expected
    assert compiled == [] and step.captures == 1
    assert step.model.state_dict().keys() == (
        {name.replace("0.", "0._orig_mod.", 1) for name in reference.state_dict()}
        if what == "a layer"
        else reference.state_dict().keys()
    )


@pytest.mark.parametrize("what", ["the model", "a layer"])
def test_what_was_compiled_stays_compiled_for_evaluation(what: str) -> None:
    compiled: list[torch.fx.GraphModule] = []
    model, loss = COMPILED[what](network(), counting(compiled))
    step = cf.compile_step(model, loss, adamw(model))
    x, y = batches(1)[0]
    step(x, y)
    assert compiled == []
    with torch.no_grad():
        found = model(x)
        assert len(compiled) == 1
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(found, model(x))
    step(x, y)
    assert step.captures == 1 and len(compiled) == 1


def accelerated(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return accelerate.Accelerator(cpu=True).prepare(model, optimizer, scheduler)


def test_what_accelerate_prepared_is_named_with_the_remedy() -> None:
    model, optimizer, scheduler = accelerated(network())
    with pytest.raises(cf.OptimizerError, match=r"wrapped in AcceleratedOptimizer: .*: pass optimizer.optimizer, or"):
        cf.compile_step(model, F.mse_loss, optimizer)
    with pytest.raises(cf.OptimizerError, match=r"AcceleratedScheduler as the optimizer: .*: pass the scheduler's"):
        cf.compile_step(model, F.mse_loss, scheduler)
    reference = network()
    expected = trained(reference, adamw(reference), batches())
    step = cf.compile_step(model, F.mse_loss, optimizer.optimizer)
    assert [step(x, y).item() for x, y in batches()] == expected
    same(model, reference)


def test_what_fabric_set_up_is_named_with_the_remedy() -> None:
    fabrics = pytest.importorskip("lightning.fabric")
    fabric = fabrics.Fabric(accelerator="cpu", devices=1)
    plain = network()
    model, optimizer = fabric.setup(plain, adamw(plain))
    with pytest.raises(cf.ModelError, match=r"wrapped in _FabricModule: .*: pass the model .* model.module"):
        cf.compile_step(model, F.mse_loss, optimizer)
    with pytest.raises(cf.OptimizerError, match=r"wrapped in _?FabricOptimizer: .*: pass optimizer.optimizer"):
        cf.compile_step(model.module, F.mse_loss, optimizer)
    cf.compile_step(model.module, F.mse_loss, optimizer.optimizer)(*batches(1)[0])


def test_what_lightning_wrapped_is_named_with_the_remedy() -> None:
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    model = network()
    with pytest.raises(cf.OptimizerError, match=r"wrapped in LightningOptimizer: .*: pass optimizer.optimizer"):
        cf.compile_step(model, F.mse_loss, lightning.LightningOptimizer(adamw(model)))


def test_an_engine_of_deepspeed_is_known_by_its_name() -> None:
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(6, 3)
    with pytest.raises(cf.ModelError, match=r"wrapped in DeepSpeedEngine: .*: leave deepspeed.initialize out"):
        cf.compile_step(engine, F.mse_loss, adamw(engine))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MISTAKEN: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a scheduler": (
        lambda model: (model, F.mse_loss, torch.optim.lr_scheduler.StepLR(sgd(model), 1)),
        r"a StepLR as the optimizer: .* pass the scheduler's optimizer",
    ),
    "parameters": (
        lambda model: (model, F.mse_loss, list(model.parameters())),
        r"a list as the optimizer: expected a to",
    ),
    "an optimizer's class": (lambda model: (model, F.mse_loss, torch.optim.SGD), r"a class SGD as the optimizer"),
    "the loss last": (
        lambda model: (model, sgd(model), F.mse_loss),
        r"an optimizer as the loss function: expected compile_step\(model, loss_fn, optimizer, mesh\)",
    ),
    "a loss's class": (lambda model: (model, nn.MSELoss, sgd(model)), r"pass an object of it: MSELoss\(\)"),
    "a loss's name": (lambda model: (model, "mse", sgd(model)), r"a str as the loss function"),
    "a function": (lambda model: (model.forward, F.mse_loss, sgd(model)), r"a method as the model: expected an nn.Mod"),
}


@pytest.mark.parametrize("mistake", MISTAKEN)
def test_arguments_that_are_something_else_are_named(mistake: str) -> None:
    arguments, told = MISTAKEN[mistake]
    with pytest.raises(cf.CrossfadeError, match=told):
        cf.compile_step(*arguments(network()))


def test_zero_redundancy_optimizer_is_named_with_the_remedy(alone: None) -> None:
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(cf.OptimizerError, match=r'wrapped in ZeroRedundancyOptimizer: .* and data_parallel="zero1"'):
        cf.compile_step(model, F.mse_loss, optimizer)
