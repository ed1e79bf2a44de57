"""`torch.compile(model, backend="crossfade")` against plain `torch.compile`: a training step, alternating in one run.

    python -m benchmarks.torch_compile_backend                              # two ranks on loopback
    sudo .venv/bin/python -m benchmarks.torch_compile_backend --network 1gbit
    python -m benchmarks.torch_compile_backend --model plain                # without collectives

The model is a stack of perceptrons; `parts` splits every parameter by rows and gathers it when it is read, as
SimpleFSDP does. Times are medians over rounds, of the slower rank; the ratio is the median of each round's own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import crossfade as cf
from benchmarks import two_ranks
from benchmarks.figures import save

BACKENDS = ("inductor", "crossfade")


class _Gathered(nn.Module):
    def forward(self, part: Any) -> Tensor:
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _built(model: str, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    stack = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    if model == "parts":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in list(stack):
            for name, parameter in list(module.named_parameters(recurse=False)):
                split = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(split))
                parametrize.register_parametrization(module, name, _Gathered(), unsafe=True)
    return stack


def measure(model: str, layers: int, width: int, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step by each backend, on the slower rank, and collectives before and after our passes."""
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        net = _built(model, layers, width)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        compiled = torch.compile(net, backend=backend)

        def step(compiled: Any = compiled, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        steps[backend] = step
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for number in range(rounds):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            seconds[backend].append(two_ranks.slowest(two_ranks.seconds_of(steps[backend])))
    counts = [(report.facts["graph"], report.total_before[0], report.total_after[0]) for report in cf.reports()]
    return {"seconds": seconds, "collectives": counts}


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the figures, and keep them if asked to."""
    plain, ours = (found["seconds"][backend] for backend in BACKENDS)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
    table = Table("backend", "ms", "ratio")
    table.add_row("torch.compile", f"{1e3 * statistics.median(plain):.2f}", "1.00")
    table.add_row("torch.compile, crossfade", f"{1e3 * statistics.median(ours):.2f}", f"{ratio:.2f}")
    Console().print(table)
    print(", ".join(f"{graph}: {before} collectives became {after}" for graph, before, after in found["collectives"]))
    if options.save:
        milliseconds = {backend: 1e3 * statistics.median(found["seconds"][backend]) for backend in BACKENDS}
        figures = {"milliseconds": milliseconds, "ratio": ratio, "collectives": found["collectives"]}
        save(f"torch-compile-backend-{options.model}-{options.network}", figures)


def main() -> None:
    """Read the options, run on two ranks, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["parts", "plain"], default="parts")
    for name, value in {"layers": 12, "width": 256, "batch": 64, "rounds": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    two_ranks.add_options(parser)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("model", "layers", "width", "batch", "rounds")}
    two_ranks.run("benchmarks.torch_compile_backend", measure, given, show, options)


if __name__ == "__main__":
    main()
