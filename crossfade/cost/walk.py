"""Walk: a program gone through in its own order on made-up inputs, its operators timed where they stand.

So an operator finds in the caches what it finds there in a step: what was made just before, what was made long ago as
far as they are large, nothing of what has been pushed out. The memory for its result is what others left.
"""

from __future__ import annotations

import contextlib
import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from crossfade.cost.keys import described
from crossfade.cost.sample import SampleMemory, made_up, written_over
from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, written_inputs
from crossfade.graph.program import Program, tensor_bytes

_MOST_OWN = 2**29
"""Inputs, and what is made of them, have so many bytes of their own at most: each far more than any cache."""

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10


class TimedWalk:
    """Rounds through a program. Nodes in `functions` are called by them; others have results out of `memory`.

    What travels arrives at once. Where a program holds more than there is memory for, what it holds longest lies in
    `memory` too, among others: far from the caches, as it would be in a step. What writes there is not timed, since the
    others may lie in the same place. `failed` tells what raised, by node: it is not called again.

        >>> import torch
        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[8, 8] = input("x")
        ... y: f32[8, 8] = aten.mm(x, x)
        ... return output("y", y)
        ... ''')
        >>> _, y, _ = program.graph.nodes
        >>> walk = TimedWalk(program, {y: torch.mm}, SampleMemory(2**12))
        >>> walk.round(deadline=float("inf"))
        True
        >>> walk.seconds([y]) > 0
        True
    """

    def __init__(self, program: Program, functions: Mapping[fx.Node, Callable[..., Any]], memory: SampleMemory) -> None:
        self.program, self.memory = program, memory
        self.failed: dict[fx.Node, Exception] = {}
        self._roots = alias_roots(program.graph.nodes)
        writes = {node: {self._roots[target] for target in written_inputs(node)} for node in program.graph.nodes}
        self._written = set().union(*writes.values())
        self._sharing = _sharing(program, self._roots)
        apart = [node for node in functions if writes[node].isdisjoint(self._sharing)]
        self.functions = {node: functions[node] for node in apart}
        self._samples: dict[fx.Node, list[float]] = {node: [] for node in self.functions}
        self._totals: list[float] = []
        self._usual = 1.0
        self._ends = _last_uses(program)
        self._inputs = {node: self._input(node) for node in program.placeholders}

    def leave_out(self, nodes: Iterable[fx.Node]) -> None:
        """Do not time these."""
        for node in nodes:
            self.functions.pop(node, None)

    def rounds(self, deadline: float) -> None:
        """Go through the program a few times, as far as there is time."""
        for _ in range(_MOST_ROUNDS):
            if not self.round(deadline):
                break
        medians = sum(statistics.median(found) for found in self._samples.values() if found)
        if self._totals and medians:
            self._usual = statistics.median(self._totals) / medians

    def round(self, deadline: float) -> bool:
        """Go through the program once; False if the time was over before the end."""
        values: dict[fx.Node, Any] = dict(self._inputs)
        total = 0.0
        for node in self.program.graph.nodes:
            if node.op == "output":
                self._totals.append(total)
                return True
            if time.perf_counter() > deadline:
                return False
            if node in self.functions:
                total += self._call(node, values)
                continue
            if node.users and node not in values:
                values[node] = self._untimed(node, values)
            for ended in self._ends.get(node, ()):
                values.pop(ended, None)
        raise AssertionError("every program ends in its output")

    def seconds(self, nodes: list[fx.Node]) -> float | None:
        """The mean of some nodes' medians; None of nodes that were never reached.

        After `rounds`, times as much as a usual round took longer than all medians together: each operator takes
        longer now and then, and in every round some do.
        """
        medians = [statistics.median(found) for node in nodes if (found := self._samples.get(node))]
        return statistics.fmean(medians) * self._usual if medians else None

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> float:
        """Call and free what is used for the last time, both of which a step must do; note the seconds."""
        function, dying = self.functions[node], [values[ended] for ended in self._ends.get(node, ())]
        args, kwargs = _arguments(node, values)
        for ended in self._ends.get(node, ()):
            del values[ended]
        result: Any = None
        seconds = 0.0
        try:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            del args, kwargs
            dying.clear()
            seconds = time.perf_counter() - start
            self._samples[node].append(seconds)
        except Exception as error:  # whatever an operator raises on made-up data is its own affair, and is reported
            self.failed[node] = error.with_traceback(None)  # which would hold the round's values
            del self.functions[node]
        if node.users:
            kept = node not in self._sharing and _fits(result, node.meta.get("val"))
            values[node] = result if kept else self._made_up(node)
        return seconds

    def _untimed(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """What a node gives that is not timed: an element of a list, what has arrived, or something like it."""
        if node in self._sharing:
            return self._made_up(node)
        if collectives.is_collective(node) or collectives.is_wait(node):
            return self._arrived(node, values)
        if getattr(node.target, "__module__", "") in ("_operator", "math"):
            args, kwargs = _arguments(node, values)
            with contextlib.suppress(ArithmeticError, ValueError, LookupError, TypeError):  # of what is made up
                return node.target(*args, **kwargs)  # type: ignore[operator]
        return self._made_up(node)

    def _arrived(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """The memory that a collective writes if that is an argument, else new memory, just written."""
        value, started = node.meta.get("val"), collectives.view(node)
        if started is not None and started.out is not None:
            return written_over(values[started.out])
        for source in node.all_input_nodes:
            if self._roots[source] is self._roots[node] and _fits(values[source], value):
                return values[source]
        return made_up(value) if isinstance(value, Tensor) else self._made_up(node)

    def _made_up(self, node: fx.Node) -> Any:
        return self.memory.value(node.meta.get("val"), self._roots[node] in self._written)

    def _input(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        return made_up(value) if isinstance(value, Tensor) and node not in self._sharing else self._made_up(node)


def fitting(counts: Mapping[str, int], seconds: Mapping[str, float], available: float) -> dict[str, int]:
    """How many nodes of each key to time, so that a few rounds fit into the time: all of them if they do.

    >>> fitting({"mm": 8, "add": 2}, {"mm": 1.0, "add": 0.5}, available=13.5)
    {'mm': 4, 'add': 1}
    """
    whole = _LEAST_ROUNDS * sum(seconds[key] * count for key, count in counts.items())
    share = min(1.0, available / whole) if whole else 1.0
    return {key: max(1, int(count * share)) for key, count in counts.items()}


def _sharing(program: Program, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Values without memory of their own: inputs beyond the bound and, where too much else is alive, the longest so."""
    held = accumulate(tensor_bytes(node.meta.get("val")) for node in program.placeholders)
    beyond = {node for node, so_far in zip(program.placeholders, held, strict=True) if so_far > _MOST_OWN}
    return beyond | _longest_alive(program, roots)


def _longest_alive(program: Program, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Which of the values that are made to leave out, so that no more than the bound is ever alive."""
    nodes = list(program.graph.nodes)
    last = {roots[value]: index for index, node in enumerate(nodes) for value in (*node.all_input_nodes, node)}
    left_out, alive, ending, held = set(), list[tuple[int, int]](), Counter[int](), 0
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        if node.op != "placeholder" and roots[node] is node and isinstance(value, Tensor):
            heapq.heappush(alive, (-last[node], index))
            ending[last[node]] += tensor_bytes(value)
            held += tensor_bytes(value)
        while held > _MOST_OWN:
            end, longest = heapq.heappop(alive)
            size = tensor_bytes(nodes[longest].meta["val"])
            ending[-end] -= size
            held -= size
            left_out.add(nodes[longest])
        held -= ending[index]
    return left_out


def _last_uses(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it is the last to use."""
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    inputs = set(program.placeholders)
    ends: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if value not in inputs and user is not value:
            ends.setdefault(user, []).append(value)
    return ends


def _arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fx.map_arg((node.args, node.kwargs), values.__getitem__)


def _fits(value: Any, like: Any) -> bool:
    """Whether a value can stand where one like another is expected."""
    if isinstance(like, Tensor):
        return isinstance(value, Tensor) and described(value) == described(like)
    return isinstance(value, (tuple, list)) == isinstance(like, (tuple, list)) and value is not None
