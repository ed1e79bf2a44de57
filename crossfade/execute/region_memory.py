"""How many bytes a program holds when its regions are compiled: what a region is given lives until it ends.

What a region makes inside counts as its operators make and free it one by one: a compiler fuses some of them and reuses
memory, so that it holds no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from crossfade.execute.regions import is_view, regions_of
from crossfade.graph.memory import Meter, Storages
from crossfade.graph.program import Program


def live_in_regions(program: Program) -> tuple[int, ...]:
    """Live bytes during each node, beside inputs and constants; during each of a region's, the most in all of it.

    >>> from crossfade.graph.text import parse
    >>> program = parse('''
    ... x: f32[4] = input("x")
    ... a: f32[4] = aten.neg(x)
    ... b: f32[4] = aten.exp(a)
    ... start: f32[4] = c10d.all_reduce(b, "sum", "dp")
    ... done: f32[4] = c10d.wait_tensor(start)
    ... c: f32[4] = aten.neg(done)
    ... d: f32[4] = aten.exp(c)
    ... return output("d", d)
    ... ''', groups={"dp": 2})
    >>> live_in_regions(program)  # a and b in the first region; done, c and d in the second
    (0, 32, 32, 32, 16, 48, 48, 16)
    """
    storages = Storages(program.graph.nodes)
    meter, during = Meter(storages), dict[fx.Node, int]()
    for together in _in_turn(program, storages):
        most = meter.run_together(together)[0] if len(together) > 1 else meter.run(together[0])[0]
        during.update(dict.fromkeys(together, most))
    return tuple(during[node] for node in program.graph.nodes)


def alive_at_peak_in_regions(program: Program) -> list[tuple[str, int]]:
    """What is alive when most is: the nodes that made it and its bytes, the largest first; see `live_in_regions`."""
    most = max(live_in_regions(program), default=0)
    storages = Storages(program.graph.nodes)
    meter, sizes = Meter(storages), Counter[str]()
    maker: dict[int, str] = {}
    for node in program.graph.nodes:
        for cell in storages.touches[node]:
            maker.setdefault(cell, node.name)

    def look(live: int) -> None:
        if live == most and not sizes:
            sizes.update(dict.fromkeys(maker.values(), 0))
            for cell, name in maker.items():
                sizes[name] += storages.size[cell] if meter.holds(cell) else 0

    for together in _in_turn(program, storages):
        meter.run_together(together, look)
        if sizes:
            break
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda pair: -pair[1])


def _in_turn(program: Program, storages: Storages) -> Iterator[list[fx.Node]]:
    """What runs at once, in turn: regions, each with the views of what it makes, and other nodes by themselves."""
    chosen = regions_of(program)
    inside = {node for region in chosen.regions for node in region.nodes}
    ending: dict[fx.Node, list[list[fx.Node]]] = {}
    for region in chosen.regions:
        ending.setdefault(region.end, []).append(region.nodes)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    begun, waiting = set[int](), list[fx.Node]()
    for node in program.graph.nodes:
        if node in ending:
            for nodes in ending[node]:
                begun.update(cell for each in nodes for cell in storages.touches[each])
                views = [view for view in waiting if begun.issuperset(storages.touches[view])]
                waiting = [view for view in waiting if view not in views]
                yield sorted([*nodes, *views], key=position.__getitem__)
        elif node not in inside and is_view(node) and not begun.issuperset(storages.touches[node]):
            waiting.append(node)
        elif node not in inside:
            begun.update(storages.touches[node])
            yield [node]
