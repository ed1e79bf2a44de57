"""Sampled programs with collectives whose memory is written and shared: lists, buffers, results and inputs.

Beside what `exchange_programs` samples: coalesced collectives of every kind whose results are written in place,
exchanges in uneven parts, broadcasts, collectives that nobody uses, inputs that are written, and results that share
memory with each other or with an input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from crossfade.compile.pipeline import optimization
from crossfade.cost.presets import preset
from crossfade.graph.passes import Pass
from crossfade.simplify.overwrite_dead_values import OverwriteDeadValues
from crossfade.simplify.remove_dead_collectives import RemoveDeadCollectives
from crossfade.simplify.remove_redundant_gathers import RemoveRedundantGathers
from tests.properties.exchange_programs import Choices, Sampler, aten, c10d, sampled_passes


@dataclass
class WritingSampler(Sampler):
    """Adds one operation a choice, more of which write."""

    def kinds(self) -> list[Callable[[], None]]:
        more = [self.list_of_any, self.list_of_any, self.list_of_any, self.write_result, self.write_result]
        more += [
            self.uneven,
            self.broadcast,
            self.broadcast_in_place,
            self.dead,
            self.write_input,
            self.wait,
            self.halves,
        ]
        return [*super().kinds(), *more]

    def contiguous(self) -> fx.Node | None:
        x = self.operand()
        return x if x is not None and x.meta["val"].is_contiguous() else None

    def list_of_any(self) -> None:
        """Two or three values in one collective; each result is waited for now, later, or before it is written."""
        group, kind = self.group(), self.choices.below(3)
        size = self.groups[group]
        given = [x for _ in range(2 + self.choices.below(2)) if (x := self.contiguous()) is not None]
        if kind == 2:
            given = [x for x in given if x.meta["val"].shape[0] % size == 0]
        given = [x for x in given if x.meta["val"].dtype == given[0].meta["val"].dtype]
        if not given:
            return
        most = 4 * max(self.largest[x] for x in given)
        calls = [
            (c10d.all_reduce_coalesced.default, given, "sum", group),
            (c10d.all_gather_into_tensor_coalesced.default, given, size, group),
            (c10d.reduce_scatter_tensor_coalesced.default, given, "sum", size, group),
        ]
        target, *args = calls[kind]
        start = self.emit(target, *args, largest=most)
        elements = [self.emit(operator.getitem, start, index, largest=most) for index in range(len(given))]
        if self.choices.chance(2):
            self.write_first(elements)
            return
        self.in_flight += elements
        for _ in range(self.choices.below(len(elements) + 1)):
            self.wait()

    def write_first(self, elements: list[fx.Node]) -> None:
        """Wait for all, then write one before any other is used: it is nobody else's memory, whatever is in flight."""
        most = self.largest[elements[0]]
        waits = [self.keep(c10d.wait_tensor.default, element, largest=most) for element in elements]
        self.emit(aten.clamp_.default, waits[0], -2, 2, largest=most)
        self.emit(aten.mul_.Tensor, waits[0], -2, largest=most)
        self.largest[waits[0]] = max(4.0, most)

    def write_result(self) -> None:
        """Write a value, or a view of it, in place: if nothing is in flight that reads it, or might write it."""
        if self.in_flight:
            return
        x = self.pick(lambda value: value.dtype.is_floating_point and value.dim() > 0)
        if x is not None and x.op == "call_function" and self.largest[x] <= 64:
            into = self.emit(aten.unsqueeze.default, x, 0, largest=4.0) if self.choices.chance(2) else x
            self.emit(aten.clamp_.default, into, -2, 2, largest=2.0)
            self.emit(self.choices.of([aten.add_, aten.mul_]).Tensor, into, self.choices.of([1, -1]), largest=3.0)
            self.largest[x] = max(self.largest[x], 3.0)

    def write_input(self) -> None:
        given = [node for node in self.values if node.op == "placeholder" and node.meta["val"].dtype.is_floating_point]
        if given and not self.in_flight:
            self.emit(aten.mul_.Tensor, self.choices.of(given), -1, largest=2.0)

    def uneven(self) -> None:
        """An exchange in which every rank keeps more than it sends to each other."""
        group = self.group()
        size, x = self.groups[group], self.contiguous()
        if x is not None and x.meta["val"].shape[0] > size:
            parts = [1] * size
            parts[self.positions[group]] += x.meta["val"].shape[0] - size
            self.launch(c10d.all_to_all_single.default, x, parts, parts, group)

    def broadcast(self) -> None:
        if (x := self.contiguous()) is not None:
            self.launch(c10d.broadcast.default, x, 0, self.group())

    def broadcast_in_place(self) -> None:
        if (x := self.contiguous()) is not None:
            most = self.largest[x]
            copy = self.emit(aten.clone.default, x, largest=most)
            self.in_flight.append(self.emit(c10d.broadcast_.default, copy, 0, self.group(), largest=most))
            self.wait()

    def dead(self) -> None:
        if (x := self.contiguous()) is not None:
            started = self.emit(c10d.all_reduce.default, x, "sum", self.group(), largest=4 * self.largest[x])
            self.emit(c10d.wait_tensor.default, started, largest=4 * self.largest[x])

    def halves(self) -> None:
        x = self.pick(lambda value: value.dim() > 0 and value.shape[0] % 2 == 0)
        if x is not None:
            parts = self.emit(aten.split.Tensor, x, x.meta["val"].shape[0] // 2, largest=self.largest[x])
            self.values += [self.emit(operator.getitem, parts, index, largest=self.largest[x]) for index in (0, 1)]

    def returned(self, inputs: list[fx.Node]) -> list[fx.Node]:
        """Some results, among them inputs, the same value twice, and views of what is returned."""
        results = [*super().returned(inputs)]
        for one in list(results)[:: 1 + self.choices.below(3)]:
            more = [one, self.emit(aten.unsqueeze.default, one, 0, largest=1.0), inputs[0]]
            results.append(self.choices.of(more))
        return results


def some_passes(choices: Choices, groups: Mapping[str, int], positions: Mapping[str, int]) -> list[Pass]:
    """Some passes out of one pipeline: the default one, the one for a machine, or all of communication with options."""
    backends = dict.fromkeys(groups, "gloo")
    pipelines: list[Callable[[], Any]] = [
        lambda: optimization(backends),
        lambda: optimization({}),
        lambda: optimization({}, preset("ethernet-1gbit"), groups),
        lambda: sampled_passes(choices, groups, positions),
        lambda: [RemoveRedundantGathers(), RemoveDeadCollectives(), *sampled_passes(choices, groups, positions)],
        lambda: [*optimization({}), OverwriteDeadValues()],
    ]
    chosen = list(choices.of(pipelines)())
    return chosen if choices.chance(2) else [one for one in chosen if not choices.chance(3)]
