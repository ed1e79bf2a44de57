"""A GPT split by our own stage, forward and backward: computed on own tokens between blocks, it gives the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import crossfade as cf
from crossfade.communicate.scatter_between_blocks import ScatterBetweenBlocks
from crossfade.demo.model import GPT, Size, next_token_loss
from crossfade.execute.executable import Executable
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module
from crossfade.graph.text import parse, render
from crossfade.graph.verify import verify

SIZE = Size(width=16, heads=4, layers=2, vocabulary=32, length=8, batch=4)
PLAN: dict[str, object] = {
    "blocks.*.attention.query_key_value": cf.Fused("colwise", blocks=3),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def split_gpt(ranks: int, batch: int) -> tuple[Program, dict[str, str]]:
    """The graph of loss and gradients on a rank, and what each of its inputs is: alike, a part, or the rank."""
    model = GPT(SIZE)
    tokens = torch.zeros(batch, SIZE.length, dtype=torch.int64)
    local = cf.shard(torch.export.export(model, (tokens,)), {"tp": ranks}, PLAN, rank=0).module()
    state, buffers = dict(local.named_parameters()), dict(local.named_buffers())

    def step(values: list[Tensor], kept: list[Tensor], tokens: Tensor, targets: Tensor) -> list[Tensor]:
        trained = [value.requires_grad_() for value in values]
        called = dict(zip([*state, *buffers], [*trained, *kept], strict=True))
        loss = next_token_loss(torch.func.functional_call(local, called, (tokens,)), targets)
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    given = [parameter.detach().clone() for parameter in state.values()], list(buffers.values()), tokens, tokens.clone()
    program = from_graph_module(make_fx(step, tracing_mode="fake")(*given), groups={"tp": ranks})
    whole = dict(model.named_parameters())
    kinds = ["alike" if parameter.shape == whole[name].shape else "part" for name, parameter in state.items()]
    kinds += ["rank" for _ in buffers] + ["alike", "alike"]
    return program, {item.name: kind for item, kind in zip(program.inputs, kinds, strict=True)}


def largest_difference(texts: tuple[str, str], kinds: Mapping[str, str]) -> float:
    """How far apart the results of two programs are on this rank."""
    rank, group = dist.get_rank(), dist.group.WORLD
    programs = [parse(text, groups={"tp": dist.get_world_size()}) for text in texts]
    inputs: list[Tensor] = []
    for index, (item, node) in enumerate(programs[0].named_inputs()):
        generator = torch.Generator().manual_seed(index if kinds[item.name] == "alike" else 1000 * (rank + 1) + index)
        like = node.meta["val"]
        if kinds[item.name] == "rank":
            inputs.append(torch.tensor(rank))
        elif like.is_floating_point():
            inputs.append(torch.randn(tuple(like.shape), generator=generator) / 4)
        else:
            inputs.append(torch.randint(0, SIZE.vocabulary, tuple(like.shape), generator=generator))
    groups = {"tp": group.group_name}  # type: ignore[union-attr]
    plain, other = (Executable(program, groups)([value.clone() for value in inputs]) for program in programs)
    assert len(plain) == 30  # the loss and 29 gradients
    return max(float((a - b).abs().max()) for a, b in zip(plain, other, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(("count", "batch", "dim"), [(2, 4, 0), (4, 2, 1)], ids=["2 by batch", "4 by position"])
def test_a_split_gpt_gives_the_same_loss_and_gradients(ranks: Any, count: int, batch: int, dim: int) -> None:
    program, kinds = split_gpt(count, batch)
    alike = tuple(name for name, kind in kinds.items() if kind == "alike")
    done = run_passes(program, [ScatterBetweenBlocks(alike)])
    verify(done, recompute=True)
    assert done.history[0].counts == {"scattered": 8, "gathered": 9, "summed": 10, "cut": 4, "left": 0}
    assert all(f"along dim {dim} of" in verdict.detail for verdict in done.history[0].verdicts)
    differences = ranks(count).run(largest_difference, (render(program), render(done)), kinds)
    assert max(differences) < 1e-5
