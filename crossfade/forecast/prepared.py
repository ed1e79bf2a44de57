"""A program made ready to be costed on many machines: equal operators are costed once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from crossfade.cost.estimate import Estimator, computes
from crossfade.cost.fusion import Kernel, fused_kernels
from crossfade.cost.keys import Keys
from crossfade.cost.lanes import Lanes
from crossfade.cost.machine import Machine
from crossfade.cost.presets import preset
from crossfade.cost.products import shape_of
from crossfade.cost.stragglers import largest_of
from crossfade.cost.timeline import Costs, Timeline, simulate
from crossfade.errors import MachineError
from crossfade.forecast.float8 import RATE, Float8
from crossfade.forecast.repeat import layer_of
from crossfade.graph import collectives
from crossfade.graph.lasting import lasting_views
from crossfade.graph.program import Program

_WAIT, _COLLECTIVE, _OPERATOR = "wait", "collective", "operator"
_PLAIN = Float8()
_ANY = preset("a100-node")
"""Whether an operator is a view does not depend on it."""


@dataclass(frozen=True)
class Prepared:
    """A program with the operators that are alike, for a mesh of ranks."""

    program: Program
    mesh: Mapping[str, int]
    keys: Keys
    alike: Mapping[fx.Node, fx.Node]
    """For each operator that computes, the first one like it."""
    kernels: tuple[Kernel, ...] = ()
    """What a compiler makes of elementwise operators, where it does: inside of each layer, where there are layers."""
    float8: Float8 = _PLAIN
    """The products that are computed in float8."""

    @classmethod
    def of(cls, program: Program, mesh: Mapping[str, int], *, compiled: bool = False, float8: bool = False) -> Prepared:
        """Look for operators that are alike."""
        keys = Keys(threads=1)
        is_view = Estimator(program, _ANY, {}, keys).is_view
        in_float8 = Float8.of(program, keys, is_view) if float8 else _PLAIN
        first: dict[str, fx.Node] = {}
        alike: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            if computes(node):
                alike[node] = first.setdefault(_key(node, keys, in_float8), node)
        kernels: list[Kernel] = []
        if compiled:
            has_layers = any(layer_of(node) is not None for node in program.graph.nodes)
            kernels = fused_kernels(program, is_view, keys, lambda node: not has_layers or layer_of(node) is not None)
        return cls(program, dict(mesh), keys, alike, tuple(kernels), in_float8)

    def costs(self, machine: Machine) -> Costs:
        """The seconds of every node on a machine, whose fabrics are laid over the mesh."""
        estimator = Estimator(self.program, machine, {}, self.keys)
        seconds = {node: self._seconds(node, estimator, machine) for node in dict.fromkeys(self.alike.values())}
        known = {node: seconds[first] for node, first in self.alike.items()}
        for kernel in self.kernels:
            known.update(dict.fromkeys(kernel.nodes, 0.0))
            known[kernel.nodes[0]] = kernel.bytes / machine.memory_bandwidth + machine.overhead
        costs = estimator.costs(known)
        sent = {node: self._travel(node, size, machine) for node, size in self.float8.sent.items()}
        return dataclasses.replace(costs, travel={**costs.travel, **sent}) if sent else costs

    def _travel(self, node: fx.Node, size: int, machine: Machine) -> float:
        """Seconds of a collective that carries other bytes than it says."""
        found = collectives.view(node)
        assert found is not None
        return machine.collective_seconds(found.kind, size, self.program.groups[found.group], found.group)

    def seconds(self, machine: Machine, known: dict[str, float] | None = None, more: int = 0) -> float:
        """The length of `timeline`, counted without drawing it: for fits, which ask for it thousands of times.

        With `more`, of a program with so many more layers like its last one, whose collectives are waited for inside
        of them. `known` keeps the seconds of operators on this machine, for other programs with the same.
        """
        known = {} if known is None else known
        estimator = Estimator(self.program, machine, {}, self.keys)
        for key, node in self._by_key.items():
            if key not in known:
                known[key] = self._seconds(node, estimator, machine)
        fabrics = {group: machine.fabric(group) for group in self._groups}
        lanes = Lanes([fabrics[group].slows_compute for group in self._groups])
        host, launch = 0.0, machine.launching.seconds
        arrivals: dict[Any, float] = {}
        pending: set[Any] = set()
        for what, value in self._with_more(more):
            if what == _WAIT:
                lanes.wait(arrivals.get(value, 0.0))
                pending.discard(value)
                continue
            if what == _COLLECTIVE:
                busy, (index, kind, size, ranks) = fabrics[value[1]].launch, value[2:]
            else:
                busy = known[value]
            if busy:
                host += launch
                lanes.wait(host)
                lanes.compute(busy)
            if what == _COLLECTIVE:
                travel = machine.collective_seconds(kind, size, ranks, value[1])
                arrivals[value[0]] = lanes.carry(travel, index)
                pending.add(value[0])
        return max([lanes.now, *(arrivals[each] for each in pending)])

    @cached_property
    def unwritten(self) -> frozenset[fx.Node]:
        """What only lives inside of compiled kernels."""
        return frozenset(node for kernel in self.kernels for node in kernel.unwritten)

    @cached_property
    def _by_key(self) -> dict[str, fx.Node]:
        return {_key(node, self.keys, self.float8): node for node in dict.fromkeys(self.alike.values())}

    @cached_property
    def _groups(self) -> list[str]:
        found = (collectives.view(node) for node in self.program.graph.nodes)
        return list(dict.fromkeys(each.group for each in found if each is not None))

    def _with_more(self, more: int) -> list[tuple[str, Any]]:
        """What a simulation has to look at, with the last layer's forward and backward repeated."""
        found = self._known_events.get(more)
        if found is None:
            events = self._events
            last = max((place for _, _, place in events if place is not None), default=(0, ""))[0]
            found = []
            for place, run in itertools.groupby(events, key=lambda event: event[2]):
                plain = [(what, value) for what, value, _ in run]
                found += plain * (1 + more if place is not None and place[0] == last else 1)
            self._known_events[more] = found
        return found

    @cached_property
    def _known_events(self) -> dict[int, list[tuple[str, Any]]]:
        return {}

    @cached_property
    def _events(self) -> list[tuple[str, Any, tuple[int, str] | None]]:
        """What a simulation has to look at, in order, and the layer that it lies in."""
        key_of = {node: key for key, node in self._by_key.items()}
        estimator = Estimator(self.program, _ANY, {}, self.keys)
        lasting = lasting_views(self.program)
        events: list[tuple[str, Any, tuple[int, str] | None]] = []
        place: tuple[int, str] | None = None
        for node in self.program.graph.nodes:
            collective = collectives.view(node)
            place = layer_of(node) if node.op == "call_function" else place
            if collectives.is_wait(node):
                events.append((_WAIT, collectives.started_by(node), place))
            elif collective is not None:
                ranks = self.program.groups[collective.group]
                index = self._groups.index(collective.group)
                size = self.float8.sent.get(node, collective.bytes)
                described = (node, collective.group, index, collective.kind, size, ranks)
                events.append((_COLLECTIVE, described, place))
            elif node in self.alike and node not in lasting and not estimator.is_view(node):
                events.append((_OPERATOR, key_of[self.alike[node]], place))
        return events

    def _seconds(self, node: fx.Node, estimator: Estimator, machine: Machine) -> float:
        """Seconds of one operator; of a product in float8 with the casts of its factors."""
        casts, shape = self.float8.casts.get(node), shape_of(node, self.keys)
        if casts is None or shape is None or machine.products is None:
            return estimator.compute_seconds(node)
        rate = machine.flops.get(RATE)
        if rate is None:
            raise MachineError(f"{machine.name} has no rate for float8", expected=f"flops.{RATE}",
                               remedy="take a machine that computes in it, such as h100-cluster")  # fmt: skip
        cast = casts.bytes / machine.memory_bandwidth + casts.kernels * machine.overhead
        return machine.products.seconds(*shape, rate) + machine.overhead + cast

    def timeline(self, machine: Machine) -> Timeline:
        """What the program does when, on a machine."""
        return simulate(self.program, self.costs(machine), f"forecast for {machine.name}")


def _key(node: fx.Node, keys: Keys, float8: Float8) -> str:
    casts = float8.casts.get(node)
    return keys.of(node) if casts is None else f"{keys.of(node)} in float8, {casts}"


def at_the_pace_of(machine: Machine, ranks: int) -> Machine:
    """A machine whose host launches as fast as the slowest of ranks that meet again and again.

    >>> from crossfade.cost.presets import preset
    >>> at_the_pace_of(preset("ethernet-1gbit"), 8).launching.seconds
    0.0
    """
    launching = machine.launching
    slower = dataclasses.replace(launching, seconds=launching.seconds * (1 + launching.spread * largest_of(ranks)))
    return dataclasses.replace(machine, launching=slower) if slower != launching else machine
