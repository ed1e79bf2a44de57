"""The best order there is, by looking at all that matter; and small random programs to look at."""

from __future__ import annotations

from random import Random

from crossfade.cost.timeline import Costs
from crossfade.graph import collectives
from crossfade.graph.order import Order
from crossfade.graph.program import Program
from crossfade.graph.text import parse

GROUPS = {"dp": 2, "tp": 2}


def least_seconds(program: Program, costs: Costs) -> float:
    """The seconds of the fastest order of a small program, by a search that knows nothing of how schedules are made.

    Of two ways to have run the same nodes, one that is nowhere later makes the other needless to follow.
    """
    order = Order(program.graph)
    nodes = [node for node in order.nodes if node.op == "call_function"]
    number = {node: index for index, node in enumerate(nodes)}
    needs = [
        sum(1 << number[source] for source in set(order.predecessors(node, within_group=False)) if source in number)
        for node in nodes
    ]
    links = sorted({collective.group for collective in collectives.find(program.graph)})
    waits_for = [number[start] if (start := _start(node)) is not None else None for node in nodes]
    everything = (1 << len(nodes)) - 1
    states = {0: {(0.0, (0.0,) * len(links), ())}}
    for _ in nodes:
        reached: dict[int, set] = {}
        for done, found in states.items():
            for index, node in enumerate(nodes):
                if done >> index & 1 or needs[index] & ~done:
                    continue
                for now, free, arrivals in found:
                    arrives = dict(arrivals)
                    at = max(now, arrives.get(waits_for[index], 0.0)) + costs.compute.get(node, 0.0)
                    links_free = list(free)
                    if node in costs.travel:
                        link = links.index(collectives.group_of(node))
                        links_free[link] = arrives[index] = max(at, free[link]) + costs.travel[node]
                    state = (at, tuple(links_free), tuple(sorted(arrives.items())))
                    reached.setdefault(done | 1 << index, set()).add(state)
        states = {done: _undominated(found) for done, found in reached.items()}
    return min(max(now, *free) if free else now for now, free, _ in states[everything])


def _start(node):
    return collectives.started_by(node) if collectives.is_wait(node) else None


def _undominated(found: set) -> set:
    kept: list = []
    for state in sorted(found):
        if not any(_is_no_later(other, state) for other in kept):
            kept.append(state)
    return set(kept)


def _is_no_later(state, other) -> bool:
    pairs = [(state[0], other[0]), *zip(state[1], other[1], strict=True)]
    pairs += [(a, b) for (_, a), (_, b) in zip(state[2], other[2], strict=True)]
    return all(a <= b for a, b in pairs)


def small_program(random: Random, operations: int = 5, exchanges: int = 3) -> tuple[Program, Costs]:
    """A few operators and all-reduces on two groups, each fed by earlier values; whole seconds."""
    lines, values = ['x: f32[4] = input("x")'], ["x"]
    steps = ["compute"] * operations + ["exchange"] * exchanges
    random.shuffle(steps)
    seconds: dict[str, float] = {}
    for count, step in enumerate(steps):
        left, two = random.choice(values[-3:]), random.choice(values)
        if step == "compute":
            call = f"aten.add.Tensor({left}, {two})" if random.random() < 0.6 else f"aten.neg({left})"
            lines.append(f"c{count}: f32[4] = {call}")
            values.append(f"c{count}")
            seconds[f"c{count}"] = random.randint(1, 6)
        else:
            group = random.choice(["dp", "dp", "tp"])
            lines.append(f'c10d{count}: f32[4] = c10d.all_reduce({left}, "sum", "{group}")')
            lines.append(f"w{count}: f32[4] = c10d.wait_tensor(c10d{count})")
            values.append(f"w{count}")
            seconds[f"c10d{count}"] = random.randint(1, 6)
    used = " ".join(line.partition("=")[2] for line in lines)
    ends = [value for value in values if f"({value}" not in used and f" {value}" not in used] or values[-1:]
    lines.append("return " + ", ".join(f'output("{value}", {value})' for value in ends))
    program = parse("\n".join(lines), groups=GROUPS)
    nodes = {node.name: node for node in program.graph.nodes}
    travel = {nodes[name]: value for name, value in seconds.items() if name.startswith("c10d")}
    return program, Costs({nodes[n]: v for n, v in seconds.items() if nodes[n] not in travel}, travel, {})
