"""Experts of an exported program, spread over the ranks of an axis: rows travel to them and back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from crossfade.capture.exported import capture_exported
from crossfade.compile.simplify_exported import rebuild
from crossfade.errors import ModelError
from crossfade.graph.passes import run_passes
from crossfade.graph.private import exported_with
from crossfade.graph.program import Program
from crossfade.shard.exchange_with_backward import ExchangeWithBackward
from crossfade.shard.expert_regions import find_experts
from crossfade.shard.split_experts import SplitExperts
from crossfade.shard.tensor.devices import like
from crossfade.shard.tensor.localize import LocalProgram
from crossfade.shard.tensor.own_experts import SpreadExperts
from crossfade.simplify.remove_asserts import RemoveAsserts
from crossfade.simplify.spell_out_copies import SpellOutCopies


def spread(local: LocalProgram, axis: str, ranks: int) -> tuple[LocalProgram, SpreadExperts]:
    """The program of a rank that has its own experts alone, and which parameters hold these.

    Every rank has tokens of its own, of the same sizes, whatever they are.
    """
    program = run_passes(capture_exported(local.exported), [RemoveAsserts(), SpellOutCopies()])
    program.groups = {axis: ranks}
    experts = _experts(program, axis, ranks)
    done = run_passes(program, [SplitExperts(axis, ranks, rows_alone=True), ExchangeWithBackward()])
    split = next(record for record in done.history if record.name == SplitExperts.name)
    rebuilt = rebuild(local.exported, done)
    state = {name: _own(value, ranks) if name in experts else value for name, value in rebuilt.state_dict.items()}
    exported = exported_with(rebuilt, state, rebuilt.constants)
    verdicts = (*local.verdicts, *split.verdicts)
    return replace(local, exported=exported, verdicts=verdicts), SpreadExperts(axis, ranks, experts)


def _experts(program: Program, axis: str, ranks: int) -> tuple[str, ...]:
    found = find_experts(program, ranks, rows_alone=True).parameters
    if not found:
        raise ModelError(
            f"an exported program in which no experts are found, on a mesh with an axis {axis}",
            expected="matmuls of groups of rows, each with a matrix of its own: torch's or transformers' grouped_mm",
            remedy='compute experts by grouped_mm (transformers: experts_implementation="grouped_mm", its default), or '
            f"leave the axis {axis} out of the mesh",
        )
    return found


def _own(value: Tensor, ranks: int) -> Tensor:
    """As many experts as a rank has, still without numbers."""
    shape = value.shape[0] // ranks, *value.shape[1:]
    return like(torch.empty(shape, dtype=value.dtype, device=value.device), value)
