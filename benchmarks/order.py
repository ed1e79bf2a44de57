"""How the shared vocabulary scales: `python -m benchmarks.order [SIZES...]`, by default 1,000 10,000 100,000 nodes.

Each program is a training step: layers forward, their backward with one all-reduce a layer, and updates in place.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from crossfade.graph.order import Order, Reachability, reorder
from crossfade.graph.passes import fingerprint
from crossfade.graph.private import FakeTensorMode
from crossfade.graph.program import Input, InputKind, Output, OutputKind, Program
from crossfade.graph.text import render, resolve_operator
from crossfade.graph.verify import verify

MARKED = 2_000
NODES_PER_LAYER = 15
REPEATS = 3


class TrainingStep:
    """Builds a training step of about `size` nodes; all tensors are f32[8, 8], so that one fake tensor does for all."""

    def __init__(self, size: int) -> None:
        self.layers = max(1, size // NODES_PER_LAYER)
        self.graph = fx.Graph()
        self.inputs: list[Input] = []
        with FakeTensorMode():
            self.value = torch.empty(8, 8)

    def program(self) -> Program:
        weights = [self.input(InputKind.PARAMETER, f"layers.{i}.weight") for i in range(self.layers)]
        moments = [self.input(InputKind.OPTIMIZER_STATE, f"layers.{i}.moment") for i in range(self.layers)]
        x = self.input(InputKind.INPUT, "x")
        activations = [x]
        for weight in weights:
            activations.append(self.forward(activations[-1], weight))
        gradient = activations[-1]
        waits = []
        for activation, weight in zip(reversed(activations[:-1]), reversed(weights), strict=True):
            gradient, wait = self.backward(gradient, activation, weight)
            waits.append(wait)
        for wait, weight, moment in zip(reversed(waits), weights, moments, strict=True):
            self.update(wait, weight, moment)
        self.graph.output((activations[-1],))
        outputs = (Output(OutputKind.LOSS, "loss"),)
        return Program(self.graph, tuple(self.inputs), outputs, groups={"dp": 8})

    def forward(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        aten = torch.ops.aten
        product = self.call(aten.mm.default, x, self.call(aten.t.default, weight))
        return self.call(aten.add.Tensor, self.call(aten.relu.default, product), x)

    def backward(self, gradient: fx.Node, activation: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
        aten = torch.ops.aten
        masked = self.call(aten.threshold_backward.default, gradient, activation, 0)
        of_weight = self.call(aten.mm.default, self.call(aten.t.default, masked), activation)
        start = self.call(resolve_operator("c10d.all_reduce"), of_weight, "sum", "dp")
        through = self.call(aten.mm.default, masked, weight)
        return through, self.call(resolve_operator("c10d.wait_tensor"), start)

    def update(self, gradient: fx.Node, weight: fx.Node, moment: fx.Node) -> None:
        aten = torch.ops.aten
        self.call(aten.mul_.Tensor, moment, 0.9)
        moved = self.call(aten.add_.Tensor, moment, gradient)
        self.call(aten.sub_.Tensor, weight, moved)

    def input(self, kind: InputKind, name: str) -> fx.Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = self.value
        self.inputs.append(Input(kind, name))
        return node

    def call(self, target: object, *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = self.value
        return node


def measure(size: int) -> tuple[int, dict[str, float]]:
    """The number of nodes, and the best seconds of each operation."""
    program = TrainingStep(size).program()
    order = Order(program.graph)
    nodes = order.nodes
    marked = nodes[:: max(1, len(nodes) // MARKED)][:MARKED]
    waits_last = order.sorted(
        key=lambda node: (node.op == "call_function" and "wait" in node.name, order.position[node])
    )
    operations: dict[str, Callable[[], object]] = {
        "Program.copy": program.copy,
        "Order": lambda: Order(program.graph),
        "Order.sorted": order.sorted,
        f"Reachability of {MARKED:,}": lambda: Reachability(order, marked),
        "reorder, twice": lambda: (reorder(program.graph, waits_last), reorder(program.graph, nodes)),
        "verify": lambda: verify(program),
        "fingerprint": lambda: fingerprint(program),
        "render": lambda: render(program),
    }
    return len(nodes), {name: best_seconds(operation) for name, operation in operations.items()}


def best_seconds(operation: Callable[[], object]) -> float:
    """The best of a few runs, fewer where one takes long."""
    best, spent = math.inf, 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        operation()
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > 5:
            break
    return best


def growth(sizes: list[int], seconds: list[float]) -> float:
    """The exponent between the two largest sizes: 1 is linear, 2 quadratic."""
    return math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])


def main(arguments: list[str]) -> None:
    """Measure all sizes and print one table."""
    rows = [measure(size) for size in ([int(item) for item in arguments] or [1_000, 10_000, 100_000])]
    sizes = [number for number, _ in rows]
    table = Table(title=f"us a node, torch {torch.__version__}")
    table.add_column("")
    for number in sizes:
        table.add_column(f"{number:,} nodes", justify="right")
    table.add_column("seconds, largest", justify="right")
    table.add_column("growth", justify="right")
    for name in rows[0][1]:
        seconds = [timings[name] for _, timings in rows]
        cells = [f"{1e6 * taken / number:.2f}" for taken, number in zip(seconds, sizes, strict=True)]
        exponent = f"{growth(sizes, seconds):.2f}" if len(sizes) > 1 else ""
        table.add_row(name, *cells, f"{seconds[-1]:.3f}", exponent)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
