"""A program made runnable: logical groups resolved, errors traced back to the collective they came from."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from crossfade.execute.codegen import compile_program
from crossfade.execute.compile_regions import CompiledRegions
from crossfade.execute.cuda_graph import with_replays
from crossfade.graph import collectives
from crossfade.graph.private import below_autograd
from crossfade.graph.program import Program, source_line


class Executable:
    """Runs a program, node after node, `regions` of it compiled; every value is freed after its last use.

    `groups` maps the program's group names to those of process groups. With `replay` what can be recorded as a CUDA
    graph is, with the collectives of the groups that are `recorded`.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[2] = input("x")
        ... y: f32[2] = aten.neg(x)
        ... return output("y", y)
        ... ''')
        >>> Executable(program, {})([torch.ones(2)])
        (tensor([-1., -1.]),)
    """

    def __init__(
        self,
        program: Program,
        groups: Mapping[str, str],
        regions: CompiledRegions | None = None,
        *,
        replay: bool = False,
        recorded: Collection[str] = (),
    ) -> None:
        self.recorded = {groups[name] for name in recorded}
        self.program = program.copy() if regions is None else regions.called_by(program, host_first=bool(recorded))
        collectives.rename_groups(self.program.graph.nodes, dict(groups))
        self.groups = {real: logical for logical, real in groups.items()}
        self.compiled = compile_program(with_replays(self.program, self.recorded) if replay else self.program)
        values = (node.meta.get("val") for node in self.program.placeholders)
        self.device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run on the inputs, in the program's order; the list is emptied."""
        casts_are_written_out = torch.autocast(self.device, enabled=False)
        try:
            with torch.no_grad(), casts_are_written_out, below_autograd():
                return self.compiled.function(inputs)
        except Exception as error:
            node = self._node_at(error)
            if node is not None and source_line(node):
                error.add_note(f"In {node.target}, which comes from {source_line(node)}")
            raise

    def collective_at(self, error: BaseException) -> str:
        """Which collective an error came out of, in words; empty if it came from elsewhere."""
        node = self._node_at(error)
        return self._describe(node) if node is not None else ""

    def _node_at(self, error: BaseException) -> fx.Node | None:
        """The node whose line of the generated function an error came out of."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            node = self.compiled.node_at.get(frame.lineno or 0)
            if node is not None and frame.filename == self.compiled.filename:
                return node
        return None

    def _describe(self, node: fx.Node) -> str:
        start = collectives.started_by(node) if collectives.is_wait(node) else node
        found = collectives.view(start) if start is not None else None
        if found is None:
            return ""
        where = f" [{source_line(found.node)}]" if source_line(found.node) else ""
        group = self.groups.get(found.group, found.group)
        return f"{found.kind} {found.node.name}{where} of {found.bytes} bytes on group {group!r}"
