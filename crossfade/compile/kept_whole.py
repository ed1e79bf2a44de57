"""Which parameters every rank keeps whole where the others are split, so that neither link nor lane stands still.

A parameter that is split is gathered before its first use, under the forward; one that is kept whole is gathered as
soon as it is updated, under the backward. Both exchange their gradients under the backward. A forward computes a third
of a step and has, with all parameters split, half of its bytes or more to hide: where links are about as fast as
computation it stands still for them, at first most of all. So those that are used first are kept whole, as many as pay.
Their gradients are the last ones of a backward; what is left to compute then are products of factors that have
travelled already (`exchange-factors`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from crossfade.communicate.exchange_factors import factors_pay, travel_of_factors
from crossfade.cost.estimate import estimate
from crossfade.cost.lanes import Lanes
from crossfade.cost.machine import Machine
from crossfade.graph.collectives import Kind
from crossfade.graph.program import InputKind, OutputKind, Program, tensor_bytes

_SHARES = 16
"""Shares of the bytes to try: none, a sixteenth, ..., all."""
_WORTH = 0.01
"""By which share of a step the choice must be faster than to keep nothing whole."""
_UPDATE_WALKS = 8
"""How often an update reads or writes something as large as what it updates: Adam's parameter, gradient, moments."""


def parameters_to_keep_whole(
    program: Program, machine: Machine, measured: Mapping[str, float] | None = None, group: str = "dp", ranks: int = 2
) -> list[str]:
    """The parameters to keep whole, by what a step of a forward and backward program with gradients should take.

    Links carry what is asked for in turn, as in large buckets; the same on all ranks that have the same numbers.

        >>> from crossfade.cost.presets import preset
        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... w: f32[64, 64] = parameter("w")
        ... x: f32[8, 64] = input("x")
        ... y: f32[8, 64] = aten.mm(x, w)
        ... t: f32[64, 8] = aten.t(x)
        ... g: f32[64, 64] = aten.mm(t, y)
        ... return output("y", y), gradient("w", g)
        ... ''')
        >>> parameters_to_keep_whole(program, preset("ethernet-1gbit"))
        []
    """
    step = _Step.of(program, machine, measured or {}, group, ranks)
    choices = [step.first(share) for share in range(_SHARES + 1)]
    fastest = min(choices, key=lambda kept: (step.seconds(kept), len(kept)))
    return fastest if step.seconds(fastest) < step.seconds([]) * (1 - _WORTH) else []


@dataclass(frozen=True)
class _Parameter:
    """A parameter: how much is computed before its first use, and before its gradient or the factors of that are ready;
    and how long it and they travel."""

    name: str
    bytes: int
    needed: float
    ready: float | None
    gather: float
    exchange: float


@dataclass(frozen=True)
class _Step:
    """What a step consists of: its parameters in the order of first use, what must be computed in order, and what may
    be left for the end (products of factors, updates)."""

    parameters: Sequence[_Parameter]
    in_order: float
    at_the_end: float
    slows_compute: float

    @classmethod
    def of(cls, program: Program, machine: Machine, measured: Mapping[str, float], group: str, ranks: int) -> _Step:
        compute = estimate(program, machine, measured).compute
        gradients = {out.name: node for out, node in program.named_results() if out.kind is OutputKind.GRADIENT}
        late = {node for node in gradients.values() if _travels_as_factors(node, machine, group, ranks)}
        done, before, after = 0.0, {}, {}
        for node in program.graph.nodes:
            before[node] = done
            done += 0.0 if node in late else compute.get(node, 0.0)
            after[node] = done

        def travel(kind: Kind, size: int) -> float:
            """Of bytes that share a bucket's latency with others."""
            alone, nothing = (machine.collective_seconds(kind, one, ranks, group) for one in (size, 0))
            return alone - nothing

        def exchange(size: int, gradient: fx.Node | None) -> float:
            if gradient is None or gradient not in late:
                return travel(Kind.REDUCE_SCATTER, size)
            left, right = _factors(gradient)
            return travel_of_factors(machine, left, right, ranks, group)

        found = [
            _Parameter(
                item.name,
                size := tensor_bytes(node.meta["val"]),
                min((before[user] for user in node.users), default=done),
                after.get(gradient := gradients.get(item.name)),  # type: ignore[arg-type]
                travel(Kind.ALL_GATHER, size),
                exchange(size, gradient),
            )
            for item, node in program.named_inputs()
            if item.kind is InputKind.PARAMETER and node.meta["val"].dim()
        ]
        found.sort(key=lambda one: one.needed)
        updated = sum(one.bytes for one in found if one.ready is not None) / ranks
        products = sum(compute.get(node, 0.0) for node in late)
        at_the_end = products + _UPDATE_WALKS * updated / machine.memory_bandwidth
        return cls(found, done, at_the_end, machine.fabric(group).slows_compute)

    def first(self, share: int) -> list[str]:
        """The names of those used first that have about so many of `_SHARES` of all bytes; and of what is never
        updated: to keep that whole takes no communication."""
        left = sum(one.bytes for one in self.parameters) * share / _SHARES
        chosen = []
        for one in self.parameters:
            if one.ready is not None:
                left -= one.bytes / 2
                if left < 0:
                    break
                left -= one.bytes / 2
            chosen.append(one.name)
        return chosen

    def seconds(self, kept: Collection[str]) -> float:
        """What the step takes with these kept whole."""
        lanes, chosen = Lanes([self.slows_compute]), frozenset(kept)
        arrives = {one.name: lanes.carry(one.gather) for one in self.parameters if one.name not in chosen}
        uses = [(one.needed, 0, one) for one in self.parameters if one.name not in chosen]
        gradients = [(one.ready, 1, one) for one in self.parameters if one.ready is not None]
        done = 0.0
        for at, is_gradient, one in sorted([*uses, *gradients], key=lambda event: event[:2]):
            lanes.compute(at - done)
            done = at
            if not is_gradient:
                lanes.wait(arrives[one.name])
                continue
            lanes.carry(one.exchange)
            if one.name in chosen:
                lanes.carry(one.gather)
        lanes.compute(self.in_order - done + self.at_the_end)
        return max(lanes.now, *lanes.free)


def _travels_as_factors(gradient: fx.Node, machine: Machine, group: str, ranks: int) -> bool:
    if gradient.target is not torch.ops.aten.mm.default or gradient.meta["val"].shape[0] % ranks:
        return False
    left, right = _factors(gradient)
    return factors_pay(machine, left, right, ranks, group)


def _factors(product: fx.Node) -> tuple[Any, Any]:
    left, right = (one.meta["val"] for one in product.args)  # type: ignore[union-attr]
    return left, right
