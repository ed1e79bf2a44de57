"""What exchanges in pieces save: a region of a program simulated by itself, as it stands and cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from crossfade.cost.estimate import Estimator, computes
from crossfade.cost.keys import Keys
from crossfade.cost.machine import Machine
from crossfade.cost.timeline import Costs, simulate
from crossfade.graph.program import Program


def most_saved(costs: Costs, exchanges: Iterable[fx.Node], calls: Iterable[fx.Node]) -> float:
    """The seconds that pieces could save at the very most: all of what travels, or all of what is computed.

    >>> graph = fx.Graph()
    >>> start, call = graph.placeholder("start"), graph.placeholder("call")
    >>> most_saved(Costs({call: 2.0}, {start: 3.0}, {}), [start], [call])
    2.0
    """
    travel = sum(costs.travel.get(node, 0.0) for node in exchanges)
    return min(travel, sum(costs.compute.get(node, 0.0) for node in calls))


def seconds_of(
    program: Program, machine: Machine, measured: Mapping[str, float], *, of: Program | None = None, keys: Keys
) -> float:
    """The predicted seconds of a program, which is one in pieces `of` another if that is given.

    Operators on pieces, which nobody has measured, are as much slower than arithmetic says as the whole ones are.

    >>> from crossfade.cost.presets import preset
    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[1024, 1024] = input("x")
    ... y: f32[1024, 1024] = aten.mm(x, x)
    ... return output("y", y)
    ... ''')
    >>> seconds_of(program, preset("ethernet-1gbit"), {}, keys=Keys(None)) < 1.0
    True
    """
    known = dict(measured)
    if of is not None:
        ratios = _measured_to_arithmetic(of, machine, measured, keys)
        plain = Estimator(program, machine, {}, keys)
        for node in program.graph.nodes:
            if node.target in ratios and computes(node):
                known.setdefault(keys.of(node), plain.compute_seconds(node) * ratios[node.target])
    return simulate(program, Estimator(program, machine, known, keys).costs()).seconds


def _measured_to_arithmetic(
    program: Program, machine: Machine, measured: Mapping[str, float], keys: Keys
) -> dict[Any, float]:
    """For each operator that was measured, by how much it takes longer than arithmetic says."""
    plain = Estimator(program, machine, {}, keys)
    seconds: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node in program.graph.nodes:
        if computes(node) and (found := measured.get(keys.of(node))) is not None:
            seconds[node.target][0] += found
            seconds[node.target][1] += plain.compute_seconds(node)
    return {target: found / expected for target, (found, expected) in seconds.items() if expected}
