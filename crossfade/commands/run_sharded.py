"""`crossfade run`: a folder of a sharded program is run once, on local ranks or on torchrun's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.compile.sharding import Sharded, own_inputs
from crossfade.errors import BatchError
from crossfade.files.pickled import load_tensors
from crossfade.graph.private import group_named, tree_flatten, tree_unflatten
from crossfade.ranks.local import Ranks
from crossfade.shard.tensor.folder import read_account
from crossfade.shard.tensor.parts import gathered
from crossfade.shard.tensor.placements import Partial, Placement, Shard


@dataclass(frozen=True)
class Ran:
    """One run: the whole outputs' shapes, and how long it took on the first rank."""

    ranks: int
    outputs: list[str]
    seconds: float
    loading: float


def run_folder(
    folder: Path, inputs: Path, output: Path | None = None, *, timeout: float = 600.0, trusted: bool = False
) -> Ran | None:
    """Run a saved program on whole inputs, and save its whole outputs; under torchrun, None on all ranks but the first.

    Where experts are spread, the ranks of `ep` are all given the same tokens.

    `inputs` was written by `torch.save`: a tuple of arguments, a dict of named ones, or one tensor. Nothing in
    the files is run, unless they are `trusted`.
    """
    account = read_account(folder)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with Ranks(account.files, timeout=timeout) as ranks:
            return ranks.run(_run, str(folder), str(inputs), str(output or ""), trusted)[0]
    dist.init_process_group("gloo")
    try:
        ran = _run(str(folder), str(inputs), str(output or ""), trusted)
        return ran if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _run(folder: str, inputs: str, output: str, trusted: bool) -> Ran:
    began = time.perf_counter()
    account, ranks = read_account(Path(folder)), dist.get_world_size()
    mesh = account.axes if account.experts is not None else {account.axis: ranks}
    sharded = Sharded.load(folder, mesh, trusted=trusted)
    module = sharded.module()
    args, kwargs = read_inputs(Path(inputs), sharded, trusted=trusted)
    loaded = time.perf_counter()
    with torch.no_grad():
        result = module(*args, **kwargs)
    ended = time.perf_counter()
    leaves, shape = tree_flatten(result)
    group = group_named(sharded.axis) if sharded.ranks > 1 else None
    wholes = [_whole(value, where, group) for value, where in zip(leaves, sharded.outputs, strict=True)]
    if output and sharded.place == 0:
        torch.save(tree_unflatten(wholes, shape), output)
    described = [
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value) for value in wholes
    ]
    return Ran(ranks, [text.removeprefix("torch.") for text in described], ended - loaded, loaded - began)


def read_inputs(path: Path, sharded: Sharded, *, trusted: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A rank's parts of the whole inputs that a file holds, as the program is called."""
    given = load_tensors(path, BatchError, trusted=trusted)
    if isinstance(given, Mapping) and given.keys() == sharded.inputs.keys():
        given = [given[name] for name in sharded.inputs]
    leaves, _ = tree_flatten(given)
    if isinstance(given, Mapping) or len(leaves) != len(sharded.inputs):
        raise BatchError(
            f"{path} holds " + (", ".join(map(str, given)) if isinstance(given, Mapping) else f"{len(leaves)} values"),
            expected=f"{len(sharded.inputs)} inputs: {', '.join(sharded.inputs)}",
            remedy="torch.save a tuple of the arguments in this order, or a dict by these names",
        )
    parts = own_inputs(leaves, sharded.inputs.values(), sharded.rank, sharded.ranks)
    return tree_unflatten(parts, sharded.program.call_spec.in_spec)


def _whole(value: Any, placement: Placement, group: Any) -> Any:
    """An output as one device would have it; `group` is that of the plan's axis, None where it has one rank."""
    if group is None:
        return value
    if isinstance(placement, Partial):
        value = value.clone()  # what is returned twice is one tensor
        dist.all_reduce(value, group=group)
    if not isinstance(placement, Shard):
        return value
    return gathered(value, placement, group)
