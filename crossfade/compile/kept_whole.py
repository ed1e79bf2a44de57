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
        """Read a step off its program.

        A gradient whose factors travel is multiplied whenever they have arrived: its product is left out of what must
        be computed in order, and its exchange is ready as soon as what comes before it is computed.
        """
        compute = estimate(program, machine, measured).compute
        gradients = {out.name: node for out, node in program.named_results() if out.kind is OutputKind.GRADIENT}
        late = {node for node in gradients.values() if _travels_as_factors(node, machine, group, ranks)}
        done, before, after = 0.0, {}, {}
        for node in program.graph.nodes:
            before[node] = done
            done += 0.0 if node in late else compute.get(node, 0.0)
            after[node] = done

        def travel(kind: Kind, size: int) -> float:
            """The share of a bucket's travel: its latency is shared by too many to count."""
            latency = machine.collective_seconds(kind, 0, ranks, group)
            return machine.collective_seconds(kind, size, ranks, group) - latency

        def read(name: str, node: fx.Node) -> _Parameter:
            size, gradient = tensor_bytes(node.meta["val"]), gradients.get(name)
            needed = min((before[user] for user in node.users), default=done)
            exchange = travel(Kind.REDUCE_SCATTER, size)
            if gradient in late:
                exchange = travel_of_factors(machine, *_factors(gradient), ranks, group)
            ready = after[gradient] if gradient is not None else None
            return _Parameter(name, size, needed, ready, travel(Kind.ALL_GATHER, size), exchange)

        inputs = [item for item in program.named_inputs() if item[0].kind is InputKind.PARAMETER]
        parameters = [read(item.name, node) for item, node in inputs if node.meta["val"].dim()]
        parameters.sort(key=lambda parameter: parameter.needed)
        updated = sum(parameter.bytes for parameter in parameters if parameter.ready is not None) / ranks
        products = sum(compute.get(node, 0.0) for node in late)
        at_the_end = products + _UPDATE_WALKS * updated / machine.memory_bandwidth
        return cls(parameters, done, at_the_end, machine.fabric(group).slows_compute)

    def first(self, share: int) -> list[str]:
        """The names of those used first that have about so many of `_SHARES` of all bytes (the last one counts if more
        than half of it does); and of what is never updated: to keep that whole takes no communication."""
        left = sum(parameter.bytes for parameter in self.parameters) * share / _SHARES
        chosen = []
        for parameter in self.parameters:
            if parameter.ready is not None:
                if left < parameter.bytes / 2:
                    break
                left -= parameter.bytes
            chosen.append(parameter.name)
        return chosen

    def seconds(self, kept: Collection[str]) -> float:
        """What the step takes with these kept whole."""
        lanes, chosen = Lanes([self.slows_compute]), frozenset(kept)
        split = [parameter for parameter in self.parameters if parameter.name not in chosen]
        arrives = {parameter.name: lanes.carry(parameter.gather) for parameter in split}
        uses = [(parameter.needed, 0, parameter) for parameter in split]
        gradients = [(parameter.ready, 1, parameter) for parameter in self.parameters if parameter.ready is not None]
        done = 0.0
        for at, is_gradient, parameter in sorted([*uses, *gradients], key=lambda event: event[:2]):
            lanes.compute(at - done)
            done = at
            if not is_gradient:
                lanes.wait(arrives[parameter.name])
                continue
            lanes.carry(parameter.exchange)
            if parameter.name in chosen:
                lanes.carry(parameter.gather)
        lanes.compute(self.in_order - done + self.at_the_end)
        return max(lanes.now, *lanes.free)


def _travels_as_factors(gradient: fx.Node, machine: Machine, group: str, ranks: int) -> bool:
    if gradient.target is not torch.ops.aten.mm.default or gradient.meta["val"].shape[0] % ranks:
        return False
    left, right = _factors(gradient)
    return factors_pay(machine, left, right, ranks, group)


def _factors(product: Any) -> tuple[Any, Any]:
    left, right = (factor.meta["val"] for factor in product.args)
    return left, right
