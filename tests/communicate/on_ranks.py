"""A program before and after a pass, run side by side on the ranks of one gloo world."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
import torch.distributed as dist

from crossfade.execute.executable import Executable
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.text import parse
from crossfade.graph.verify import verify


def differences(text: str, pass_: Pass, *, whole_numbers: bool) -> list[float]:
    """How far apart each result is on this rank. Whole numbers have one sum, in whatever order they are added."""
    program = parse(textwrap.dedent(text), groups={"dp": dist.get_world_size()})
    done = run_passes(program, [pass_])
    assert done.history[0].changed
    verify(done, recompute=True)
    groups = {"dp": dist.group.WORLD.group_name}  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [_input(node.meta["val"], generator, whole_numbers) for node in program.placeholders]
    before, after = (Executable(each, groups)([*inputs]) for each in (program, done))
    return [_difference(a, b) for a, b in zip(before, after, strict=True)]


def _input(like: Any, generator: torch.Generator, whole_numbers: bool) -> Any:
    if isinstance(like, int):
        return dist.get_rank()
    if whole_numbers:
        return torch.randint(-4, 5, tuple(like.shape), generator=generator).to(like.dtype)
    return torch.randn(tuple(like.shape), generator=generator).to(like.dtype)


def _difference(tensor: torch.Tensor, other: torch.Tensor) -> float:
    assert tensor.shape == other.shape and tensor.dtype is other.dtype
    return float((tensor.double() - other.double()).abs().max())
