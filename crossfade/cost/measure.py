"""Measure: what the operators of a program really take on this machine.

An operator takes longer in a step than when it is called again and again: its code and some of its arguments have left
the caches meanwhile, and memory for its result must be found. So each distinct one is tried alone, and on a CPU the
program is then walked through a few times, see `crossfade.cost.walk`. Kernels of a GPU, whose launches hide behind
others, are timed by themselves.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from crossfade.cost.estimate import Estimator, computes
from crossfade.cost.keys import Keys, device_of
from crossfade.cost.presets import preset
from crossfade.cost.sample import SampleMemory, TimedCall
from crossfade.cost.walk import TimedWalk, fitting
from crossfade.errors import MachineError
from crossfade.files.found import FileValue
from crossfade.files.plain import decoded_json, read_text
from crossfade.graph.passes import Pass, run_passes
from crossfade.graph.private import below_autograd, unwrapped_operator
from crossfade.graph.program import Program

_LEAST_FAR, _MOST_FAR = 2**22, 2**27
_MOST_ALONE = 10


class Measurements(dict[str, float]):
    """Seconds by key, as `crossfade.cost.estimate` takes them.

    `left_out` are the keys for which the time did not suffice, `unmeasurable` those that cannot run alone, with the
    reason; both stay analytic.

        >>> table = Measurements({"aten.neg.default(f32[4]) cpu x1": 2e-6}, left_out=["aten.mm.default(...) cpu x1"])
        >>> table
        1 measured, 1 left out, 0 unmeasurable
        >>> Measurements.from_json(table.to_json()) == table
        True
    """

    def __init__(
        self,
        seconds: Mapping[str, float] | None = None,
        *,
        left_out: list[str] | None = None,
        unmeasurable: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(seconds or {})
        self.left_out = list(left_out or [])
        self.unmeasurable = dict(unmeasurable or {})

    def __repr__(self) -> str:
        return f"{len(self)} measured, {len(self.left_out)} left out, {len(self.unmeasurable)} unmeasurable"

    def to_json(self) -> str:
        """The table as JSON."""
        plain = {"seconds": dict(self), "left_out": self.left_out, "unmeasurable": self.unmeasurable}
        return json.dumps(plain, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Measurements:
        """A table from its JSON."""
        return cls._read(text, "a table of measurements")

    @classmethod
    def _read(cls, text: str, where: str) -> Measurements:
        remedy = "write it with Measurements.save"
        found = FileValue(decoded_json(text, where, MachineError, remedy), where, "", MachineError, remedy)
        return cls(
            {key: float(entry.number()) for key, entry in found["seconds"].entries().items()},
            left_out=[item.text() for item in found["left_out"].items()],
            unmeasurable={key: entry.text() for key, entry in found["unmeasurable"].entries().items()},
        )

    def save(self, path: str | Path) -> Path:
        """Write the table as a JSON file."""
        path = Path(path)
        path.write_text(self.to_json() + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """A table from a JSON file."""
        path = Path(path)
        if not path.exists():
            raise MachineError(f"no file {path}", remedy="measure first, and save with Measurements.save")
        return cls._read(read_text(path, MachineError, "give a file of Measurements.save"), str(path))


def measure(
    program: Program,
    *,
    threads: int | None = None,
    seconds: float = 2.0,
    known: Mapping[str, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    binding: Callable[[Any], Callable[..., Any]] = unwrapped_operator,
) -> Measurements:
    """Run the operators of a program on made-up tensors, and return the seconds that each takes there by key.

    Those that the program spends most on, by arithmetic, come first; when `seconds` are over, what is left stays
    analytic and is counted. What raises is noted with its reason. Keys in `known` are taken over and not run. Torch
    computes with `threads` threads meanwhile, by default with as many as now. Its random state is left as it was.

    `binding` gives what to call for an operator: give what the program will be run with, where that differs.
    `progress` is called with the number of keys done and of all. Ranks that must decide alike need one table: measure
    on all of them at once, as they compute at once in a step, then share one.

        >>> from crossfade.graph.text import parse
        >>> program = parse('''
        ... x: f32[8, 8] = input("x")
        ... y: f32[8, 8] = aten.mm(x, x)
        ... return output("y", y)
        ... ''')
        >>> measure(program, threads=1)
        1 measured, 0 left out, 0 unmeasurable
    """
    with _as_in_a_step(threads, program):
        return _Measure(program, Keys(threads), known or {}, binding).run(seconds, progress)


def measured_as_run(program: Program, lowering: Sequence[Pass], **options: Any) -> Measurements:
    """Measure a program as it runs after `lowering`; keys are of its nodes as they are then, and as they are before.

    A new value that is written over the old one needs no memory, which on a CPU takes as long to find as to fill. Where
    nodes with one key run in other forms only, their mean counts. Nodes are known by their names, which `lowering` must
    leave. `options` are those of `measure`.
    """
    lowered = run_passes(program, lowering)
    found = measure(lowered, **options)
    keys, lowered_keys = Keys(options.get("threads")), Keys(options.get("threads"))
    forms = {node.name: lowered_keys.of(node) for node in lowered.graph.nodes if computes(node)}
    samples: dict[str, list[float]] = {}
    for node in program.graph.nodes:
        seconds_of_form = found.get(forms.get(node.name, ""))
        if seconds_of_form is not None and computes(node):
            samples.setdefault(keys.of(node), []).append(seconds_of_form)
    means = {key: statistics.fmean(values) for key, values in samples.items()}
    return Measurements({**means, **found}, left_out=found.left_out, unmeasurable=found.unmeasurable)


@contextmanager
def _as_in_a_step(threads: int | None, program: Program) -> Iterator[None]:
    """Torch as a running step sees it: no gradients recorded, this many threads; put back afterwards."""
    before = torch.get_num_threads()
    device = next((device_of(node) for node in program.graph.nodes if computes(node)), "cpu")
    drawing = torch.random.fork_rng(_cuda_devices(device))
    with drawing, torch.no_grad(), torch.autocast(device, enabled=False), below_autograd():
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _cuda_devices(device: str) -> list[int]:
    return [torch.cuda.current_device()] if device == "cuda" and torch.cuda.is_available() else []


class _Measure:
    def __init__(
        self, program: Program, keys: Keys, known: Mapping[str, float], binding: Callable[[Any], Callable[..., Any]]
    ) -> None:
        self.program, self.keys, self.known, self.binding = program, keys, known, binding
        self.found = Measurements()
        self.memory = SampleMemory(_far_bytes(program, keys))

    def run(self, seconds: float, progress: Callable[[int, int], None] | None) -> Measurements:
        """Each alone, the dearest first, for half of the time at most; on a CPU then all of these where they stand."""
        deadline = time.perf_counter() + seconds
        wanted = self._wanted()
        calls: dict[str, TimedCall] = {}
        for done, (key, nodes) in enumerate(wanted.items()):
            if key in self.known:
                self.found[key] = self.known[key]
            elif time.perf_counter() > deadline - seconds / 2:
                self.found.left_out.append(key)
            elif (call := self._call(key, nodes[0])) is not None:
                calls[key] = call
            if progress is not None:
                progress(done + 1, len(wanted))
        walks = self._is_all_here()
        for key, call in calls.items():
            for _ in range(0 if walks else _MOST_ALONE):
                if time.perf_counter() < deadline and key not in self.found.unmeasurable:
                    self._sample(call, key)
            if key not in self.found.unmeasurable:
                self.found[key] = statistics.median(call.samples)
        if walks and calls:
            self._walk({key: (call.function, wanted[key]) for key, call in calls.items()}, deadline)
        return self.found

    def _is_all_here(self) -> bool:
        """Whether every tensor of the program is one of the CPU's."""
        values = [node.meta.get("val") for node in self.program.graph.nodes]
        listed = [item for value in values for item in (value if isinstance(value, (tuple, list)) else [value])]
        return all(item.device.type == "cpu" for item in listed if isinstance(item, torch.Tensor))

    def _sample(self, call: TimedCall, key: str) -> None:
        try:
            call.sample(self.memory)
        except Exception as error:  # it worked before: reported like the others
            self.found.unmeasurable[key] = _in_a_line(error)

    def _call(self, key: str, node: fx.Node) -> TimedCall | None:
        """A call that works, one sample taken; none, and the reason noted, of an operator that does not."""
        if (device := device_of(node)) != "cpu" and not _is_here(device):
            self.found.unmeasurable[key] = f"no {device} device here"
            return None
        try:
            call = TimedCall(node, self.binding(node.target), device)
            call.sample(self.memory)
            call.samples.clear()  # what is set up at the first call is not for every one to pay
            call.sample(self.memory)
        except Exception as error:  # whatever an operator raises on made-up data is its own affair, and is reported
            self.found.unmeasurable[key] = _in_a_line(error)
            return None
        return call

    def _walk(self, wanted: Mapping[str, tuple[Callable[..., Any], list[fx.Node]]], deadline: float) -> None:
        """Time the nodes of some keys where they stand, as many of each as there is time for."""
        functions = {node: function for function, nodes in wanted.values() for node in nodes}
        walk = TimedWalk(self.program, functions, self.memory)
        counts = {key: len(nodes) for key, (_, nodes) in wanted.items()}
        for key, most in fitting(counts, self.found, deadline - time.perf_counter()).items():
            walk.leave_out(wanted[key][1][most:])
        walk.rounds(deadline)
        for key, (_, nodes) in wanted.items():
            failure = next((walk.failed[node] for node in nodes if node in walk.failed), None)
            seconds = walk.seconds(nodes)
            if seconds is not None:
                self.found[key] = seconds
            elif failure is not None:
                del self.found[key]
                self.found.unmeasurable[key] = _in_a_line(failure)

    def _wanted(self) -> dict[str, list[fx.Node]]:
        """The nodes of each key, those first on which the program spends most."""
        arithmetic = Estimator(self.program, preset("loopback-gloo"), {}, self.keys)
        alike: dict[str, list[fx.Node]] = {}
        spent: Counter[str] = Counter()
        for node in self.program.graph.nodes:
            if computes(node):
                key = self.keys.of(node)
                alike.setdefault(key, []).append(node)
                spent[key] += arithmetic.compute_seconds(node)  # type: ignore[assignment]
        return {key: alike[key] for key, _ in spent.most_common()}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _far_bytes(program: Program, keys: Keys) -> int:
    """Through how much memory arguments rotate: as much as the program comes back to at each run, its inputs."""
    held = sum(tensor.bytes for node in program.placeholders for tensor in keys.tensors(node))
    return min(max(held, _LEAST_FAR), _MOST_FAR)


def _is_here(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_available()
