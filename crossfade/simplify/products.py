"""What matrix products cost before and after a rewrite, and what the rewrite's verdict says about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from crossfade.cost.keys import described
from crossfade.cost.machine import Machine
from crossfade.graph.passes import Outcome, PassResult, Verdict
from crossfade.graph.private import is_erased
from crossfade.graph.program import Program, size_hint
from crossfade.graph.rewrite import Rule, apply_rules

WORTH_IT = 0.9
"""Estimates are rough: a rewrite must take at most this share of the time before."""


class CallCost(NamedTuple):
    """What one operator does: floating-point operations at its dtype's rate, and bytes read and written."""

    flops: float
    bytes: float
    dtype: torch.dtype = torch.float32
    is_view: bool = False

    def seconds(self, machine: Machine) -> float:
        """As `cost.estimate` has it: the longer of arithmetic and memory, and the overhead of a call."""
        if self.is_view:
            return machine.overhead if machine.device == "cpu" else 0.0
        return max(self._arithmetic(machine), self.bytes / machine.memory_bandwidth) + machine.overhead

    def is_bound_by_memory(self, machine: Machine) -> bool:
        """Whether moving its bytes takes at least as long as its arithmetic."""
        return self._arithmetic(machine) <= self.bytes / machine.memory_bandwidth

    def _arithmetic(self, machine: Machine) -> float:
        return self.flops / machine.flops.get(str(self.dtype).removeprefix("torch."), machine.flops["float32"])


VIEW = CallCost(0, 0, is_view=True)
"""A call that only looks at memory differently."""


@dataclass(frozen=True)
class CostComparison:
    """Two ways to compute the same thing.

    >>> small, large = CallCost(flops=100, bytes=10), CallCost(flops=1000, bytes=10)
    >>> print(CostComparison((large,), (small,)))
    1000 FLOP, 10 B, 1 call -> 100 FLOP, 10 B, 1 call
    """

    before: tuple[CallCost, ...]
    after: tuple[CallCost, ...]

    def reason_against(self, machine: Machine | None) -> str | None:
        """None if the second way pays: on the machine, or without one on every machine, as it needs less of all."""
        if machine is not None:
            slower = self.seconds(machine)[1] > WORTH_IT * self.seconds(machine)[0]
            return "it would not be faster on this machine" if slower else None
        old, new = _needs(self.before), _needs(self.after)
        if any(a > b for a, b in zip(new, old, strict=True)) or new == old:
            return "it does not need less of everything, and no machine says what that costs"
        return None

    def seconds(self, machine: Machine) -> tuple[float, float]:
        """The seconds of both ways."""
        return sum(call.seconds(machine) for call in self.before), sum(call.seconds(machine) for call in self.after)

    def on(self, machine: Machine | None) -> str:
        """The numbers as text, with the machine's seconds if there is one."""
        if machine is None:
            return str(self)
        before, after = self.seconds(machine)
        return f"{self}; {before * 1e6:.1f} -> {after * 1e6:.1f} us on {machine.name}"

    def __str__(self) -> str:
        return f"{_described(self.before)} -> {_described(self.after)}"


def _needs(calls: tuple[CallCost, ...]) -> tuple[float, float, int]:
    return sum(call.flops for call in calls), sum(call.bytes for call in calls), len(calls)


def _described(calls: tuple[CallCost, ...]) -> str:
    flops, size, count = _needs(calls)
    return f"{flops:.0f} FLOP, {size:.0f} B, {count} call{'' if count == 1 else 's'}"


def bytes_of(*nodes: fx.Node) -> float:
    """The bytes of memory behind the values of some nodes; symbolic sizes count by their hint."""
    return float(sum(tensor.bytes for node in nodes for tensor in described(node.meta.get("val"))))


def sizes_of(node: fx.Node) -> tuple[int, ...]:
    """A tensor's sizes as numbers, for what things cost."""
    return tuple(size_hint(size) for size in node.meta["val"].shape)


def product_of(left: fx.Node, right: fx.Node) -> CallCost:
    """The product of two matrices."""
    (rows, inner), (_, columns) = sizes_of(left), sizes_of(right)
    value = left.meta["val"]
    result = rows * columns * value.element_size()
    return CallCost(2 * rows * inner * columns, bytes_of(left, right) + result, value.dtype)


def product_of_sizes(rows: int, inner: int, columns: int, value: Tensor, stack: int = 1) -> CallCost:
    """A product of dense matrices of some sizes and a tensor's dtype, or a stack of such."""
    elements = rows * inner + inner * columns + rows * columns
    return CallCost(2 * stack * rows * inner * columns, stack * elements * value.element_size(), value.dtype)


def copy_of(*nodes: fx.Node) -> CallCost:
    """Values read and written once, as `cat` and `stack` do."""
    return CallCost(0, 2 * bytes_of(*nodes), nodes[0].meta["val"].dtype)


def is_only_read_by(node: Any, user: fx.Node) -> bool:
    """Whether nothing but one argument of `user` reads a value."""
    return isinstance(node, fx.Node) and list(node.users) == [user] and _times_read(user, node) == 1


def _times_read(user: fx.Node, node: fx.Node) -> int:
    found: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def are_pointwise(users: Iterable[fx.Node]) -> bool:
    """Whether some nodes, at least one, work element by element: a compiler makes them one loop with their input."""
    users = list(users)
    return bool(users) and all(torch.Tag.pointwise in getattr(user.target, "tags", ()) for user in users)


def run_priced_rules(program: Program, rules: Iterable[Rule], prices: dict[fx.Node, tuple[str, str]]) -> PassResult:
    """Apply rules and report what became of every candidate, with the numbers that decided.

    The rules' checks leave in `prices`, under a match's root, why they agree and the numbers. Rules used here must not
    erase the root of another candidate: a root that is gone was replaced.
    """
    done = apply_rules(program, rules)
    verdicts = [
        Verdict.of(node, Outcome.LEFT, reason, detail=prices[node][1] if node in prices else rule.name)
        for rule, node, reason in done.declined
    ]
    verdicts += [
        Verdict.of(node, Outcome.REPLACED, why, detail=numbers)
        for node, (why, numbers) in prices.items()
        if is_erased(node)
    ]
    return PassResult(done.changed, dict(done.counts), tuple(verdicts))
