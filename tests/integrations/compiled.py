"""Models and loops that are trained twice: eagerly, and through torch.compile with our backend."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import crossfade as cf

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")

EAGERLY: dict[str, Any] = {"options": {"inductor": False}}


class Perceptron(nn.Module):
    """Three linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x))


class Block(nn.Module):
    """Causal attention and a multi-layer perceptron, each added to what it is given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens to logits, over a few blocks."""

    def __init__(self, width: int = 16, layers: int = 2, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Network(nn.Module):
    """Linear layers with batch norm, whose running statistics the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))) * 1.0


class Broken(Network):
    """The same, with a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x))
        torch._dynamo.graph_break()
        return self.down(F.gelu(hidden))


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some sequences, and what follows each of their tokens."""
    drawn = torch.randint(12, (count, 7), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some vectors, and targets for them."""
    drawn = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return drawn[:, :8], drawn[:, 8:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of words, or squares of differences."""
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train(model: nn.Module, run: Callable[..., Tensor], batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of a few steps of SGD: Adam would make steps of the rounding of gradients that are zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a model holds, whole, under the names of the model it was made from."""
    found = {}
    for name, value in model.state_dict().items():
        plain = name.removeprefix("module.").replace("parametrizations.", "").replace(".original", "")
        found[plain] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def compare(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], given: dict[str, Any], **compiling: Any
) -> list[cf.Report]:
    """Train a model eagerly and a copy of it compiled, and expect the same of both; what became of its graphs."""
    torch._dynamo.reset()
    cf.reports(clear=True)
    other = copy.deepcopy(model)
    expected = train(model, model, batches)
    got = train(other, torch.compile(other, backend="crossfade", **given, **compiling), batches)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(other), weights(model), rtol=1e-3, atol=1e-4)
    return cf.reports(clear=True)


# ---------------------------------------------------------------------------------------------------------- on ranks


def mine(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in batches]


def in_ddp(model: nn.Module) -> nn.Module:
    """In torch's DDP, with buckets so small that Dynamo cuts the graph of a wide model between them."""
    return DistributedDataParallel(model, bucket_cap_mb=1)


def in_fsdp(model: nn.Module) -> nn.Module:
    """In FSDP2, layer by layer."""
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)  # type: ignore[arg-type]
    return fully_shard(model)


def in_tensor_parallel(model: nn.Module) -> nn.Module:
    """Each perceptron split over the ranks, by DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Gathered(nn.Module):
    """A parameter in parts, gathered whenever it is read; its gradient is averaged, and each rank gets its part."""

    def forward(self, part: DTensor) -> Tensor:
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def in_simple_fsdp(model: nn.Module) -> nn.Module:
    """Every parameter split by rows and gathered by a parametrization, so that collectives are in the graph."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(split))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model


WRAPPERS = {
    "ddp": in_ddp,
    "fsdp": in_fsdp,
    "tensor-parallel": in_tensor_parallel,
    "simple-fsdp": in_simple_fsdp,
}


BUILT: dict[str, tuple[Callable[..., nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "transformer": (Transformer, tokens),
    "perceptron": (Perceptron, rows),
}


def built(kind: str, width: int, sizes: tuple[int, ...]) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A model, the same in every process, and batches for it."""
    torch.manual_seed(0)
    model, batch = BUILT[kind]
    return model(width), [batch(size, seed) for seed, size in enumerate(sizes)]


def trained_on_ranks(
    wrapper: str, kind: str, given: dict[str, Any], width: int, sizes: tuple[int, ...], **dynamo: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """A model's weights after a few steps through our backend on all ranks, and what became of its collectives."""
    torch._dynamo.reset()
    cf.reports(clear=True)
    plain, batches = built(kind, width, sizes)
    model = WRAPPERS[wrapper](plain)
    part = batches if wrapper == "tensor-parallel" else mine(batches)
    with torch._dynamo.config.patch(**dynamo):
        train(model, torch.compile(model, backend="crossfade", **given), part)
    counts = [
        (report.facts["graph"], _numbers(report.collectives_before), _numbers(report.collectives_after))
        for report in cf.reports(clear=True)
    ]
    return weights(model), counts


def _numbers(counts: Any) -> dict[str, int]:
    return {kind: number for kind, (number, _) in counts.items()}


def not_waited_for() -> tuple[Tensor, list[str]]:
    """A sum over ranks that a compiled function only starts, which no program of ours may do; and the verdicts."""
    torch._dynamo.reset()
    cf.reports(clear=True)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    start = torch.compile(
        lambda x: torch.ops._c10d_functional.all_reduce(x * 2, "sum", group), backend="crossfade", **EAGERLY
    )
    total = torch.ops._c10d_functional.wait_tensor(start(torch.ones(2)))
    return total, [str(verdict) for report in cf.reports(clear=True) for _, verdict in report.verdicts]


def with_symbolic_sizes() -> list[Any]:
    """What becomes of two sums over ranks of as many numbers as the batch has rows."""
    torch._dynamo.reset()
    cf.reports(clear=True)
    group = dist.group.WORLD

    def summed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return funcol.all_reduce(x.cos(), "sum", group) + 1, funcol.all_reduce(y.sin(), "sum", group) + 1

    compiled = torch.compile(summed, backend="crossfade", dynamic=True, **EAGERLY)
    for size in (4, 6):
        x, y = torch.ones(size), torch.ones(size)
        torch.testing.assert_close(compiled(x, y), (2 * x.cos() + 1, 2 * y.sin() + 1))
    return [
        (_numbers(report.collectives_after), sorted({verdict.reason for _, verdict in report.verdicts}))
        for report in cf.reports(clear=True)
    ]
