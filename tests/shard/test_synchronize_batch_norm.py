"""Batch norm over the samples of all ranks is torch's batch norm on the whole batch, forward, backward, statistics."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade as cf
from crossfade.communicate.lower_averages import LowerAverages
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.text import parse, render_type
from crossfade.graph.verify import verify
from crossfade.shard.batch_dims import BATCH_DIMS
from crossfade.shard.synchronize_batch_norm import SynchronizeBatchNorm

SHAPES = {"2-D": (6, 3), "3-D": (4, 3, 5), "4-D": (4, 3, 2, 5)}


def forward_backward(shape: tuple[int, ...], affine: bool, tracked: bool, dtype: str = "f32"):
    """The program of one rank: what autograd calls, as text."""
    x, c = f"{dtype}[{', '.join(map(str, (shape[0] // 2, *shape[1:])))}]", f"f32[{shape[1]}]"
    w, b = ("w", "b") if affine else ("None", "None")
    m, v = ("m", "v") if tracked else ("None", "None")
    if tracked:
        call, extra = f"aten._native_batch_norm_legit_functional(x, {w}, {b}, m, v, True, 0.1, 1e-05)", True
    else:
        call, extra = f"aten._native_batch_norm_legit.no_stats(x, {w}, {b}, True, 0.1, 1e-05)", False
    lines = [f'x: {x} = input("x")', f'g: {x} = input("g")']
    lines += [f'{name}: {c} = parameter("{name}")' for name in "wb"] + [
        f'{name}: {c} = buffer("{name}")' for name in "mv"
    ]
    lines += [f"norm = {call}", "y = norm[0]", "mean = norm[1]", "inverse = norm[2]"]
    lines += ["new_m = norm[3]", "new_v = norm[4]"] if extra else []
    wanted = [True, affine, affine]
    lines += [f"back = aten.native_batch_norm_backward(g, x, {w}, {m}, {v}, mean, inverse, True, 1e-05, {wanted})"]
    lines += ["gx = back[0]"] + (["gw = back[1]", "gb = back[2]"] if affine else [])
    results = ['output("y", y)', 'gradient("x", gx)']
    results += ['gradient("w", gw)', 'gradient("b", gb)'] if affine else []
    results += ['update("m", new_m)', 'update("v", new_v)'] if tracked else []
    program = parse("\n".join([*lines, f"return {', '.join(results)}"]), groups={"dp": 2})
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (0,) if isinstance(node.meta.get("val"), Tensor) else ()
    return program


def values(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 3 + 50  # a large mean: a difference of squares would show
    g = torch.randn(shape, generator=generator)
    rest = [torch.rand(shape[1], generator=generator) + 0.5 for _ in range(4)]
    return [x, g, *rest]


def on_rank(cases: list[tuple], gather: bool) -> list[list[Tensor]]:
    """This rank's results of every case, on its half of the batch."""
    found = []
    for shape, affine, tracked in cases:
        done = run_passes(
            forward_backward(shape, affine, tracked), [SynchronizeBatchNorm(gather=gather), LowerAverages()]
        )
        verify(done, recompute=True)
        x, g, *rest = values(shape)
        half = shape[0] // 2
        mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
        found.append(list(Executable(done, {"dp": dist.group.WORLD.group_name})([x[mine], g[mine], *rest])))
    return found


def on_one_device(shape: tuple[int, ...], affine: bool, tracked: bool) -> dict[str, Tensor]:
    x, g, w, b, m, v = values(shape)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    module = kinds[len(shape)](shape[1], affine=affine, track_running_stats=tracked)
    if affine:
        module.weight.data, module.bias.data = w, b
    if tracked:
        module.running_mean, module.running_var = m, v
    x.requires_grad_()
    y = module(x)
    y.backward(g)
    found = {"y": y.detach(), "x": x.grad}
    found |= {"w": module.weight.grad, "b": module.bias.grad} if affine else {}
    return found | ({"m": module.running_mean, "v": module.running_var} if tracked else {})


@pytest.mark.ranks
@pytest.mark.parametrize("gather", [True, False])
def test_two_ranks_are_one_device(ranks: Any, gather: bool):
    cases = [(s, affine, tracked) for s in SHAPES.values() for affine in (True, False) for tracked in (True, False)]
    both = ranks(2).run(on_rank, cases, gather)
    for index, case in enumerate(cases):
        expected = on_one_device(*case)
        for (name, whole), *parts in zip(expected.items(), *(found[index] for found in both), strict=True):
            if name in "yx":
                got = torch.cat(parts)
            elif name in "wb":
                got = parts[0] + parts[1]  # each rank has the gradient of its own samples: averages come later
            else:
                assert torch.equal(parts[0], parts[1]), f"{name} differs between ranks in {case}"
                got = parts[0]
            torch.testing.assert_close(got, whole, rtol=2e-5, atol=2e-5, msg=lambda m, n=name, c=case: f"{n} {c}: {m}")


@pytest.mark.parametrize(("dim", "synchronized"), [(0, 2), (1, 0), (2, 2)])
def test_samples_may_lie_along_any_dim_but_channels(dim: int, synchronized: int) -> None:
    program = forward_backward(SHAPES["3-D"], True, True)
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = (dim,) if isinstance(node.meta.get("val"), Tensor) else ()
    done = run_passes(program, [SynchronizeBatchNorm()])
    assert done.history[0].counts == {"synchronized": synchronized}


class Steps(nn.Module):
    """A sequence whose steps are the samples: batch norm finds them along the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).T.unsqueeze(0)).pow(3).mean()


def train_steps(ranks: int) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model, batches = Steps(), [torch.randn(8, 4) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = cf.compile_step(model, None, optimizer, {"dp": ranks} if ranks > 1 else None, timeout=30.0)
    return [float(step(batch)) for batch in batches], model.norm.running_var.clone()


@pytest.mark.ranks
def test_samples_along_the_last_dim_on_two_ranks(ranks: Any) -> None:
    losses, variance = train_steps(1)
    for found, other in ranks(2).run(train_steps, 2):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(other, variance)


def test_types_stay_with_mixed_precision():
    program = forward_backward((4, 3, 5), True, True, "bf16")
    before = [render_type(value.meta["val"]) for value in program.results]
    done = run_passes(program, [SynchronizeBatchNorm()])
    verify(done, recompute=True)
    assert [render_type(value.meta["val"]) for value in done.results] == before


def test_verdicts():
    done = run_passes(forward_backward((4, 3), True, True), [SynchronizeBatchNorm(ranks=2)])
    assert [str(v) for v in done.history[0].verdicts] == [
        "norm: replaced: statistics taken over all 2 ranks",
        "back: replaced: gradient sums taken over all 2 ranks",
        "all_gather_into_tensor: inserted: it spreads a batch norm over all ranks",
        "all_reduce: inserted: it spreads a batch norm over all ranks",
    ]
    assert done.history[0].counts == {"synchronized": 2}


LEFT = {
    "it uses running statistics, the same on every rank": (
        "aten._native_batch_norm_legit_functional(x, w, w, w, w, False, 0.1, 1e-05)",
        (0,),
    ),
    "its statistics are not taken over samples (instance normalisation)": (
        "aten._native_batch_norm_legit_functional(x, w, w, w, w, True, 0.1, 1e-05)",
        (1,),
    ),
    "aten.native_batch_norm.default is not one of the spellings known here: statistics stay per rank": (
        "aten.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-05)",
        (0,),
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_left(reason: str):
    call, dims = LEFT[reason]
    text = f'x: f32[4, 2] = input("x")\nw: f32[2] = parameter("w")\nnorm = {call}\ny = norm[0]\nreturn output("y", y)'
    program = parse(textwrap.dedent(text))
    for node in program.graph.nodes:
        node.meta[BATCH_DIMS] = dims
    done = run_passes(program, [SynchronizeBatchNorm()])
    assert [str(v) for v in done.history[0].verdicts] == [f"norm: left alone: {reason}"]
    assert not done.history[0].changed
