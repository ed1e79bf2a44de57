"""Machine-free overlap: our launches and waits against torch's `simple_overlap` (2.14 and later), on the same graphs.

    make TORCH=2.15.0 .venv-2.15.0/.ready
    .venv-2.15.0/bin/python -m benchmarks.overlap_order --layers 4,16 --save

torch's function orders the nodes of Inductor's scheduler. Here it gets the nodes of the FX graph in their place, one
for one, with the buffers that they make and free as `graph/effects.py` knows them: its decisions are its own, its walk
is over as many nodes as ours. Compared are the bytes that travel while a matmul stands between launch and first use
(`communicate/hiding.py`), the peak of live memory, the step predicted on three presets, and the seconds of the
processor; ours is the best of three, torch's one run without setting up its lists. Each torch has a file of its own.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from benchmarks import graphs
from benchmarks.figures import save
from crossfade.communicate.hiding import Hiding
from crossfade.communicate.raise_gathers import RaiseGathers
from crossfade.communicate.raise_launches import RaiseLaunches
from crossfade.communicate.sink_waits import SinkWaits
from crossfade.cost.estimate import estimate
from crossfade.cost.presets import preset
from crossfade.cost.timeline import simulate
from crossfade.graph import collectives
from crossfade.graph.effects import alias_roots, written_inputs
from crossfade.graph.memory import memory_curve
from crossfade.graph.order import Order, reorder
from crossfade.graph.passes import run_passes
from crossfade.graph.program import Program, from_graph_module, tensor_bytes
from crossfade.graph.verify import verify

PRESETS = ("ethernet-1gbit", "ethernet-10gbit", "h100-nvlink-node")
GRAPHS: dict[str, Callable[[int], fx.GraphModule]] = {
    "ddp": graphs.ddp,
    "ddp gradients": graphs.ddp_gradients,
    "fsdp": graphs.fsdp,
    "tp": graphs.tp,
}
OURS = (RaiseLaunches(), SinkWaits(), RaiseGathers())


@dataclass
class Outcome:
    """What one order of a graph hides and takes."""

    graph: str
    layers: int
    nodes: int
    order: str
    hidden: int
    bytes: int
    peak: int
    predicted: dict[str, float]
    seconds: float | None = None


@dataclass(eq=False)
class Scheduled:
    """A node of a graph as torch's function asks for it."""

    node: fx.Node
    outputs: list[Any] = field(default_factory=list)
    dependencies: list[Any] = field(default_factory=list)

    @property
    def unmet_dependencies(self) -> list[Any]:
        """What it reads, by name."""
        return self.dependencies

    def get_outputs(self) -> list[Any]:
        """What it makes, by name."""
        return self.outputs

    def get_name(self) -> str:
        """Its name."""
        return self.node.name


class Scheduler:
    """The nodes of a program for torch's function, and what they take and free. Views are no nodes of its own kind:
    whoever reads one reads what it is of."""

    def __init__(self, program: Program) -> None:
        order = Order(program.graph)
        roots = alias_roots(program.graph.nodes)
        self.views = {node for node in program.graph.nodes if _is_view(node, roots)}
        self.nodes = [
            Scheduled(node) for node in program.graph.nodes if node.op == "call_function" and node not in self.views
        ]
        of = {scheduled.node: scheduled for scheduled in self.nodes}
        readers: dict[fx.Node, list[Scheduled]] = defaultdict(list)
        for scheduled in self.nodes:
            name = scheduled.node.name
            scheduled.outputs = [SimpleNamespace(get_name=lambda name=name: name)]
            before = {self.seen(other) for other in order.predecessors(scheduled.node)}
            scheduled.dependencies = [SimpleNamespace(name=other.name) for other in before if other in of]
            touched = {roots[source] for source in scheduled.node.all_input_nodes} | {roots[scheduled.node]}
            for source in touched - {scheduled.node}:
                readers[source].append(scheduled)
        kept = {roots[value] for value in program.results if isinstance(value, fx.Node)}
        self.buffers: dict[Any, Scheduled] = {}
        taken, freed = defaultdict(int), defaultdict(int)  # type: ignore[var-annotated]
        for scheduled in self.nodes:
            if roots[scheduled.node] is not scheduled.node:
                continue
            size, users = tensor_bytes(scheduled.node.meta.get("val")), readers[scheduled.node]
            taken[scheduled] += size
            if scheduled.node not in kept:
                last = users[-1] if users else scheduled
                freed[last] += size
                if users:
                    buffer = SimpleNamespace(size_free=size, succ_nodes=set(users))
                    self.buffers[_Buffer(scheduled.node.name, buffer)] = last
        self.taken, self.freed = taken, freed

    def seen(self, node: fx.Node) -> fx.Node:
        """What a value is, or is a view of."""
        while node in self.views:
            node = node.all_input_nodes[0]
        return node

    def whole(self, program: Program, ordered: Sequence[Scheduled]) -> list[fx.Node]:
        """The nodes of the program in an order of those here, each view just above the first node that reads it."""
        placed = dict.fromkeys(node for node in program.graph.nodes if node.op in ("placeholder", "get_attr"))
        for node in [*(scheduled.node for scheduled in ordered), program.output_node]:
            waiting = [source for source in node.all_input_nodes if source not in placed]
            chain = []
            while waiting:
                source = waiting.pop()
                chain.append(source)
                waiting += [before for before in source.all_input_nodes if before not in placed]
            placed |= dict.fromkeys([*reversed(chain), node])
        return list(placed)

    def memory(self) -> tuple[Any, ...]:
        """What torch calls memory tracking: the peak, live bytes at each node, what each takes and frees."""
        from torch._inductor import comms

        live, peak, current, each = 0, 0, {}, {}
        for scheduled in self.nodes:
            live += self.taken[scheduled]
            peak, at = max(peak, live), live
            live -= self.freed[scheduled]
            current[scheduled] = (at, live)
            each[scheduled] = SimpleNamespace(size_alloc=self.taken[scheduled], size_free=self.freed[scheduled])
        last_use = dict(self.buffers)
        return peak, {**current, None: (0, 0)}, each, last_use, {}, comms._build_candidate_buffer_map(last_use)


@dataclass(frozen=True, eq=False)
class _Buffer:
    name: str
    mpi_buffer: Any

    def get_name(self) -> str:
        return self.name


def _is_view(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> bool:
    """Whether a node only sees memory of another one."""
    if node.op != "call_function" or collectives.is_wait(node) or written_inputs(node):
        return False
    return roots[node] is not node and len(node.all_input_nodes) == 1


def by_torch(program: Program) -> tuple[list[fx.Node], float]:
    """The nodes in the order of torch's `simple_overlap`, and its seconds."""
    from torch._inductor import comms

    scheduler = Scheduler(program)
    memory = scheduler.memory()
    replaced = {
        "contains_async_collective": lambda scheduled: collectives.is_collective(scheduled.node),
        "contains_wait": lambda scheduled: collectives.is_wait(scheduled.node),
        "_initialize_memory_tracking": lambda nodes: memory,
    }
    with mock.patch.multiple(comms, **replaced):
        start = time.process_time()
        ordered = comms.simple_overlap(scheduler.nodes)
        seconds = time.process_time() - start
    return scheduler.whole(program, ordered), seconds


def by_us(program: Program) -> tuple[Program, float]:
    """The program as our passes leave it, and their seconds."""
    best = float("inf")
    for _ in range(3):
        done = program.copy()
        start = time.process_time()
        for step_pass in OURS:
            step_pass.run(done)
        best = min(best, time.process_time() - start)
    return done, best


def judged(name: str, layers: int, order: str, program: Program, seconds: float | None) -> Outcome:
    """What an order hides, holds and is predicted to take."""
    hiding = Hiding(Order(program.graph))
    found = collectives.find(program.graph)
    hidden = sum(each.bytes for each in found if hiding.window(each).hidden_by is not None)
    machines = [preset(machine) for machine in PRESETS]
    predicted = {machine.name: simulate(program, estimate(program, machine)).seconds for machine in machines}
    size = len(program.graph.nodes)
    peak = memory_curve(program).peak
    return Outcome(name, layers, size, order, hidden, sum(each.bytes for each in found), peak, predicted, seconds)


def _has_simple_overlap() -> bool:
    from torch._inductor import comms

    return hasattr(comms, "simple_overlap")


def race(name: str, layers: int) -> list[Outcome]:
    """One graph as it is, as we order it, and as torch does."""
    given = from_graph_module(GRAPHS[name](layers), groups={graphs.start_fake_world(): graphs.RANKS})
    program = run_passes(given, [], keep_text=False)
    outcomes = [judged(name, layers, "as written", program, None)]
    ours, seconds = by_us(program)
    verify(ours)
    outcomes.append(judged(name, layers, "Crossfade", ours, seconds))
    if _has_simple_overlap():
        theirs = program.copy()
        order, seconds = by_torch(theirs)
        reorder(theirs.graph, order)
        verify(theirs)
        outcomes.append(judged(name, layers, f"torch {torch.__version__}", theirs, seconds))
    return outcomes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,16", help="sizes to try")
    parser.add_argument("--only", default="", help="the graphs that have this in their name")
    parser.add_argument("--busy", action="store_true", help="say in the results that other work ran beside this")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    for layers in map(int, given.layers.split(",")):
        for name in GRAPHS:
            if given.only in name:
                outcomes += race(name, layers)
    _show(outcomes)
    if given.save:
        version = torch.__version__.partition("+")[0]
        save(f"overlap-order-{version}", {"busy": given.busy, "outcomes": [asdict(each) for each in outcomes]})


def _show(outcomes: Sequence[Outcome]) -> None:
    table = Table("graph", "layers", "nodes", "order", "hidden", "peak, MB", *(f"{name}, ms" for name in PRESETS), "s")
    for each in outcomes:
        times = [f"{each.predicted[name] * 1e3:,.1f}" for name in PRESETS]
        hidden, seconds = f"{each.hidden / max(1, each.bytes):.1%}", f"{each.seconds:.3f}" if each.seconds else ""
        cells = [str(each.layers), f"{each.nodes:,}", each.order, hidden, f"{each.peak / 2**20:,.0f}", *times, seconds]
        table.add_row(each.graph, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
