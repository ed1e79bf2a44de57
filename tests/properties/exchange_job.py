"""What each rank does with a sampled program: run it as it is and after each pass, and compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from crossfade.communicate.bucket_plan import MB
from crossfade.communicate.lower_all_gathers import LowerAllGathers
from crossfade.execute.executable import Executable
from crossfade.graph import collectives
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program
from tests.properties.exchange_programs import Choices, Sampler, inputs_for, sampled_passes
from tests.properties.written_programs import WritingSampler, some_passes


@functools.cache
def groups_of(ranks: int) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, str]]:
    """Three groups of this world: their sizes, this rank's position in each, and the process groups' names."""
    rank = dist.get_rank()
    partitions = {"all": [list(range(ranks))], "tp": [list(range(ranks))], "dp": [list(range(ranks))]}
    if ranks == 4:
        partitions |= {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    sizes, positions, names = {}, {}, {}
    for name, parts in partitions.items():
        for part in parts:
            made = dist.new_group(part)
            if rank in part:
                sizes[name], positions[name], names[name] = len(part), part.index(rank), made.group_name
    return sizes, positions, names


def launches(program: Program) -> dict[str, list[str]]:
    """What each group is asked to do, in order: the same on all ranks, or they would hang."""
    found: dict[str, list[str]] = {}
    for one in collectives.find(program.graph):
        found.setdefault(one.group, []).append(f"{one.kind} {one.reduce_op} {one.bytes}")
    return found


def run_alone_and_together(numbers: list[int], ranks: int) -> dict[str, Any]:
    """On each rank: what each pass alone, and all together, launch, and what differs from the program as it was."""
    sizes, positions, names = groups_of(ranks)
    choices = Choices(numbers)
    used = dict(list(sizes.items())[: 1 + choices.below(3)])
    passes = sampled_passes(choices, used, positions)
    program = Sampler(choices, used, positions).program()
    given = inputs_for(program, dist.get_rank())
    whole, cut = (LowerAllGathers(tuple(used), piece) for piece in (math.inf, (16 << choices.below(6)) / MB))
    expected = Executable(run_passes(program, [whole]), names)([value.clone() for value in given])
    seen: dict[str, Any] = {}
    for variant in [*([one] for one in passes), passes]:
        label = " ".join(one.name for one in variant)
        done = run_passes(program, [*variant, cut], keep_text=False)
        seen[label] = launches(done)
        if not any(record.changed for record in done.history[: len(variant)]):
            continue
        found = Executable(done, names)([value.clone() for value in given])
        same = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, found, strict=True)]
        if not all(same):
            spelled = "\n".join(one.spelling for one in variant)
            seen["difference"] = f"results {same} after\n{spelled}\n{program}\n\nbecame\n\n{done}"
    return seen


def run_optimized(numbers: list[int], ranks: int) -> dict[str, Any]:
    """On each rank: what some passes launch, and what differs after them, in numbers or in who shares memory."""
    sizes, positions, names = groups_of(ranks)
    choices = Choices(numbers)
    used = dict(list(sizes.items())[: 1 + choices.below(3)])
    passes = some_passes(choices, used, positions)
    program = WritingSampler(choices, used, positions).program()
    done = run_passes(program, passes, keep_text=False)
    expected, found = (_run(one, names) for one in (program, done))
    seen: dict[str, Any] = {"launches": launches(done)}
    spelled = "\n".join(one.spelling for one in passes)
    for what, before, after in zip(("values", "sharing of memory"), expected, found, strict=True):
        if before != after:
            seen["difference"] = f"{what} {before} became {after} after\n{spelled}\n{program}\n\nbecame\n\n{done}"
    return seen


def _run(program: Program, names: Mapping[str, str]) -> tuple[list[Any], dict[tuple[int, int], int]]:
    """The values of all inputs and results, and of any two in one storage how far apart they begin."""
    given = inputs_for(program, dist.get_rank())
    tensors = [*given, *Executable(program, names)([*given])]
    apart = {
        (i, j): one.data_ptr() - other.data_ptr()
        for i, one in enumerate(tensors)
        for j, other in enumerate(tensors[:i])
        if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    }
    return [(str(one.dtype), one.tolist()) for one in tensors], apart
