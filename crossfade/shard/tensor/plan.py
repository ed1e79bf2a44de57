"""The user's side of the tensor-parallel transform: which parameters are split, how, and where results are reduced.

>>> import torch
>>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
>>> exported = torch.export.export(model, (torch.ones(4, 8),))
>>> plan = Plan({"0": ColwiseParallel(), "2": RowwiseParallel()})
>>> print(plan.resolve(exported, ranks=2))
  parameter      shape   style             split dim   per rank   bytes per rank
 ────────────────────────────────────────────────────────────────────────────────
  0.weight       32x8    ColwiseParallel   0           16x8                512 B
  0.bias         32      ColwiseParallel   0           16                   64 B
  2.weight       8x32    RowwiseParallel   1           8x16                512 B
  2.bias         8       RowwiseParallel   -           8                    32 B
  4 of 2.2 KiB                                                           1.1 KiB
>>> Plan.megatron(exported)
Plan({'0': 'colwise', '2': 'rowwise'})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.export import ExportedProgram

from crossfade.errors import PlanError
from crossfade.shard.tensor import plan_file
from crossfade.shard.tensor.plan_from_model import entries_of_model, unnamed
from crossfade.shard.tensor.plan_megatron import find_entries
from crossfade.shard.tensor.plan_resolve import resolve
from crossfade.shard.tensor.plan_resolved import ModuleBoundary, ParameterSharding, ResolvedPlan
from crossfade.shard.tensor.plan_styles import Fused, Style, read_style, to_data

__all__ = ["Fused", "ModuleBoundary", "ParameterSharding", "Plan", "ResolvedPlan", "Style"]


class Plan(Mapping[str, Style]):
    """An immutable mapping of names to styles.

    A name is a module's or a parameter's, fully qualified, or a glob: `*` stands for one part of a name (or some of
    it), `**` for any number of parts. A style is a `ParallelStyle` of torch (or its class), a placement for a
    parameter, `Fused(...)`, or one of the transformers library's strings.
    """

    def __init__(self, entries: Mapping[str, object], notes: tuple[str, ...] = ()) -> None:
        if not isinstance(entries, Mapping):
            remedy = "pass a dict, or use Plan.load, Plan.from_model or Plan.megatron"
            raise PlanError(f"a plan cannot be a {type(entries).__name__}", expected="names and styles", remedy=remedy)
        self._entries = MappingProxyType({str(name): _read(name, entry) for name, entry in entries.items()})
        self.notes = notes
        """What was left out or left whole by what made the plan, and why; not part of its meaning."""

    def __getitem__(self, name: str) -> Style:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and dict(self._entries) == dict(other._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return f"Plan({self.as_data()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (dict(self._entries), self.notes)

    @classmethod
    def from_model(cls, model: Any) -> Plan:
        """The plan that a model of the transformers library has: its `tp_plan`, or its configuration's for the base.

        Entries that name nothing in this model, and styles that a plan cannot express, are left out and noted.
        """
        return cls(*entries_of_model(model))

    @classmethod
    def megatron(cls, exported: ExportedProgram, vocab: bool = False, singles: bool = False) -> Plan:
        """The plan that the graph suggests: pairs of a column-wise and a row-wise projection, one reduction each.

        A projection is split by columns where everything it puts out stays split, head by head or channel by channel,
        until another projection contracts over it. `vocab` also splits the token embedding and the head by vocabulary.
        What is in no pair stays whole, and is listed in `notes`; `singles` splits what is large of it too, for one
        gather of what it puts out.
        """
        return cls(*find_entries(exported, vocab, singles))

    def filled(self, exported: ExportedProgram, vocab: bool = False, singles: bool = False) -> Plan:
        """This plan, and what `Plan.megatron` finds for parameters that it does not name.

        The plans of the transformers library leave most of some models whole. What a pair found in the graph shares
        with this plan is left to this plan.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> Plan({}).filled(torch.export.export(model, (torch.ones(4, 8),)))
        Plan({'0': 'colwise', '2': 'rowwise'})
        """
        found = Plan.megatron(exported, vocab, singles)
        added = unnamed(self._entries, found._entries, exported)
        return Plan({**self._entries, **added}, (*self.notes, *found.notes))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan from a `.json` or `.yaml` file: names and strings, or `{style, blocks, input, output}`."""
        entries = plan_file.read(Path(path))
        try:
            return cls(entries)
        except PlanError as error:
            raise PlanError(f"{path}: {error.found}", expected=error.expected, remedy=error.remedy) from error

    def save(self, path: str | Path) -> None:
        """Write the plan where `load` reads it, `.json` or `.yaml`."""
        plan_file.write(self.as_data(), Path(path))

    def resolve(self, exported: ExportedProgram, ranks: int) -> ResolvedPlan:
        """What the plan says about every parameter of a program, for so many ranks; PlanError where it does not fit."""
        return resolve(self._entries, exported, ranks)

    def as_data(self) -> dict[str, Any]:
        """The entries as plan files hold them.

        >>> Plan({"up": "colwise"}).as_data()
        {'up': 'colwise'}
        """
        return {name: to_data(style) for name, style in self._entries.items()}


def _read(name: str, entry: object) -> Style:
    try:
        return read_style(entry)
    except PlanError as error:
        raise PlanError(f"the plan's {name!r}: {error.found}", expected=error.expected, remedy=error.remedy) from error
